"""run_steps compared with one scheduled step after another, and with TF1's between-graph, on the same servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Figure, ratio
from tests.jobs import TF4SLURM

_SCRIPT = Path(__file__).with_name("schedule_and_run.py")
_SIZES = (
    ("4 B", 1, 3.0, ">= 3", ">= 1.2"),
    ("1 MB", 262_144, 3.0, ">= 1.5", ">= 1"),
    ("40 MB", 10_000_000, 8.0, "", ">= 1"),
)
"""Name, floats, seconds of a round, bound of the ratio to one by one, and to between-graph."""


def measure_steps(directory: Path, rounds: int) -> list[Figure]:
    """Measure steps per second with 1 ps and 2 local workers; the methods take turns."""
    figures = []
    for name, floats, seconds, by_one_bound, between_bound in _SIZES:
        report = directory / f"{floats}.json"
        script = [sys.executable, str(_SCRIPT), str(floats), str(seconds), str(rounds), str(report)]
        run = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), "--ps", "1", "--workers", "2", "--"]
        subprocess.run([*run, *script], check=True, capture_output=True, timeout=900)
        found = json.loads(report.read_text())
        figures += [Figure(f"steps per second, {name}, {way}", "1/s", tuple(found[way]), "") for way in found]
        ours = found["run_steps"]
        figures += [
            ratio(
                f"run_steps / one by one, {name}", ours, found["one by one"], by_one_bound, beside="TensorFlow's loop"
            ),
            ratio(f"run_steps / between-graph, {name}", ours, found["between-graph"], between_bound, beside="TF1"),
        ]
    return figures
