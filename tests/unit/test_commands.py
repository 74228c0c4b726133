"""The command lines of Slurm's programs, compared whole."""

from __future__ import annotations

import pytest

from tf4slurm.slurm.allocation import HetComponent, SlurmAllocation
from tf4slurm.slurm.commands import srun_command

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
