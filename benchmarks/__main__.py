"""`python -m benchmarks [quick | NAME…]`: measure, print one table, store it with the machine's facts in results/, and
compare it with the run that was stored there.

`quick` takes under 5 minutes. Runs with `quick` or names store nothing. `python -m benchmarks faults` runs the fault
matrix instead, which takes 20 minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.accuracy import measure_accuracy
from benchmarks.control_plane import measure_control_plane, measure_launcher
from benchmarks.earlier import agreement, read_earlier
from benchmarks.faults import measure_faults
from benchmarks.growth import growth_of, measure_growth
from benchmarks.joining import measure_joining
from benchmarks.keras_fit import measure_fit, measure_fit_accuracy
from benchmarks.layout import measure_map, measure_nodelist
from benchmarks.main_job import (
    measure_end_on_slurm,
    measure_imports,
    measure_memory,
    measure_shutdown,
    measure_start,
)
from benchmarks.measure import Figure, machine
from benchmarks.network import measure_infiniband
from benchmarks.page import FIGURES, write_results
from benchmarks.peer_processes import peer_versions
from benchmarks.preload import measure_preload
from benchmarks.real_job import measure_import_storm, measure_start_on_slurm
from benchmarks.recommender import measure_recommender
from benchmarks.rendezvous import measure_rendezvous
from benchmarks.report import measure_report
from benchmarks.saving import measure_saving
from benchmarks.slow_worker import measure_slow_worker
from benchmarks.spares import measure_spares
from benchmarks.staging import measure_staging
from benchmarks.stall import measure_stall
from benchmarks.table import summary, text_table
from benchmarks.training import measure_training, measure_training_on_slurm
from benchmarks.training_steps import measure_steps
from benchmarks.watching import measure_status
from benchmarks.workers import measure_workers

Measurement = Callable[[Path], list[Figure]]
MEASUREMENTS: dict[str, Measurement] = {
    "rendezvous": lambda directory: [
        *(figure for size in (10, 100, 1_000) for figure in measure_rendezvous(size, 5)),
    ],
    "growth": lambda directory: measure_growth(),
    "launcher": lambda directory: measure_launcher(directory, 1_000, 5),
    "memory": measure_memory,
    "start": lambda directory: measure_start(directory, 11),
    "start on Slurm": lambda directory: measure_start_on_slurm(directory, 10),
    "preload": lambda directory: measure_preload(directory, 3),
    "import storm": lambda directory: measure_import_storm(directory, 4),
    "staging": lambda directory: measure_staging(directory, 3),
    "saving": lambda directory: measure_saving(directory, 3),
    "stall": lambda directory: measure_stall(directory, 3),
    "spares": lambda directory: measure_spares(directory, 3),
    "joining": lambda directory: measure_joining(directory, 5),
    "end": lambda directory: measure_end_on_slurm(directory, 10),
    "shutdown": lambda directory: measure_shutdown(directory, 5),
    "training": lambda directory: measure_training(directory, 6),
    "training on Slurm": lambda directory: measure_training_on_slurm(directory, 4),
    "steps": lambda directory: measure_steps(directory, 6),
    "fit": lambda directory: measure_fit(directory, 6),
    "fit accuracy": lambda directory: measure_fit_accuracy(directory, 5),
    "accuracy": lambda directory: measure_accuracy(directory, 5),
    "recommender": measure_recommender,
    "workers": lambda directory: measure_workers(directory, 5),
    "slow worker": lambda directory: measure_slow_worker(directory, 5),
    "infiniband": measure_infiniband,
    "imports": lambda directory: measure_imports(11),
    "map": lambda directory: measure_map(directory, 11),
    "nodelist": lambda directory: measure_nodelist(directory, 51),
    "status": lambda directory: measure_status(directory, 11),
    "report": lambda directory: measure_report(directory, 5),
    "five thousand": lambda directory: measure_control_plane(5_000, 3),
}
QUICK: dict[str, Measurement] = {
    "rendezvous": lambda directory: [*measure_rendezvous(100, 2), *measure_rendezvous(1_000, 2)],
    "control": lambda directory: measure_control_plane(1_000, 1),
    "memory": measure_memory,
    "start": lambda directory: measure_start(directory, 3),
    "start on Slurm": lambda directory: measure_start_on_slurm(directory, 2),
    "end": lambda directory: measure_end_on_slurm(directory, 2),
    "imports": lambda directory: measure_imports(5),
    "nodelist": lambda directory: measure_nodelist(directory, 11),
    "status": lambda directory: measure_status(directory, 3),
}


def main(names: list[str]) -> int:
    """Return the number of failed measurements; with "faults", of failed or late cases."""
    if names[:1] == ["faults"]:
        return measure_faults(names[1:])
    if names != ["quick"] and (unknown := [name for name in names if name not in MEASUREMENTS]):
        sys.exit(f"Unknown benchmark {unknown[0]!r}. Known: quick, faults, {', '.join(MEASUREMENTS)}.")
    chosen = QUICK if names == ["quick"] else {name: MEASUREMENTS[name] for name in names or MEASUREMENTS}
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC logs each connection that has to wait
    facts = {**machine(), **peer_versions()}  # before the benchmarks add their own load
    figures, failed = measure(chosen)
    figures += growth_of(figures)
    print(text_table(figures))
    print(summary(figures) + (f" Not measured: {', '.join(failed)}." if failed else ""), flush=True)
    if not names:
        earlier = read_earlier(FIGURES, facts)
        comparison = agreement(figures, earlier) if earlier else ""
        print(comparison, flush=True)
        write_results(figures, failed, facts, comparison)
    return len(failed)


def measure(chosen: Mapping[str, Measurement]) -> tuple[list[Figure], list[str]]:
    """Return the figures of all measurements, and the names of those that failed.

    Prints the traceback of a failed measurement and continues. After Ctrl-C the rest counts as failed.
    """
    figures, waiting, failed = [], list(chosen), []
    try:
        while waiting:
            started = time.monotonic()
            print(f"measuring: {waiting[0]} …", end=" ", file=sys.stderr, flush=True)
            try:
                with tempfile.TemporaryDirectory() as directory:
                    figures += chosen[waiting[0]](Path(directory))
            except Exception:
                failed.append(waiting[0])
                traceback.print_exc()
            print(f"{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            del waiting[0]
    except KeyboardInterrupt:
        print("given up", file=sys.stderr)
    return figures, failed + waiting


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
