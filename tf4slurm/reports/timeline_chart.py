"""Draw the timeline: a row per task, or in large jobs a band per role with the share of tasks in each state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from tf4slurm.jobs.formatting import format_seconds
from tf4slurm.reports.charts import Drawing, Scale, element, line, mark, outline, text, time_ticks
from tf4slurm.reports.timeline import STATES, TaskTimeline, Timeline, TimelineEvent

WIDTH = 1100
_MAX_ROWS = 40
_LEFT, _RIGHT, _TOP = 104, 16, 46
_ROW, _BAR, _BAND, _BAND_GAP = 19, 13, 72, 22
_BINS = 240
_MARK_PIXELS = 9  # minimum distance of two marks of one kind; a nearer second mark is not drawn
_LEGEND_COLUMNS, _LEGEND_ROW = 3, 18
_MARK_MEANINGS = {
    "cross": "failed or lost",
    "triangle": "restarted in place",
    "diamond": "connection lost",
    "square": "other event",
}
_MARKS = {"restarting": "triangle", "disconnected": "diamond", "exited_early": "diamond"}
_LABELS = {
    "attempt": "new attempt",
    "stopping": "stop request",
    "grace_period_over": "grace period over",
    "outcome": "outcome",
}


def draw_timeline(timeline: Timeline, start: float, end: float, cause: str | None = None) -> Drawing:
    """Draw the time from `start` to `end` (seconds); the name of the task `cause` is highlighted."""
    rows, bands = choose_rows(timeline.tasks, cause)
    scale = Scale(start, max(end, start + 0.001), _LEFT, WIDTH - _RIGHT)
    height = _TOP + len(rows) * _ROW + len(bands) * (_BAND + _BAND_GAP) + 10
    parts = [*_draw_axis(scale, height)]
    y = _TOP
    for task in rows:
        parts.append(_draw_row(task, scale, y, is_cause=task.name == cause))
        y += _ROW
    for role, tasks in bands.items():
        parts += _draw_band(role, tasks, timeline.states, scale, y + 10)
        y += _BAND + _BAND_GAP
    parts += _draw_job_events(timeline.events, scale, height)
    return Drawing(WIDTH, height, f"Timeline of {len(timeline.tasks)} tasks", parts)


def draw_legend(states: Sequence[str]) -> Drawing:
    """Draw the meanings of the colors of these states, and of the marks."""
    keys = [(element("rect", class_=f"s-{s}", x=-8, y=-5, width=16, height=10), f"{s}: {STATES[s]}") for s in states]
    keys += [(mark(0, 0, kind, meaning), meaning) for kind, meaning in _MARK_MEANINGS.items()]
    parts = []
    for number, (key, words) in enumerate(keys):
        row, column = divmod(number, _LEGEND_COLUMNS)
        place = f"translate({16 + column * WIDTH / _LEGEND_COLUMNS:g} {10 + row * _LEGEND_ROW})"
        parts.append(element("g", key, text(14, 4, words), transform=place))
    return Drawing(WIDTH, (len(keys) - 1) // _LEGEND_COLUMNS * _LEGEND_ROW + 20, "Legend of the timeline", parts)


def choose_rows(
    tasks: Sequence[TaskTimeline], cause: str | None
) -> tuple[list[TaskTimeline], dict[str, list[TaskTimeline]]]:
    """Return the tasks with a row of their own, and the others by role.

    Of more than 40 tasks, at most 20 have rows: the cause, tasks of small roles, and tasks with the most events.
    """
    by_role: dict[str, list[TaskTimeline]] = {}
    for task in tasks:
        by_role.setdefault(task.role, []).append(task)
    if len(tasks) <= _MAX_ROWS:
        return list(tasks), {}

    def priority(task: TaskTimeline) -> tuple[bool, bool, int, int]:
        failures = sum(event.is_failure for event in task.events)
        return task.name == cause, len(by_role[task.role]) <= 4, failures, len(task.events)

    ranked = sorted(tasks, key=priority, reverse=True)[: _MAX_ROWS // 2]
    chosen = {task.name for task in ranked if any(priority(task))}
    others = {role: [task for task in each if task.name not in chosen] for role, each in by_role.items()}
    return [task for task in tasks if task.name in chosen], {role: each for role, each in others.items() if each}


def describe_grouping(tasks: Sequence[TaskTimeline], cause: str | None) -> str:
    """Return a note about tasks that are grouped by role; empty if there are none."""
    rows, bands = choose_rows(tasks, cause)
    if not bands:
        return ""
    grouped = [task for each in bands.values() for task in each]
    note = (
        f"{len(rows)} of {len(tasks):,} tasks, those with the most events, have a row of their own. The other "
        f"{len(grouped):,} are grouped by role: the height of a color is the share of tasks in that state."
    )
    with_events = sum(bool(task.events) for task in grouped)
    return f"{note} Events of {with_events:,} grouped tasks are only in events.jsonl." if with_events else note


def _draw_axis(scale: Scale, height: float) -> Iterator[Markup]:
    for seconds, label in time_ticks(scale.low, scale.high, 9):
        x = scale(seconds)
        yield line(x, _TOP - 8, x, height, "grid")
        yield text(x, _TOP - 13, label, "tick", "end" if x > WIDTH - _RIGHT - 20 else "middle")


def _draw_row(task: TaskTimeline, scale: Scale, y: float, *, is_cause: bool) -> Markup:
    middle = y + _ROW / 2
    parts = [text(_LEFT - 10, middle + 4, task.name[:15], "name bad" if is_cause else "name", "end")]
    for span in task.spans:
        if span.end >= scale.low and span.start <= scale.high:
            x, end = scale(span.start), scale(span.end)
            times = f"from {format_seconds(span.start)} to {format_seconds(span.end)}"
            title = f"{task.name}: {span.state} for {format_seconds(span.end - span.start)}, {times}"
            box = {"x": x, "y": middle - _BAR / 2, "width": max(end - x, 0.8), "height": _BAR}
            parts.append(element("rect", element("title", title), class_=f"s-{span.state}", **box))
    return element("g", *parts, *_draw_events(task.events, scale, middle), class_="row")


def _draw_events(events: Sequence[TimelineEvent], scale: Scale, y: float) -> Iterator[Markup]:
    """Draw the marks of a task's events; a mark that would cover one of another kind is drawn beside it."""
    last: dict[str, float] = {}
    for event in events:
        kind = "cross" if event.is_failure else _MARKS.get(event.kind, "square")
        x = scale(event.seconds)
        if scale.contains(event.seconds) and x - last.get(kind, -_MARK_PIXELS) >= _MARK_PIXELS:
            last[kind] = x = min(max([x, *(at + _MARK_PIXELS for at in last.values())]), scale.end)
            yield mark(x, y, kind, f"{format_seconds(event.seconds)}: {event.text}")


