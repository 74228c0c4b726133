"""`python -m benchmarks [NAME…]`: measure, print, and keep the figures with the machine's facts under results/.

`python -m benchmarks faults` runs the fault matrix instead, which takes 20 minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.accuracy import measure_accuracy
from benchmarks.control_plane import measure_control_plane
from benchmarks.faults import measure_faults
from benchmarks.layout import measure_map, measure_nodelist
from benchmarks.main_job import (
    measure_end_on_slurm,
    measure_imports,
    measure_memory,
    measure_shutdown,
    measure_start,
    measure_training,
)
from benchmarks.measure import Figure, machine
from benchmarks.network import measure_infiniband
from benchmarks.recommender import measure_recommender
from benchmarks.report import measure_report
from benchmarks.training_steps import measure_steps
from benchmarks.watching import measure_status

RESULTS = Path(__file__).with_name("results") / "figures.json"
MEASUREMENTS: dict[str, Callable[[Path], list[Figure]]] = {
    "imports": lambda directory: measure_imports(11),
    "start": lambda directory: measure_start(directory, 11),
    "memory": measure_memory,
    "end": lambda directory: measure_end_on_slurm(directory, 10),
    "shutdown": lambda directory: measure_shutdown(directory, 5),
    "training": lambda directory: measure_training(directory, 6),
    "steps": lambda directory: measure_steps(directory, 6),
    "accuracy": lambda directory: measure_accuracy(directory, 5),
    "recommender": measure_recommender,
    "map": lambda directory: measure_map(directory, 11),
    "infiniband": measure_infiniband,
    "control": lambda directory: [*measure_control_plane(100, 5), *measure_control_plane(1_000, 3)],
    "status": lambda directory: measure_status(directory, 11),
    "nodelist": lambda directory: measure_nodelist(directory, 51),
    "report": lambda directory: measure_report(directory, 5),
}


def main(names: list[str]) -> None:
    if names[:1] == ["faults"]:
        sys.exit(min(measure_faults(names[1:]), 1))
    figures = []
    for name in names or MEASUREMENTS:
        with tempfile.TemporaryDirectory() as directory:
            for figure in MEASUREMENTS[name](Path(directory)):
                print(figure, flush=True)
                figures.append(figure)
    if not names:
        RESULTS.parent.mkdir(exist_ok=True)
        content = {"machine": machine(), "figures": [figure.to_json() for figure in figures]}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
