"""The click options of a job, generated from the fields of `JobSpec` and `BatchSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from tf4slurm.options import Option, options_of
from tf4slurm.spec import JobSpec

PLACE_OPTIONS = ("runs_directory", "interface", "ports")
"""The fields that determine where a job keeps its files, and how its tasks reach each other."""

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def job_options(verb: str, names: Sequence[str] = ()) -> _Decorator:
    """Return a decorator that adds the options of a verb, or only those named, and the command after `--`."""
    found = [each for each in options_of(JobSpec).values() if not each.verbs or verb in each.verbs]
    decorators = [_click_option(each) for each in found if not names or each.name in names]
    if not names:
        decorators.append(click.argument("command", nargs=-1, type=click.UNPROCESSED))

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return add


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def _click_option(each: Option) -> _Decorator:
    flag = f"--{each.key}/--no-{each.key}" if each.is_switch else f"--{each.key}"
    values: dict[str, Any] = {} if each.is_switch else {"metavar": each.metavar_text, "multiple": each.is_repeatable}
    return click.option(*each.flags, flag, each.name, default=None, help=each.help_text, **values)
