"""What hundreds of workers cost one chief: each closure, beside TensorFlow's loop, and each change of the workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, ratio

_SCRIPT = "benchmarks.drive_workers"
_STEPS_PER_SECOND = 64  # of all workers together, so that two cores are not busy


def measure_workers(directory: Path, rounds: int) -> list[Figure]:
    """Measure one chief with 64 and with 256 workers, whose servers share a few processes, and whose steps sleep."""
    figures = []
    for count in (64, 256):
        report = directory / f"{count}.json"
        arguments = [str(count), str(count / _STEPS_PER_SECOND), str(rounds), str(report)]
        subprocess.run([sys.executable, "-m", _SCRIPT, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=1800)
        figures += _figures_of(count, json.loads(report.read_text()))
    return figures


def _figures_of(count: int, found: dict[str, Any]) -> list[Figure]:
    ways = {"run_steps": "`run_steps`", "schedule": "TensorFlow's `schedule`"}
    figures = [
        Figure(f"chief's processor time per closure, {name}", "ms", tuple(found[way]["ms"]), at=count)
        for way, name in ways.items()
    ]
    ours, theirs = found["run_steps"], found["schedule"]["ms"]
    what = "chief's processor time per closure, run_steps / schedule"
    figures.append(ratio(what, ours["ms"], theirs, "<= 1.2", beside="TensorFlow's loop", at=count))
    ideal = tuple(rate / _STEPS_PER_SECOND for rate in ours["steps_per_second"])
    figures += [
        Figure("steps per second / ideal", "x", ideal, ">= 0.97", at=count),
        Figure("closures per second", "1/s", tuple(ours["closures_per_second"]), "<= 100", at=count),
    ]
    for name, cost in found["operations"].items():
        figures.append(Figure(f"workers: {name}", "s", (cost["seconds"],), at=count))
        figures.append(Figure(f"workers: {name}, chief's processor time", "s", (cost["processor_seconds"],), at=count))
        if cost["pause"] is not None:
            bound = "<= 5" if "are lost" in name else ""
            figures.append(
                Figure(f"workers: {name}, longest time without a step", "s", (cost["pause"],), bound, at=count)
            )
    last = found["operations"]["stop"]
    figures.append(Figure("chief's threads", "", (last["threads"],), at=count))
    figures.append(Figure("chief's memory", "MB", (last["megabytes"],), at=count))
    return figures
