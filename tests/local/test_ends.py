"""The word for the end of a job, in every place that shows it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

import tf4slurm
from tests.jobs import NAMES, ROLES, TF4SLURM, Job
from tests.processes import child_of, wait_until, wait_until_gone
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.live_page import _Page

SCRIPT = """
import json, os, pathlib, sys, time
import tf4slurm
config = json.loads(os.environ["TF_CONFIG"])
role, index, directory = config["task"]["type"], config["task"]["index"], pathlib.Path(sys.argv[1])
asks = role == "chief" and "asks" in sys.argv
if asks:
    tf4slurm.should_stop()
draft = directory / f"draft-{role}-{index}"
draft.write_text("{}")
draft.replace(directory / f"{role}-{index}.1")
while not (asks and tf4slurm.should_stop()):
    end = directory / f"{role}-{index}.exit"
    if end.exists():
        sys.exit(int(end.read_text() or 0))
    time.sleep(0.02)
"""


def send(number: signal.Signals) -> Callable[[Job], object]:
    """Return a function that sends the launcher a signal."""

    def act(job: Job) -> None:
        assert job.process is not None
        job.process.send_signal(number)

    return act


def cancel(grace_period_seconds: float | None = None) -> Callable[[Job], object]:
    return lambda job: tf4slurm.cancel(str(job.run_directory), grace_period_seconds=grace_period_seconds)


class End(NamedTuple):
    """How a job is ended, and what is expected then."""

    act: Callable[[Job], object]
    state: str
    exit_code: int
    reason: str
    script: str = "waits"


ENDS = {
    "chief exits with 0": End(lambda job: job.end_child("chief-0"), "COMPLETED", 0, "Training is done"),
    "chief exits with 3": End(lambda job: job.end_child("chief-0", 3), "FAILED", 3, "chief/0 on "),
    "chief exits with 75": End(lambda job: job.end_child("chief-0", 75), "FAILED", 75, "chief/0 on "),
    "chief exits with 143": End(lambda job: job.end_child("chief-0", 143), "FAILED", 143, "chief/0 on "),
    "ps is killed": End(lambda _: os.kill(child_of("ps/0"), signal.SIGKILL), "FAILED", 137, "ps/0 on "),
    "Ctrl-C": End(send(signal.SIGINT), "STOPPED", 130, "the launcher received SIGINT"),
    "SIGTERM": End(send(signal.SIGTERM), "STOPPED", 143, "the launcher received SIGTERM"),
    "SIGUSR1": End(send(signal.SIGUSR1), "STOPPED", 138, "the launcher received SIGUSR1"),
    "closed terminal": End(send(signal.SIGHUP), "STOPPED", 129, "the launcher received SIGHUP"),
    "script saves and exits with 0": End(send(signal.SIGTERM), "STOPPED", 143, "received SIGTERM", "asks"),
    "signal to a script that asks": End(
        lambda _: os.kill(child_of("chief/0"), signal.SIGUSR1), "STOPPED", 138, "received SIGUSR1", "asks"
    ),
    "cancel": End(cancel(), "STOPPED", 143, "the launcher received SIGTERM", "asks"),
    "cancel without grace period": End(cancel(0), "STOPPED", 131, "the launcher received SIGQUIT"),
}


def call(*arguments: str) -> str:
    """Return the standard output and the standard error of a verb."""
    done = subprocess.run([TF4SLURM, *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_end_of_a_job_has_the_same_word_everywhere(job: Job, end: End) -> None:
    command = (sys.executable, "-c", SCRIPT, str(job.children), end.script)
    job.start(*ROLES, "--grace-period", "60", command=command)
    for name in NAMES:
        job.wait_for_child(name)
    end.act(job)
    assert job.wait() == end.exit_code, job.stderr
    assert (job.result["state"], job.result["exit_code"]) == (end.state, end.exit_code)
    run = job.run_directory
    last = job.stderr.splitlines()
    (line,) = [each for each in last if re.match(f"{end.state} (in|with exit code {end.exit_code} after) ", each)]
    assert end.reason in " ".join(last[last.index(line) :][:3])
    assert last[-1] == f"report: {run / 'report.html'}"
    status = tf4slurm.status(str(run))
    assert (status.state, status.exit_code, end.reason in status.reason) == (end.state, end.exit_code, True)
    assert tf4slurm.Job.find(str(run)).status().state == end.state
    assert re.search(rf"^{run.name}  {end.state}  .*exit code {end.exit_code}$", call("status", str(run)), re.MULTILINE)
    assert re.search(rf"^-  +{run.name} +{end.state} +{end.exit_code} ", call("list"), re.MULTILINE)
    assert f"{run.name} {end.state}, exit code {end.exit_code}. " in call("wait", str(run))
    for page in ((run / "report.html").read_text(), _Page(RunDirectory(run)).html()):
        assert re.findall(r'<p class="outcome \w+">([^<]+)</p>', page) == [end.state]
        assert f"<title>{run.name}: {end.state}</title>" in page
    others = {"COMPLETED", "FAILED", "STOPPED", "REQUEUED", "LOST"} - {end.state}
    assert not [word for word in others if word in job.stderr + status.reason]


def test_page_of_a_job_whose_launcher_is_killed_is_final_when_its_tasks_have_ended(job: Job, process_mark: str) -> None:
    command = (sys.executable, "-c", SCRIPT, str(job.children), "waits")
    job.start(*ROLES, "--heartbeat-timeout", "15", command=command)
    for name in NAMES:
        job.wait_for_child(name)
    run = RunDirectory(job.run_directory)

    def states() -> set[str]:
        return {task.state for task in tf4slurm.status(str(run.path)).tasks}

    assert wait_until(lambda: states() == {"importing"}, 60)  # until the first status.json after the start
    send(signal.SIGKILL)(job)
    job.wait()
    page = _Page(run).content()
    assert (page["title"], page["ended"]) == (f"{run.path.name}: LOST", False)
    assert "Tasks may still run: their agents terminate them 15 s after the loss." in page["body"]
    assert states() == {"importing"}
    assert wait_until_gone(process_mark, 60) == []
    page = _Page(run).content()
    assert (page["title"], page["ended"]) == (f"{run.path.name}: LOST", True)
    assert "Agents terminated the scripts of 4 tasks" in page["body"]
    assert "Tasks may still run" not in page["body"]
    assert states() == {"ended"}
