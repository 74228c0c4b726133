"""Growth of the control plane's costs with the number of tasks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.control_plane import measure_control_plane
from benchmarks.measure import Figure

_FREE = {"bytes of messages": " (N tasks x a cluster spec of N)", "the same without compression": " (longer names)"}
_RUNS = {10: 5, 100: 5, 1_000: 5}


def measure_growth() -> list[Figure]:
    """Return the figures of the same job at several sizes; 5,000 is measured separately."""
    return [figure for num_tasks, runs in _RUNS.items() for figure in measure_control_plane(num_tasks, runs)]


def growth_of(figures: Sequence[Figure], low: int = 1_000, high: int = 5_000) -> list[Figure]:
    """Return the growth of each quantity between two sizes, relative to the number of tasks: 1 is linear growth.

    The spread is that of the runs at the larger size, divided by the median at the smaller one.

    The bytes that all tasks receive together have no bound: each of N tasks receives a cluster spec of N. Nor has the
    cluster spec without compression, which is never sent: it shows the effect of compression, and the names of more
    tasks are longer.
    """
    grown = []
    for small in (figure for figure in figures if figure.at == low):
        for large in (figure for figure in figures if figure.at == high and figure.what == small.what):
            times = tuple(value / small.median / (high / low) for value in large.values)
            why_free = next((why for start, why in _FREE.items() if small.what.startswith(start)), "")
            beside = f"{low:,} tasks, a task{why_free}"
            grown.append(Figure(f"growth to {high:,}: {small.what}", "x", times, "" if why_free else "<= 1", beside))
    return grown
