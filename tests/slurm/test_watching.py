"""The verbs about existing jobs on a real Slurm, from another directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab
from tf4slurm.jobs.run_directory import RunDirectory

SCRIPT = """
import os, sys, time, tf4slurm
task = os.environ["TF4SLURM_TASK"]
print("hello from", task, "with", *sys.argv[1:])
if task.startswith("ps"):
    time.sleep(1000)
for step in range(10**6):
    tf4slurm.report(step=step)
    time.sleep(0.05)
    if tf4slurm.should_stop():
        print("saved at the stop")
        break
"""


class Watcher:
    """The verbs, on the login host; jobs run in `directory`, the verbs are called elsewhere."""

    def __init__(self, lab: SlurmLab, directory: Path) -> None:
        self.lab = lab
        self.directory = directory
        self._elsewhere = directory / "elsewhere"
        self._elsewhere.mkdir()
        (directory / "train.py").write_text(SCRIPT)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run(TF4SLURM, *arguments, cwd=self._elsewhere, env=env, check=False)

    def submit(self, *options: str) -> str:
        command = (*options, "--", sys.executable, str(self.directory / "train.py"), "two words")
        done = self.lab.run(TF4SLURM, "submit", "-t", "5", *command, cwd=self.directory)
        return done.stdout.strip()

    def status(self, job_id: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json", job_id).stdout)
        return found[0]

    def wait_for_steps(self, job_id: str) -> None:
        """Wait until all training tasks have reported a step, and thus handle a stop request."""

        def have_stepped() -> bool:
            steps = [task["step"] for task in self.status(job_id)["tasks"] if task["task"] != "ps/0"]
            return bool(steps) and all(steps)

        assert wait_until(have_stepped, 60, poll_seconds=0.5)


@pytest.fixture
def watcher(lab: SlurmLab, tmp_path: Path) -> Iterator[Watcher]:
    yield Watcher(lab, tmp_path)
    lab.cancel_all()


def test_pending_job_has_a_reason_and_is_cancelled(watcher: Watcher) -> None:
    job_id = watcher.submit("-N4", "--workers", "2", "--sbatch", "begin=now+1hour")
    shown = watcher.run("status", job_id).stdout
    assert re.search(rf"^{job_id}  train-{job_id}  PENDING", shown)
    assert "BeginTime: the job waits for its begin time" in shown
    assert "Slurm expects to start it at 20" in shown
    logs = watcher.run("logs", job_id)
    assert logs.returncode == 1
    assert "has no logs: it is PENDING" in logs.stderr
    assert ". To wait for them: tf4slurm logs -f" in logs.stderr
    assert watcher.run("cancel", job_id).returncode == 0
    waited = watcher.run("wait", job_id)
    assert waited.returncode == 1
    assert f"{job_id} STOPPED, exit code 1. Slurm's queue shows CANCELLED" in waited.stderr


def test_running_job_has_status_and_logs_and_is_cancelled_and_resumed(watcher: Watcher) -> None:
    job_id = watcher.submit("-N4", "--workers", "2", "--grace-period", "20")
    watcher.wait_for_steps(job_id)
    status = watcher.status(job_id)
    assert (status["state"], status["phase"], status["limit"]) == ("RUNNING", "training", "5:00")
    assert sorted(task["node"] for task in status["tasks"]) == sorted(watcher.lab.nodes)
    assert all(task["memory_bytes"] > 0 for task in status["tasks"]) or wait_until(
        lambda: all(task["memory_bytes"] > 0 for task in watcher.status(job_id)["tasks"]), 60, poll_seconds=0.5
    )
    assert watcher.run("logs", job_id, "worker/1").stdout == "hello from worker/1 with two words\n"
    assert re.search(rf"^{job_id} +train-{job_id} +RUNNING", watcher.run("list").stdout, re.MULTILINE)
    done = watcher.run("cancel", job_id)
    assert done.returncode == 0
    assert "has ended: STOPPED, exit code 130" in done.stderr
    assert "saved at the stop" in watcher.run("logs", job_id, "chief/0").stdout
    assert watcher.run("wait", job_id, SQUEUE_PARTITION="none", SCANCEL_STATE="PENDING").returncode == 130
    again = watcher.run("resume", job_id)
    assert again.returncode == 0, again.stderr
    watcher.wait_for_steps(again.stdout.strip())
    assert watcher.run("cancel", again.stdout.strip(), "--grace-period", "0").returncode == 0


def test_cancelled_job_is_not_requeued(watcher: Watcher) -> None:
    job_id = watcher.submit("-N4", "--workers", "2", "--requeue", "3")
    watcher.wait_for_steps(job_id)
    assert watcher.run("cancel", job_id).returncode == 0
    assert watcher.run("wait", job_id).returncode == 130
    assert watcher.lab.wait_for_job(job_id)[0] == "FAILED"


def test_state_of_a_job_without_a_launcher_is_that_of_the_accounting(accounting_lab: SlurmLab, tmp_path: Path) -> None:
    watcher = Watcher(accounting_lab, tmp_path)
    job_id = watcher.submit("--single")
    assert watcher.run("wait", job_id).returncode == 1  # the script needs a task of tf4slurm
    assert wait_until(lambda: "accounting" in watcher.status(job_id)["reason"], 60, poll_seconds=0.5)
    assert watcher.status(job_id)["state"] == "FAILED"


FORGETS = """#!/bin/bash
echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1
"""


def test_batch_script_that_fails_at_once_is_explained_and_stays_failed(watcher: Watcher, tmp_path: Path) -> None:
    job_id = watcher.submit("--workers", "1", "--venv", "/no/such", "--no-check-env")
    heading = f"Slurm's output, {watcher.directory}/slurm-{job_id}.out, ends with:\n"
    error = "/no/such/bin/activate: No such file or directory"
    waited = watcher.run("wait", job_id)
    assert waited.returncode == 3
    assert heading in waited.stderr
    forgets = tmp_path / "forgets" / "squeue"
    forgets.parent.mkdir()
    forgets.write_text(FORGETS)
    forgets.chmod(0o755)
    for path in (os.environ["PATH"], f"{forgets.parent}:{os.environ['PATH']}"):
        shown = watcher.run("status", job_id, PATH=path).stdout
        assert re.search(rf"^{job_id}  train-{job_id}  FAILED .*exit code 3", shown)
        assert (heading in shown, error in shown, "tf4slurm logs" in shown) == (True, True, False)
        for verb in ("report", "logs"):
            refused = watcher.run(verb, job_id, PATH=path).stderr
            assert (error in refused, "FAILED" in refused, "not started yet" in refused) == (True, True, False)


def test_job_that_fails_before_its_tasks_start_has_a_result(watcher: Watcher) -> None:
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    listens = f"import socket, time; s = socket.create_server(('', {port})); open('up', 'w'); time.sleep(600)"
    prologue = f"{shlex.join([sys.executable, '-c', listens])} & other=$!; until [ -e up ]; do sleep 0.05; done"
    job_id = watcher.submit(
        "--workers", "1", "--control-port", port, "--prologue", prologue, "--epilogue", "kill $other"
    )
    waited = watcher.run("wait", job_id)
    assert waited.returncode == 3
    assert f"FAILED, exit code 3. None of the 1 ports {port} is free on this host" in waited.stderr
    status = watcher.status(job_id)
    assert (status["state"], status["has_result"], status["slurm_output"]) == ("FAILED", True, {})
    assert watcher.run("report", job_id).returncode == 0


def test_step_that_fails_before_its_tasks_start_has_a_result(watcher: Watcher) -> None:
    task = (TF4SLURM, "task", "--no-chief", "--ps", "1", "--start-timeout", "5", "--", "true")
    fails = (sys.executable, "-c", FAILS_IN_SERVICE, *task)
    done = watcher.lab.run("srun", "-Q", "-N2", "-n2", *fails, cwd=watcher.directory, check=False)
    assert done.returncode != 0
    (path,) = (watcher.directory / "runs").glob("*/result.json")
    result = json.loads(path.read_text())
    assert (result["state"], result["exit_code"], result["reason"]) == ("FAILED", 3, "The service cannot start.")


FAILS_IN_SERVICE = """
import sys
from tf4slurm.cli.main import main
from tf4slurm.errors import LaunchError
from tf4slurm.control.service import ControlService
async def fail(*_):
    raise LaunchError("The service cannot start.", command=())
