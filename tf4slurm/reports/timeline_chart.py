"""Make a chart of a timeline, with a row for each task.

In a job of more than 40 tasks most tasks have no row. They are shown in a band for each role, with the share of its
tasks that are in each state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tf4slurm.jobs.formatting import format_seconds
from tf4slurm.reports.timeline import TaskTimeline, Timeline

MARK_MEANINGS = {
    "cross": "failed or lost",
    "triangle": "restarted in place",
    "diamond": "connection lost",
    "square": "exit or other event",
}
"""The shapes of marks and what each means. Shapes differ, because some readers cannot distinguish colors."""

_MAX_ROWS = 40
_BINS = 240
_MARK_PERCENT = 0.9  # minimum distance of two marks of one kind; a nearer second mark is not shown
_MARKS = {"restarting": "triangle", "disconnected": "diamond"}
_MOMENTS = {
    "attempt": "new attempt",
    "failed": "failed, may be restarted",
    "vacant": "chief left",
    "stopping": "stop request",
    "grace_period_over": "grace period over",
    "outcome": "outcome",
}
_LETTER_PERCENT = 0.75  # width of a letter, at most
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@dataclass(frozen=True)
class TimelineChart:
    """A chart of the part of a timeline from `start` to `end` (seconds). Positions are percent of the chart's width."""

    timeline: Timeline
    start: float
    end: float

    def ticks(self) -> list[tuple[float, str]]:
        return [(self.percent(seconds), label) for seconds, label in find_ticks(self.start, self.start + self._span)]

    def marks(self, task: TaskTimeline) -> Iterator[tuple[str, float, str]]:
        """Yield (shape, position, tooltip) of a task's marks. A shape is a key of `MARK_MEANINGS`.

        Of marks of the same shape that would overlap, only the first is shown. Marks of different shapes are moved
        apart.
        """
        last: dict[str, float] = {}
        for event in task.events:
            kind = "cross" if event.is_failure else _MARKS.get(event.kind, "square")
            left = self.percent(event.seconds)
            if self.contains(event.seconds) and left - last.get(kind, -_MARK_PERCENT) >= _MARK_PERCENT:
                last[kind] = left = min(max([left, *(at + _MARK_PERCENT for at in last.values())]), 100.0)
                yield kind, round(left, 2), f"{format_seconds(event.seconds)}: {event.text}"

    def moments(self) -> Iterator[tuple[float, str]]:
        """Yield (position, label) of the events of the whole job, such as a stop request.

        A label that would overlap the one to its left is empty. The page shifts each label so that it stays inside the
        chart: at 30 % of the width, 30 % of the label is left of the position.
        """
        free_from = 0.0
        for event in self.timeline.events:
            if event.kind in _MOMENTS and self.contains(event.seconds):
                left, label = self.percent(event.seconds), _MOMENTS[event.kind]
                width = _LETTER_PERCENT * len(label)
                start = left * (1 - width / 100)
                yield left, label if start >= free_from else ""
                if start >= free_from:
                    free_from = start + width + 1

    def areas(self, role: str, tasks: Sequence[TaskTimeline]) -> Iterator[tuple[str, str, str]]:
        """Yield (state, SVG path, tooltip) for each area of a role's band, from the bottom up.

        The areas are stacked, one for each state. The height of an area is the share of `tasks` that are in the state.
        The coordinates of a path are from 0 to 240 (time) and from 0 to 100 (share).
        """
        bottom = [0.0] * _BINS
        for state in reversed(self.timeline.states):
            shares = self.share_of_tasks(tasks, state)
            if any(shares):
                top = [below + share for below, share in zip(bottom, shares, strict=True)]
                points = _thin_out(top) + _thin_out(bottom)[::-1]
                path = "L".join(f"{x:g} {100 * (1 - share):.3g}" for x, share in points)
                yield state, f"M{path}Z", f"{role}: {state}, up to {max(shares):.0%}"
                bottom = top

    def share_of_tasks(self, tasks: Sequence[TaskTimeline], state: str) -> list[float]:
        """Return the share of `tasks` that is in `state` (0 to 1), for each of 240 equal parts of the chart's time."""
        changes = [0] * (_BINS + 1)
        step = self._span / _BINS
        for task in tasks:
            for span in task.spans:
                first = max(0, int((span.start - self.start) / step + 0.5))
                last = min(_BINS, int((span.end - self.start) / step + 0.5))
                if span.state == state and first < last:
                    changes[first] += 1
                    changes[last] -= 1
        return [count / len(tasks) for count in itertools.accumulate(changes[:-1])]

    @property
    def _span(self) -> float:
        return min(max(self.end - self.start, 0.001), 1e300)  # damaged records must not make it infinite

    def percent(self, seconds: float) -> float:
        """Return the position of a time in percent. A time outside of the chart has the position of the nearer end."""
        return round(100 * min(1.0, max(0.0, (seconds - self.start) / self._span)), 2)

    def contains(self, seconds: float) -> bool:
        return self.start <= seconds <= self.end


