"""The command lines of Slurm's programs, compared whole."""

from __future__ import annotations

import pytest

from tf4slurm.slurm.allocation import SlurmAllocation
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
