"""A worker that joins a training job on this host: time until its first steps are done."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.measure import Figure
from tests.jobs import Job
from tests.tensorflow.test_joining import Training

_SECONDS = 120.0
_POLL_SECONDS = 0.02


def measure_joining(directory: Path, rounds: int) -> list[Figure]:
    """Let one worker after another join; measure until a call of run_steps with steps of that worker has returned."""
    whole, since_server = [], []
    with Job(directory) as job:
        training = Training(job)
        for number in range(rounds):
            index = 2 + number
            started = time.time()
            training.join()
            stepped = _wait_for_steps(training, index)
            serving = next(
                event["time"]
                for event in job.events
                if (event["kind"], event["task"]) == ("serving", f"worker/{index}")
            )
            whole.append(stepped - started)
            since_server.append(stepped - serving)
            training.leave(training.joined[-1])
            training.joined[-1].communicate(timeout=_SECONDS)
        training.finish()
    return [
        Figure(
            "a worker joins, from its TensorFlow server's answer to its first steps", "s", tuple(since_server), "< 5"
        ),
        Figure("a worker joins, from `tf4slurm join` to its first steps", "s", tuple(whole)),
    ]


def _wait_for_steps(training: Training, index: int) -> float:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        for line in training.lines()[-20:]:
            if any(line.by_worker[index : index + 1]):
                return line.time
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"worker/{index} took no step: {training.job.events[-5:]}")
