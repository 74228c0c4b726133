"""Command lines of srun, and its error messages."""

from __future__ import annotations

import pytest

from tf4slurm.slurm.allocation import HetComponent, SlurmAllocation
from tf4slurm.slurm.commands import exited_tasks, srun_command, srun_on_each_node_command

ALWAYS = ("--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL", "--input=none")


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        (SlurmAllocation("38", 7, None), ("srun", "--ntasks=4", *ALWAYS, "python", "-m", "x")),
        (SlurmAllocation("38", None, 6), ("srun", "--ntasks=4", *ALWAYS, "--cpus-per-task=6", "python", "-m", "x")),
    ],
)
def test_srun(allocation: SlurmAllocation, expected: tuple[str, ...]) -> None:
    assert srun_command(allocation, 4, ["python", "-m", "x"]) == expected


def test_srun_on_the_components_of_a_heterogeneous_job() -> None:
    allocation = SlurmAllocation("38", 3, None, (HetComponent(1, 2), HetComponent(2, None)))
    assert srun_command(allocation, 3, ["python"], ["--mem=1G"]) == (
        *("srun", "--het-group=0", "--ntasks=1", *ALWAYS, "--cpus-per-task=2", "--mem=1G", "python"),
        *(":", "--het-group=1", "--ntasks=2", *ALWAYS, "--mem=1G", "python"),
    )


def test_srun_once_on_each_node() -> None:
    command = srun_on_each_node_command(3, ["hostname"])
    assert command[:5] == ("srun", "--label", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1")
    assert command[-1] == "hostname"
    assert "--input=none" not in command, "what srun reads goes to all tasks"


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("srun: error: r1-n9: task 1: Exited with exit code 2", {1}),
        ("srun: error: r1-n[2,9]: tasks 0,2-3: Exited with exit code 2", {0, 2, 3}),
        ("srun: error: gpu-09: task 0: Killed", {0}),
        ("srun: error: Unable to create step for job 3: Invalid node name", set()),
        ("slurmstepd: error: execve(): /usr/bin/python: No such file or directory", set()),
        ("", set()),
    ],
)
def test_exited_tasks(line: str, ranks: set[int]) -> None:
    assert exited_tasks(line) == ranks
