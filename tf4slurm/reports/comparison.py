"""Compare two jobs: their facts side by side, and the curves of both in the same charts."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from markupsafe import Markup

from tf4slurm.jobs.formatting import format_bytes, format_number, make_visible
from tf4slurm.reports.charts import Chart, make_charts
from tf4slurm.reports.report import describe_job, describe_outcome, describe_versions, make_page, read_template, render
from tf4slurm.reports.runs import flatten
from tf4slurm.reports.summary import JobSummary, measured

_COLORS = ("first", "second")


def make_comparison(first: JobSummary, second: JobSummary) -> str:
    """Return an HTML page that compares two jobs: facts, options that differ, and charts with the lines of both."""
    names = [job.run.path.name for job in (first, second)]
    if names[0] == names[1]:
        names = [str(job.run.path) for job in (first, second)]
    body = Markup('<header>\n<p class="sub">Comparison of two jobs</p>\n<h1>{} and {}</h1>\n</header>\n').format(
        *map(make_visible, names)
    )
    return make_page(f"{names[0]} and {names[1]}", body + compare(first, second, names), read_template("page.js"))


def compare(first: JobSummary, second: JobSummary, names: Sequence[str]) -> Markup:
    """Return the sections of a page that compare two jobs. `names` are the jobs' names on the page."""
    jobs = (first, second)
    charts = [make_charts(job, max_lines=1) for job in jobs]
    return render(
        "comparison.html",
        names=names,
        rows=[*_rows([_facts(job, each) for job, each in zip(jobs, charts, strict=True)])],
        options=[*_rows([_options(job) for job in jobs], is_different=True)],
        charts=[each for each in _merge(names, charts) if each.has_curve],
    )


def _rows(jobs: Sequence[dict[str, str]], *, is_different: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a table: a name, such as "exit code", and its value for each of two jobs.

    `jobs` has the values of each job by name. A missing value is shown as "–". With `is_different`, names that have the
    same value for both jobs are left out.
    """
    for name in dict.fromkeys(itertools.chain(*jobs)):
        values = [job.get(name, "–") for job in jobs]
        if not is_different or values[0] != values[1]:
            yield name, values


def _facts(job: JobSummary, charts: Sequence[Chart]) -> dict[str, str]:
    usage = job.usage
    speeds = measured([task.steps_per_second for task in usage.tasks])
    facts = {"outcome": describe_outcome(job)[0], **{name: str(value) for name, value in describe_job(job)}}
    if speeds:
        facts["steps per second, mean"] = format_number(max(speeds))
    facts |= {chart.title: chart.reading for chart in charts if chart.reading}
    if usage.cores is not None:
        facts["cores in use, mean"] = format_number(usage.cores)
    sent, received = [task.sent_bytes for task in usage.tasks], [task.received_bytes for task in usage.tasks]
    totals = {"bytes sent": measured(sent), "bytes received": measured(received)}
    peaks = {"memory, peak": usage.memory_bytes, "GPU memory, peak": usage.gpu_memory_bytes}
    facts |= {name: format_bytes(value) for name, value in peaks.items() if value is not None}
    facts |= {name: format_bytes(sum(values)) for name, values in totals.items() if values}
    if job.headline:
        facts["end"] = job.headline
    return facts


def _options(job: JobSummary) -> dict[str, str]:
    return {"command": shlex.join(job.job.command), **describe_versions(job.job), **flatten(job.job.options)}


def _merge(names: Sequence[str], jobs: Sequence[Sequence[Chart]]) -> list[Chart]:
    """Merge charts of different jobs into one chart if they have the same title and kind of x axis.

    A line's color shows its job. `names` are the names of the jobs, and `jobs` has the charts of each.
    """
    found: dict[tuple[str, bool], list[tuple[int, Chart]]] = {}
    for number, charts in enumerate(jobs):
        for chart in charts:
            found.setdefault((chart.title, chart.end is None), []).append((number, chart))
    merged = []
    for group in found.values():
        lines = [
            replace(line, name=f"{names[number]}: {line.name}", role=_COLORS[number], dash=dash)
            for number, chart in group
            for dash, line in enumerate(chart.lines)
        ]
        ends = [chart.end for _, chart in group if chart.end is not None]
        merged.append(replace(group[0][1], lines=lines, end=max(ends, default=None), reading=""))
    return merged
