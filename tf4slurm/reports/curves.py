"""Make curves of the usage and metrics of each task over time, from the samples of the job.

The curve of a counter (steps, processor seconds, bytes) is its rate from one change to the next, because agents report
counters less often than samples are taken. A counter that decreases belongs to a restarted script. If there are more
than 240 samples, every nth sample is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tf4slurm.jobs.schema import Sample

MAX_POINTS = 240
_STEPS_TIMEOUT_SECONDS = 20.0  # a counter that has not changed for this long has the rate 0
_USAGE_TIMEOUT_SECONDS = 6.0  # agents measure every 5 s
_MAX_METRICS = 24
_MAX_NAME_LENGTH = 80

Values = list[float | None]
"""One value per time; None where nothing was measured."""


@dataclass(frozen=True)
class Curves:
    """The curves of all tasks: lists with `Values` for each rank.

    Attributes:
        seconds: The times of all curves, in seconds since the start of the job.
        metrics: Reported metrics by name and rank.
        total_bytes: Bytes sent and received by each rank, over all its starts.
        peak_memory: Peak memory of each rank in bytes, over all samples.
        not_finite: First time in seconds at which a metric was NaN or infinite, by metric name and rank.
        num_samples_left_out, num_metrics_left_out: Numbers of samples and metrics left out.
    """

    seconds: list[float]
    steps: list[Values]
    memory: list[Values]
    cores: list[Values]
    sent: list[Values]
    received: list[Values]
    metrics: dict[str, dict[int, Values]]
    total_bytes: list[tuple[float, float]]
    peak_memory: list[float]
    not_finite: dict[tuple[str, int], float]
    num_samples_left_out: int
    num_metrics_left_out: int


def make_curves(samples: Iterable[Sample], num_tasks: int) -> Curves:
    """Return the curves of these samples; samples without a time or out of order are ignored."""
    valid: list[tuple[float, Sample]] = []
    for sample in samples:
        if sample.seconds is not None and (not valid or sample.seconds > valid[-1][0]):
            valid.append((sample.seconds, sample))
    stride = max(1, math.ceil(len(valid) / MAX_POINTS))
    shown = [sample for _, sample in valid][::-1][::stride][::-1]  # contains the last sample
    seconds = [at for at, _ in valid][::-1][::stride][::-1]

    def columns(rows: Iterable[Sequence[float | None]]) -> list[Values]:
        return _columns([*rows], num_tasks)

    def rates(counters: list[Values], timeout: float = _USAGE_TIMEOUT_SECONDS) -> list[Values]:
        return [_rate(counter, seconds, timeout) for counter in counters]

    sent, received = columns(each.sent_bytes for each in shown), columns(each.received_bytes for each in shown)
    metrics, not_finite, unnamed = _metrics(seconds, shown, num_tasks)
    return Curves(
        seconds=seconds,
        steps=rates(columns(each.step for each in shown), _STEPS_TIMEOUT_SECONDS),
        memory=columns(each.memory_bytes for each in shown),
        cores=rates(columns(each.cpu_seconds for each in shown)),
        sent=rates(sent),
        received=rates(received),
        metrics=metrics,
        total_bytes=[(_total(out), _total(into)) for out, into in zip(sent, received, strict=True)],
        peak_memory=[max(measured(column), default=0.0) for column in columns(each.memory_bytes for _, each in valid)],
        not_finite=not_finite,
        num_samples_left_out=len(valid) - len(shown),
        num_metrics_left_out=unnamed,
    )


def measured(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the measured values; None if there is none."""
    found = measured(values)
    return sum(found) / len(found) if found else None


def combine(columns: Sequence[Values], function: Callable[[list[float]], float]) -> Values:
    """Apply a function to the values of all tasks at each time; the result is None where no task has a value."""
    return [function(found) if (found := measured(row)) else None for row in zip(*columns, strict=True)]


def _columns(rows: Sequence[Sequence[float | None]], num_tasks: int) -> list[Values]:
    """Transpose rows, one per time, into columns, one per task; missing values are None."""
    padded = [row if len(row) == num_tasks else (*row, *[None] * num_tasks)[:num_tasks] for row in rows]
    return [list(column) for column in zip(*padded, strict=True)] or [[] for _ in range(num_tasks)]


def _rate(column: Values, seconds: list[float], timeout: float) -> Values:
    """Return the increase per second between changes of a counter; None before the first value and after a restart."""
    result: Values = [None] * len(column)
    first: int | None = None
    for number, value in enumerate(column):
        before = None if first is None else column[first]
        if value is None or before is None or first is None or value < before:
            first = None if value is None else number
        elif value > before or seconds[number] - seconds[first] >= timeout:
            rate = (value - before) / (seconds[number] - seconds[first])
            result[first + 1 : number + 1] = [rate] * (number - first)
            first = number
    return result


def _total(column: Values) -> float:
    """Return the sum of a counter over all starts of its script."""
    total = last = 0.0
    for value in measured(column):
        total += value - last if value >= last else value
        last = value
    return total


def _metrics(
    seconds: Sequence[float], samples: Sequence[Sample], num_tasks: int
) -> tuple[dict[str, dict[int, Values]], dict[tuple[str, int], float], int]:
    """Return the metrics by name and rank, the times they were first not finite, and the number left out."""
    metrics: dict[str, dict[int, Values]] = {}
    not_finite: dict[tuple[str, int], float] = {}
    others: set[str] = set()
    for number, sample in enumerate(samples):
        for rank, values in sample.metrics.items():
            if not (rank.isdecimal() and int(rank) < num_tasks):
                continue
            for full_name, value in values.items():
                name = full_name[:_MAX_NAME_LENGTH]
                if name not in metrics and len(metrics) >= _MAX_METRICS:
                    others.add(name)
                    continue
                by_rank = metrics.setdefault(name, {})
                by_rank.setdefault(int(rank), [None] * len(samples))[number] = value
                if value is None:
                    not_finite.setdefault((name, int(rank)), seconds[number])
    return metrics, not_finite, len(others)
