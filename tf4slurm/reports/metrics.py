"""Collect the metrics that scripts reported, and compute steps per second from the reported steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from tf4slurm.control.script_metrics import StepMetrics

MAX_METRICS = 24
MAX_NAME_LENGTH = 80
_MAX_RATES = 240  # per task
_MIN_RATE_SECONDS = 1.0
LOWER_IS_BETTER = (
    *("loss", "error", "err", "mse", "rmse", "mae", "mape", "cost", "nll", "crossentropy", "perplexity", "ppl"),
    *("msle", "logloss", "divergence", "hinge", "wer", "cer"),
)
"""A metric whose name has one of these words is better if it is lower."""
_HIGHER_IS_BETTER = {"accuracy", "acc", "auc", "precision", "recall", "f1", "iou", "score", "reward", "bleu", "r2"}
_WORD = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*")


def is_lower_better(metric: str) -> bool | None:
    """Return whether lower values of a metric are better. Return None if its name does not show which are better.

    The words in the name decide: "val_loss" and "valLoss" are losses, whose lower values are better.
    """
    words = {word.lower() for word in _WORD.findall(metric)}
    if words & {*LOWER_IS_BETTER}:
        return True
    return False if words & _HIGHER_IS_BETTER else None


def choose_loss(metrics: Iterable[str]) -> str | None:
    """Return the metric that shows best whether training works, by its name, or None without a loss or error.

    "loss" is preferred, then the first loss, then the first metric whose lower values are better.
    """
    names = list(metrics)
    losses = [name for name in names if "loss" in {word.lower() for word in _WORD.findall(name)}]
    return next((name for name in ("loss", *losses, *filter(is_lower_better, names)) if name in names), None)


def choose_best(metric: str, values: Iterable[float]) -> float | None:
    """Return the best of the values of a metric: the lowest if lower ones are better, else the highest.

    A metric whose name does not show which are better counts as one whose higher values are. Without values, return
    None.
    """
    return min(values, default=None) if is_lower_better(metric) else max(values, default=None)


class MetricPoint(NamedTuple):
    """A value that a script reported for a metric, or several consecutive values that were merged into one point.

    Attributes:
        seconds: When the script reported the (last) value, in seconds since the start of the job.
        step: The step of the (last) value; None if the script reported none.
        value: The (last) value; None for NaN and infinity.
        low, high: The lowest and highest of the merged values. None if one was NaN or infinite.
        attempt: Number of the job's attempt, from 1.
    """

    seconds: float
    step: int | None
    value: float | None
    low: float | None
    high: float | None
    attempt: int = 1


class MetricSeries(NamedTuple):
    """All points of one metric of one task, in the order of time.

    Steps may go back, because a restarted script repeats the steps since its checkpoint.
    """

    metric: str
    task: str
    points: list[MetricPoint]

    @property
    def last(self) -> MetricPoint | None:
        """The last point whose value is finite, or None without one."""
        return next((point for point in reversed(self.points) if point.value is not None), None)

    @property
    def lowest(self) -> MetricPoint | None:
        return min((point for point in self.points if point.low is not None), key=attrgetter("low"), default=None)

    @property
    def highest(self) -> MetricPoint | None:
        return max((point for point in self.points if point.high is not None), key=attrgetter("high"), default=None)

    @property
    def best(self) -> float | None:
        """The lowest value of a loss or error, or the highest of an accuracy or score. None for other metrics.

        `is_lower_better` decides which it is.
        """
        lower = is_lower_better(self.metric)
        if lower is None:
            return None
        lowest, highest = self.lowest, self.highest
        if lower:
            return lowest.low if lowest is not None else None
        return highest.high if highest is not None else None


class ReportedMetrics:
    """The metrics and steps that all tasks of a job reported.

    Attributes:
        series: The series by metric and task (such as "worker/0"), of the first 24 metrics.
        num_metrics_left_out: Number of further metrics, which have no series.
        step_rates: Points by task, with steps per second as their values. Each value is the mean rate since the point
            before it. The first reports of a task, and those after a restart, have no point (see `StepRate`).
        not_finite: When a metric of a task was NaN or infinite for the first time, in seconds since the start of the
            job, by metric and task.
    """

    def __init__(
        self, entries: Mapping[tuple[str, int], Iterable[StepMetrics]], names: Sequence[str], launched: float
    ) -> None:
        """Collect the metrics of a job.

        Args:
            entries: What scripts reported, by task and attempt. Other tasks than `names` are ignored.
            names: The names of the tasks, by rank.
            launched: Start of the job in seconds since 1970.
        """
        self.series: dict[str, dict[str, MetricSeries]] = {}
        self.not_finite: dict[tuple[str, str], float] = {}
        ranks = {name: rank for rank, name in enumerate(names)}
        left_out: set[str] = set()
        steps: dict[str, list[MetricPoint]] = {}
        for task, attempt in sorted(entries.keys(), key=lambda key: (ranks.get(key[0], -1), key[1])):
            for entry in entries[task, attempt] if task in ranks else ():
                if entry.time is None:
                    continue
                seconds = entry.time - launched
                if entry.step is not None:
                    steps.setdefault(task, []).append(MetricPoint(seconds, entry.step, None, None, None, attempt))
                for metric, point in _points(entry, seconds, attempt):
                    self._add(task, metric[:MAX_NAME_LENGTH], point, left_out)
        self.step_rates = {task: rates for task, points in steps.items() if (rates := _step_rates(points))}
        self.num_metrics_left_out = len(left_out)

    def _add(self, task: str, metric: str, point: MetricPoint, left_out: set[str]) -> None:
        if metric not in self.series and len(self.series) >= MAX_METRICS:
            left_out.add(metric)
            return
        series = self.series.setdefault(metric, {}).setdefault(task, MetricSeries(metric, task, []))
        series.points.append(point)
        if point.low is None or point.value is None:
            self.not_finite.setdefault((metric, task), point.seconds)


def _points(entry: StepMetrics, seconds: float, attempt: int) -> Iterable[tuple[str, MetricPoint]]:
    for metric, value in entry.metrics.items():
        low, high = entry.low.get(metric, value), entry.high.get(metric, value)
        yield metric, MetricPoint(seconds, entry.step, value, low, high, attempt)


def _step_rates(steps: Sequence[MetricPoint]) -> list[MetricPoint]:
    """Return at most 240 points whose values are steps per second of one task, each a mean over at least 1 s.

    As in `StepRate`, the time from the first report of a process to the second counts only if there is no third.
    `steps` has a point for each step that the task reported, without values.
    """
    rates: list[MetricPoint] = []
    interval = max(_MIN_RATE_SECONDS, (steps[-1].seconds - steps[0].seconds) / _MAX_RATES)
    for run in _split_at_restarts(steps):
        before, *later = run[1:] if len(run) > 2 else run
        for point in later:
            assert point.step is not None
            assert before.step is not None
            seconds = point.seconds - before.seconds
            if seconds >= interval:
                rate = (point.step - before.step) / seconds
                rates.append(point._replace(value=rate, low=rate, high=rate))
                before = point
    return rates


def _split_at_restarts(steps: Sequence[MetricPoint]) -> list[list[MetricPoint]]:
    """Split the reports of a task where its script was restarted: at a new attempt, and where the steps go back.

    Of a step that was reported several times in a row, only the first report is kept.
    """
    runs: list[list[MetricPoint]] = []
    for point in steps:
        before = runs[-1][-1] if runs else None
        if before is None or point.attempt != before.attempt or (point.step or 0) < (before.step or 0):
            runs.append([point])
        elif point.step != before.step:
            runs[-1].append(point)
    return runs
