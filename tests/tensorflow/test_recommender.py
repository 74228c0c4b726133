"""A small recommender as in the tutorial: split tables are learned, and restored after a ps is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until

SCRIPT = Path(__file__).parents[2] / "TUTORIALS" / "train_recommender.py"
SIZES = ("--users", "3000", "--items", "2000", "--batch-size", "1024")

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


@pytest.mark.long
def test_recommender_learns_although_a_ps_is_killed(job: Job, tmp_path: Path) -> None:
    checkpoints, report = tmp_path / "checkpoints", tmp_path / "report.json"
    places = ("--checkpoints", str(checkpoints), "--save-every", "300", "--report-json", str(report))
    command = (sys.executable, str(SCRIPT), *SIZES, "--steps", "1500", *places)
    job.start("--ps", "2", "--workers", "2", "--max-attempts", "2", command=command)
    assert wait_until(lambda: bool(list(checkpoints.glob("ckpt-*.index"))), 120), job.stdout + job.stderr
    os.kill(child_of("ps/1"), signal.SIGKILL)
    assert job.wait(170) == 0, job.stdout + job.stderr
    assert "going on from step" in job.stdout
    found = json.loads(report.read_text())
    assert found["steps"] < 1500
    assert found["possible_auc"] - 0.02 < found["auc"] < found["possible_auc"] + 0.01


@pytest.mark.long
def test_single_ps_has_whole_tables(job: Job, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    places = ("--checkpoints", str(tmp_path / "checkpoints"), "--report-json", str(report))
    command = (sys.executable, str(SCRIPT), *SIZES, "--steps", "300", *places)
    job.start("--ps", "1", "--workers", "1", command=command)
    assert job.wait(120) == 0, job.stdout + job.stderr
    assert json.loads(report.read_text())["auc"] > 0.7
