"""What each task used and reached over time, from the lines of samples.jsonl: pure.

Of a counter (steps, processor time, bytes) the curve is its rate, from one change of the counter to the next: agents
tell it less often than samples are taken. A counter that falls began anew: the child was started again. Of more samples
than a screen can show, every nth is taken, and rates are those over the longer stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 240
_STEP_PATIENCE = 20.0  # seconds without a change after which a counter counts as standing still
_USAGE_PATIENCE = 6.0  # agents look every 5 s
_MOST_METRICS = 24
_LARGEST = 1e100
_MOST_NAME = 80  # characters

Values = list[float | None]


@dataclass(frozen=True)
class Curves:
    """Curves of all tasks: one list per rank, one value per time; None where nothing is known.

    Attributes:
        seconds: Of the samples, since the job's start.
        metrics: What scripts reported: by the metric's name, then by rank.
        totals: Of each rank: bytes sent and received in all its starts.
        undefined: When a metric was first NaN or infinite, in seconds, by the metric's name and rank.
        left_out: How many samples, and names of metrics, are not in these curves.
    """

    seconds: list[float]
    steps: list[Values]
    memory: list[Values]
    cores: list[Values]
    sent: list[Values]
    received: list[Values]
    metrics: dict[str, dict[int, Values]]
    undefined: dict[tuple[str, int], float]
    totals: list[tuple[float, float]]
    peaks: list[float]
    left_out: tuple[int, int]


def make_curves(samples: Sequence[Mapping[str, Any]], num_tasks: int) -> Curves:
    """Make the curves; samples that are not in the order of time, and values that are no numbers, are passed over."""
    good: list[Mapping[str, Any]] = []
    for sample in samples:
        at = _number(sample.get("seconds"))
        if at is not None and (not good or at > good[-1]["seconds"]):
            good.append(sample)
    stride = max(1, math.ceil(len(good) / MOST_POINTS))
    shown = good[::-1][::stride][::-1]  # the last one is among them
    seconds = [float(sample["seconds"]) for sample in shown]

    def columns(name: str, of: Sequence[Mapping[str, Any]]) -> list[Values]:
        rows = [sample.get(name) for sample in of]
        lists = [row if isinstance(row, list) else [] for row in rows]
        whole = all(len(row) == num_tasks for row in lists)
        padded = lists if whole else [(row + [None] * num_tasks)[:num_tasks] for row in lists]
        return [[_number(value) for value in column] for column in zip(*padded, strict=True)] or _nothing(num_tasks)

    sent, received = columns("sent", shown), columns("received", shown)
    metrics, undefined, unnamed = _metrics(shown, num_tasks)
    all_memory = columns("memory", good) if stride > 1 else None
    memory = columns("memory", shown)
    return Curves(
        seconds=seconds,
        steps=[_rate(column, seconds, _STEP_PATIENCE) for column in columns("step", shown)],
        memory=memory,
        cores=[_rate(column, seconds, _USAGE_PATIENCE) for column in columns("cpu", shown)],
        sent=[_rate(column, seconds, _USAGE_PATIENCE) for column in sent],
        received=[_rate(column, seconds, _USAGE_PATIENCE) for column in received],
        metrics=metrics,
        undefined=undefined,
        totals=[(_total(out), _total(into)) for out, into in zip(sent, received, strict=True)],
        peaks=[max(filter(None, column), default=0.0) for column in all_memory or memory],
        left_out=(len(good) - len(shown), unnamed),
    )


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values that are known."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None if nothing is."""
    found = known(values)
    return sum(found) / len(found) if found else None


def over_tasks(columns: Sequence[Values], combine: Callable[[list[float]], float]) -> Values:
    """Combine the values of several tasks at each time; None where no task has one."""
    return [combine(found) if (found := known(row)) else None for row in zip(*columns, strict=True)]


def _nothing(num_tasks: int) -> list[Values]:
    return [[] for _ in range(num_tasks)]


def _number(value: Any) -> float | None:
    is_number = type(value) is int or type(value) is float
    return value if is_number and abs(value) < _LARGEST else None  # not so NaN, and whole numbers of 400 digits


def _rate(column: Values, seconds: list[float], patience: float) -> Values:
    """Return the rise per second, the same from one change to the next; None before the first, and after a fall."""
    result: Values = [None] * len(column)
    first: int | None = None
    for number, value in enumerate(column):
        before = None if first is None else column[first]
        if value is None or before is None or first is None or value < before:
            first = None if value is None else number
        elif value > before or seconds[number] - seconds[first] >= patience:
            rate = (value - before) / (seconds[number] - seconds[first])
            result[first + 1 : number + 1] = [rate] * (number - first)
            first = number
    return result


def _total(column: Values) -> float:
    """Return what a counter has counted, over all its beginnings."""
    total = last = 0.0
    for value in known(column):
        total += value - last if value >= last else value
        last = value
    return total


def _metrics(
    samples: Sequence[Mapping[str, Any]], num_tasks: int
) -> tuple[dict[str, dict[int, Values]], dict[tuple[str, int], float], int]:
    found: dict[str, dict[int, Values]] = {}
    undefined: dict[tuple[str, int], float] = {}
    others: set[str] = set()
    for number, sample in enumerate(samples):
        by_rank = sample.get("metrics")
        for rank, values in by_rank.items() if isinstance(by_rank, dict) else ():
            if not (rank.isdecimal() and int(rank) < num_tasks and isinstance(values, dict)):
                continue
            for name, value in values.items():
                if name[:_MOST_NAME] not in found and len(found) >= _MOST_METRICS:
                    others.add(name)
                    continue
                curves = found.setdefault(name[:_MOST_NAME], {})
                curves.setdefault(int(rank), [None] * len(samples))[number] = _number(value)
                if value is None:  # NaN or infinite
                    undefined.setdefault((name[:_MOST_NAME], int(rank)), float(sample["seconds"]))
    return found, undefined, len(others)
