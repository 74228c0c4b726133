"""Draw the timeline and the charts of a job as a picture with matplotlib (the extra tf4slurm[plot])."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf4slurm.errors import MissingDependencyError
from tf4slurm.jobs.formatting import format_bytes, format_number, make_visible
from tf4slurm.reports.charts import Chart, make_charts
from tf4slurm.reports.summary import JobSummary
from tf4slurm.reports.timeline_chart import TimelineChart, choose_rows, find_ticks

WIDTH = 11.0
"""Width of a picture in inches."""

_CHART_HEIGHT, _ROW_HEIGHT, _AXIS_HEIGHT = 2.5, 0.2, 1.0  # in inches
_DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (1, 2)), (0, (8, 3)))
_CSS = Path(__file__).parent / "templates" / "page.css"


def make_picture(summary: JobSummary, suffix: str, *, is_short: bool = False) -> bytes:
    """Return a picture, in light colors, with the timeline and the charts of a job.

    Args:
        summary: The job.
        suffix: Format of the picture: "svg" or "png".
        is_short: Whether to leave out the charts of resources.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'A picture needs the package matplotlib. Install it with pip install "tf4slurm[plot]", or write the '
            "report as .html.",
            package="matplotlib",
        ) from error
    charts = [each for each in make_charts(summary) if each.has_curve]
    charts = [each for each in charts if not is_short or each.unit in ("", "steps/s")]
    rows, bands = choose_rows(summary.timeline.tasks, summary.cause)
    heights = [_AXIS_HEIGHT + _ROW_HEIGHT * (len(rows) + 4 * len(bands)), *[_CHART_HEIGHT] * math.ceil(len(charts) / 2)]
    options: Any = {"text.parse_math": False, "svg.hashsalt": "tf4slurm", "font.size": 9}
    with matplotlib.rc_context(options), warnings.catch_warnings():  # fonts may lack letters of a metric's name
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        colors = _read_colors()
        _draw_timeline(figure.add_subplot(grid[0, :]), summary, colors)
        for number, chart in enumerate(charts):
            _draw_chart(figure.add_subplot(grid[1 + number // 2, number % 2]), chart, colors)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        picture = io.BytesIO()
        figure.savefig(picture, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    return picture.getvalue()


def _read_colors() -> dict[str, str]:
    """Return the light colors of page.css by name, such as "bad"."""
    css = _CSS.read_text(encoding="utf-8").partition("@media")[0]
    return dict(re.findall(r"--([\w-]+):\s*([^;]+);", css))


def _draw_timeline(axes: Any, summary: JobSummary, colors: dict[str, str]) -> None:
    timeline = summary.timeline
    rows, bands = choose_rows(timeline.tasks, summary.cause)
    chart = TimelineChart(timeline, timeline.start, timeline.end)
    for number, task in enumerate(rows):
        spans = [(span.start, span.end - span.start) for span in task.spans]
        axes.broken_barh(spans, (number - 0.35, 0.7), facecolors=[colors[span.state] for span in task.spans])
        failures = [event.seconds for event in task.events if event.is_failure]
        axes.plot(failures, [number] * len(failures), "x", color=colors["bad"], markeredgewidth=2)
    for number, tasks in enumerate(bands.values()):
        bottom = len(rows) + 4 * number + 3.0
        states = timeline.states[::-1]
        shares = [chart.share_of_tasks(tasks, state) for state in states]
        times = [
            chart.start + (chart.end - chart.start) * (bin + 0.5) / len(shares[0]) for bin in range(len(shares[0]))
        ]
        heights = [[-3.0 * share for share in each] for each in shares]
        axes.stackplot(times, [bottom] * len(times), *heights, colors=["none", *(colors[state] for state in states)])
    for state in timeline.states:
        axes.bar(0, 0, color=colors[state], label=state)
    labels = [*(task.name for task in rows), *(f"{role}: {len(tasks):,} tasks" for role, tasks in bands.items())]
    places = [*range(len(rows)), *(len(rows) + 4 * number + 1.5 for number in range(len(bands)))]
    axes.set_yticks(places, [make_visible(label) for label in labels])
    axes.set_ylim(len(rows) + 4 * len(bands) - 0.4, -0.6)
    _draw_time_axis(axes, timeline.start, timeline.end)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=8, frameon=False)


def _draw_chart(axes: Any, chart: Chart, colors: dict[str, str]) -> None:
    for line in chart.lines:
        color = colors.get(line.role, colors["soft"])
        ys = _to_numbers(line.values)
        marker = "o" if sum(not math.isnan(y) for y in ys) == 1 else ""
        style = _DASHES[line.dash % len(_DASHES)]
        axes.plot(
            line.xs, ys, color=color, linestyle=style, linewidth=1.4, marker=marker, label=make_visible(line.name)
        )
        if line.low is not None and line.high is not None:
            axes.fill_between(
                line.xs, _to_numbers(line.low), _to_numbers(line.high), color=color, alpha=0.22, linewidth=0
            )
    axes.set_title(make_visible(chart.title), loc="left", fontweight="bold")
    axes.set_title(chart.reading, loc="right", fontsize=8)
    if chart.unit:
        show = format_bytes if chart.unit.startswith("B") else format_number
        suffix = {"B/s": "/s", "%": " %"}.get(chart.unit, "")
        axes.yaxis.set_major_formatter(lambda value, _: show(value) + suffix)
    else:  # matplotlib's labels have as many digits as the ticks need
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(color=colors["line"], linewidth=0.6)
    if chart.end is None:
        axes.set_xlabel("step")
        axes.locator_params("x", nbins=6)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_ylim(bottom=0)
        _draw_time_axis(axes, 0.0, chart.end)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _to_numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _draw_time_axis(axes: Any, start: float, end: float) -> None:
    ticks = find_ticks(start, end)
    axes.set_xlim(start, max(end, start + 0.001))
    axes.set_xticks([seconds for seconds, _ in ticks], [label for _, label in ticks])
