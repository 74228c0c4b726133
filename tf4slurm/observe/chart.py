"""A quantity over time, drawn: a line per task, or of many tasks of a role, their mean and what lies between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tf4slurm.observe.curves import Values, known, mean, over_tasks
from tf4slurm.observe.drawing import Scale, escape, line, path, svg, text
from tf4slurm.observe.quantities import format_bytes, format_count, format_number, format_tick, nice_ticks, time_ticks

_WIDTH, _HEIGHT = 540, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_MOST_LINES = 6  # of one role
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "1 2", "12 4")


@dataclass(frozen=True)
class Line:
    """One line of a chart: what it is called, the role that gives its colour, which dashes, its values."""

    name: str
    role: str
    dash: int
    values: Values
    low: Values | None = None
    high: Values | None = None


def make_lines(names: Sequence[str], columns: Mapping[int, Values]) -> list[Line]:
    """Return the lines of these columns by rank; tasks of a role beyond a few become one, with what lies between."""
    roles: dict[str, list[int]] = {}
    for rank, column in columns.items():
        if known(column):
            roles.setdefault(names[rank].partition("/")[0], []).append(rank)
    lines = []
    for role, ranks in roles.items():
        if len(ranks) <= _MOST_LINES:
            lines += [Line(names[rank], role, dash, columns[rank]) for dash, rank in enumerate(ranks)]
        else:
            each = [columns[rank] for rank in ranks]
            middle = over_tasks(each, lambda found: sum(found) / len(found))
            lines.append(
                Line(
                    f"{format_count(len(ranks), role)} (mean)",
                    role,
                    0,
                    middle,
                    over_tasks(each, min),
                    over_tasks(each, max),
                )
            )
    return lines


def draw_chart(title: str, unit: str, seconds: Sequence[float], lines: Sequence[Line], end: float) -> str:
    """Return a figure with its caption and legend; empty where nothing is known.

    `unit` is "B" or "B/s", or empty for plain numbers.
    """
    highs = known([value for each in lines for value in (each.high or each.values)])
    lows = known([value for each in lines for value in (each.low or each.values)])
    if not highs:
        return ""
    low, high = min(0.0, *lows), max(*highs, 0.0) if len(highs) > 1 else max(highs[0], 0.0)
    if high <= low:
        high = low + 1.0
    show = _shower(unit)
    xs = Scale(0.0, max(end, 0.001), _LEFT, _WIDTH - _RIGHT)
    ys = Scale(low, high + 0.06 * (high - low), _HEIGHT - _BOTTOM, _TOP)
    parts = _axes(xs, ys, show)
    for each in lines:
        if each.low is not None and each.high is not None:
            parts.append(_between(each, seconds, xs, ys))
    for each in lines:
        dash = _DASHES[each.dash % len(_DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<path class="curve r-{_class(each.role)}"{dashes} d="{_outline(each.values, seconds, xs, ys)}"/>'
        )
    data = {
        "x": [round(at, 1) for at in seconds],
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "end": end,
        "lines": [[each.name, [None if v is None else show(v) for v in each.values]] for each in lines],
    }
    drawing = svg(
        _WIDTH, _HEIGHT, title, parts, f' class="chart" data-chart="{escape(json.dumps(data, separators=(",", ":")))}"'
    )
    caption = f'<figcaption>{escape(title)}<span class="reading"></span></figcaption>'
    return f"<figure>{caption}{drawing}{_legend(lines, show)}</figure>"


def _shower(unit: str) -> Callable[[float], str]:
    if unit.startswith("B"):
        return lambda value: format_bytes(value) + unit[1:]
    return format_number


def _axes(xs: Scale, ys: Scale, show: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in nice_ticks(ys.low, ys.high, 5):
        y = ys(tick)
        parts += [line(xs.start, y, xs.end, y, "grid"), text(xs.start - 6, y + 4, show(tick), "tick", "end")]
    ticks = time_ticks(xs.low, xs.high, 6)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    for tick in ticks:
        x = xs(tick)
        anchor = "end" if x > xs.end - 14 else "middle"
        parts += [line(x, ys.start, x, ys.start + 4, "axis")]
        parts += [text(min(x, xs.end), ys.start + 17, format_tick(tick, step), "tick", anchor)]
    return [*parts, line(xs.start, ys.start, xs.end, ys.start, "axis")]


def _outline(values: Values, seconds: Sequence[float], xs: Scale, ys: Scale) -> str:
    """Return a path that is broken where nothing is known; a value between two gaps becomes a dot."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(seconds, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((xs(at), ys(value)))
    return "".join(path(run) if len(run) > 1 else f"{path(run)}h0.01" for run in runs if run)


def _between(each: Line, seconds: Sequence[float], xs: Scale, ys: Scale) -> str:
    edges = [
        (xs(at), ys(low), ys(high))
        for at, low, high in zip(seconds, each.low or [], each.high or [], strict=True)
        if low is not None and high is not None
    ]
    outline = [(x, low) for x, low, _ in edges] + [(x, high) for x, _, high in reversed(edges)]
    return f'<path class="between r-{_class(each.role)}" d="{path(outline, closed=True)}"/>' if outline else ""


def _legend(lines: Sequence[Line], show: Callable[[float], str]) -> str:
    items = []
    for each in lines:
        dash = _DASHES[each.dash % len(_DASHES)]
        key = (
            f'<svg class="key" viewBox="0 0 26 8"><path class="curve r-{_class(each.role)}" d="M0 4H26"'
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + "/></svg>"
        )
        average = mean(each.values)
        said = f" <small>mean {show(average)}</small>" if average is not None else ""
        items.append(f"<span>{key}{escape(each.name)}{said}</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def _class(role: str) -> str:
    return role if role in ("chief", "ps", "worker", "evaluator") else "other"
