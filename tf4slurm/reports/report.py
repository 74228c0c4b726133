"""The report of a job: one HTML file that needs no network, or its charts alone as an SVG or PNG file."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tf4slurm.errors import MissingDependencyError, RunDirectoryError
from tf4slurm.jobs.formatting import format_bytes, format_count, format_number, format_seconds, make_visible
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.reports.advice import explain_failure, give_advice
from tf4slurm.reports.charts import WIDTH as CHART_WIDTH
from tf4slurm.reports.charts import Drawing, draw_chart, element, make_charts, text
from tf4slurm.reports.summary import JobSummary, JobUsage, TaskUsage, mean, measured
from tf4slurm.reports.timeline import Timeline
from tf4slurm.reports.timeline_chart import WIDTH, describe_grouping, draw_legend, draw_timeline

_TEMPLATES = Path(__file__).parent / "templates"
_SHORT_START = 0.15  # a start that takes a smaller share of the job gets a second timeline
_MAX_WAITS = 8
_PNG_ZOOM = 2
_FONTS = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Open Sans", "Roboto", "Arial", "Helvetica")
_LETTER = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="sans-serif">'
    '<text y="15">{}</text></svg>'
)
_MARGIN, _TITLE = 20, 26


def make_file(summary: JobSummary, name: str | Path) -> bytes:
    """Return the content of a report file: HTML for .html or no suffix, only the charts for .svg and .png.

    Raises:
        RunDirectoryError: The name has another suffix.
        MissingDependencyError: The package resvg_py or a font for a PNG is missing.
    """
    suffix = Path(name).suffix.lower()
    if suffix == ".png":
        return _rasterize(make_picture(summary))
    if suffix == ".svg":
        return make_picture(summary).encode()
    if suffix in ("", ".html", ".htm"):
        return make_report(summary).encode()
    raise RunDirectoryError(
        f"{str(name)!r} cannot be written: {suffix!r} is no format of a report. Use a name that ends in .html, .svg or "
        ".png, or print the .html from a browser.",
        path=str(name),
    )


def make_report(summary: JobSummary) -> str:
    """Return the report as an HTML page."""
    return make_page(make_title(summary), make_body(summary), read_template("page.js"))


def make_page(title: str, body: Markup, script: str, live_note: str = "") -> str:
    """Return a page that may run only this script and connect only to its own server.

    Args:
        title: Title of the page.
        body: Content of the page.
        script: JavaScript.
        live_note: First line of a live page.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _render(
        "page.html",
        title=title,
        live_note=live_note,
        body=body,
        policy=Markup(policy),
        style=Markup(read_template("page.css")),
        script=Markup(script),
    )


def load_templates() -> None:
    """Compile the templates, so that the next report takes 20 ms less."""
    for name in ("page.html", "report.html"):
        _environment().get_template(name)


def make_title(summary: JobSummary) -> str:
    """Return the title of the page: the name of the job and its outcome."""
    return f"{summary.run.path.name}: {_outcome(summary)[0].lower()}"


def make_body(summary: JobSummary) -> Markup:
    """Return the content of the page."""
    timeline, result = summary.timeline, summary.result
    outcome, style = _outcome(summary)
    job, path = summary.job, summary.run.path
    job_id = f"job {job.job_id}" if job.job_id else None
    content = _render(
        "report.html",
        summary=summary,
        outcome=outcome,
        style=style,
        name=job.name or path.name,
        subtitle=" · ".join(str(each) for each in (job_id, job.started, path) if each),
        command=shlex.join(job.command),
        facts=[*_facts(summary)],
        result=result or ResultFile(),
        explanation=explain_failure(result, summary.usage.allocation) if result and summary.has_failed else [],
        timeline=draw_timeline(timeline, timeline.start, timeline.end, summary.cause),
        legend=draw_legend(timeline.states),
        start_timeline=_draw_start(timeline, summary.cause),
        grouping=describe_grouping(timeline.tasks, summary.cause),
        waits=sorted(timeline.waits, key=lambda wait: wait.seconds, reverse=True),
        charts=make_charts(summary),
        usage_rows=[*_usage_rows(summary.usage)],
        advice=give_advice(summary.usage, timeline, summary.curves.not_finite),
        max_waits=_MAX_WAITS,
        missing=[*summary.list_missing_files()],
    )
    return Markup(content)


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values)


