"""Make charts of metrics over steps and of resources over time, as JSON that page.js draws with the library uPlot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tf4slurm.jobs.formatting import format_count, format_number
from tf4slurm.reports.metrics import MetricPoint, MetricSeries
from tf4slurm.reports.summary import MAX_POINTS, JobSummary, Values, combine, measured
from tf4slurm.reports.timeline import task_type_of

MAX_LINES_PER_ROLE = 6
STEPS_CHART = "Steps per second"
_MAX_POINTS_PER_LINE = 1000

Point = tuple[float, float, float, float]
"""A point of a line: (x, y, low, high). If it stands for several values, y is their mean or the last of them.

`low` and `high` are the lowest and highest of these values.
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: Name in the legend: a task, or a role and the number of its tasks.
        role: Selects the color.
        dash: Index of the dash pattern, from 0.
        xs: Steps, or seconds since the start of the job, in increasing order.
        values: The value at each of `xs`.
        low, high: Bounds of a shaded band around the line, at each of `xs`. None for no band.
    """

    name: str
    role: str
    dash: int
    xs: Sequence[float]
    values: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Chart:
    """A chart of lines that share the axes.

    Attributes:
        unit: Unit of the y axis: "B", "B/s", "%" or a word, such as "cores". Empty for a metric.
        end: End of the time axis in seconds. None if the x axis shows steps.
        reading: A text with the last and the best value of a metric. Empty for other charts.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    end: float | None = None
    reading: str = ""

    @property
    def has_curve(self) -> bool:
        """Whether a line has two values or more. A chart with a single value shows nothing."""
        return any(sum(map(_is_drawn, line.values)) > 1 for line in self.lines)

    def to_json(self) -> str:
        """Return the chart as JSON for page.js.

        Lines whose `xs` is the same list object are put into one table, so that the JSON has this list once.
        """
        tables: dict[int, tuple[Sequence[float], list[Line]]] = {}
        for line in self.lines:
            tables.setdefault(id(line.xs), (line.xs, []))[1].append(line)
        content = {
            "title": self.title,
            "unit": self.unit,
            "end": self.end,
            "tables": [
                {"xs": _round(xs), "lines": [_line_to_json(line) for line in lines]} for xs, lines in tables.values()
            ],
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _line_to_json(line: Line) -> dict[str, object]:
    content: dict[str, object] = {"name": line.name, "role": line.role, "dash": line.dash, "ys": _round(line.values)}
    if line.low is not None and line.high is not None:
        content.update(low=_round(line.low), high=_round(line.high))
    return content


def _round(values: Iterable[float | None]) -> list[float | None]:
    """Return the values with 6 significant digits. Values that are not finite become None."""
    return [float(f"{value:.6g}") if value is not None and _is_drawn(value) else None for value in values]


def _is_drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def make_charts(summary: JobSummary, max_lines: int = MAX_LINES_PER_ROLE) -> list[Chart]:
    """Return the charts of a job: metrics over steps, then speed and resources over time.

    Charts without values are left out, but not those with a single one (`Chart.has_curve`). If a role has more than
    `max_lines` tasks with values, a chart shows one line for all of them, the mean, with a band from the lowest to the
    highest value.
    """
    curves = summary.curves
    end = summary.timeline.end
    roles = summary.usage.roles
    rates = {task: _to_points(points, has_steps=False) for task, points in summary.metrics.step_rates.items()}

    def over_time(title: str, unit: str, columns: Sequence[Values], names: Sequence[str] = summary.names) -> Chart:
        return Chart(title, unit, make_lines(curves.seconds, dict(zip(names, columns, strict=False)), max_lines), end)

    charts = [
        *(_metric_chart(name, series, end, max_lines) for name, series in summary.metrics.series.items()),
        Chart(STEPS_CHART, "steps/s", make_point_lines(rates, max_lines), end),
        over_time("GPU use per task", "%", curves.gpu_percent),
        over_time("GPU memory per task", "B", curves.gpu_memory),
        over_time("Memory per task", "B", curves.memory),
        over_time("Processor cores used per task", "cores", curves.cores),
        over_time("Bytes sent per second, by role", "B/s", _sum_by_role(summary, curves.sent), roles),
        over_time("Bytes received per second, by role", "B/s", _sum_by_role(summary, curves.received), roles),
    ]
    return [each for each in charts if each.lines]


def make_lines(
    seconds: Sequence[float], columns: Mapping[str, Values], max_lines: int = MAX_LINES_PER_ROLE
) -> list[Line]:
    """Return the lines of tasks whose values were measured at the same times.

    Args:
        seconds: The times, in seconds since the start of the job.
        columns: The values at these times, by task. Tasks without a measured value are left out.
        max_lines: A role with more tasks has one line, their mean, with a band from the lowest to the highest value.
    """
    lines = []
    for role, tasks in _by_role(task for task, column in columns.items() if measured(column)):
        if len(tasks) <= max_lines:
            lines += [Line(task, role, dash, seconds, columns[task]) for dash, task in enumerate(tasks)]
        else:
            values = [columns[task] for task in tasks]
            means = combine(values, lambda found: sum(found) / len(found))
            name = f"{format_count(len(tasks), role)} (mean)"
            lines.append(Line(name, role, 0, seconds, means, combine(values, min), combine(values, max)))
    return lines


def make_point_lines(points: Mapping[str, Sequence[Point]], max_lines: int = MAX_LINES_PER_ROLE) -> list[Line]:
    """Return the lines of tasks whose values were measured at different times or steps.

    If a role has more than `max_lines` tasks, it has one line, their mean. The points of this line are averaged in at
    most 240 bins. So are the points of a task that has more than 1,000.

    Args:
        points: The points by task. Tasks without points are left out.
        max_lines: Maximum number of lines for a role.
    """
    lines = []
    for role, tasks in _by_role(task for task, each in points.items() if each):
        if len(tasks) <= max_lines:
            for dash, task in enumerate(tasks):
                line = points[task]
                if len(line) > _MAX_POINTS_PER_LINE:
                    line = [*_average(line[:-1]), line[-1]]  # the legend shows the end of the line as the last value
                lines.append(_make_line(task, role, dash, line))
        else:
            name = f"{format_count(len(tasks), role)} (mean)"
            lines.append(_make_line(name, role, 0, _average([point for task in tasks for point in points[task]])))
    return lines


def describe_values(series: Iterable[MetricSeries]) -> str:
    """Return a text with the last and the best value of a metric over all tasks.

    If it is unknown whether lower or higher values are better, the text has the lowest and the highest instead. The
    text is empty if no value is finite.
    """
    tasks = [each for each in series if each.last is not None]
    last = max((each.last for each in tasks if each.last is not None), key=lambda point: point.seconds, default=None)
    if last is None:
        return ""
    lows = [(point.low or 0.0, point) for each in tasks if (point := each.lowest) is not None]
    highs = [(point.high or 0.0, point) for each in tasks if (point := each.highest) is not None]
    found = {"lowest": min(lows, default=None), "highest": max(highs, default=None)}
    best = tasks[0].best
    if best is not None:
        is_low = tasks[0].lowest is not None and best == tasks[0].lowest.low
        found = {"best": found["lowest" if is_low else "highest"]}
    parts = [f"last {format_number(last.value or 0.0)}"]
    for word, value_and_point in found.items():
        if value_and_point is not None:
            value, point = value_and_point
            place = "" if point.step is None else f" {'at' if value == point.value else 'before'} step {point.step:,}"
            parts.append(f"{word} {format_number(value)}{place}")
    return ", ".join(parts)


def _metric_chart(name: str, series: Mapping[str, MetricSeries], end: float, max_lines: int) -> Chart:
    has_steps = any(point.step is not None for each in series.values() for point in each.points)
    points = {task: _to_points(each.points, has_steps=has_steps) for task, each in series.items()}
    lines = make_point_lines(points, max_lines)
    return Chart(name, "", lines, None if has_steps else end, describe_values(series.values()))


def _to_points(points: Iterable[MetricPoint], *, has_steps: bool) -> list[Point]:
    """Return the points with a finite value, sorted by step (if `has_steps`) or by time.

    Of a step that was repeated after a restart, the last point is returned.
    """
    found: dict[float, Point] = {}
    for point in points:
        x = point.step if has_steps else point.seconds
        if x is not None and point.value is not None:
            low, high = (point.value if each is None else each for each in (point.low, point.high))
            found[x] = (x, point.value, low, high)
    return sorted(found.values())


def _average(points: Sequence[Point]) -> list[Point]:
    """Group points into at most 240 bins of equal width along x. Return one point for each bin that is not empty.

    It has the mean x and y, the lowest `low` and the highest `high` of the points in the bin.
    """
    start, end = min(point[0] for point in points), max(point[0] for point in points)
    width = (end - start) / (MAX_POINTS - 1) or 1.0
    bins: dict[int, list[Point]] = {}
    for point in points:
        bins.setdefault(round((point[0] - start) / width), []).append(point)
    columns = (list(zip(*bins[number], strict=True)) for number in sorted(bins))
    return [(sum(xs) / len(xs), sum(ys) / len(ys), min(lows), max(highs)) for xs, ys, lows, highs in columns]


def _make_line(name: str, role: str, dash: int, points: Sequence[Point]) -> Line:
    xs, ys, lows, highs = (list(column) for column in zip(*points, strict=True))
    has_band = lows != ys or highs != ys
    return Line(name, role, dash, xs, [*ys], [*lows] if has_band else None, [*highs] if has_band else None)


def _by_role(tasks: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(task_type_of(task), []).append(task)
    return found.items()


def _sum_by_role(summary: JobSummary, columns: Sequence[Values]) -> list[Values]:
    return [
        combine([columns[rank] for rank, name in enumerate(summary.names) if task_type_of(name) == role], sum)
        for role in summary.usage.roles
    ]
