"""Steps in environments of real tasks, and variations of them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.captures import OUTSIDE_OF_STEPS
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.slurm.step import SlurmStep, is_in_step

DATA = Path(__file__).parent.parent / "data"
BATCH: dict[str, str] = json.loads((DATA / "batch-3-nodes-7-tasks.json").read_text())["environments"][0]
RECORDED = {name: json.loads((DATA / name).read_text()) for name in ("step-3-nodes-7-tasks.json", "step-cyclic.json")}
TASK: dict[str, str] = RECORDED["step-3-nodes-7-tasks.json"]["environments"][6]


@pytest.mark.parametrize("name", RECORDED)
def test_rank_and_node_of_every_task_of_a_recorded_step(name: str) -> None:
    environments, nodes = RECORDED[name]["environments"], RECORDED[name]["nodes"]
    steps = [SlurmStep.from_environ(environ) for environ in environments]
    assert {str(step.rank): step.node_name for step in steps} == nodes
    assert {step.num_tasks for step in steps} == {len(nodes)}
    for node, count in Counter(nodes.values()).items():
        assert sorted(step.local_rank for step in steps if step.node_name == node) == list(range(count))


def test_all_fields_of_one_task() -> None:
    step = SlurmStep.from_environ(TASK)
    assert {field.name: getattr(step, field.name) for field in dataclasses.fields(step) if field.compare} == {
        "job_id": "38",
        "step_id": "0",
        "rank": 6,
        "local_rank": 0,
        "num_tasks": 7,
        "node_name": "r1-n11",
        "reserved_ports": tuple(range(23163, 23169)),
        "launch_address": "10.78.0.2",
    }


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
    environ = {name: text for name, text in TASK.items() if name != variable}
    if value is not None:
        environ[variable] = value
    assert getattr(SlurmStep.from_environ(environ), field) == expected


@pytest.mark.parametrize(
    "variable",
    ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURMD_NODENAME"],
)
@pytest.mark.parametrize("value", [None, ""])
def test_error_names_a_missing_variable(variable: str, value: str | None) -> None:
    environ = {name: text for name, text in TASK.items() if name != variable}
    if value is not None:
        environ[variable] = value
    with pytest.raises(SlurmEnvironmentError) as caught:
        SlurmStep.from_environ(environ)
    assert str(caught.value).startswith(f"{variable} is not set: this process is not a task of a Slurm step. ")
    assert (caught.value.variable, caught.value.value) == (variable, None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_PROCID", "x"),
        ("SLURM_PROCID", "-1"),
        ("SLURM_LOCALID", "0.5"),
        ("SLURM_STEP_NUM_TASKS", "7(x2)"),
        ("SLURM_STEP_RESV_PORTS", "23010-23000"),
        ("SLURM_STEP_RESV_PORTS", "(null)"),
        ("SLURM_RESTART_COUNT", "often"),
    ],
)
def test_error_names_an_invalid_variable(variable: str, value: str) -> None:
    with pytest.raises(SlurmEnvironmentError) as caught:
        _ = SlurmStep.from_environ({**TASK, variable: value}).restart_count
    assert str(caught.value).startswith(variable)
    assert (caught.value.variable, caught.value.value) == (variable, value)


def test_the_tasks_of_a_node_try_different_reserved_ports_first() -> None:
    on_first_node = RECORDED["step-3-nodes-7-tasks.json"]["environments"][:5]
    candidates = [SlurmStep.from_environ(environ).port_candidates for environ in on_first_node]
    assert [ports[0] for ports in candidates] == [23163, 23164, 23165, 23166, 23167]
    assert candidates[4] == (23167, 23168, 23163, 23164, 23165, 23166)


def test_more_tasks_than_reserved_ports_begin_again() -> None:
    environ = {**TASK, "SLURM_LOCALID": "7", "SLURM_STEP_RESV_PORTS": "23000-23002"}
    assert SlurmStep.from_environ(environ).port_candidates == (23001, 23002, 23000)


def test_without_reserved_ports_there_are_no_candidates() -> None:
    assert SlurmStep.from_environ({**TASK, "SLURM_STEP_RESV_PORTS": ""}).port_candidates == ()


@pytest.mark.parametrize("step_id", ["0", "7", "4294967279"])
def test_task_is_in_step(step_id: str) -> None:
    assert is_in_step({**TASK, "SLURM_STEP_ID": step_id})


@pytest.mark.parametrize("environ", [{}, BATCH, *OUTSIDE_OF_STEPS.values()], ids=["none", "batch", *OUTSIDE_OF_STEPS])
def test_batch_script_and_interactive_shell_are_in_no_step(environ: dict[str, str]) -> None:
    assert not is_in_step(environ)
    with pytest.raises(
        SlurmEnvironmentError, match=r'not a task of a Slurm step\. Start it with srun, or use "tf4slurm'
    ):
        SlurmStep.from_environ(environ)


@pytest.mark.parametrize("step_id", [*map(str, range(-6, 0)), *(str(2**32 - number) for number in range(1, 7))])
def test_reserved_step_id_is_not_a_task(step_id: str) -> None:
    assert not is_in_step({**TASK, "SLURM_STEP_ID": step_id})
    with pytest.raises(SlurmEnvironmentError, match=f"^SLURM_STEP_ID is '{step_id}': "):
        SlurmStep.from_environ({**TASK, "SLURM_STEP_ID": step_id})
