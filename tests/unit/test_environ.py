"""Steps and allocations in environments of real tasks, and variations of them. See also test_slurm_captures."""

from __future__ import annotations

import pytest

from tests.captures import OUTSIDE_OF_STEPS, capture_of
from tf4slurm.errors import LayoutError, SlurmEnvironmentError
from tf4slurm.slurm.environ import HetComponent, SlurmAllocation, SlurmStep, is_in_step, without_step
from tf4slurm.slurm.job_id import JobId

ENVIRON = capture_of("uneven-n7-plane2").environs[0]
HET = capture_of("het-batch").environs[3]
BATCH = OUTSIDE_OF_STEPS["sbatch-srun-batch"]


def environ_with(**changes: str | None) -> dict[str, str]:
    """Return the environment of a task with these changes. None removes a variable."""
    return {name: value for name, value in {**ENVIRON, **changes}.items() if value is not None}


def step(**changes: str | None) -> SlurmStep:
    return SlurmStep.from_environ(environ_with(**changes))


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("SLURM_STEP_RESV_PORTS", None, "reserved_ports", ()),
        ("SLURM_STEP_RESV_PORTS", "", "reserved_ports", ()),
        ("SLURM_STEP_RESV_PORTS", "23000,23010-23011", "reserved_ports", (23000, 23010, 23011)),
        ("SLURM_LAUNCH_NODE_IPADDR", None, "launch_address", None),
        ("SLURM_LAUNCH_NODE_IPADDR", "", "launch_address", None),
        ("SLURM_RESTART_COUNT", "2", "restart_count", 2),
        ("SLURM_RESTART_COUNT", "", "restart_count", 0),
    ],
)
def test_optional_variables(variable: str, value: str | None, field: str, expected: object) -> None:
    assert getattr(step(**{variable: value}), field) == expected


@pytest.mark.parametrize(
    "variable",
    ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURMD_NODENAME"],
)
@pytest.mark.parametrize("value", [None, ""])
def test_error_names_a_missing_variable(variable: str, value: str | None) -> None:
    with pytest.raises(SlurmEnvironmentError) as caught:
        step(**{variable: value})
    assert str(caught.value).startswith(f"{variable} is not set: this process is not a task of a Slurm step. ")
    assert (caught.value.variable, caught.value.value) == (variable, None)


def test_the_tasks_of_a_node_try_different_reserved_ports_first() -> None:
    on_first_node = capture_of("sbatch-srun").environs[:5]
    candidates = [SlurmStep.from_environ(environ).port_candidates for environ in on_first_node]
    assert [ports[0] for ports in candidates] == [23163, 23164, 23165, 23166, 23167]
    assert candidates[4] == (23167, 23168, 23163, 23164, 23165, 23166)


def test_more_tasks_than_reserved_ports_begin_again() -> None:
    read = step(SLURM_LOCALID="7", SLURM_STEP_RESV_PORTS="23000-23002")
    assert read.port_candidates == (23001, 23002, 23000)


def test_without_reserved_ports_there_are_no_candidates() -> None:
    assert step(SLURM_STEP_RESV_PORTS="").port_candidates == ()


@pytest.mark.parametrize("step_id", ["0", "7", "4294967279"])
def test_task_is_in_step(step_id: str) -> None:
    assert is_in_step(environ_with(SLURM_STEP_ID=step_id))


@pytest.mark.parametrize("environ", [{}, *OUTSIDE_OF_STEPS.values()], ids=["none", *OUTSIDE_OF_STEPS])
def test_batch_script_and_interactive_shell_are_in_no_step(environ: dict[str, str]) -> None:
    assert not is_in_step(environ)
    with pytest.raises(
        SlurmEnvironmentError, match=r'not a task of a Slurm step\. Start it with srun, or use "tf4slurm'
    ):
        SlurmStep.from_environ(environ)


@pytest.mark.parametrize("step_id", [*map(str, range(-6, 0)), *(str(2**32 - number) for number in range(1, 7))])
def test_reserved_step_id_is_not_a_task(step_id: str) -> None:
    assert not is_in_step(environ_with(SLURM_STEP_ID=step_id))
    with pytest.raises(SlurmEnvironmentError, match=f"^SLURM_STEP_ID is '{step_id}': "):
        step(SLURM_STEP_ID=step_id)


def test_ordinary_step() -> None:
    read = step()
    assert (read.job_id, read.step_id) == (ENVIRON["SLURM_JOB_ID"], "0")
    assert (read.rank, read.local_rank, read.num_tasks) == (0, 0, 7)
    assert (read.reserved_ports, read.launch_address) == ((23348, 23349, 23350, 23351), "10.78.0.254")
    assert (read.node_name, read.nodes) == ("r1-n9", ("r1-n9", "r1-n10", "r1-n11"))
    assert (read.tasks_per_node, read.node_ranks) == ((3, 2, 2), (0, 1, 6))
    assert (read.distribution, read.plane_size) == ("plane", 2)
    assert (read.restart_count, read.het_groups) == (0, {})
    assert (read.gpus, read.gpus_on_node) == ((), None)
    assert read.nodes_by_rank == ("r1-n9", "r1-n9", "r1-n10", "r1-n10", "r1-n11", "r1-n11", "r1-n9")


