"""The tutorial's training with real TensorFlow processes on this host, with and without failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import child_of, wait_until

SCRIPT = Path(__file__).parents[2] / "TUTORIALS" / "train_digits.py"
ROLES = ("--ps", "1", "--workers", "2")

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

pytestmark = [pytest.mark.keras, pytest.mark.timeout(400)]


def start(job: Job, *arguments: str) -> None:
    job.start(*ROLES, command=(sys.executable, str(SCRIPT), *arguments))


def wait_for_epoch(job: Job, epoch: int) -> None:
    line = f"chief/0 | epoch {epoch} "
    assert wait_until(lambda: line in job.stdout, timeout_seconds=90), job.stdout + job.stderr


def accuracy(text: str) -> float:
    (found,) = re.findall(r"test accuracy: ([0-9.]+)", text)
    return float(found)


def test_training_learns_and_all_tasks_end(job: Job) -> None:
    start(job)
    assert job.wait(150) == 0
    assert accuracy(job.stdout) >= 0.95
    assert {task["state"] for task in job.result["tasks"]} == {"terminated"}
    serving = {event["task"] for event in job.events if event["kind"] == "serving"}
    assert serving == {"chief/0", "ps/0", "worker/0", "worker/1"}
    assert job.result["warnings"] == []
    chief = job.result["tasks"][0]
    assert (chief["step"], chief["metrics"]["val_accuracy"]) == (660, pytest.approx(accuracy(job.stdout), abs=1e-4))
    assert chief["metrics"]["loss"] < 0.1
    assert chief["metrics"]["accuracy"] > 0.95
    assert job.stderr.splitlines()[-1] == f"report: {job.run_directory / 'report.html'}"
    page = (job.run_directory / "report.html").read_text()
    assert ">Recommendations<" not in page


@pytest.mark.parametrize(
    ("command", "times"),
    [
        pytest.param(
            (TF4SLURM, "run", "--ps", "0", "--no-chief", "--workers", "2", "--"),
            2,
            id="in-step",
            marks=pytest.mark.long,
        ),
        pytest.param((), 1, id="alone"),
    ],
)
def test_training_without_ps_learns_and_resumes(command: tuple[str, ...], times: int, tmp_path: Path) -> None:
    options = ("--checkpoint-dir", str(tmp_path / "saved"), "--report-json", str(tmp_path / "report.json"))
    for epochs in ("4", "20"):
        run = (*command, sys.executable, str(SCRIPT), *options, "--epochs", epochs)
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"resuming from step \d+", done.stdout)) == times
    assert re.search(r"epoch 4 ", done.stdout) is None
    (printed,) = set(re.findall(r"test accuracy: ([0-9.]+)", done.stdout))
    report = json.loads((tmp_path / "report.json").read_text())
    assert float(printed) == pytest.approx(report["test_accuracy"], abs=1e-4)
    assert float(printed) >= 0.9


@pytest.mark.long
def test_killed_worker_is_replaced_and_training_completes(job: Job) -> None:
    start(job)
    wait_for_epoch(job, 3)
    os.kill(child_of("worker/1"), signal.SIGKILL)
    assert job.wait(150) == 0
    assert accuracy(job.stdout) >= 0.95
    assert [task["starts"] for task in job.result["tasks"]] == [1, 1, 1, 2]


@pytest.mark.long
def test_killed_ps_ends_the_job_and_the_next_job_resumes(job: Job, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    start(job, "--checkpoint-dir", str(checkpoints))
    wait_for_epoch(job, 3)
    os.kill(child_of("ps/0"), signal.SIGKILL)
    assert job.wait(40) == 137  # not after the heartbeat timeout
    assert job.stderr.count("Root cause:") == 1
    (tmp_path / "again").mkdir()
    again = Job(tmp_path / "again")
    start(again, "--checkpoint-dir", str(checkpoints))
    assert again.wait(150) == 0
    assert "resuming from step" in again.stdout
    assert "epoch 1 " not in again.stdout
    assert accuracy(again.stdout) >= 0.95
