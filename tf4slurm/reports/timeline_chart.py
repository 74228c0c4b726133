"""The timeline of a job, drawn: one row per task, or of many tasks of a role, one band that tells how many do what."""

from __future__ import annotations

from collections.abc import Sequence

from tf4slurm.reports.drawing import Scale, box, line, path, svg, symbol, text
from tf4slurm.reports.quantities import format_seconds, format_tick, time_ticks
from tf4slurm.reports.timeline import Mark, TaskLife, Timeline

WIDTH = 1100
MOST_ROWS = 40
_LEFT, _RIGHT, _TOP = 104, 16, 46
_ROW, _BAR, _BAND = 19, 13, 72
_BINS = 240
_MARK_PIXELS = 9  # two marks of a kind that are nearer become one
_SYMBOLS = {
    "restarting": "turn",
    "disconnected": "gap",
    "reconnected": "end",
    "not_restarted": "end",
    "exited_early": "gap",
    "exited": "end",
}
_LABELS = {"attempt": "new attempt", "stopping": "stop asked", "grace_period_over": "grace over", "outcome": "outcome"}


def draw_timeline(timeline: Timeline, start: float, end: float, cause: str | None = None) -> tuple[str, str]:
    """Draw what lies between two times (seconds); return the SVG, and what of it was drawn together, in a sentence."""
    alone, together, said = _choose_rows(timeline.tasks, cause)
    scale = Scale(start, max(end, start + 0.001), _LEFT, WIDTH - _RIGHT)
    height = _TOP + len(alone) * _ROW + sum(_BAND + 22 for _ in together) + 10
    parts = _axis(scale, height)
    y = _TOP
    for life in alone:
        parts.append(_row(life, scale, y, is_cause=life.name == cause))
        y += _ROW
    for role, lives in together.items():
        parts.append(_band(role, lives, timeline.states, scale, y + 10))
        y += _BAND + 22
    parts += _job_marks(timeline.marks, scale, height)
    return svg(WIDTH, height, f"Timeline of {len(timeline.tasks)} tasks", parts, ' class="timeline"'), said


