"""How the control plane grows with the number of tasks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.control_plane import measure_control_plane
from benchmarks.measure import Figure

_RUNS = {10: 5, 100: 5, 1_000: 3}


def measure_growth() -> list[Figure]:
    """Return the figures of the same job at several sizes; that at 10,000 is a measurement of its own."""
    return [figure for num_tasks, runs in _RUNS.items() for figure in measure_control_plane(num_tasks, runs)]


def growth_of(figures: Sequence[Figure], low: int = 1_000, high: int = 10_000) -> list[Figure]:
    """Return by how much each quantity grows between two sizes, for each task more: 1 is as fast as the tasks do.

    What all tasks receive together is the exception: each of N tasks receives a map of N.
    """
    grown = []
    for small in (figure for figure in figures if figure.at == low):
        for large in (figure for figure in figures if figure.at == high and figure.what == small.what):
            times = large.median / small.median / (high / low)
            is_free = small.what.startswith("bytes of messages")
            beside = f"{low:,} tasks, a task" + (" (N tasks x a map of N)" if is_free else "")
            grown.append(Figure(f"growth to {high:,}: {small.what}", "x", (times,), "" if is_free else "<= 1", beside))
    return grown
