"""Make the options of the verbs that start jobs, from the fields of `JobSpec` and `BatchSpec`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from tf4slurm.cli.mistakes import check_separator
from tf4slurm.cli.shared import Decorator, Verb, complete, note
from tf4slurm.errors import LaunchError
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.options import Option, options_of
from tf4slurm.spec.settings import NO_SITE, SITE, SettingsPaths, fill_in, read_settings

HOST_OPTIONS = ("runs_directory", "interface", "ports")
"""The fields of `JobSpec` that depend on the host: the parent of run directories, and the network."""

ARGUMENTS = "tf4slurm.arguments"
"""The key with which `JobVerb` keeps the arguments of a verb in the `meta` of click's context."""

_COMPLETION_SECONDS = 2.0


def job_options(verb: str, cls: type = JobSpec, names: Sequence[str] = ()) -> Decorator:
    """Return a decorator that adds options to the function of a verb.

    Args:
        verb: Name of the verb. Options that are declared for other verbs only are left out.
        cls: The class whose fields declare the options.
        names: Fields to restrict the options to. Without them, all options and the argument COMMAND are added.
    """
    found = [each for each in options_of(cls).values() if not each.verbs or verb in each.verbs]
    decorators = [_click_option(each) for each in found if not names or each.name in names]
    if not names:
        decorators.append(click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND..."))

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return add


class JobVerb(Verb):
    """A verb with an argument COMMAND, which the tasks run.

    The arguments of the verb are kept in click's context, because a comment in the batch script shows them.
    """

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = given = tuple(args)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            check_separator(ctx, given, ctx.params["command"])
        return rest


class _GroupedOption(click.Option):
    def __init__(self, *arguments: Any, group: str, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self.group = group


def verb_option(name: str, kind: type, help: str, default: Any = None, **declaration: Any) -> Decorator:
    """Return a decorator that adds an option to one verb only. `declaration` has further fields of `Option`."""
    each = Option(name, kind, is_list=False, choices=(), default=default, help=help, **declaration)
    return _click_option(each, callback=lambda _context, _parameter, value: each.convert(value))


def _click_option(each: Option, **values: Any) -> Decorator:
    flags = (*each.flags, f"--{each.key}/--no-{each.key}" if each.is_switch else f"--{each.key}")
    if not each.is_switch:
        find = _FINDERS.get(each.complete, lambda _: each.choices)
        values |= {"metavar": each.metavar, "multiple": each.is_repeatable, "shell_complete": complete(find)}
    return click.option(*flags, each.name, cls=_GroupedOption, group=each.group, default=None, help=each.help, **values)


def site_option(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate the function of a verb that reads settings: add the option --site."""
    text = 'Profile of the cluster; "none" reads no settings from files and variables. See "tf4slurm config".'
    finish = complete(lambda _: (NO_SITE, *SettingsPaths.from_environ(os.environ).sites()))
    return click.option("--site", help=text, shell_complete=finish)(function)


def isolated_option(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate the function of a verb that runs local processes: add the switch --isolated."""
    text = "Run local processes in a network of their own, which has only loopback: no other host or user reaches them."
    return click.option("--isolated", is_flag=True, help=text)(function)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those options that were given on the command line: neither None nor ()."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def read_options(cls: type, environ: Mapping[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the given options of a command line, completed from settings, as values for the fields of a job.

    Settings come from settings files and variables (`read_settings`). A given option overrides its setting.
    The paths of settings files that set an option are printed to standard error.

    Args:
        cls: `JobSpec` or `BatchSpec`.
        values: The values of click's options. The entry "site" is removed.

    Raises:
        SettingsError, UntrustedFileError: A settings file cannot be used.
        OptionError: A value is invalid, or two options exclude each other.
    """
    settings = read_settings(environ, values.pop(SITE))
    files = sorted({setting.origin for setting in settings.values() if os.path.isabs(setting.origin)})
    if files:
        note(f"settings from {', '.join(files)}")
    return fill_in(cls, given(values), settings)


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