def _choose_rows(tasks: Sequence[TaskLife], cause: str | None) -> tuple[list[TaskLife], dict[str, list[TaskLife]], str]:
    """Return those that get a row of their own, the others by role, and what was done with whom."""
    if len(tasks) <= MOST_ROWS:
        return list(tasks), {}, ""
    roles: dict[str, list[TaskLife]] = {}
    for life in tasks:
        roles.setdefault(life.role, []).append(life)
    few = {role for role, lives in roles.items() if len(lives) <= 4}

    def weight(life: TaskLife) -> tuple[bool, bool, int, int]:
        return life.name == cause, life.role in few, sum(mark.is_bad for mark in life.marks), len(life.marks)

    ranked = sorted(tasks, key=weight, reverse=True)[: MOST_ROWS // 2]
    chosen = {id(life) for life in ranked if any(weight(life))}
    alone = [life for life in tasks if id(life) in chosen]
    together = {
        role: rest for role, lives in roles.items() if (rest := [life for life in lives if id(life) not in chosen])
    }
    eventful = sum(bool(life.marks) and id(life) not in chosen for life in tasks)
    said = (
        f"Of {len(tasks):,} tasks {len(alone)} have a row of their own: those to which most happened. The other "
        f"{len(tasks) - len(alone):,} are drawn together by role: the height of a colour is the share of tasks. "
    )
    if eventful:
        said += f"Marks of {eventful:,} of them are not shown; events.jsonl has all."
    return alone, together, said


def _axis(scale: Scale, height: float) -> list[str]:
    ticks = time_ticks(scale.low, scale.high, 9)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    parts = []
    for tick in ticks:
        x = scale(tick)
        anchor = "end" if x > WIDTH - _RIGHT - 20 else "middle"
        parts += [line(x, _TOP - 8, x, height, "grid"), text(x, _TOP - 13, format_tick(tick, step), "tick", anchor)]
    return parts


def _row(life: TaskLife, scale: Scale, y: float, *, is_cause: bool) -> str:
    middle = y + _ROW / 2
    parts = [text(_LEFT - 10, middle + 4, life.name[:15], "name bad" if is_cause else "name", "end")]
    for span in life.spans:
        if span.end >= scale.low and span.start <= scale.high:
            x, until = scale(span.start), scale(span.end)
            what = f"{life.name}: {span.state} for {format_seconds(span.end - span.start)}"
            title = f"{what}, from {format_seconds(span.start)} to {format_seconds(span.end)}"
            parts.append(box(x, middle - _BAR / 2, max(until - x, 0.8), _BAR, f"s-{span.state}", title))
    last: dict[str, float] = {}
    for mark in life.marks:
        kind = "cross" if mark.is_bad else _SYMBOLS.get(mark.kind, "end")
        x = scale(mark.seconds)
        if scale.holds(mark.seconds) and x - last.get(kind, -_MARK_PIXELS) >= _MARK_PIXELS:
            x = min(max(x, *(at + _MARK_PIXELS for at in last.values()), x), scale.end)  # beside what is there
            last[kind] = x
            parts.append(symbol(x, middle, kind, f"{format_seconds(mark.seconds)}: {mark.text}"))
    return f'<g class="row">{"".join(parts)}</g>'


def _band(role: str, lives: Sequence[TaskLife], states: Sequence[str], scale: Scale, y: float) -> str:
    """Stack, from below, the shares of tasks in each state."""
    step = (scale.high - scale.low) / _BINS
    counts = {state: [0] * (_BINS + 1) for state in states}
    for life in lives:
        for span in life.spans:
            first = max(0, int((span.start - scale.low) / step + 0.5))
            last = min(_BINS, int((span.end - scale.low) / step + 0.5))
            if first < last:
                counts[span.state][first] += 1
                counts[span.state][last] -= 1
    base = [0.0] * _BINS
    parts = [text(_LEFT - 10, y + _BAND / 2, role, "name", "end")]
    parts.append(text(_LEFT - 10, y + _BAND / 2 + 14, f"{len(lives):,} tasks", "tick", "end"))
    xs = [scale(scale.low + (number + 0.5) * step) for number in range(_BINS)]
    xs[0], xs[-1] = scale.start, scale.end
    for state in reversed(states):
        number, top = 0, []
        for position in range(_BINS):
            number += counts[state][position]
            top.append(base[position] + number / len(lives))
        if top != base:
            upper = [(x, y + _BAND * (1 - share)) for x, share in zip(xs, top, strict=True)]
            lower = [(x, y + _BAND * (1 - share)) for x, share in zip(xs, base, strict=True)]
            outline = _thin(upper) + _thin(lower)[::-1]
            title = f"<title>{role}: {state}, up to {max(a - b for a, b in zip(top, base, strict=True)):.0%}</title>"
            parts.append(f'<path class="s-{state}" d="{path(outline, closed=True)}">{title}</path>')
        base = top
    parts.append(f'<path class="frame" d="M{scale.start:g} {y:g}H{scale.end:g}V{y + _BAND:g}H{scale.start:g}Z"/>')
    return "".join(parts)


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out the points in the middle of a level line."""
    rounded = [(x, round(y, 1)) for x, y in points]
    ends = (0, len(rounded) - 1)
    return [
        point
        for number, point in enumerate(rounded)
        if number in ends or not rounded[number - 1][1] == point[1] == rounded[number + 1][1]
    ]


def _job_marks(marks: Sequence[Mark], scale: Scale, height: float) -> list[str]:
    parts: list[str] = []
    free_from = 0.0
    for mark in marks:
        if mark.kind not in _LABELS or not scale.holds(mark.seconds):
            continue
        x = scale(mark.seconds)
        parts.append(f'<path class="moment" d="M{x:g} {_TOP - 8:g}V{height:g}"/>')
        label = _LABELS[mark.kind]
        width = 6.2 * len(label)
        at = min(max(x - width / 2, _LEFT), WIDTH - _RIGHT - width)
        if at >= free_from:
            parts.append(text(at, 13, label, "moment-name"))
            free_from = at + width + 8
    return parts