ControlService.start = fail
sys.argv = sys.argv[1:]
main()
"""


@pytest.mark.long
def test_sites_and_partitions_are_completed(watcher: Watcher) -> None:
    def complete(words: str) -> list[str]:
        arguments = {
            "_TF4SLURM_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return watcher.run(**arguments).stdout.split()

    names = [f"plain,{name}" for name in partitions(watcher.lab)]
    # Completion waits for the controller for 2 s at most.
    assert wait_until(lambda: complete("tf4slurm submit --partition ") == names, timeout_seconds=60)
    assert complete("tf4slurm submit --site ces") == ["plain,cesga-ft3"]


def partitions(lab: SlurmLab) -> list[str]:
    return list(dict.fromkeys(lab.run("sinfo", "-h", "-o", "%R").stdout.split()))


def test_step_without_a_launcher_is_found_by_the_job_id(watcher: Watcher) -> None:
    task = (TF4SLURM, "task", "--ps", "1", "--workers", "1", "--", "true")
    watcher.lab.run("srun", "-N3", "-n3", *task, cwd=watcher.directory)
    listed = json.loads(watcher.run("list", "--json").stdout)[0]
    assert re.fullmatch(rf"true-{listed['job_id']}\.0", listed["name"])
    assert watcher.status(listed["job_id"])["state"] == "COMPLETED"


@pytest.mark.long
def test_job_without_a_result_has_slurms_state(watcher: Watcher) -> None:
    job_id = watcher.submit("-N4", "--workers", "2", "--heartbeat-timeout", "2")  # less than Slurm's KillWait
    watcher.wait_for_steps(job_id)
    watcher.lab.run("scancel", "--signal=KILL", "--batch", job_id)
    assert wait_until(lambda: watcher.status(job_id)["exit_code"] is not None, 60, poll_seconds=0.5)
    status = watcher.status(job_id)
    assert status["exit_code"] != 0
    assert "the launcher wrote no result. Last recorded state, at " in status["reason"]
    run = RunDirectory(Path(status["run_directory"]))
    assert wait_until(lambda: len(run.read_last_states()) == 4, 60, poll_seconds=0.5)  # written by the agents
    assert {task["state"] for task in watcher.status(job_id)["tasks"]} <= {"ended", "exited 0", "killed by signal 15"}
    assert ">LOST</p>" in Path(watcher.run("report", job_id).stdout.strip()).read_text()


def test_job_that_slurm_cannot_start_has_slurms_reason(watcher: Watcher) -> None:
    job_id = watcher.submit("--single", "--output", "/proc/%j.out")
    done = watcher.run("wait", job_id)
    assert done.returncode != 0
    assert "FAILED (JobLaunchFailure: a node could not start the batch script" in done.stderr


@pytest.mark.long
def test_controller_without_an_answer_is_a_warning_within_15_s(watcher: Watcher) -> None:
    job_id = watcher.submit("-N4", "--workers", "2")
    watcher.wait_for_steps(job_id)
    host = psutil.Process(int((watcher.lab.directory / "run" / "ctl").read_text()))
    (controller,) = (process for process in host.children(recursive=True) if process.name() == "slurmctld")
    controller.suspend()
    try:
        started = time.monotonic()
        shown = watcher.run("status", job_id).stdout
        assert time.monotonic() - started < 15
    finally:
        controller.resume()
    assert "Slurm's information is missing: squeue" in shown
    assert re.match(rf"{job_id}  train-{job_id}  RUNNING  \S+  training  on ", shown)
    assert re.search(rf"The state of train-{job_id} is what its launcher wrote \d+ s ago\.", shown)
    assert "chief/0" in shown
    assert watcher.status(job_id)["state"] == "RUNNING"


@pytest.mark.long
def test_error_for_an_unknown_slurm_job_names_similar_ones(watcher: Watcher) -> None:
    job_id = watcher.submit("--single")
    unknown = watcher.run("status", f"{job_id}0")
    assert unknown.returncode == 5
    assert job_id in unknown.stderr
    assert watcher.run("wait", job_id).returncode == 1  # the script needs a task of tf4slurm
    assert watcher.run("wait", "/nowhere").returncode == 5


def test_job_is_submitted_cancelled_and_waited_for_in_python(watcher: Watcher) -> None:
    code = (
        "import sys, tf4slurm\n"
        "job = tf4slurm.Job([sys.executable, 'train.py'], ps=1, workers=2, nodes=4, time=5).submit()\n"
        "while not any(task.step for task in job.status().tasks): pass\n"
        "print(job.status().state)\n"
        "job.cancel()\n"
        "print(job.wait(60), job.status().state)\n"
    )
    done = watcher.lab.run(sys.executable, "-c", code, cwd=watcher.directory, timeout_seconds=120)
    assert [line for line in done.stdout.splitlines() if line] == ["RUNNING", "130 STOPPED"]
