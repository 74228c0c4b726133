"""What scripts report, in the files of a job's run directory: every report, in a bounded file."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disk import freezable_disk, freeze, thaw
from tests.jobs import Job
from tests.processes import wait_until
from tf4slurm.cluster import Task
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.summary import JobSummary

ONE_TASK = ("--ps", "0", "--workers", "0")
CHIEF = Task("chief", 0)


def lines_of(job: Job, task: Task = CHIEF, attempt: int = 1) -> list[dict[str, Any]]:
    path = RunDirectory(job.run_directory).metrics(task, attempt)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_report_is_recorded(job: Job) -> None:
    code = """
import time, tf4slurm
for step in range(300):
    tf4slurm.report(step=step, loss=1 / (step + 1))
    time.sleep(0.002)
tf4slurm.report(accuracy=0.5)
"""
    job.start(*ONE_TASK, command=(sys.executable, "-c", code))
    assert job.wait() == 0, job.stderr
    lines = lines_of(job)
    losses = [line["metrics"]["loss"] for line in lines if "loss" in line["metrics"]]
    assert losses == [1 / (step + 1) for step in range(300)]
    assert [line.get("step") for line in lines] == [*range(300), None]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    series = JobSummary(RunDirectory(job.run_directory)).metrics.series
    assert [point.step for point in series["loss"]["chief/0"].points] == [*range(300)]
    assert (series["loss"]["chief/0"].best, series["accuracy"]["chief/0"].best) == (1 / 300, 0.5)


def test_many_reports_are_merged_and_none_is_lost(job: Job) -> None:
    code = """
import tf4slurm
for step in range(100_000):
    tf4slurm.report(step=step, loss=-5.0 if step == 77_777 else 9.0 if step == 3_333 else 1.0)
"""
    job.start(*ONE_TASK, command=(sys.executable, "-c", code))
    assert job.wait(60) == 0, job.stderr
    lines = lines_of(job)
    assert sum(line.get("calls", 1) for line in lines) == 100_000
    assert len(lines) <= 10_000
    assert lines[-1]["step"] == 99_999
    series = JobSummary(RunDirectory(job.run_directory)).metrics.series["loss"]["chief/0"]
    assert (series.best, series.highest and series.highest.high) == (-5.0, 9.0)


REPORT_AND_FAIL_ONCE = """
import os, pathlib, sys, time, tf4slurm
task, starts = os.environ["TF4SLURM_TASK"], pathlib.Path(sys.argv[1])
if task == sys.argv[2]:
    number = len([*starts.iterdir()])
    tf4slurm.report(step=number, loss=1.0)
    (starts / str(number)).touch()
    sys.exit(3 if number == 0 else 0)
while len([*starts.iterdir()]) < 2:
    time.sleep(0.05)
"""


def test_restarted_worker_continues_its_file(job: Job, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()
    command = (sys.executable, "-c", REPORT_AND_FAIL_ONCE, str(starts), "worker/0")
    job.start("--ps", "1", "--workers", "1", command=command)
    assert job.wait() == 0, job.stderr
    assert [line["step"] for line in lines_of(job, Task("worker", 0))] == [0, 1]


def test_each_attempt_has_its_own_file(job: Job, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()
    command = (sys.executable, "-c", REPORT_AND_FAIL_ONCE, str(starts), "chief/0")
    job.start(*ONE_TASK, "--max-attempts", "2", command=command)
    assert job.wait() == 0, job.stderr
    assert [[line["step"] for line in lines_of(job, attempt=attempt)] for attempt in (1, 2)] == [[0], [1]]
    points = JobSummary(RunDirectory(job.run_directory)).metrics.series["loss"]["chief/0"].points
    assert [(point.step, point.attempt) for point in points] == [(0, 1), (1, 2)]


def test_reports_of_a_killed_script_are_recorded(job: Job) -> None:
    code = """
import os, signal, time, tf4slurm
from tf4slurm.scripts.channel import find_script_channel
for step in range(10):
    tf4slurm.report(step=step)
def has_sent(channel):
    with channel._changed:
        return not channel._reports
while not has_sent(find_script_channel()):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""
    job.start(*ONE_TASK, command=(sys.executable, "-c", code))
    assert job.wait() == 128 + signal.SIGKILL
    assert [line["step"] for line in lines_of(job)] == [*range(10)]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a file system")
def test_reports_during_a_stall_are_recorded_after_it(job: Job, tmp_path: Path) -> None:
    code = """
import pathlib, sys, time, tf4slurm
step = 0
while not pathlib.Path(sys.argv[1]).exists():
    tf4slurm.report(step=step, loss=1.0)
    step += 1
    pathlib.Path(sys.argv[2]).write_text(f"{step:9}")
    time.sleep(0.05)
"""
    end, reported, runs = tmp_path / "end", tmp_path / "reported", job.directory / "runs"
    with freezable_disk(runs):
        job.start(*ONE_TASK, "--heartbeat-timeout", "10", command=(sys.executable, "-c", code, str(end), str(reported)))
        assert wait_until(lambda: any(runs.glob("*/metrics/chief-0.1.jsonl")), 60), job.stderr
        before = int(reported.read_text() or 0)
        freeze(runs)
        assert not wait_until(lambda: job.process is not None and job.process.poll() is not None, 12)
        assert wait_until(lambda: int(reported.read_text() or 0) > before + 100, 60)
        thaw(runs)
        end.touch()
        assert job.wait() == 0, job.stderr
        steps = [line["step"] for line in lines_of(job)]
        assert steps == [*range(len(steps))]
        assert len(steps) > before + 100
