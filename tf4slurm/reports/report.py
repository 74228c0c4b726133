"""Make the report of a job: one HTML file that needs no network."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from tf4slurm.control.step_rate import MEANING
from tf4slurm.errors import COMPLETED, REQUEUED, STOPPED
from tf4slurm.jobs.formatting import format_bytes, format_count, format_number, format_seconds, make_visible
from tf4slurm.jobs.logs import find_logs
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, ResultFile
from tf4slurm.jobs.status import describe_checkpoints, describe_variables
from tf4slurm.reports.advice import explain_failure, give_advice
from tf4slurm.reports.charts import STEPS_CHART, make_charts
from tf4slurm.reports.summary import JobSummary, JobUsage, TaskUsage, mean, measured, peak
from tf4slurm.reports.timeline import STATES, Timeline
from tf4slurm.reports.timeline_chart import MARK_MEANINGS, TimelineChart, choose_rows, describe_grouping

_UPLOT = "vendor/uPlot-1.6.32"
_TEMPLATES = Path(__file__).parent / "templates"
_RATE = "steps per second"
_SHORT_START = 0.15  # a start that takes a smaller share of the job gets a second timeline
_SOFTWARE = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras"}
_ACTIVITIES = {
    "rendezvous": "Forming the cluster",
    "checking": "Checking addresses",
    "importing": "Importing",
    "running": "Running",
    "training": "Training",
    "stopping": "Stopping",
    "terminating": "Ending",
    "ended": "Ending",
}


def make_report(summary: JobSummary, directory: Path | None = None) -> str:
    """Return the report as an HTML page.

    `directory` is where the page will be stored, by default the run directory. The links to logs are relative to it.
    """
    body = make_body(summary, directory or summary.run.path)
    return make_page(make_title(summary), body, read_template("page.js"))


def make_page(title: str, body: Markup, script: str, live_note: str = "", style: str = "") -> str:
    """Return an HTML page that may run only the library uPlot and `script`, and connect only to its own server.

    Args:
        title: Title of the page.
        body: HTML content of the page.
        script: JavaScript that the page runs after uPlot.
        live_note: First line of a live page, such as when it was updated. Empty for other pages.
        style: CSS that the page uses after that of all pages.
    """
    script = f"/*!\n{read_template(f'{_UPLOT}.LICENSE')}\n*/\n{read_template(f'{_UPLOT}.min.js')}{script}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    page = render(
        "page.html",
        title=title,
        live_note=live_note,
        body=body,
        policy=Markup(policy),
        style=Markup(read_template(f"{_UPLOT}.min.css") + read_template("page.css") + style),
        script=Markup(script),
    )
    return str(page)


def load_templates() -> None:
    """Compile the templates of the report in advance, so that making the report takes 20 ms less."""
    for name in ("page.html", "report.html", "charts.html"):
        _environment().get_template(name)


def make_title(summary: JobSummary) -> str:
    """Return the title of a job's page: name of the run directory, and outcome or phase."""
    return f"{summary.run.path.name}: {describe_outcome(summary)[0]}"


def make_body(summary: JobSummary, directory: Path | None = None) -> Markup:
    """Return the HTML content of the report.

    If `directory` is given, the page will be a file in it, and the content has relative links to the logs.
    """
    timeline, result = summary.timeline, summary.result
    chart = TimelineChart(timeline, timeline.start, timeline.end)
    rows = choose_rows(timeline.tasks, summary.cause)
    marks = {kind for task in rows[0] for kind, _, _ in chart.marks(task)}
    waits = sorted(timeline.waits, key=lambda wait: wait.seconds, reverse=True)
    outcome, style = describe_outcome(summary)
    job, path = summary.job, summary.run.path
    job_id = f"job {job.job_id}" if job.job_id else None
    facts, charts = dict(describe_job(summary)), make_charts(summary)
    return render(
        "report.html",
        summary=summary,
        outcome=outcome,
        style=style,
        name=job.name or path.name,
        subtitle=" · ".join(str(each) for each in (job_id, _describe_start(job.started), path) if each),
        command=shlex.join(job.command),
        facts=facts,
        rate_meaning=f"Steps per second are {MEANING}" if _RATE in facts else "",
        result=result or ResultFile(),
        explanation=explain_failure(result, summary.usage.allocation) if result and summary.has_failed else [],
        timeline=chart,
        start_timeline=_start_of(timeline),
        rows=rows,
        states=STATES,
        mark_meanings={kind: meaning for kind, meaning in MARK_MEANINGS.items() if kind in marks},
        grouping=describe_grouping(*rows),
        waits=[(wait.task, wait.what, format_seconds(wait.seconds), format_seconds(wait.until)) for wait in waits],
        charts=[each for each in charts if each.has_curve],
        single_values=[f"{each.title}: {each.reading}" for each in charts if each.reading and not each.has_curve],
        has_rates=any(each.has_curve and each.title == STEPS_CHART for each in charts),
        usage_table=[*_make_usage_table(summary.usage)],
        advice=give_advice(summary.usage, timeline, summary.metrics.not_finite) if summary.has_ended else [],
        missing=[*summary.list_missing_files()],
        versions=" · ".join(f"{name} {version}" for name, version in describe_versions(job).items()),
        logs=_link_logs(summary.run, directory) if directory is not None else [],
        cause_log=_link_cause(summary, directory) if directory is not None else "",
    )


def _link_logs(run: RunDirectory, directory: Path) -> list[tuple[str, str]]:
    """Return the name of each log of a job, and a link to it that is relative to `directory`."""
    links = [(str(log.task), log.attempt, os.path.relpath(log.path, directory)) for log in find_logs([run])]
    has_attempts = len({attempt for _, attempt, _ in links}) > 1
    return [(f"{name}, attempt {attempt}" if has_attempts else name, quote(path)) for name, attempt, path in links]


