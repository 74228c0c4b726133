"""What the verbs share that are about jobs of before: their argument, its completion, tables and colours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import click
from click.shell_completion import CompletionItem

from tf4slurm.jobs.registry import known_jobs

_COMPLETED_JOBS = 50


def complete_jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids and names that a person may mean, the latest first."""
    words = (
        (word, job.name) for job in known_jobs(os.environ)[:_COMPLETED_JOBS] for word in (job.job_id, job.name) if word
    )
    return [CompletionItem(word, help=name) for word, name in words if word.startswith(incomplete)]


def job_argument(*, many: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the argument for a job: Slurm's id, a run's name, or its directory; the latest if there is none."""
    if many:
        return click.argument("jobs", nargs=-1, metavar="[ID]...", shell_complete=complete_jobs)
    return click.argument("job", required=False, metavar="[ID]", shell_complete=complete_jobs)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def paint(text: str, colour: str, environ: Mapping[str, str]) -> str:
    """Return text in a colour, where standard output is a terminal that wants any (see https://no-color.org)."""
    is_plain = environ.get("NO_COLOR") or not sys.stdout.isatty()
    return text if is_plain else click.style(text, fg=colour, bold=True)
