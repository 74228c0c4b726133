"""Accuracy of asynchronous training: the tutorial's digits on a ps and 2 workers, and in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.main_job import ROLES
from benchmarks.measure import Figure
from benchmarks.training import DIGITS
from tests.jobs import TF4SLURM


def measure_accuracy(directory: Path, seeds: int) -> list[Figure]:
    """Measure the accuracy on the held-out images after the same number of steps, for each seed both ways."""
    ours: list[float] = []
    alone: list[float] = []
    for seed in range(seeds):
        report = directory / f"{seed}.json"
        script = [sys.executable, str(DIGITS), "--seed", str(seed), "--report-json", str(report)]
        run = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *ROLES, "--", *script]
        for command, accuracies in ((run, ours), (script, alone)):
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            accuracies.append(100 * json.loads(report.read_text())["test_accuracy"])
    difference = tuple(a - b for a, b in zip(ours, alone, strict=True))
    return [
        Figure("digits: test accuracy with a ps and 2 workers", "%", tuple(ours), ""),
        Figure("digits: test accuracy in one process", "%", tuple(alone), ""),
        Figure("digits: the one less the other, in points", "%", difference, ">= -1", "one process"),
    ]
