"""A running job to which workers can be added, without processes. Slurm's programs are fakes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tf4slurm import __version__
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, ResultFile, WorkerArray

_QUEUE = "{}|{}|None|1|1:00|N/A|n1"


class GrowingJob:
    """A running job, without processes, in a directory with fakes of Slurm's programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.known = KnownJob("4711", "train-4711", str(directory))
        self.run = RunDirectory.create(directory, "train-4711")
        self.write_job()
        self.fake("sbatch", "cat > script; echo 4712")
        self.fake("scancel", 'echo "$@" >> cancelled')
        self.set_queue(("4711", "RUNNING"))

    def write_job(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "job_id": "4711",
            "counts": {"chief": 1, "ps": 1, "worker": 1},
            "process": Process.of(os.getpid()),
            "versions": {"tf4slurm": __version__},
        }
        self.run.write(JobFile(name="train", **{**values, **changes}))

    def fake(self, name: str, text: str) -> None:
        (self.directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.directory / name).chmod(0o755)

    def set_queue(self, *jobs: tuple[str, str]) -> None:
        """Let squeue print these jobs, each with its state."""
        (self.directory / "queue").write_text("".join(_QUEUE.format(*job) + "\n" for job in jobs))
        self.fake("squeue", 'echo "$@" > asked; cat queue')

    def end(self, state: str = "COMPLETED") -> None:
        self.run.write_result(ResultFile(state=state, exit_code=0))

    @property
    def was_submitted(self) -> bool:
        return (self.directory / "script").exists()

    @property
    def cancelled(self) -> list[str]:
        path = self.directory / "cancelled"
        return path.read_text().split() if path.exists() else []

    @property
    def arrays(self) -> list[str]:
        return [array.job_id for array in self.run.read_lines(WorkerArray)]


@pytest.fixture
def growing_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowingJob:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return GrowingJob(tmp_path)
