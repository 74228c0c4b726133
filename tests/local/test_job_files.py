"""The files that `tf4slurm run` writes while a job runs: status.json, samples.jsonl and the registry entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.jobs import ROLES, TF4SLURM, Job
from tests.processes import wait_until
from tf4slurm.job import Job as FoundJob
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event, JobFile, ResultFile, Sample, StatusFile, TaskStatus

REPORTS = """
import os, sys, time, pathlib, tf4slurm
held = bytearray(30_000_000)
for step in range(10**6):
    if os.environ["TF4SLURM_TASK"] == "chief/0":
        tf4slurm.report(step=step, loss=1 / (step + 1))
    time.sleep(0.05)
    if pathlib.Path(sys.argv[1]).exists():
        break
"""


def test_status_and_samples_are_written_while_a_job_runs(job: Job, tmp_path: Path) -> None:
    script, end = tmp_path / "reports.py", tmp_path / "end"
    script.write_text(REPORTS)
    job.start(*ROLES, command=(sys.executable, str(script), str(end)))
    assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 20)
    run = RunDirectory(job.run_directory)

    def read() -> StatusFile:
        return run.read(StatusFile) or StatusFile(tasks=(TaskStatus(),))

    def is_complete() -> bool:  # early samples have little memory, and the first steps may be reported late
        chief = read().tasks[0]
        return chief.memory_bytes > 30_000_000 and 1 < (chief.steps_per_second or 0) <= 20

    assert wait_until(is_complete, 40), read()
    status = read()
    assert (status.phase, status.attempt) == ("training", 1)
    assert [task.task for task in status.tasks] == ["chief/0", "ps/0", "worker/0", "worker/1"]
    assert {task.state for task in status.tasks} == {"running"}
    assert (status.tasks[0].metrics["loss"] or 0) > 0
    assert find_job(None, os.environ).run_directories == [run]
    end.touch()
    assert job.wait() == 0
    assert (read().phase, read().reason) == ("ended", (run.read(ResultFile) or ResultFile()).reason)
    samples = run.read_lines(Sample)
    steps = [sample.step[0] for sample in samples]
    reported = [step for step in steps if step is not None]
    assert reported == sorted(reported)
    assert (samples[-1].metrics["0"]["loss"] or 0) > 0


def read_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_metrics_that_are_not_finite_are_null(job: Job) -> None:
    code = "import sys, tf4slurm; tf4slurm.report(step=1, loss=float('nan'), high=float('inf'), low=float('-inf'))"
    job.start("--ps", "0", "--workers", "0", command=(sys.executable, "-c", code))
    assert job.wait() == 0
    written = {"loss": None, "high": None, "low": None}
    status = read_strictly((job.run_directory / "status.json").read_text())
    assert status["tasks"][0]["metrics"] == written
    samples = (job.run_directory / "samples.jsonl").read_text().splitlines()
    assert read_strictly(samples[-1])["metrics"] == {"0": written}
    shown = subprocess.run(
        [TF4SLURM, "status", "--json", job.run_directory], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert read_strictly(shown)[0]["tasks"][0]["metrics"] == written
    assert FoundJob.find(str(job.run_directory)).status().tasks[0].metrics == written


def test_truncated_files_are_read_up_to_the_damage(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "cut")
    assert (run.read(JobFile), run.read(ResultFile), run.read_lines(Event)) == (None, None, [])
    run.write(StatusFile(phase="training"))
    (run.path / "status.json").write_text('{"phase": "trai')
    run.events.write_text('{"kind": "registered"}\n[1]\n{"kind": "exi')
    assert run.read(StatusFile) is None
    assert run.read_lines(Event) == [Event(kind="registered")]
