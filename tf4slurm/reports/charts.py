"""Charts of steps, metrics, memory, processors and network traffic over time, and the SVG elements of all drawings.

Colors are CSS classes of page.css.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from tf4slurm.jobs.formatting import format_bytes, format_count, format_number, make_visible
from tf4slurm.reports.summary import JobSummary, Values, combine, mean, measured
from tf4slurm.reports.timeline import role_of_task

_TIME_STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
MARKS = {
    "cross": "M-4 -4L4 4M-4 4L4 -4",
    "triangle": "M-3.5 -5L4.5 0L-3.5 5Z",
    "diamond": "M0 -5L4 0L0 5L-4 0Z",
    "square": "M-3 -3h6v6h-6Z",
}
"""The outlines of marks, around the point 0, 0. Their shapes differ because some readers cannot distinguish colors."""


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to positions from `start` to `end`; other values are clipped."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Drawing:
    """The content of an SVG and its size; screen readers read `label`."""

    width: float
    height: float
    label: str
    parts: Sequence[Markup]

    def to_svg(self, **attributes: object) -> Markup:
        box = f"0 0 {self.width:g} {self.height:g}"
        return element("svg", *self.parts, viewBox=box, role="img", aria_label=self.label, **attributes)


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Return an element with escaped text; `class_` and `aria_label` are the attributes class and aria-label."""
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escape(value)}"' for name, value in attributes.items() if value != ""
    )
    if not content:
        return Markup(f"<{tag}{pairs}/>")
    return Markup(f"<{tag}{pairs}>{''.join(map(_escape, content))}</{tag}>")


