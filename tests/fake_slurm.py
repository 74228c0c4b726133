"""Fakes of Slurm's programs, and jobs that they know."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tf4slurm.jobs import cancellation
from tf4slurm.jobs.registry import KnownJob, register_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, ResultFile, StatusFile
from tf4slurm.spec.points import ArrayElement


class FakeSlurm:
    """Fakes of Slurm's programs in `directory`, first on PATH. Each call is a line of the file "calls"."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "bin"
        self.directory.mkdir()
        self.runs = directory / "runs"
        self.runs.mkdir()
        self.set_queue()
        self.fake("sacct", "exit 1")
        self.fake("scancel", "true")
        self.fake("sbatch", f"cat > {self.directory}/script; echo 50")
        self.set_jobs("JobId=19 ArrayJobId=19 ArrayTaskId=0 BatchFlag=1 JobState=RUNNING Partition=p ExitCode=0:0")

    def fake(self, name: str, body: str) -> None:
        text = f'#!/bin/sh\necho "{name} $*" >> {self.directory}/calls\n{body}\n'
        (self.directory / name).write_text(text)
        (self.directory / name).chmod(0o755)

    def set_queue(self, **states: str) -> None:
        """Let squeue print jobs with their states. The names of the arguments are "j" and the id, with p for "+"."""
        lines = [f"{name[1:].replace('p', '+')}|{state}|None|0:01|1:00|N/A|n1" for name, state in states.items()]
        (self.directory / "queue").write_text("".join(f"{line}\n" for line in lines))
        gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
        self.fake("squeue", f"cat {self.directory}/queue" if lines else gone)

    def set_jobs(self, *records: str) -> None:
        lines = "\n".join(records)
        self.fake(
            "scontrol",
            f'[ "$2" = partition ] && {{ echo "PartitionName=p PreemptMode=OFF"; exit; }}\ncat <<END\n{lines}\nEND',
        )

    def calls(self, program: str) -> list[str]:
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(f"{program} ")]

    def register(self, job_id: str, indices: Sequence[int] = (), name: str = "train") -> KnownJob:
        elements = [ArrayElement(index, {"lr": f"0.{index}"}) for index in indices]
        return register_job(f"{name}-{job_id}", self.runs, os.environ, job_id, elements)

    def run(self, name: str, state: str | None = None, exit_code: int = 0, age: float = 0.0) -> RunDirectory:
        """Create a run directory: with a result, if `state` is given, otherwise of a launcher that runs."""
        run = RunDirectory.create(self.runs, name)
        run.write(JobFile(name="train", grace_period_seconds=0.1, process=Process.of(os.getpid())))
        run.write(StatusFile(time=time.time() - age, phase="training", heartbeat_timeout_seconds=10.0))
        if state is not None:
            run.write_result(ResultFile(state, exit_code, f"It is {state}."))
        return run


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, seconds in (("_POLL_SECONDS", 0.05), ("_MARGIN_SECONDS", 0.2), ("_ASK_SECONDS", 0.0)):
        monkeypatch.setattr(cancellation, name, seconds)
    monkeypatch.setattr(cancellation, "_KILL_SECONDS", 0.3)
    return FakeSlurm(tmp_path)
