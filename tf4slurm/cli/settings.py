"""Settings from profiles and the environment, as the defaults of a verb's options."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from tf4slurm.cli.options import job_options
from tf4slurm.cli.submission_options import option_names, submission_options
from tf4slurm.profiles import SITE, Places, Setting, read_settings


def site_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add --site, which lets a verb take what the command line does not say from settings.

    Not for `task`: it is told everything, and starts fast.
    """
    return click.option(
        "--site",
        is_eager=True,  # before the options whose defaults it gives
        expose_value=False,
        callback=_take_settings,
        help='Profile of the cluster; "none" takes no settings from files and variables. See "tf4slurm config".',
    )(function)


def settings_of(environ: Mapping[str, str], site: str | None = None) -> dict[str, Setting]:
    """Return all settings for a user who works here."""
    return read_settings(Places.from_environ(environ, Path(os.getcwd())), environ, known_options(), site)


def known_options() -> list[str]:
    """Return the long names of the options that settings can give: those of `submit`, which has all of `run`."""
    options = {**option_names(submission_options), **option_names(job_options)}
    return sorted({SITE, *(name for names in options.values() for name in names)})


def _take_settings(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    settings = settings_of(context.obj, value)
    settings.pop(SITE, None)
    context.default_map = {
        parameter.name: _convert(parameter, settings[name].value)
        for parameter in context.command.params
        for name in _long_names(parameter)
        if name in settings and parameter.name is not None
    }


def _long_names(parameter: click.Parameter) -> list[str]:
    if not isinstance(parameter, click.Option):
        return []
    return [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]


def _convert(parameter: click.Parameter, value: Any) -> Any:
    """Return the value as click takes it: a list for an option that may be repeated, else a text or a truth."""
    if parameter.multiple:
        return shlex.split(value) if isinstance(value, str) else [str(item) for item in value]
    return value if isinstance(value, bool) else str(value)
