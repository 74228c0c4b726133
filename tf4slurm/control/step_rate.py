"""Compute the steps per second of a task. `status`, the live page and the report show this one value."""

from __future__ import annotations

import collections

RATE_SECONDS = 20.0
"""The period over which steps per second are averaged."""

MEANING = (
    f"new steps divided by the time between the script's reports of them, over the last {RATE_SECONDS:g} s; the time "
    "before its second report, in which TensorFlow traces functions, does not count."
)
"""What steps per second are: the end of a sentence."""

_THINNED_SECONDS = 0.1  # the least time between two reports that are kept, but for the first and last ones


class StepRate:
    """Averages the steps per second of one process over its reports of the last 20 s, but at least over the last two.

    The time from the first report to the second counts only until there is a third one.
    """

    def __init__(self) -> None:
        self._reports: collections.deque[tuple[float, int]] = collections.deque()  # (time in seconds, step)
        self._num_reports = 0

    def add(self, step: int, seconds: float) -> None:
        """Add a report of a step at a time in seconds, by any clock. The same step again is no report.

        After a step back, as to a checkpoint, or a time before the last one, the average begins again.
        """
        if self._reports and (step < self._reports[-1][1] or seconds < self._reports[-1][0]):
            self._reports.clear()
            self._num_reports = 0
        if self._reports and step == self._reports[-1][1]:
            return
        self._num_reports += 1
        if self._num_reports > 3 and seconds - self._reports[-2][0] < _THINNED_SECONDS:
            self._reports.pop()
        self._reports.append((seconds, step))
        if self._num_reports == 3:
            self._reports.popleft()
        while len(self._reports) > 2 and seconds - self._reports[0][0] > RATE_SECONDS:
            self._reports.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """The average with three significant digits, or None before the second report."""
        if len(self._reports) < 2:
            return None
        (start, first), (end, last) = self._reports[0], self._reports[-1]
        return float(f"{(last - first) / (end - start):.3g}") if end > start else None
