"""Response times of the command line: help, completion, and the status of a job of 1,000 tasks."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measure import Figure
from tests.jobs import TF4SLURM
from tf4slurm.jobs.registry import register_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, StatusFile
from tf4slurm.system.typed_json import from_json

_TASKS = 1_000


def measure_status(directory: Path, runs: int) -> list[Figure]:
    """Measure whole commands, from the start of the process to its end, with their output in a pipe."""
    environ = {**os.environ, "XDG_STATE_HOME": str(directory / "state")}
    run = RunDirectory.create(directory / "runs", "large")
    run.write(JobFile(name="large", command=("true",), counts={"chief": 1, "ps": 99, "worker": 900}))
    run.write(from_json(StatusFile, _status()))
    register_job("large", directory / "runs", environ)
    completing = {"_TF4SLURM_COMPLETE": "bash_complete", "COMP_WORDS": "tf4slurm status ", "COMP_CWORD": "2"}
    figures = []
    for what, arguments, more, bound in (
        ("tf4slurm --help", ("--help",), {}, "< 0.15"),
        (f"tf4slurm status, {_TASKS} tasks", ("status",), {}, "< 0.4"),
        (f"tf4slurm status --json, {_TASKS} tasks", ("status", "--json"), {}, "< 0.4"),
        ("completion of a job's name", (), completing, ""),
    ):
        values = tuple(_seconds(arguments, {**environ, **more}) for _ in range(runs))
        figures.append(Figure(what, "s", values, bound))
    return figures


def _status() -> dict[str, object]:
    names = ["chief/0", *(f"ps/{index}" for index in range(99)), *(f"worker/{index}" for index in range(900))]
    tasks = [
        {
            "task": name,
            "rank": rank,
            "node": f"n{rank // 8:04}",
            "address": f"10.0.{rank // 250}.{rank % 250}:40000",
            "state": "running",
            "starts": 1,
            "heartbeat_age_seconds": 0.5,
            "started_seconds": 3.0,
            "step": 1000 + rank,
            "steps_per_second": 12.5,
            "seconds_since_step": 0.1,
            "metrics": {"loss": 0.25},
            "memory_bytes": 1_500_000_000,
        }
        for rank, name in enumerate(names)
    ]
    facts = {
        "phase": "training",
        "attempt": 1,
        "max_attempts": 1,
        "heartbeat_timeout_seconds": 1e6,
    }
    return {"time": time.time(), "seconds": 100.0, **facts, "tasks": tasks}


def _seconds(arguments: tuple[str, ...], environ: Mapping[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run([TF4SLURM, *arguments], env=environ, capture_output=True, check=True, timeout=60)
    return time.perf_counter() - started