def test_reserved_ports_may_have_gaps() -> None:
    read = step(SLURM_STEP_RESV_PORTS="23000-23001,23500,23900-23901", SLURM_LOCALID="2")
    assert read.reserved_ports == (23000, 23001, 23500, 23900, 23901)
    assert read.port_candidates == (23500, 23900, 23901, 23000, 23001)


def test_groups_of_a_heterogeneous_job() -> None:
    read = SlurmStep.from_environ(HET)
    assert read.het_groups == {"36": ("r1-n10",), "37": ("r1-n2", "r1-n9")}
    assert read.nodes_by_rank == ("r1-n10", "r1-n10", "r1-n2", "r1-n2", "r1-n2", "r1-n9")


def test_groups_of_an_outer_job_are_ignored() -> None:
    left = {name: value for name, value in HET.items() if "GROUP" in name or "SIZE" in name}
    assert step(**left).het_groups == {}
    assert len(step(**left).nodes_by_rank) == 7


def test_layout_of_an_ordinary_step_in_a_heterogeneous_job() -> None:
    capture = capture_of("het-batch-group1")
    cyclic = {"SLURM_DISTRIBUTION": "cyclic", "SLURM_GTIDS": "0,2,3"}
    read = SlurmStep.from_environ({**capture.environs[0], **cyclic})
    assert read.nodes_by_rank == ("r1-n2", "r1-n9", "r1-n2", "r1-n2")


def test_gpus_are_those_of_the_first_variable() -> None:
    read = step(ROCR_VISIBLE_DEVICES="2,3", ZE_AFFINITY_MASK="4", SLURM_GPUS_ON_NODE="4")
    assert (read.gpus, read.gpus_on_node) == (("2", "3"), 4)
    assert read.visible_devices == {"ROCR_VISIBLE_DEVICES": ("2", "3"), "ZE_AFFINITY_MASK": ("4",)}


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SLURM_PROCID", "", "SLURM_PROCID is not set: this process is not a task of a Slurm step. Start it with srun"),
        ("SLURM_PROCID", "x", "expected a number"),
        ("SLURM_PROCID", "-1", "SLURM_PROCID is '-1': expected a number"),
        ("SLURM_LOCALID", "0.5", "expected a number"),
        ("SLURM_LOCALID", "²", "expected a number"),
        ("SLURM_STEP_NUM_TASKS", "7(x2)", "expected a number"),
        ("SLURM_STEP_NUM_TASKS", "9" * 5000, "expected a number"),
        (
            "SLURM_STEP_RESV_PORTS",
            "23010-23000",
            "SLURM_STEP_RESV_PORTS is '23010-23000': '23010-23000' is not a range",
        ),
        ("SLURM_STEP_RESV_PORTS", "(null)", "SLURM_STEP_RESV_PORTS is '(null)'"),
    ],
)
def test_invalid_variable_of_every_task_is_refused_at_construction(variable: str, value: str, expected: str) -> None:
    with pytest.raises(SlurmEnvironmentError) as caught:
        step(**{variable: value})
    assert expected in str(caught.value)
    assert (caught.value.variable, caught.value.value) == (variable, value or None)


@pytest.mark.parametrize(
    ("attribute", "variable", "value", "expected"),
    [
        ("nodes", "SLURM_STEP_NODELIST", "", "SLURM_STEP_NODELIST is not set"),
        ("nodes", "SLURM_STEP_NODELIST", "n[3-1]", "is reversed"),
        ("tasks_per_node", "SLURM_STEP_TASKS_PER_NODE", "3,2(x)", 'expected counts such as "3,1(x2)"'),
        ("tasks_per_node", "SLURM_STEP_TASKS_PER_NODE", "1(x999999999)", "expected counts"),
        ("tasks_by_node", "SLURM_STEP_TASKS_PER_NODE", "3,4", "expected 3 counts as in SLURM_STEP_NODELIST, 7 in all"),
        ("nodes_by_rank", "SLURM_STEP_TASKS_PER_NODE", "3,3,2", "expected 3 counts"),
        ("node_ranks", "SLURM_GTIDS", "0,,6", 'expected numbers such as "0,3,4"'),
        ("plane_size", "SLURM_DIST_PLANESIZE", "two", "expected a number"),
        ("restart_count", "SLURM_RESTART_COUNT", "often", "expected a number"),
        ("gpus_on_node", "SLURM_GPUS_ON_NODE", "1.5", "expected a number"),
    ],
)
def test_invalid_property_is_refused_on_access(attribute: str, variable: str, value: str, expected: str) -> None:
    read = step(**{variable: value})
    assert read.rank == 0
    with pytest.raises(SlurmEnvironmentError) as caught:
        getattr(read, attribute)
    assert expected in str(caught.value)
    assert caught.value.variable == variable


