"""What several verbs share: the options of a job, from the fields of `JobSpec` and `BatchSpec`, and the argument ID."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from tf4slurm.errors import LaunchError
from tf4slurm.options import Option, options_of
from tf4slurm.settings import NO_SITE, SITE, SettingsPaths, fill_in, read_settings
from tf4slurm.spec import JobSpec

HOST_OPTIONS = ("runs_directory", "interface", "ports")
"""The fields for the files and the network of a job."""

_COMPLETED_JOBS = 50
_COMPLETION_SECONDS = 2.0
_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def job_options(verb: str, cls: type = JobSpec, names: Sequence[str] = ()) -> _Decorator:
    """Return a decorator that adds a verb's options and its command, or only the options in `names`."""
    found = [each for each in options_of(cls).values() if not each.verbs or verb in each.verbs]
    decorators = [_click_option(each) for each in found if not names or each.name in names]
    if not names:
        decorators.append(click.argument("command", nargs=-1, type=click.UNPROCESSED))

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return add


def _click_option(each: Option) -> _Decorator:
    flags = (*each.flags, f"--{each.key}/--no-{each.key}" if each.is_switch else f"--{each.key}")
    values: dict[str, Any] = {}
    if not each.is_switch:
        find = _FINDERS.get(each.complete, lambda _: each.choices)
        values = {"metavar": each.metavar, "multiple": each.is_repeatable, "shell_complete": complete(find)}
    return click.option(*flags, each.name, default=None, help=each.help, **values)


def site_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add --site to a verb that reads settings."""
    text = 'Profile of the cluster; "none" reads no settings from files and variables. See "tf4slurm config".'
    finish = complete(lambda _: (NO_SITE, *SettingsPaths.from_environ(os.environ).sites()))
    return click.option("--site", help=text, shell_complete=finish)(function)


def job_argument(*, many: bool = False, is_optional: bool = True) -> _Decorator:
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


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given on the command line."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def read_options(cls: type, environ: Mapping[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a job from the command line and the settings; print the settings files to stderr.

    Raises:
        SettingsError, UntrustedFileError: A settings file cannot be used.
    """
    settings = read_settings(environ, values.pop(SITE))
    files = sorted({setting.origin for setting in settings.values() if os.path.isabs(setting.origin)})
    if files:
        note(f"settings from {', '.join(files)}")
    return fill_in(cls, given(values), settings)


def note(text: str) -> None:
    """Print a message to standard error."""
    click.echo(f"tf4slurm: {text}", err=True)


def paint(text: str, colour: str) -> str:
    """Return text in a colour if standard output is a terminal, unless NO_COLOR is set (https://no-color.org)."""
    is_plain = click.get_current_context().obj.get("NO_COLOR") or not sys.stdout.isatty()
    return text if is_plain else click.style(text, fg=colour, bold=True)


def complete(find: Callable[[click.Context], Iterable[str]]) -> _Completion:
    """Return a shell completion by the names that `find` returns."""
    return lambda context, _, start: [CompletionItem(name) for name in find(context) if name.startswith(start)]


def _find_jobs(_context: click.Context) -> list[str]:
    from tf4slurm.jobs.registry import registered_jobs

    jobs = registered_jobs(os.environ)[:_COMPLETED_JOBS]
    return [word for job in jobs for word in (job.job_id, job.name) if word]


def _find_partitions(_context: click.Context) -> Sequence[str]:
    from tf4slurm.slurm.commands import query_partitions

    try:
        return query_partitions(timeout_seconds=_COMPLETION_SECONDS)
    except LaunchError:
        return ()


def _find_interfaces(_context: click.Context) -> list[str]:
    from tf4slurm.network.interfaces import list_interfaces

    return sorted({each.name for each in list_interfaces()})


_FINDERS: Mapping[str, Callable[[click.Context], Iterable[str]]] = {
    "partitions": _find_partitions,
    "interfaces": _find_interfaces,
}
