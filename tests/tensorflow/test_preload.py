"""Jobs whose processes are forked from one that has imported TensorFlow: training, restarts, attempts, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

TRAINING = Path(__file__).with_name("training.py")
ROLES = ("--ps", "1", "--workers", "2")


def is_forked(process_id: int) -> bool:
    """Return whether the parent of a process is a fork of a preloader."""
    parent = psutil.Process(process_id).parent()
    return parent is not None and any(word.endswith("preload/program.py") for word in parent.cmdline())


def start(job: Job, steps: int, *options: str) -> None:
    command = (sys.executable, str(TRAINING), str(job.directory / "checkpoints"), str(steps), "500")
    job.start(*ROLES, "--preload", "always", *options, command=command)


def test_training_goes_on_after_a_killed_worker_and_resumes_after_a_killed_ps(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        start(job, 20_000, "--max-attempts", "2")
        checkpoints = tmp_path / "checkpoints"
        assert wait_until(lambda: len(list(checkpoints.glob("*.index"))) > 1, 120), job.stderr
        tasks = ("chief/0", "ps/0", "worker/0", "worker/1")
        first = {task: child_of(task) for task in tasks}
        assert all(map(is_forked, first.values()))
        os.kill(first["worker/0"], signal.SIGKILL)
        job.wait_for_event("restarting", "worker/0")
        assert wait_until(lambda: child_of_or_none("worker/0") not in (None, first["worker/0"]), 60)
        second = child_of("worker/0")
        assert is_forked(second)
        os.kill(first["ps/0"], signal.SIGKILL)
        assert job.wait(120) == 0, job.stderr
        assert "not preloaded" not in job.stderr
        lines = job.stdout.splitlines()
        restored = [line.split() for line in lines if " restored " in line]
        assert [words[3] == "None" for words in restored] == [True, False]
        (done,) = [line for line in lines if "done {" in line]
        result = json.loads(done.partition("done ")[2])
        assert result["weight"] >= result["step"] >= 20_000  # a checkpoint may have later weights than its counter


def child_of_or_none(task: str) -> int | None:
    try:
        return child_of(task)
    except ValueError:  # none, or two for a moment
        return None


def test_reason_is_told_if_a_script_cannot_be_preloaded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('starting')\nimport tensorflow\n")
    with Job(tmp_path) as job:
        job.start("--ps", "0", "--workers", "0", "--preload", "always", command=(sys.executable, str(script)))
        assert job.wait(120) == 0, job.stderr
        why = "TensorFlow is not preloaded, because line 1 of train.py calls a function"
        assert f"rank 0: {why}" in job.stdout + job.stderr
