"""Give constructors the options of a job as keyword arguments, with types for editors and type checkers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.options import options_of

_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_Command = str | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class JobKeywords(BatchSpec):
    """The keyword arguments of `Job`, for type checkers. `site` is the profile of settings, "none" for no settings."""

    site: str | None = None


def takes_command_and_options_of(
    keywords: Callable[Concatenate[tuple[str, ...], _P], BatchSpec],
) -> Callable[[Callable[[_Self, _Command], None]], Callable[Concatenate[_Self, _Command, _P], None]]:
    """Return a decorator for a constructor that takes a command and **options. See `takes_options_of`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        return _with_options(function, keywords, ())

    return decorate


def takes_options_of(
    keywords: Callable[Concatenate[tuple[str, ...], _P], BatchSpec], left_out: Collection[str] = ()
) -> Callable[[Callable[[_Self], None]], Callable[Concatenate[_Self, _P], None]]:
    """Return a decorator for a constructor that takes **options: its keyword arguments are then typed and documented.

    They are the options of a job, and the further fields of `keywords`. The options' help texts replace the line
    OPTIONS in the constructor's docstring.

    Args:
        keywords: A subclass of BatchSpec. The type checker sees its fields, except `command`.
        left_out: Options that the constructor refuses. They are neither documented nor completed.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        return _with_options(function, keywords, left_out)

    return decorate


def _with_options(
    function: Callable[..., None], keywords: Callable[..., BatchSpec], left_out: Collection[str]
) -> Callable[..., None]:
    own, known, base = (inspect.signature(each).parameters for each in (function, keywords, BatchSpec))
    options = {name: each for name, each in options_of(BatchSpec).items() if name not in {*left_out, *own}}
    fields = [each for name, each in known.items() if name in options or name not in {*base, *own}]
    first = list(own.values())[:-1]  # the last one is **options
    shown: Any = function
    shown.__signature__ = inspect.signature(function).replace(parameters=[*first, *fields])
    lines = "\n".join(f"    {name}: {option.help}" for name, option in options.items())
    shown.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("    OPTIONS", lines)
    return function