def _link_cause(summary: JobSummary, directory: Path) -> str:
    """Return a relative link to the log of the task that failed first, or an empty text if there is none."""
    log = summary.run.path / "logs" / Path(summary.result.log or "").name if summary.result is not None else None
    return quote(os.path.relpath(log, directory)) if log is not None and log.is_file() else ""


def render(template: str, **values: Any) -> Markup:
    """Return the HTML of a template in the directory `templates`, filled in with `values`.

    Values that are no `Markup` are escaped.
    """
    return Markup(_environment().get_template(template).render(values))


def read_template(name: str) -> str:
    """Return the text of a file in the directory `templates`."""
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
    return environment


def describe_outcome(summary: JobSummary) -> tuple[str, str]:
    """Return a job's outcome, or its phase while it runs, and the CSS class that gives this text its color."""
    result = summary.result
    if summary.is_lost:
        return "LOST", "bad"
    if result is None:
        if summary.status.phase is None:
            return ("Starting", "live") if summary.job.command else ("UNKNOWN", "warn")
        return _ACTIVITIES.get(summary.status.phase, summary.status.phase), "live"
    return result.state, {COMPLETED: "good", STOPPED: "warn", REQUEUED: "warn"}.get(result.state, "bad")


def describe_job(summary: JobSummary) -> Iterator[tuple[str, object]]:
    """Yield the facts at the top of the report, such as ("exit code", 0)."""
    result, status = summary.result, summary.status
    yield ("duration" if summary.has_ended or summary.is_lost else "running for"), format_seconds(summary.timeline.end)
    if summary.timeline.start < 0:
        yield "queued", format_seconds(-summary.timeline.start)
    if result is not None:
        yield "exit code", result.exit_code
    roles = Counter(task.task_type for task in summary.usage.tasks)
    yield "tasks", ", ".join(format_count(count, role) for role, count in roles.items()) or "unknown"
    left = (result or status).workers_left
    if num_joined := left + sum(task.has_joined and not task.is_gone for task in summary.tasks):
        yield "joined later", format_count(num_joined, "worker")
    yield "hosts", len({task.node for task in summary.tasks if task.node}) or "unknown"
    yield "attempt", (result and result.attempts) or status.attempt or 1
    steps = [task.step for task in status.tasks if task.step is not None]
    if steps:
        yield "step", f"{max(steps):,}"
    rates = [task.steps_per_second for task in status.tasks if task.steps_per_second is not None]
    if rates and result is None and not summary.is_lost:
        yield _RATE, format_number(max(rates))
    if variables := describe_variables(summary.tasks):
        yield "variables", variables
    if checkpoints := describe_checkpoints(summary.tasks):
        yield "checkpoint", checkpoints


def describe_versions(job: JobFile) -> dict[str, str]:
    """Return the versions of a job's software by name, and the git commit of its code as "git commit"."""
    versions = {_SOFTWARE.get(name, name): version for name, version in job.versions.items()}
    if job.commit:
        versions["git commit"] = job.commit[:10] + (" with uncommitted changes" if job.is_dirty else "")
    return versions


def _start_of(timeline: Timeline) -> TimelineChart | None:
    """Return a chart of the beginning of a timeline: from 0 to 1.25 times the time of the first step.

    Return None if this is 15 % of the timeline or more, or if there was no step.
    """
    end = (timeline.first_step_at or 0.0) * 1.25
    return TimelineChart(timeline, 0.0, end) if 0 < end < _SHORT_START * (timeline.end - timeline.start) else None


def _make_usage_table(usage: JobUsage) -> Iterator[list[str]]:
    """Yield the rows of the table of resource usage, the header first."""
    gpus = ["GPU use, mean", "GPU memory, peak"] if usage.has_gpus else []

    def row(
        name: str, tasks: Sequence[TaskUsage], cores: float | None, busiest: str, *peaks: float | None
    ) -> Iterator[str]:
        memory, gpu_memory = (_format(each, format_bytes) for each in peaks)
        yield from (name, f"{len(tasks):,}", _format(cores, format_number), busiest, memory)
        if gpus:
            yield from (_format(mean([task.gpu_percent for task in tasks]), "{:.0f} %".format), gpu_memory)
        for counts in ([task.sent_bytes for task in tasks], [task.received_bytes for task in tasks]):
            yield _format(sum(measured(counts)) if measured(counts) else None, format_bytes)

    yield ["role", "tasks", "cores, mean", "cores, busiest task", "memory, peak", *gpus, "sent", "received"]
    for role in usage.roles:
        tasks = usage.of_role(role)
        cores = [task.cores for task in tasks]
        peaks = peak([task.memory_bytes for task in tasks]), peak([task.gpu_memory_bytes for task in tasks])
        yield [*row(role, tasks, mean(cores), _format(peak(cores), format_number), *peaks)]
    yield [*row("job", usage.tasks, usage.cores, "", usage.memory_bytes, usage.gpu_memory_bytes)]
    allocated = usage.allocation
    if allocated.cpus or allocated.memory_bytes:
        memory_text = format_bytes(allocated.memory_bytes) if allocated.memory_bytes else "not limited"
        cells = ["allocated by Slurm", "", _format(allocated.cpus or None, format_number), "", memory_text]
        yield [*cells, *[""] * (len(gpus) + 2)]


def _format(value: float | None, write: Callable[[float], str]) -> str:
    return "–" if value is None else write(value)


def _describe_start(started: str | None) -> str | None:
    """Return the start time of job.json, "2026-11-23T08:08:42+0000", as "2026-11-23 08:08:42 +0000"."""
    return re.sub(r"^([\d-]{10})T([\d:]{8})(?=[+-])", r"\1 \2 ", started) if started else None