def read_template(name: str) -> str:
    """Return the text of a file in `templates`."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else make_visible(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(seconds=format_seconds, thousands="{:,}".format)
    environment.globals.update(draw_chart=draw_chart)
    return environment


def _outcome(summary: JobSummary) -> tuple[str, str]:
    """Return one word for the outcome, or the phase of a running job, and the CSS class of its color."""
    result = summary.result
    if summary.is_lost:
        return "Lost", "bad"
    if result is None:
        phase = summary.status.phase
        return (phase.capitalize(), "live") if phase else ("Unknown", "warn")
    if result.requeued:
        return "Requeued", "warn"
    return result.state.capitalize(), {"COMPLETED": "good", "STOPPED": "warn"}.get(result.state, "bad")


def _facts(summary: JobSummary) -> Iterator[tuple[str, object]]:
    """Yield the names and values in the head of the report."""
    result, status = summary.result, summary.status
    yield ("duration" if summary.has_ended else "running for"), format_seconds(summary.timeline.end)
    if summary.timeline.start < 0:
        yield "queued", format_seconds(-summary.timeline.start)
    if result is not None:
        yield "exit code", result.exit_code
    roles = Counter(task.role for task in summary.usage.tasks)
    yield "tasks", ", ".join(format_count(count, role) for role, count in roles.items()) or "unknown"
    yield "hosts", len({task.node for task in summary.tasks if task.node}) or "unknown"
    yield "attempt", (result and result.attempts) or status.attempt or 1
    steps = [task.step for task in status.tasks if task.step is not None]
    if steps:
        yield "step", f"{max(steps):,}"


def _draw_start(timeline: Timeline, cause: str | None) -> Drawing | None:
    """Draw the time until the first step if it is a small part of the timeline, else return None."""
    end = (timeline.first_step_at or 0.0) * 1.25
    is_short = 0 < end < _SHORT_START * (timeline.end - timeline.start)
    return draw_timeline(timeline, 0.0, end, cause) if is_short else None


def _usage_rows(usage: JobUsage) -> Iterator[tuple[str, ...]]:
    for role in usage.roles:
        tasks = usage.of_role(role)
        cores = measured([task.cores for task in tasks])
        memory = format_bytes(max(task.memory_bytes for task in tasks))
        yield _usage_row(role, tasks, _format_cores(mean(cores)), _format_cores(max(cores, default=None)), memory)
    yield _usage_row("job", usage.tasks, _format_cores(usage.cores), "", format_bytes(usage.memory_bytes))
    allocated = usage.allocation
    if allocated.cpus or allocated.memory_bytes:
        memory = format_bytes(allocated.memory_bytes) if allocated.memory_bytes else "not limited"
        yield "allocated by Slurm", "", _format_cores(allocated.cpus or None), "", memory, "", ""


def _usage_row(name: str, tasks: Sequence[TaskUsage], *cells: str) -> tuple[str, ...]:
    sent, received = sum(task.sent_bytes for task in tasks), sum(task.received_bytes for task in tasks)
    return name, f"{len(tasks):,}", *cells, format_bytes(sent), format_bytes(received)


def _format_cores(cores: float | None) -> str:
    return "-" if cores is None else format_number(cores)


def make_picture(summary: JobSummary) -> str:
    """Return the timeline and the charts as one SVG file in light colors."""
    timeline = summary.timeline
    y = float(_MARGIN)
    parts = [element("rect", width="100%", height="100%", fill="white")]
    for drawing in (draw_legend(timeline.states), draw_timeline(timeline, timeline.start, timeline.end, summary.cause)):
        parts.append(drawing.to_svg(x=0, y=y, width=WIDTH, height=drawing.height))
        y += drawing.height + _MARGIN
    charts = [(chart.title, draw_chart(chart)) for chart in make_charts(summary)]
    for number in range(0, len(charts), 2):
        row = charts[number : number + 2]
        for (title, drawing), x in zip(row, (0, WIDTH - CHART_WIDTH), strict=False):
            parts.append(text(x + 8, y + 14, title))
            parts.append(drawing.to_svg(x=x, y=y + _TITLE, width=CHART_WIDTH, height=drawing.height))
        y += _TITLE + max(drawing.height for _, drawing in row) + _MARGIN
    style = element("style", Markup(_picture_style()))
    font = {"style": "max-width:100%;height:auto", "font_family": "sans-serif"}
    box = {"viewBox": f"0 0 {WIDTH} {y:g}", "width": WIDTH, "height": y}
    return element("svg", style, *parts, xmlns="http://www.w3.org/2000/svg", **box, **font) + "\n"


def _picture_style() -> str:
    """Return the rules of page.css for drawings. CSS variables are replaced, because some programs lack them."""
    css = read_template("page.css")
    colors = dict(re.findall(r"(--[\w-]+):\s*([^;]+);", css.partition("@media")[0]))
    return re.sub(r"var\((--[\w-]+)\)", lambda match: colors[match[1]], css.partition("/* drawings */")[2])


def _rasterize(svg: str) -> bytes:
    """Return an SVG as a PNG."""
    try:
        import resvg_py
    except ImportError as error:
        raise MissingDependencyError(
            'A PNG needs the package resvg_py. Install it with pip install "tf4slurm[png]", or write an .svg.',
            package="resvg_py",
        ) from error

    def draw(drawing: str, font: str) -> bytes:
        svg_bytes = resvg_py.svg_to_bytes(svg_string=drawing, sans_serif_family=font, serif_family=font, zoom=_PNG_ZOOM)
        return bytes(svg_bytes)

    for font in _FONTS:
        if draw(_LETTER.format("M"), font) != draw(_LETTER.format(""), font):
            return draw(svg, font)
    raise MissingDependencyError(
        f"A PNG needs one of these fonts: {', '.join(_FONTS)}. Install one (on Debian: fonts-dejavu-core), or write an "
        ".svg.",
        package="fonts",
    )
