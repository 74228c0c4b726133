"""The report of a job: one HTML file that needs nothing else, and no network."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf4slurm.reports.chart import Chart, draw_chart, stroke
from tf4slurm.reports.curves import known, mean
from tf4slurm.reports.drawing import escape
from tf4slurm.reports.gallery import make_charts
from tf4slurm.reports.job_summary import Story
from tf4slurm.reports.quantities import format_bytes, format_count, format_number, format_seconds
from tf4slurm.reports.resource_usage import TaskNeeds
from tf4slurm.reports.timeline_chart import draw_timeline

_HERE = Path(__file__).parent
_START_SHARE = 0.15  # a start that takes less of the job's time gets a drawing of its own
_MOST_WAITS = 8
_MEANINGS = {
    "queued": "in Slurm's queue",
    "starting": "the cluster forms",
    "importing": "started, no server yet",
    "waiting": "ready, others are not",
    "training": "since the first step",
    "running": "ready; no steps are reported",
    "restarting": "ended, not yet started again",
    "terminating": "terminating, or ended",
}


def make_report(story: Story) -> str:
    """Return the report as HTML."""
    return make_page(title_of(story), make_body(story), read_part("page.js"))


def make_page(title: str, body: str, script: str) -> str:
    """Return a whole page, which may run this script and no other, and ask nothing of anybody but its own server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{read_part("page.css")}</style></head>\n'
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def title_of(story: Story) -> str:
    return f"{story.path.name}: {_verdict(story)[0].lower()}"


def make_body(story: Story) -> str:
    """Return what stands in the page: what a person wants to know first comes first."""
    parts = [
        _header(story),
        _cause(story),
        _section("Warnings", _paragraphs(story.warnings)) if story.warnings else "",
        _timeline(story),
        _waits(story),
        _curves(story),
        _needs(story),
        _advice(story),
    ]
    if story.missing:
        parts.append(_section("What is not known", _paragraphs(story.missing)))
    return "\n".join(filter(None, parts))


