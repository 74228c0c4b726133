"""What several verbs share: the argument ID, messages, colours and shell completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_COMPLETED_JOBS = 50


def job_argument(*, many: bool = False, is_optional: bool = True) -> Decorator:
    """Add the argument `job` (a `KnownJob`), or `jobs` (a list) with `many`.

    If `is_optional`, a missing argument selects the latest job.
    """
    from tf4slurm import api

    def find(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if many:
            return [api.find(job) for job in value or ((None,) if is_optional else ())]
        return api.find(value)

    name, num, metavar = ("jobs", -1, "[ID]...") if many else ("job", 1, "[ID]")
    finish = complete(_find_jobs)
    return click.argument(name, nargs=num, metavar=metavar, required=False, callback=find, shell_complete=finish)


def note(text: str) -> None:
    """Print a message to standard error."""
    click.echo(f"tf4slurm: {text}", err=True)


def paint(text: str, colour: str) -> str:
    """Return text in a colour if standard output is a terminal, unless NO_COLOR is set (https://no-color.org)."""
    is_plain = click.get_current_context().obj.get("NO_COLOR") or not sys.stdout.isatty()
    return text if is_plain else click.style(text, fg=colour, bold=True)


def complete(find: Callable[[click.Context], Iterable[str]]) -> _Completion:
    """Return a shell completion that offers the names that `find` returns."""
    return lambda context, _, start: [CompletionItem(name) for name in find(context) if name.startswith(start)]


def _find_jobs(_context: click.Context) -> list[str]:
    from tf4slurm.jobs.registry import registered_jobs

    jobs = registered_jobs(os.environ)[:_COMPLETED_JOBS]
    return [word for job in jobs for word in (job.job_id, job.name) if word]
