"""The click options of a job, generated from the fields of `JobSpec` and `BatchSpec`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from tf4slurm.errors import LaunchError
from tf4slurm.options import Option, options_of
from tf4slurm.settings import NO_SITE, SITE, Places, fill_in, settings_here
from tf4slurm.spec import JobSpec

PLACE_OPTIONS = ("runs_directory", "interface", "ports")
"""The fields for the files and the network of a job."""

_COMPLETION_SECONDS = 2.0
_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


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


def site_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add --site to a verb that reads settings."""
    text = 'Profile of the cluster; "none" reads no settings from files and variables. See "tf4slurm config".'
    return click.option("--site", help=text, shell_complete=_complete_sites)(function)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given on the command line."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def read_options(cls: type, environ: Mapping[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a job from the command line and the settings; print the settings files to stderr.

    Raises:
        ProfileError, UntrustedFileError: A settings file cannot be used.
    """
    settings = settings_here(environ, values.pop(SITE))
    files = sorted({setting.origin for setting in settings.values() if os.path.isabs(setting.origin)})
    if files:
        click.echo(f"tf4slurm: settings from {', '.join(files)}", err=True)
    return fill_in(cls, given(values), settings)


def _click_option(each: Option) -> _Decorator:
    flags = (*each.flags, f"--{each.key}/--no-{each.key}" if each.is_switch else f"--{each.key}")
    values: dict[str, Any] = {}
    if not each.is_switch:
        values = {"metavar": each.metavar, "multiple": each.is_repeatable, "shell_complete": _completion_of(each)}
    return click.option(*flags, each.name, default=None, help=each.help, **values)


def _completion_of(each: Option) -> Callable[..., list[CompletionItem]] | None:
    find = _FINDERS.get(each.complete, lambda: each.choices)
    return _complete(find) if each.complete or each.choices else None


def _complete(find: Callable[[], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in find() if name.startswith(incomplete)]

    return complete


def _find_partitions() -> Sequence[str]:
    from tf4slurm.slurm.commands import query_partitions

    try:
        return query_partitions(timeout_seconds=_COMPLETION_SECONDS)
    except LaunchError:
        return ()


def _find_interfaces() -> Sequence[str]:
    from tf4slurm.network.interfaces import list_interfaces

    return sorted({each.name for each in list_interfaces()})


_FINDERS: Mapping[str, Callable[[], Sequence[str]]] = {
    "partitions": _find_partitions,
    "interfaces": _find_interfaces,
}
_complete_sites = _complete(lambda: (NO_SITE, *Places.here(os.environ).sites()))
