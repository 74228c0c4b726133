"""A quantity over time, drawn: a line per task, or of many tasks of a role, their mean and what lies between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tf4slurm.reports.curves import Values, known, over_tasks
from tf4slurm.reports.drawing import Scale, escape, line, path, svg, text
from tf4slurm.reports.quantities import format_bytes, format_count, format_number, format_tick, nice_ticks, time_ticks

WIDTH, HEIGHT = 540, 190
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


@dataclass(frozen=True)
class Chart:
    """A quantity of some tasks over time, until `end`; `unit` is "B" or "B/s", or empty for plain numbers."""

    title: str
    unit: str
    seconds: Sequence[float]
    lines: Sequence[Line]
    end: float

    def show(self, value: float) -> str:
        return format_bytes(value) + self.unit[1:] if self.unit.startswith("B") else format_number(value)


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


def draw_chart(chart: Chart) -> str:
    """Return the SVG of a chart; empty where nothing is known."""
    highs = known([value for each in chart.lines for value in (each.high or each.values)])
    lows = known([value for each in chart.lines for value in (each.low or each.values)])
    if not highs:
        return ""
    low, high = min(0.0, *lows), max(0.0, *highs)
    if high <= low:
        high = low + 1.0
    xs = Scale(0.0, max(chart.end, 0.001), _LEFT, WIDTH - _RIGHT)
    ys = Scale(low, high + 0.06 * (high - low), HEIGHT - _BOTTOM, _TOP)
    parts = _axes(xs, ys, chart.show)
    parts += [_between(each, chart.seconds, xs, ys) for each in chart.lines]
    parts += [stroke(each, _outline(each.values, chart.seconds, xs, ys)) for each in chart.lines]
    data = {
        "x": [round(at, 1) for at in chart.seconds],
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "end": chart.end,
        "lines": [[each.name, [None if v is None else chart.show(v) for v in each.values]] for each in chart.lines],
    }
    attribute = escape(json.dumps(data, separators=(",", ":")))
    return svg(WIDTH, HEIGHT, chart.title, parts, f' class="chart" data-chart="{attribute}"')


def stroke(each: Line, outline: str) -> str:
    """Return a path in the colour and with the dashes of a line."""
    dash = _DASHES[each.dash % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="curve r-{_class(each.role)}"{dashes} d="{outline}"/>'


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
    if each.low is None or each.high is None:
        return ""
    edges = [
        (xs(at), ys(low), ys(high))
        for at, low, high in zip(seconds, each.low, each.high, strict=True)
        if low is not None and high is not None
    ]
    outline = [(x, low) for x, low, _ in edges] + [(x, high) for x, _, high in reversed(edges)]
    return f'<path class="between r-{_class(each.role)}" d="{path(outline, closed=True)}"/>' if outline else ""


def _class(role: str) -> str:
    return role if role in ("chief", "ps", "worker", "evaluator") else "other"