def test_invalid_variables_of_a_heterogeneous_job_are_refused() -> None:
    with pytest.raises(SlurmEnvironmentError, match="SLURM_HET_SIZE is '5000': expected at most"):
        _ = step(SLURM_HET_SIZE="5000").het_groups
    with pytest.raises(SlurmEnvironmentError, match="SLURM_JOB_ID_PACK_GROUP_2 is not set"):
        _ = SlurmStep.from_environ({**HET, "SLURM_HET_SIZE": "3"}).het_groups


@pytest.mark.parametrize("distribution", ["block", "cyclic", "arbitrary"])
def test_wrong_distribution_is_refused(distribution: str) -> None:
    with pytest.raises(LayoutError, match=f"distribution.* '{distribution}'"):
        _ = step(SLURM_DISTRIBUTION=distribution).nodes_by_rank


def test_huge_number_of_tasks_is_refused_before_it_is_expanded() -> None:
    huge = step(SLURM_STEP_NUM_TASKS="999999999", SLURM_STEP_TASKS_PER_NODE="333333333(x3)")
    with pytest.raises(SlurmEnvironmentError, match="333333333"):
        _ = huge.nodes_by_rank


def batch_without(*variables: str, **changes: str) -> dict[str, str]:
    return {**{name: value for name, value in BATCH.items() if name not in variables}, **changes}


def test_batch_script() -> None:
    expected = SlurmAllocation(job_id=JobId(38), num_tasks=7, cpus_per_task=None, num_nodes=3, number=38)
    assert SlurmAllocation.from_environ(BATCH) == expected


def test_element_of_a_job_array() -> None:
    allocation = SlurmAllocation.from_environ(batch_without(SLURM_ARRAY_JOB_ID="38", SLURM_ARRAY_TASK_ID="2"))
    assert allocation is not None
    assert allocation.job_id == JobId(38, (2,))


HET_BATCH = {
    **{"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "38", "SLURM_JOB_ID_HET_GROUP_1": "39"},
    **{"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_CPUS_PER_TASK_HET_GROUP_0": "3"},
    **{"SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"},
}


def test_components_of_a_heterogeneous_job() -> None:
    allocation = SlurmAllocation.from_environ(batch_without(**HET_BATCH))
    assert allocation is not None
    assert allocation.components == (HetComponent(1, 3), HetComponent(6, None))
    assert allocation.num_tasks == 7
    some = SlurmAllocation.from_environ({**batch_without(**HET_BATCH), "SLURM_NTASKS_PER_NODE_HET_GROUP_1": ""})
    assert some is not None
    assert some.num_tasks is None


def test_components_of_an_outer_job_are_ignored() -> None:
    allocation = SlurmAllocation.from_environ(batch_without(**{**HET_BATCH, "SLURM_JOB_ID_HET_GROUP_0": "5"}))
    assert allocation is not None
    assert (allocation.components, allocation.num_tasks) == ((), 7)


@pytest.mark.parametrize("environ", [{}, {"PATH": "/bin"}, {"SLURM_JOB_ID": ""}, {"SLURM_CONF": "/etc/slurm.conf"}])
def test_no_allocation(environ: dict[str, str]) -> None:
    assert SlurmAllocation.from_environ(environ) is None


@pytest.mark.parametrize(
    ("environ", "num_tasks"),
    [
        (batch_without("SLURM_NTASKS"), None),
        (batch_without("SLURM_NTASKS", SLURM_NTASKS_PER_NODE="4"), 12),
        (batch_without(SLURM_NTASKS_PER_NODE="4"), 7),
        (batch_without("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", SLURM_NTASKS_PER_NODE="4"), None),
        (batch_without(SLURM_NTASKS=""), None),
    ],
)
def test_number_of_tasks(environ: dict[str, str], num_tasks: int | None) -> None:
    allocation = SlurmAllocation.from_environ(environ)
    assert allocation is not None
    assert allocation.num_tasks == num_tasks


def test_cpus_per_task() -> None:
    allocation = SlurmAllocation.from_environ({**BATCH, "SLURM_CPUS_PER_TASK": "4"})
    assert allocation is not None
    assert allocation.cpus_per_task == 4


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_NTASKS", "seven"),
        ("SLURM_NTASKS", "-1"),
        ("SLURM_NTASKS", "9" * 10),
        ("SLURM_JOB_NUM_NODES", "3(x2)"),
        ("SLURM_CPUS_PER_TASK", "4.5"),
        ("SLURM_RESTART_COUNT", "often"),
    ],
)
def test_invalid_count_is_refused(variable: str, value: str) -> None:
    with pytest.raises(SlurmEnvironmentError, match=f"^{variable} is ") as caught:
        SlurmAllocation.from_environ({**BATCH, variable: value})
    assert (caught.value.variable, caught.value.value) == (variable, value)


def test_variables_of_the_own_step_are_removed() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1", "PATH": "/bin"}
    step = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_STEP_NODELIST": "n1"}
    assert without_step({**kept, **step, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}) == kept
    assert without_step({**kept, **step}) == {**kept, **step}
