"""The tutorial's training over four hosts of a real Slurm."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).parents[2] / "TUTORIALS" / "train_digits.py"
pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

pytestmark = pytest.mark.keras

PAGE = SCRIPT.parents[1] / "docs" / "start" / "slurm.md"


def accuracy(text: str) -> float:
    (found,) = re.findall(r"test accuracy: ([0-9.]+)", text)
    return float(found)


def lay_out(directory: Path) -> dict[str, str]:
    """Make `directory` look like a checkout with the command installed; return the environment for it."""
    (directory / "TUTORIALS").symlink_to(SCRIPT.parent)
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.long
def test_batch_script_of_documentation_trains(tmp_path: Path, lab: SlurmLab) -> None:
    environ = lay_out(tmp_path)
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "job.sh").write_text(script)
    job_id = lab.run("sbatch", "--parsable", "-o", "slurm.out", "job.sh", cwd=tmp_path, env=environ).stdout.strip()
    assert lab.wait_for_job(job_id, timeout_seconds=150) == ("COMPLETED", "0:0")
    output = (tmp_path / "slurm.out").read_text()
    assert accuracy(output) >= 0.95
    assert all(node in output for node in lab.nodes)


@pytest.mark.long
def test_command_of_laptop_trains_in_salloc(tmp_path: Path, lab: SlurmLab) -> None:
    environ = lay_out(tmp_path)
    command = "tf4slurm run --ps 1 --workers 2 -- python TUTORIALS/train_digits.py"
    assert command in (PAGE.parent / "laptop.md").read_text(encoding="utf-8")
    salloc = ("salloc", "-Q", "-N4", "-n4", *shlex.split(command))
    assert accuracy(lab.run(*salloc, timeout_seconds=150, cwd=tmp_path, env=environ).stdout) >= 0.95
