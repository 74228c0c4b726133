"""Settings from profiles and the environment, as the defaults of a verb's options."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tf4slurm.cli.submission_options import option_names, submission_options
from tf4slurm.errors import OptionError, ProfileError
from tf4slurm.options import options_by_key, options_of
from tf4slurm.settings import NO_SITE, SITE, Places, Setting, read_settings
from tf4slurm.spec import JobSpec


def site_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add --site, which lets a verb take what the command line does not say from settings.

    Not for `task`: it is told everything, and starts fast.
    """
    return click.option(
        "--site",
        is_eager=True,  # before the options whose defaults it gives
        expose_value=False,
        callback=_take_settings,
        shell_complete=_complete_sites,
        help='Profile of the cluster; "none" takes no settings from files and variables. See "tf4slurm config".',
    )(function)


def _complete_sites(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = (NO_SITE, *Places.from_environ(os.environ, here()).sites())
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def here() -> Path:
    """Return the current directory; one that was removed has no project."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def settings_of(environ: Mapping[str, str], site: str | None = None) -> dict[str, Setting]:
    """Return all settings for a user who works here."""
    return read_settings(Places.from_environ(environ, here()), environ, known_options(), site)


def known_options() -> list[str]:
    """Return the long names of the options that settings can give: those of `submit`, which has all of `run`."""
    names = (name for names in option_names(submission_options).values() for name in names)
    return sorted({SITE, *names, *options_by_key(JobSpec)})


def _take_settings(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    settings = settings_of(context.obj, value)
    settings.pop(SITE, None)
    files = sorted({setting.origin for setting in settings.values() if os.path.isabs(setting.origin)})
    if files and not context.resilient_parsing:  # that is: while a shell completes a word
        click.echo(f"tf4slurm: settings from {', '.join(files)}", err=True)
    context.default_map = {
        parameter.name: _convert(context, parameter, settings[name])
        for parameter in context.command.params
        for name in _long_names(parameter)
        if name in settings and parameter.name is not None
    }


def _long_names(parameter: click.Parameter) -> list[str]:
    if not isinstance(parameter, click.Option):
        return []
    return [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]


def _convert(context: click.Context, parameter: click.Parameter, setting: Setting) -> Any:
    """Return the value as click takes it: a list for an option that may be repeated, else a text or a truth."""
    value = setting.value
    try:
        declared = options_of(JobSpec).get(parameter.name or "")
        if declared is not None:
            declared.convert(value)
        if parameter.multiple:
            value = shlex.split(value) if isinstance(value, str) else [str(item) for item in value]
        elif not isinstance(value, bool):
            value = str(value)
        parameter.type_cast_value(context, value)
    except OptionError as error:
        raise ProfileError(f"{setting.origin} sets {error}", source=setting.origin) from error
    except (click.BadParameter, TypeError, ValueError) as error:
        why = error.message if isinstance(error, click.BadParameter) else str(error)
        raise ProfileError(f"{setting.origin} sets {parameter.opts[-1]}: {why}", source=setting.origin) from error
    return value
