"""Allocations in environments of real jobs, and variations of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.slurm.allocation import HetComponent, SlurmAllocation

DATA = Path(__file__).parent.parent / "data"
BATCH: dict[str, str] = json.loads((DATA / "batch-3-nodes-7-tasks.json").read_text())["environments"][0]


def batch_without(*variables: str, **changes: str) -> dict[str, str]:
    return {**{name: value for name, value in BATCH.items() if name not in variables}, **changes}


def test_batch_script() -> None:
    expected = SlurmAllocation(job_id="38", num_tasks=7, cpus_per_task=None, num_nodes=3)
    assert SlurmAllocation.from_environ(BATCH) == expected


def test_element_of_a_job_array() -> None:
    allocation = SlurmAllocation.from_environ(batch_without(SLURM_ARRAY_JOB_ID="38", SLURM_ARRAY_TASK_ID="2"))
    assert allocation is not None
    assert allocation.array_element == "38_2"


HET = {
    **{"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "38", "SLURM_JOB_ID_HET_GROUP_1": "39"},
    **{"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_CPUS_PER_TASK_HET_GROUP_0": "3"},
    **{"SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"},
}


def test_components_of_a_heterogeneous_job() -> None:
    allocation = SlurmAllocation.from_environ(batch_without(**HET))
    assert allocation is not None
    assert allocation.components == (HetComponent(1, 3), HetComponent(6, None))
    assert allocation.num_tasks == 7
    some = SlurmAllocation.from_environ({**batch_without(**HET), "SLURM_NTASKS_PER_NODE_HET_GROUP_1": ""})
    assert some is not None
    assert some.num_tasks is None


def test_components_of_an_outer_job_are_ignored() -> None:
    allocation = SlurmAllocation.from_environ(batch_without(**{**HET, "SLURM_JOB_ID_HET_GROUP_0": "5"}))
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