def read_part(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _verdict(story: Story) -> tuple[str, str]:
    """Return how it went in a word or two, and the class of its colour."""
    code = story.result.get("exit_code")
    if code == 0:
        return "Completed", "good"
    if story.result.get("requeued"):
        return "Requeued", "warn"
    if isinstance(code, int) and code > 128 and not story.cause:
        return "Stopped", "warn"
    if code is not None:
        return "Failed", "bad"
    if story.loss:
        return "Lost", "bad"
    phase = story.status.get("phase")
    return (str(phase).capitalize(), "live") if phase else ("Unknown", "warn")


def _header(story: Story) -> str:
    word, style = _verdict(story)
    code = story.result.get("exit_code")
    roles: dict[str, int] = {}
    for name in story.names:
        role = name.partition("/")[0]
        roles[role] = roles.get(role, 0) + 1
    attempt = story.result.get("attempts") or story.status.get("attempt") or 1
    tasks = ", ".join(format_count(count, role) for role, count in roles.items())
    facts: list[tuple[str, object]] = [
        ("lasted" if story.has_ended else "runs for", format_seconds(story.timeline.end))
    ]
    if story.timeline.start < 0:
        facts.append(("queued", format_seconds(-story.timeline.start)))
    if code is not None:
        facts.append(("exit code", code))
    facts += [("tasks", tasks or "none known"), ("hosts", len(_nodes(story)) or "unknown"), ("attempt", attempt)]
    steps = [step for task in _tasks(story.status) if isinstance(step := task.get("step"), int)]
    if steps:
        facts.append(("step", f"{max(steps):,}"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    command = story.job.get("command")
    words = shlex.join(map(str, command)) if isinstance(command, list) else ""
    started, job_id = story.job.get("started"), story.job.get("job_id")
    sub = " · ".join(str(each) for each in (f"job {job_id}" if job_id else "", started or "", story.path) if each)
    reason = story.result.get("reason") or story.status.get("reason") or ""
    said = f'<p class="reason">{escape(reason)}</p>' if reason and style == "good" else ""
    return (
        f'<header><p class="outcome {style}">{escape(word)}</p>'
        f"<h1>{escape(story.job.get('name') or story.path.name)}</h1>"
        f'<p class="sub">{escape(sub)}</p>{f"<pre class=command>{escape(words)}</pre>" if words else ""}'
        f"{said}<dl>{cells}</dl></header>"
    )


def _cause(story: Story) -> str:
    if not story.has_ended or story.result.get("exit_code") == 0:
        return ""
    body = f'<p class="reason">{escape(story.result.get("reason") or story.loss or "No reason was written down.")}</p>'
    if story.tail:
        log = story.result.get("log")
        body += f"<h3>The last lines of {escape(story.cause or 'its output')}</h3>"
        body += f'<pre class="tail">{escape(chr(10).join(story.tail))}</pre>'
        body += f'<p class="sub">{escape(log)}</p>' if log else ""
    if story.explanation:
        body += f"<h3>What that means</h3>{_paragraphs(story.explanation)}"
    others = story.result.get("collateral")
    if isinstance(others, list) and others:
        shown = "".join(f"<li>{escape(each)}</li>" for each in others[:10])
        more = f"<li>and {len(others) - 10:,} more</li>" if len(others) > 10 else ""
        body += f"<h3>What followed from it</h3><ul>{shown}{more}</ul>"
    stopped = _verdict(story)[1] == "warn"
    return _section("Why it was stopped" if stopped else "Why it failed", body, "cause warn" if stopped else "cause")


def _timeline(story: Story) -> str:
    timeline = story.timeline
    if not timeline.tasks:
        return ""
    keys = "".join(
        f'<span><svg class="key" viewBox="0 0 16 10"><rect class="s-{state}" width="16" height="10"/></svg>'
        f"<b>{state}</b> <small>{_MEANINGS[state]}</small></span>"
        for state in timeline.states
    )
    marks = "".join(
        f'<span><svg class="key" viewBox="-8 -7 16 14"><path class="mark {kind}" d="{shape}"/></svg>{name}</span>'
        for kind, shape, name in (
            ("cross", "M-4 -4L4 4M-4 4L4 -4", "failed or lost"),
            ("turn", "M-3.5 -5L4.5 0L-3.5 5Z", "restarted in place"),
            ("gap", "M0 -5L4 0L0 5L-4 0Z", "connection lost"),
            ("end", "M-3 -3h6v6h-6Z", "other event"),
        )
    )
    drawing, said = draw_timeline(timeline, timeline.start, timeline.end, story.cause)
    body = f'<div class="legend">{keys}</div><div class="wide">{drawing}</div><div class="legend">{marks}</div>'
    if said:
        body += f'<p class="note">{escape(said)}</p>'
    ready = timeline.training_at
    if ready is not None and ready * 1.25 < _START_SHARE * (timeline.end - timeline.start):
        start, _ = draw_timeline(timeline, 0.0, ready * 1.25, story.cause)
        body += f"<h3>The start, until training</h3><div class='wide'>{start}</div>"
    return _section("Timeline", body)


def _waits(story: Story) -> str:
    waits = sorted(story.timeline.waits, key=lambda wait: wait.seconds, reverse=True)
    if not waits:
        return ""
    rows = [
        (wait.task, wait.what, format_seconds(wait.seconds), format_seconds(wait.until)) for wait in waits[:_MOST_WAITS]
    ]
    more = (
        f'<p class="note">{len(waits) - _MOST_WAITS:,} shorter ones are not shown.</p>'
        if len(waits) > _MOST_WAITS
        else ""
    )
    return _section("Who was waited for", _table(("task", "for what", "how long", "until"), rows, words=True) + more)


def _curves(story: Story) -> str:
    body = "".join(map(_figure, make_charts(story)))
    if not body:
        return ""
    samples, names = story.curves.left_out
    notes = []
    if samples:
        all_samples = samples + len(story.curves.seconds)
        notes.append(f"{samples:,} of {all_samples:,} samples are not drawn; samples.jsonl has them.")
    if names:
        notes.append(f"{names:,} more metrics are not drawn.")
    note = f'<p class="note">{" ".join(notes)}</p>' if notes else ""
    return _section("Over time", f'<div class="figures">{body}</div>{note}')


def _figure(chart: Chart) -> str:
    drawing = draw_chart(chart)
    if not drawing:
        return ""
    keys = []
    for each in chart.lines:
        average = mean(each.values)
        said = f" <small>mean {chart.show(average)}</small>" if average is not None else ""
        key = f'<svg class="key" viewBox="0 0 26 8">{stroke(each, "M0 4H26")}</svg>'
        keys.append(f"<span>{key}{escape(each.name)}{said}</span>")
    caption = f'<figcaption>{escape(chart.title)}<span class="reading"></span></figcaption>'
    return f'<figure>{caption}{drawing}<div class="legend">{"".join(keys)}</div></figure>'


def _needs(story: Story) -> str:
    needs = story.needs
    if not story.curves.seconds:
        return ""
    rows = [_needs_row(role, needs.of_role(role)) for role in needs.roles]
    cores = "-" if needs.cores is None else format_number(needs.cores)
    total = f"{format_bytes(needs.memory_bytes)} at once"
    moved = [(task.sent_bytes, task.received_bytes) for task in needs.tasks]
    rows.append(
        (
            "job",
            f"{len(needs.tasks):,}",
            cores,
            "",
            total,
            *(format_bytes(sum(each)) for each in zip(*moved, strict=True)),
        )
    )
    given: tuple[str, ...] = ("given by Slurm", "", *["unknown"] * 3, "", "")
    if needs.given_cpus or needs.given_memory_bytes:
        memory = format_bytes(needs.given_memory_bytes) if needs.given_memory_bytes else "not limited"
        given = ("given by Slurm", "", f"{needs.given_cpus:,}" if needs.given_cpus else "-", "", memory, "", "")
        rows.append(given)
    head = ("role", "tasks", "cores, mean", "cores, busiest", "memory, most", "sent", "received")
    note = (
        "Cores: processor seconds per second while the job trained, the mean of a role's tasks and the busiest one. "
        "Memory: the most that one task of the role had. Bytes: over the ports of the tasks, by connections of others."
    )
    if given not in rows:
        note += " The job ran without Slurm: nothing was asked for, so there is nothing to hold it against."
    return _section("Asked for and used", _table(head, rows) + f'<p class="note">{note}</p>')


def _needs_row(role: str, tasks: Sequence[TaskNeeds]) -> tuple[str, ...]:
    cores = known([task.cores for task in tasks])
    return (
        role,
        f"{len(tasks):,}",
        format_number(sum(cores) / len(cores)) if cores else "-",
        format_number(max(cores)) if cores else "-",
        format_bytes(max(task.memory_bytes for task in tasks)),
        format_bytes(sum(task.sent_bytes for task in tasks)),
        format_bytes(sum(task.received_bytes for task in tasks)),
    )


def _advice(story: Story) -> str:
    if not story.advice:
        return ""
    items = "".join(f"<li>{escape(each.seen)}<br><b>{escape(each.todo)}</b></li>" for each in story.advice)
    return _section("What could be better", f'<ul class="advice">{items}</ul>')


def _tasks(content: Any) -> list[dict[str, Any]]:
    tasks = content.get("tasks")
    return [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []


def _nodes(story: Story) -> set[str]:
    return {str(task["node"]) for task in _tasks(story.result) or _tasks(story.status) if task.get("node")}


def _section(title: str, body: str, style: str = "") -> str:
    return f'<section class="{style}"><h2>{escape(title)}</h2>{body}</section>'


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{escape(each)}</p>" for each in sentences)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    style = ' class="words"' if words else ""
    return f'<div class="wide"><table{style}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
