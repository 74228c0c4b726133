"""The files that `tf4slurm run` writes while a job runs: status.json, samples.jsonl and the registry entry."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tf4slurm
from tests.jobs import ROLES, TF4SLURM, Job
from tests.processes import wait_until
from tf4slurm.job import Job as FoundJob
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event, JobFile, ResultFile, Sample, StatusFile, TaskStatus
from tf4slurm.reports.summary import JobSummary

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
    assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 60)
    run = RunDirectory(job.run_directory)

    def read() -> StatusFile:
        return run.read(StatusFile) or StatusFile(tasks=(TaskStatus(),))

    def is_complete() -> bool:  # early samples have little memory, and the first steps may be reported late
        chief = read().tasks[0]
        return chief.memory_bytes > 30_000_000 and 1 < (chief.steps_per_second or 0) <= 20

    assert wait_until(is_complete, 60), read()
    status = read()
    assert (status.phase, status.attempt) == ("training", 1)
    assert [task.task for task in status.tasks] == ["chief/0", "ps/0", "worker/0", "worker/1"]
    assert [task.state for task in status.tasks] == ["running", "importing", "importing", "importing"]
    assert (status.tasks[0].metrics["loss"] or 0) > 0
    assert find_job(None, os.environ).run_directories == [run]
    facts = run.read(JobFile) or JobFile()
    assert wait_until(lambda: "tensorflow" in (run.read(JobFile) or facts).versions, 60)
    facts = run.read(JobFile) or facts
    assert facts.versions.items() >= {"tf4slurm": tf4slurm.__version__, "python": platform.python_version()}.items()
    assert re.fullmatch("[0-9a-f]{40}", facts.commit or "")
    assert facts.is_dirty is not None
    assert facts.command[0] == sys.executable
    end.touch()
    assert job.wait() == 0
    assert (read().phase, read().reason) == ("ended", (run.read(ResultFile) or ResultFile()).reason)
    samples = run.read_lines(Sample)
    steps = [sample.step[0] for sample in samples]
    reported = [step for step in steps if step is not None]
    assert reported == sorted(reported)


def test_script_is_importing_until_its_server_answers(job: Job, tmp_path: Path) -> None:
    marks = tmp_path / "import", tmp_path / "serve", tmp_path / "train"
    code = """
import concurrent.futures, grpc, json, os, pathlib, sys, time, tf4slurm
imported, served, trained = map(pathlib.Path, sys.argv[1:])
def wait(path):
    while not path.exists():
        time.sleep(0.02)
wait(imported)
task = json.loads(os.environ["TF_CONFIG"])
address = task["cluster"][task["task"]["type"]][task["task"]["index"]]
server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
server.add_insecure_port(address)
server.start()
wait(served)
tf4slurm.report(step=1)
wait(trained)
"""
    job.start("--ps", "1", "--workers", "1", command=(sys.executable, "-c", code, *map(str, marks)))
    assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 60)

    def read() -> tuple[str | None, set[str]]:
        status = RunDirectory(job.run_directory).read(StatusFile) or StatusFile()
        return status.phase, {task.state for task in status.tasks}

    def is_now(phase: str, state: str) -> bool:
        return read() == (phase, {state})

    for mark, expected in zip(
        marks, (("importing", "importing"), ("running", "running"), ("training", "running")), strict=True
    ):
        phase, state = expected
        assert wait_until(functools.partial(is_now, phase, state), 60), read()
        shown = subprocess.run(
            [TF4SLURM, "status", job.run_directory], capture_output=True, text=True, check=True
        ).stdout
        assert phase in shown
        assert state in shown
        mark.touch()
    assert job.wait() == 0, job.stderr
    assert "COMPLETED" in job.stderr


NVIDIA_SMI = """#!/bin/sh
echo called >> {record}
case "$1" in
    *apps*) ps -eo pid= | while read process; do echo "$process, GPU-a, 64"; done;;
    *) echo "GPU-a, 75"; echo "GPU-b, 1";;
esac
"""


def test_use_of_gpus_is_recorded_for_tasks_that_see_them(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.format(record=tmp_path / "record"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    job.start("--ps", "1", "--workers", "1")
    for name in ("chief-0", "ps-0", "worker-0"):
        job.wait_for_child(name)

    def found() -> list[tuple[str, float | None, int | None]]:
        status = RunDirectory(job.run_directory).read(StatusFile) or StatusFile()
        return [(task.task, task.gpu_percent, task.gpu_memory_bytes) for task in status.tasks]

    used = [("chief/0", None, None), ("ps/0", None, None), ("worker/0", 75.0, 64 * 2**20)]
    assert wait_until(lambda: found() == used, 60), found()
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert JobSummary(RunDirectory(job.run_directory)).curves.gpu_percent[2][-1] == 75.0


def test_nvidia_smi_that_hangs_does_not_disturb_the_job(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    patient = "from tf4slurm.agent import gpu_usage; gpu_usage._TIMEOUT_SECONDS = 600\n"
    (tmp_path / "sitecustomize.py").write_text(patient)  # so that a job that waits for nvidia-smi does not end
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    job.start("--ps", "1", "--workers", "1", "--heartbeat-timeout", "10")
    job.wait_for_child("chief-0")
    job.wait_for_event("started", "worker/0")
    assert not wait_until(lambda: job.process is not None and job.process.poll() is not None, 12)
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert "lost" not in {event["kind"] for event in job.events}


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
    reports = (job.run_directory / "metrics" / "chief-0.1.jsonl").read_text().splitlines()
    assert [read_strictly(line)["metrics"] for line in reports] == [written]
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
