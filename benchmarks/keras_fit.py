"""fit: its speed beside run_steps and TensorFlow's loop, and the accuracy of six models beside Keras in one process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, ratio
from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab

_SPEED_SCRIPT = Path(__file__).with_name("fit_and_run.py")
_MODELS_SCRIPT = Path(__file__).parent.parent / "tests" / "tensorflow" / "keras_models.py"
_MODELS = ("mlp", "cnn", "text", "recommender", "own-step", "outputs")
_CLUSTERS = {
    "1 worker": ("--ps", "1", "--workers", "1"),
    "2 workers": ("--ps", "1", "--workers", "2"),
    "3 workers": ("--ps", "1", "--workers", "3"),
    "2 workers in step": ("--ps", "0", "--no-chief", "--workers", "2"),
    "3 workers in step": ("--ps", "0", "--no-chief", "--workers", "3"),
}
_SECONDS = 4.0


def measure_fit(directory: Path, rounds: int) -> list[Figure]:
    """Measure steps per second of a small model with 1 ps and 2 local workers; the methods take turns."""
    report = directory / "fit.json"
    script = [sys.executable, str(_SPEED_SCRIPT), str(_SECONDS), str(rounds), str(report)]
    run = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), "--ps", "1", "--workers", "2", "--"]
    subprocess.run([*run, *script], check=True, capture_output=True, timeout=900)
    found = json.loads(report.read_text())
    return [
        *(Figure(f"steps per second, small Keras model, {way}", "1/s", tuple(found[way])) for way in found),
        ratio("fit / run_steps", found["fit"], found["run_steps"], ">= 0.95", beside="a step of one's own"),
        ratio("fit / one by one", found["fit"], found["one by one"], ">= 3", beside="TensorFlow's loop"),
    ]


def measure_fit_accuracy(directory: Path, seeds: int) -> list[Figure]:
    """Train six models on each kind of cluster, local and on Slurm; compare the accuracy with Keras in one process."""
    script = [sys.executable, str(_MODELS_SCRIPT), *_MODELS, "--seeds", *map(str, range(seeds)), "--json"]
    alone = directory / "keras.json"
    subprocess.run([*script, str(alone), "--keras"], check=True, capture_output=True, timeout=900, cwd=directory)
    expected = accuracies(alone)
    figures = []
    with SlurmLab() as lab:
        for name, roles in _CLUSTERS.items():
            path = directory / "result.json"
            tasks = 1 + sum(int(each) for each in roles if each.isdigit()) - roles.count("--no-chief")
            for where in ("", " on Slurm"):
                path.unlink(missing_ok=True)
                command = [
                    TF4SLURM,
                    "run",
                    "--runs-directory",
                    str(directory / "runs"),
                    *roles,
                    "--",
                    *script,
                    str(path),
                ]
                if where:
                    allocation = ["salloc", "-Q", f"-N{min(tasks, 4)}", f"-n{tasks}"]
                    lab.run(*allocation, *command, cwd=directory, timeout_seconds=1800)
                else:
                    subprocess.run(command, check=True, capture_output=True, timeout=1800, cwd=directory)
                figures += [
                    compare(f"{model}, {name}{where}", expected[model], found)
                    for model, found in accuracies(path).items()
                ]
    return figures


def compare(what: str, expected: list[float], found: list[float]) -> Figure:
    """Return by how many points the mean accuracy is below that of Keras in one process."""
    lost = 100 * (statistics.mean(expected) - statistics.mean(found))
    return Figure(f"accuracy lost by fit: {what}", "points", (lost,), "<= 0.5", "Keras in one process")


def accuracies(path: Path) -> dict[str, list[float]]:
    """Return the accuracies of all seeds by model; check that every step was counted."""
    found: dict[str, list[float]] = {}
    results: list[dict[str, Any]] = json.loads(path.read_text())
    for result in results:
        assert result["iterations"] == result["steps"], result
        found.setdefault(result["model"], []).append(result["accuracy"])
    return found