def text(x: float, y: float, words: object, style: str = "", anchor: str = "") -> Markup:
    """Return a text element."""
    return element("text", words, x=x, y=y, class_=style, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    """Return a straight line."""
    return element("path", class_=style, d=outline([(x1, y1), (x2, y2)]))


def outline(points: Sequence[tuple[float, float]], *, is_closed: bool = False) -> str:
    """Return the attribute "d" of a path through these points."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + ("Z" if is_closed else "")


def mark(x: float, y: float, kind: str, title: str) -> Markup:
    """Return one of `MARKS`, with a title that browsers show as a tooltip."""
    where = f"translate({x:g} {y:g})"
    return element("path", element("title", title), class_=f"mark {kind}", d=MARKS[kind], transform=where)


def _escape(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return escape(f"{value:g}" if isinstance(value, float) else make_visible(value))


def number_ticks(low: float, high: float, limit: int) -> list[float]:
    """Return at most about `limit` round numbers from `low` to `high` for an axis of numbers."""
    return _multiples(low, high, _round_up((high - low) / max(limit - 1, 1), (1, 2, 2.5, 5, 10)))


def time_ticks(low: float, high: float, limit: int) -> list[tuple[float, str]]:
    """Return at most about `limit` round times in seconds for an axis of time, with their labels."""
    raw = (high - low) / max(limit - 1, 1)
    if raw <= 10:
        step = _round_up(raw, (1, 2, 5, 10))
    elif raw <= 86400:
        step = next(each for each in _TIME_STEPS if raw <= each)
    else:
        step = 86400 * _round_up(raw / 86400, (1, 2, 5, 10))
    return [(seconds, _format_time(seconds, step)) for seconds in _multiples(low, high, step)]


def _format_time(seconds: float, step: float) -> str:
    """Return a time on an axis whose ticks are `step` seconds apart: "90 s", "2 min", "2:00 h" or "3 d"."""
    if step >= 86400:
        return f"{seconds / 86400:g} d"
    if step >= 3600 or abs(seconds) >= 7200:
        sign, whole = ("-" if seconds < 0 else ""), abs(round(seconds))
        return f"{sign}{whole // 3600}:{whole % 3600 // 60:02} h"
    if step >= 60:
        return f"{seconds / 60:g} min"
    return f"{seconds:g} s"


def _round_up(raw: float, leading_digits: tuple[float, ...]) -> float:
    """Return the smallest of `leading_digits` times a power of ten that is at least `raw`; 1 if `raw` <= 0."""
    if raw <= 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(digit for digit in (*leading_digits, 100.0) if digit * power >= raw * (1 - 1e-9)) * power


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, min(last, first + 100) + 1)]


WIDTH, _HEIGHT = 540, 190
_LEGEND_COLUMNS, _LEGEND_ROW = 2, 18
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_MAX_LINES_PER_ROLE = 6
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "1 2", "12 4")


@dataclass(frozen=True)
class Line:
    """One line of a chart: `role` selects the color, `dash` the pattern; `low` and `high` bound a shaded band."""

    name: str
    role: str
    dash: int
    values: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over time from 0 to `end` seconds; `unit` is "B", "B/s", or empty for plain numbers."""

    title: str
    unit: str
    seconds: Sequence[float]
    lines: Sequence[Line]
    end: float

    def format(self, value: float) -> str:
        return format_bytes(value) + self.unit[1:] if self.unit.startswith("B") else format_number(value)

    @property
    def data(self) -> str:
        """The values as JSON; page.js shows the values under the pointer."""
        data = {
            "x": [round(at, 1) for at in self.seconds],
            "left": _LEFT,
            "right": WIDTH - _RIGHT,
            "end": self.end,
            "lines": [[each.name, [None if v is None else self.format(v) for v in each.values]] for each in self.lines],
        }
        return json.dumps(data, separators=(",", ":"))


def make_charts(summary: JobSummary) -> list[Chart]:
    """Return the charts of a job that have values: training progress first, then resources."""
    curves, end = summary.curves, summary.timeline.end

    def chart(title: str, unit: str, columns: Mapping[int, Values], names: Sequence[str] = summary.names) -> Chart:
        return Chart(title, unit, curves.seconds, make_lines(names, columns), end)

    roles = summary.usage.roles
    charts = [
        chart("Steps per second", "", dict(enumerate(curves.steps))),
        *(chart(f"Reported metric: {name}", "", by_rank) for name, by_rank in curves.metrics.items()),
        chart("Memory per task", "B", dict(enumerate(curves.memory))),
        chart("Processor cores used per task", "", dict(enumerate(curves.cores))),
        chart("Bytes sent per second, by role", "B/s", _sum_by_role(summary, curves.sent), roles),
        chart("Bytes received per second, by role", "B/s", _sum_by_role(summary, curves.received), roles),
    ]
    return [each for each in charts if each.lines]


def make_lines(names: Sequence[str], columns: Mapping[int, Values]) -> list[Line]:
    """Return a line for each task with values. A role with more than 6 tasks has one line, with mean and range."""
    ranks_by_role: dict[str, list[int]] = {}
    for rank, column in columns.items():
        if measured(column):
            ranks_by_role.setdefault(role_of_task(names[rank]), []).append(rank)
    lines = []
    for role, ranks in ranks_by_role.items():
        if len(ranks) <= _MAX_LINES_PER_ROLE:
            lines += [Line(names[rank], role, dash, columns[rank]) for dash, rank in enumerate(ranks)]
        else:
            all_values = [columns[rank] for rank in ranks]
            means = combine(all_values, lambda values: sum(values) / len(values))
            name = f"{format_count(len(ranks), role)} (mean)"
            lines.append(Line(name, role, 0, means, combine(all_values, min), combine(all_values, max)))
    return lines


def draw_chart(chart: Chart) -> Drawing:
    """Draw the lines of a chart with axes and a legend."""
    highs = measured([value for each in chart.lines for value in (each.high or each.values)])
    lows = measured([value for each in chart.lines for value in (each.low or each.values)])
    low, high = min(0.0, *lows), max(0.0, *highs)
    if high <= low:
        high = low + 1.0
    xs = Scale(0.0, max(chart.end, 0.001), _LEFT, WIDTH - _RIGHT)
    ys = Scale(low, high + 0.06 * (high - low), _HEIGHT - _BOTTOM, _TOP)
    parts = [*_draw_axes(xs, ys, chart.format)]
    parts += [_draw_range(each, chart.seconds, xs, ys) for each in chart.lines]
    parts += [_draw_stroke(each, _outline(each.values, chart.seconds, xs, ys)) for each in chart.lines]
    parts += _draw_legend(chart)
    rows = -(-len(chart.lines) // _LEGEND_COLUMNS)
    return Drawing(WIDTH, _HEIGHT + rows * _LEGEND_ROW, chart.title, parts)


def _draw_legend(chart: Chart) -> Iterator[Markup]:
    """Draw the stroke, name and mean of each line below the chart."""
    for number, each in enumerate(chart.lines):
        row, column = divmod(number, _LEGEND_COLUMNS)
        x, y = 8 + column * WIDTH / _LEGEND_COLUMNS, _HEIGHT + row * _LEGEND_ROW + 10
        yield _draw_stroke(each, f"M{x:g} {y:g}h22")
        name = each.name[:20] if each.low is not None else f"{each.name[:20]}, mean"
        yield text(x + 28, y + 4, f"{name} {chart.format(mean(each.values) or 0.0)}", "tick")


def _draw_stroke(each: Line, path: str) -> Markup:
    """Return an SVG path with the color and the dash pattern of a line."""
    dashes = _DASHES[each.dash % len(_DASHES)]
    return element("path", class_=f"curve r-{_color_class(each.role)}", stroke_dasharray=dashes, d=path)


def _sum_by_role(summary: JobSummary, columns: Sequence[Values]) -> dict[int, Values]:
    """Return the sum of the columns of each role, by role index."""
    return {
        index: combine([columns[rank] for rank, name in enumerate(summary.names) if role_of_task(name) == role], sum)
        for index, role in enumerate(summary.usage.roles)
    }


def _draw_axes(xs: Scale, ys: Scale, show: Callable[[float], str]) -> Iterator[Markup]:
    for tick in number_ticks(ys.low, ys.high, 5):
        y = ys(tick)
        yield line(xs.start, y, xs.end, y, "grid")
        yield text(xs.start - 6, y + 4, show(tick), "tick", "end")
    for seconds, label in time_ticks(xs.low, xs.high, 6):
        x = xs(seconds)
        yield line(x, ys.start, x, ys.start + 4, "axis")
        yield text(x, ys.start + 17, label, "tick", "end" if x > xs.end - 14 else "middle")
    yield line(xs.start, ys.start, xs.end, ys.start, "axis")


def _outline(values: Values, seconds: Sequence[float], xs: Scale, ys: Scale) -> str:
    """Return a path with gaps where values are missing; a single value between two gaps becomes a dot."""
    segments: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(seconds, values, strict=True):
        if value is None:
            segments.append([])
        else:
            segments[-1].append((xs(at), ys(value)))
    return "".join(outline(each) + ("h0.01" if len(each) == 1 else "") for each in segments if each)


def _draw_range(each: Line, seconds: Sequence[float], xs: Scale, ys: Scale) -> Markup:
    edges = [
        (xs(at), ys(low), ys(high))
        for at, low, high in zip(seconds, each.low or (), each.high or (), strict=False)
        if low is not None and high is not None
    ]
    if not edges:
        return Markup("")
    points = [(x, low) for x, low, _ in edges] + [(x, high) for x, _, high in reversed(edges)]
    return element("path", class_=f"between r-{_color_class(each.role)}", d=outline(points, is_closed=True))


def _color_class(role: str) -> str:
    return role if role in ("chief", "ps", "worker", "evaluator") else "other"
