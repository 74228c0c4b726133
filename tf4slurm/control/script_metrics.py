"""The metrics that a script reports (`tf4slurm.report()`): the message to its agent, and how messages are merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics/<role>-<index>.<attempt>.jsonl: a call of `tf4slurm.report()`, or several consecutive calls.

    The file has one line per call up to a limit of 20,000 numbers (steps and metrics) divided by the number of tasks,
    at least 100. Whenever the limit is exceeded, pairs of neighbouring lines are merged. From the first time on, later
    calls are merged in groups of two, from the second time on in groups of four, and so on. A merged line has the last,
    the lowest and the highest value, so the best value is not lost. If the calls of 0.2 s have more than 1,000 numbers,
    these calls are merged, too.

    Attributes:
        step: Training step of the last call with a step.
        time: Time of the last call, in seconds since 1970.
        calls: Number of calls that this line stands for.
        metrics: Last value of each metric; null for NaN and infinity.
        low: Lowest value of each metric; null if a value was NaN or infinite. Missing for a single call.
        high: Highest value of each metric; null if a value was NaN or infinite. Missing for a single call.
    """

    step: int | None = None
    time: float | None = None
    calls: int = 1
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    low: Mapping[str, float | None] = field(default_factory=dict)
    high: Mapping[str, float | None] = field(default_factory=dict)


def merge_metrics(entries: Sequence[StepMetrics]) -> StepMetrics:
    """Merge consecutive entries into one, with the last, lowest and highest value of each metric."""
    if len(entries) == 1:
        return entries[0]
    metrics: dict[str, float | None] = {}
    for entry in entries:
        metrics.update(entry.metrics)
    return StepMetrics(
        step=next((entry.step for entry in reversed(entries) if entry.step is not None), None),
        time=entries[-1].time,
        calls=sum(entry.calls for entry in entries),
        metrics=metrics,
        low=_combine(min, (entry.low or entry.metrics for entry in entries)),
        high=_combine(max, (entry.high or entry.metrics for entry in entries)),
    )


def merge_to_limit(entries: Sequence[StepMetrics], max_values: int) -> list[StepMetrics]:
    """Merge consecutive entries in groups of equal size. Return entries with about `max_values` steps and metrics.

    The result has more values if the entries of a group have different metrics. If `entries` is not empty, the result
    has at least one entry.
    """
    num_values = max((1 + len(entry.metrics) for entry in entries), default=1)
    size = max(1, -(-len(entries) // max(1, max_values // num_values)))
    return [merge_metrics(entries[start : start + size]) for start in range(0, len(entries), size)]


def _combine(
    choose: Callable[[float, float], float], parts: Iterable[Mapping[str, float | None]]
) -> dict[str, float | None]:
    result: dict[str, float | None] = {}
    for part in parts:
        for name, value in part.items():
            before = result.get(name, value)
            is_finite = value is not None and before is not None and math.isfinite(value) and math.isfinite(before)
            result[name] = choose(before, value) if is_finite else None  # type: ignore[arg-type]
    return result


class BoundedMetrics:
    """The metrics of one task. If there are more than `max_values` numbers, pairs of neighbouring entries are merged.

    After the first merging, new entries are merged in groups of two, after the second in groups of four, and so on.

    Attributes:
        lines: The entries in the order of time, each a line of the file. A new entry may be merged into the last line,
            except after `seal`.
        num_mergings: How often all pairs were merged. Each time, all lines have changed.
    """

    def __init__(self, max_values: int) -> None:
        """`max_values` is the maximum number of steps and metrics in all lines."""
        self.lines: list[StepMetrics] = []
        self.num_mergings = 0
        self._max_values = max_values
        self._num_values = 0
        self._is_open = False

    def add(self, entry: StepMetrics) -> None:
        """Add an entry, which must be later than all earlier ones.

        If all lines together then have more than `max_values` steps and metrics, each two neighbouring lines are merged
        into one. After that, entries are merged into the last line until it has as many as the lines before it.
        """
        group_size = 2**self.num_mergings
        if self._is_open and self.lines[-1].calls + entry.calls <= group_size:
            self.lines[-1] = merge_metrics([self.lines[-1], entry])
        else:
            self.lines.append(entry)
            self._num_values += 1 + len(entry.metrics)
        if self._num_values > self._max_values and len(self.lines) > 1:
            self.lines = [merge_metrics(self.lines[start : start + 2]) for start in range(0, len(self.lines), 2)]
            self._num_values = sum(1 + len(line.metrics) for line in self.lines)
            self.num_mergings += 1
        self._is_open = self.lines[-1].calls < 2**self.num_mergings

    def seal(self) -> None:
        """Let the next entry begin a new line, so that the last line does not change and can be written to the file."""
        self._is_open = False

    @property
    def num_final(self) -> int:
        """The number of lines, from the first, that do not change until all pairs are merged again."""
        return len(self.lines) - self._is_open