def _draw_band(
    role: str, tasks: Sequence[TaskTimeline], states: Sequence[str], scale: Scale, y: float
) -> Iterator[Markup]:
    """Draw the shares of tasks in each state as stacked areas, the last state at the bottom."""
    yield text(_LEFT - 10, y + _BAND / 2, role, "name", "end")
    yield text(_LEFT - 10, y + _BAND / 2 + 14, f"{len(tasks):,} tasks", "tick", "end")
    step = (scale.high - scale.low) / _BINS
    xs = [scale.start, *(scale(scale.low + (number + 0.5) * step) for number in range(1, _BINS - 1)), scale.end]
    bottom = [0.0] * _BINS
    for state in reversed(states):
        shares = _share_of_tasks(tasks, state, scale.low, step)
        if any(shares):
            top = [below + share for below, share in zip(bottom, shares, strict=True)]
            upper, lower = (
                _thin_out([(x, y + _BAND * (1 - share)) for x, share in zip(xs, edge, strict=True)])
                for edge in (top, bottom)
            )
            title = element("title", f"{role}: {state}, up to {max(shares):.0%}")
            yield element("path", title, class_=f"s-{state}", d=outline(upper + lower[::-1], is_closed=True))
            bottom = top
    corners = [(scale.start, y), (scale.end, y), (scale.end, y + _BAND), (scale.start, y + _BAND)]
    yield element("path", class_="frame", d=outline(corners, is_closed=True))


def _share_of_tasks(tasks: Sequence[TaskTimeline], state: str, low: float, step: float) -> list[float]:
    """Return the share of tasks in this state for each time bin."""
    changes = [0] * (_BINS + 1)
    for task in tasks:
        for span in task.spans:
            first = max(0, int((span.start - low) / step + 0.5))
            last = min(_BINS, int((span.end - low) / step + 0.5))
            if span.state == state and first < last:
                changes[first] += 1
                changes[last] -= 1
    return [count / len(tasks) for count in itertools.accumulate(changes[:-1])]


def _thin_out(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out the inner points of horizontal lines."""
    rounded = [(x, round(y, 1)) for x, y in points]
    ends = (0, len(rounded) - 1)
    return [
        point
        for number, point in enumerate(rounded)
        if number in ends or not rounded[number - 1][1] == point[1] == rounded[number + 1][1]
    ]


def _draw_job_events(events: Sequence[TimelineEvent], scale: Scale, height: float) -> Iterator[Markup]:
    """Draw a vertical line for each event of the whole job, with a label where there is space."""
    free_from = 0.0
    for event in events:
        if event.kind not in _LABELS or not scale.contains(event.seconds):
            continue
        x = scale(event.seconds)
        yield line(x, _TOP - 8, x, height, "moment")
        width = 6.2 * len(_LABELS[event.kind])
        label_x = min(max(x - width / 2, _LEFT), WIDTH - _RIGHT - width)
        if label_x >= free_from:
            yield text(label_x, 13, _LABELS[event.kind], "moment-name")
            free_from = label_x + width + 8