def find_ticks(start: float, end: float) -> list[tuple[int, str]]:
    """Return at most 9 round times between two times, in seconds, and their labels for an axis."""
    raw = (end - start) / 8
    step = next((each for each in _TIME_STEPS if raw <= each), 86400 * math.ceil(raw / 86400))
    times = range(math.ceil(start / step) * step, math.floor(end) + 1, step)
    return [(seconds, _format_time(seconds, step)) for seconds in times]


def _format_time(seconds: int, step: int) -> str:
    """Return the label of a time on an axis whose ticks are `step` seconds apart."""
    if step >= 86400:
        return f"{seconds / 86400:g} d"
    if step >= 3600 or abs(seconds) >= 7200:
        sign, whole = ("-" if seconds < 0 else ""), abs(seconds)
        return f"{sign}{whole // 3600}:{whole % 3600 // 60:02} h"
    return f"{seconds / 60:g} min" if step >= 60 else f"{seconds} s"


def _thin_out(shares: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points (x, share) of a line through 240 shares, one for each bin of width 1.

    x is the middle of the bin, but 0 for the first one and 240 for the last one. Points inside a horizontal part of the
    line are left out.
    """
    rounded = [round(share, 3) for share in shares]
    xs = [0.0, *(number + 0.5 for number in range(1, _BINS - 1)), float(_BINS)]
    ends = (0, len(rounded) - 1)
    return [
        (x, share)
        for number, (x, share) in enumerate(zip(xs, rounded, strict=True))
        if number in ends or not rounded[number - 1] == share == rounded[number + 1]
    ]


def choose_rows(
    tasks: Sequence[TaskTimeline], cause: str | None
) -> tuple[list[TaskTimeline], dict[str, list[TaskTimeline]]]:
    """Return the tasks that have a row of their own in the chart, and the other tasks by role.

    In a job of at most 40 tasks each has a row. In a larger one at most 20 have: the task `cause`, which failed first,
    then tasks of roles with at most 4 tasks, then those with the most failures and events.
    """
    by_role: dict[str, list[TaskTimeline]] = {}
    for task in tasks:
        by_role.setdefault(task.task_type, []).append(task)
    if len(tasks) <= _MAX_ROWS:
        return list(tasks), {}

    def priority(task: TaskTimeline) -> tuple[bool, bool, int, int]:
        failures = sum(event.is_failure for event in task.events)
        return task.name == cause, len(by_role[task.task_type]) <= 4, failures, len(task.events)

    ranked = sorted(tasks, key=priority, reverse=True)[: _MAX_ROWS // 2]
    chosen = {task.name for task in ranked if any(priority(task))}
    others = {role: [task for task in each if task.name not in chosen] for role, each in by_role.items()}
    return [task for task in tasks if task.name in chosen], {role: each for role, each in others.items() if each}


def describe_grouping(rows: Sequence[TaskTimeline], bands: Mapping[str, Sequence[TaskTimeline]]) -> str:
    """Return sentences about the tasks without a row of their own, or "" if all tasks have one.

    `rows` and `bands` are the results of `choose_rows`.
    """
    grouped = [task for each in bands.values() for task in each]
    if not grouped:
        return ""
    note = (
        f"{len(rows)} of {len(rows) + len(grouped):,} tasks have a row of their own: small roles, and tasks with the "
        "most events. "
        f"The other {len(grouped):,} are grouped by role: the height of a color is the share of tasks in that state."
    )
    with_events = sum(bool(task.events) for task in grouped)
    return f"{note} Events of {with_events:,} grouped tasks are only in events.jsonl." if with_events else note
