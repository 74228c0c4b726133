"""Time and size of a large job's report: 1,000 tasks for an hour, as a launcher would record them."""

from __future__ import annotations

import json
import math
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure
from tests.jobs import TF4SLURM
from tf4slurm.errors import COMPLETED
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, ResultFile, Sample, StatusFile, TaskStatus
from tf4slurm.slurm.parsing import SlurmResources
from tf4slurm.system.typed_json import from_json

_PS, _WORKERS, _SECONDS, _SAMPLE_SECONDS = 16, 983, 3600.0, 10.0
NAMES = ["chief/0", *(f"ps/{index}" for index in range(_PS)), *(f"worker/{index}" for index in range(_WORKERS))]


def measure_report(directory: Path, runs: int) -> list[Figure]:
    """Measure the whole command `tf4slurm report`, and the size of its file."""
    run = write_large_run(directory)
    seconds, megabytes = [], []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run([TF4SLURM, "report", str(run.path)], check=True, capture_output=True, timeout=120)
        seconds.append(time.perf_counter() - started)
        megabytes.append((run.path / "report.html").stat().st_size / 1e6)
    what = "report of 1,000 tasks x 1 hour"
    return [Figure(what, "s", tuple(seconds), "< 5"), Figure(f"size of the {what}", "MB", tuple(megabytes), "< 5")]


def write_large_run(parent: Path) -> RunDirectory:
    """Write the run directory of such a job: workers register late, are restarted and disconnect at random."""
    chance = random.Random(1)
    run = RunDirectory.create(parent, "large-1000")
    run.write(JobFile(name="large", command=("python", "train.py"), job_id="4711"))
    cpus, memory = 2 * len(NAMES), 4 * 10**9 * len(NAMES)
    run.write(SlurmResources(submitted=1e9 - 600, started=1e9 - 5, cpus=cpus, memory_bytes=memory))
    events = sorted(_make_events(chance), key=lambda event: float(event["seconds"]))
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    for sample in _make_samples(chance):
        run.append_sample(from_json(Sample, sample))
    _write_metrics(run, chance)
    tasks = [TaskStatus(task=name, rank=rank, node=f"n{rank // 8}") for rank, name in enumerate(NAMES)]
    run.write(StatusFile(seconds=_SECONDS, phase="ended", attempt=1, tasks=tuple(tasks)))
    reason = "Training is done: every task that the job waits for exited with code 0."
    run.write_result(
        ResultFile(COMPLETED, exit_code=0, reason=reason, seconds=_SECONDS, attempts=1, tasks=tuple(tasks))
    )
    return run


def _write_metrics(run: RunDirectory, chance: random.Random) -> None:
    """Write the reports of the chief, one in 10 s."""
    (run.path / "metrics").mkdir()
    lines = []
    for at in range(150, int(_SECONDS), int(_SAMPLE_SECONDS)):
        metrics = {"loss": math.exp(-(at - 140) / 900) + 0.02 * chance.random()}
        lines.append(json.dumps({"step": (at - 140) * 41, "time": 1e9 + at, "calls": 1, "metrics": metrics}))
    (run.path / "metrics" / "chief-0.1.jsonl").write_text("\n".join(lines) + "\n")


def _make_events(chance: random.Random) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []

    def add(at: float, kind: str, task: str | None, text: str = "") -> None:
        name = task or "the job"
        events.append({"time": 1e9 + at, "seconds": at, "kind": kind, "task": task, "text": text or f"{name} {kind}"})

    add(20.0, "checking", None)
    add(25.0, "training", None)
    for name in NAMES:
        add(chance.uniform(2, 20), "registered", name)
        _start(add, chance, name, 25.0)
        at = 200.0
        for _ in range(chance.choice((0, 0, 1, 3)) if name.startswith("worker") else 0):
            at += chance.uniform(100, 1000)
            add(at, "exited", name, f"{name} was killed by signal 9 (SIGKILL)")
            add(at, "restarting", name)
            _start(add, chance, name, at + 0.5)
        for _ in range(chance.choice((0, 1, 2))):
            at = chance.uniform(300, 3500)
            add(at, "disconnected", name)
            add(at + 1, "reconnected", name)
        add(_SECONDS - chance.uniform(0, 4), "terminated", name)
    add(140.0, "first_step", "chief/0")
    add(_SECONDS - 5, "outcome", None, "Training is done.")
    return events


def _start(add: Any, chance: random.Random, name: str, at: float) -> None:
    add(at, "started", name)
    add(at + chance.uniform(15, 100), "serving", name)


def _make_samples(chance: random.Random) -> list[dict[str, Any]]:
    samples = []
    for number in range(int(_SECONDS / _SAMPLE_SECONDS)):
        at = number * _SAMPLE_SECONDS
        trained = max(0.0, at - 140)
        step = int(trained * 41)
        moved = [trained * (9e7 if name == "ps/0" else 2e7 if name.startswith("ps") else 3e5) for name in NAMES]
        samples.append(
            {
                "seconds": at,
                "attempt": 1,
                "step": [step if name == "chief/0" and trained else None for name in NAMES],
                "memory_bytes": [int(6e8 + 1e8 * chance.random()) for _ in NAMES],
                "cpu_seconds": [round(at * (0.9 if name.startswith("ps") else 0.3), 2) for name in NAMES],
                "sent_bytes": [int(each) for each in moved],
                "received_bytes": [int(each * 0.8) for each in moved],
            }
        )
    return samples
