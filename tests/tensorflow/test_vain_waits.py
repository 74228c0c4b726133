"""Sessions without device_filters that wait for a worker that has exited, in real jobs."""

from __future__ import annotations

import html
import os
import signal
import subprocess
import sys

import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import wait_until
from tests.tensorflow.test_unchanged_scripts import SCRIPTS
from tf4slurm.errors import EXIT_TASK_LOST

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

SECONDS = 120
CURE = 'device_filters=["/job:ps", "/job:worker/task:1"]'


def start_until_worker_1_waits(job: Job, workers: int, *options: str) -> str:
    """Start a job whose worker 1 makes its session after worker 0 has exited. Return the warning."""
    script, flag = str(SCRIPTS / "without_filters.py"), job.directory / "flag"
    cluster = ("--no-chief", "--ps", "1", "--workers", str(workers))
    job.start(*cluster, *options, command=(sys.executable, script, str(flag)))
    assert wait_until(lambda: "starting the child processes" in job.stderr, 60), job.stderr
    job.wait_for_event("exited", "worker/0", timeout_seconds=SECONDS)
    flag.touch()
    job.wait_for_event("warning", timeout_seconds=60)
    (text,) = [event["text"] for event in job.events if event["kind"] == "warning"]
    assert "worker/1 on " in text
    assert "waits for worker/0 on " in text
    assert "exited with code 0" in text
    assert CURE in text
    assert wait_until(lambda: text in job.stderr, 10)
    return str(text)


def check_end(job: Job, warning: str) -> None:
    assert job.wait(60) == EXIT_TASK_LOST, job.stdout + job.stderr
    result = job.result
    assert (result["state"], result["cause"], result["reason"]) == ("FAILED", "worker/1", warning)
    (blocked,) = [task["task"] for task in result["tasks"] if task["vain_waits"]]
    assert blocked == "worker/1"
    check_report(job, warning)


def check_report(job: Job, warning: str) -> None:
    page = html.unescape((job.run_directory / "report.html").read_text())
    assert warning in page
    assert "did not fail" not in page
    assert 'class="s-blocked"' in page


def test_job_ends_when_all_other_tasks_have_ended(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.directory / "sitecustomize.py").write_text(
        "from tf4slurm.control import rules; rules._FINAL_WAIT_SECONDS = 3\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(job.directory), prepend=os.pathsep)
    warning = start_until_worker_1_waits(job, 2)
    check_end(job, warning)


@pytest.mark.long
def test_job_ends_after_the_stall_timeout(job: Job) -> None:
    warning = start_until_worker_1_waits(job, 3, "--stall-timeout", "3")
    check_end(job, warning)


@pytest.mark.long
def test_job_goes_on_while_other_tasks_run_and_says_so_until_it_is_stopped(job: Job) -> None:
    warning = start_until_worker_1_waits(job, 3, "--grace-period", "0")

    def status() -> str:
        command = [TF4SLURM, "status", str(job.run_directory)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert wait_until(lambda: "BLOCKED" in status(), 30), status()
    assert warning in status()
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.result["warnings"] == [warning]
    check_report(job, warning)
    assert "worker/1 waited for a task that had ended" in html.unescape((job.run_directory / "report.html").read_text())
