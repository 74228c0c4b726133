"""Declare options of a job as dataclass fields, each with its help text, flags, range and Slurm counterpart."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tf4slurm.errors import OptionError
from tf4slurm.spec.durations import parse_seconds

_METADATA = "option"
SECONDS_SUFFIX = "_seconds"
"""The end of the names of all options whose value is a time in seconds."""
Group = Literal[
    "Roles", "Resources", "Network", "Time and recovery", "Files", "Environment", "Slurm", "Advanced", "Options"
]
"""The groups of options in help texts, in their order there."""
_SIMILAR = 0.65  # the least similarity of a suggested name, from 0 to 1
_AS_SIMILAR = 0.03  # suggested names are at most this much less similar than the best one
_MOST_SIMILAR = 3
_SHORTEST = 2  # letters
_BEGINNING = 0.95  # factor of the similarity to the beginning of a longer name
_WITHOUT_SUFFIX = 0.9  # similarity of a name that consists of a known name and a suffix
_NUMBER_PREFIX = re.compile(r"^(n|no|nb|num|number|number-of|total)-")
_BOOLS = {
    **dict.fromkeys(("1", "true", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("0", "false", "no", "off", "f", "n"), False),
}


@dataclass(frozen=True)
class Option:
    """One option: the declaration, name, type and default value of a dataclass field.

    Attributes:
        is_list: Whether the value is a tuple.
        choices: The valid texts, taken from a Literal type; empty if all texts are valid.
        help: Help text, one sentence. The default value is appended unless the text contains one.
        flags: Further flags, such as "-N".
        metavar: Placeholder of the value in help texts; by default derived from the type.
        exceeds: Exclusive lower bound of a number; `minimum` and `maximum` are inclusive.
        parse: Function that reads the value from text. It raises ValueError for an invalid text.
        format: Function that writes the value as text for `parse`.
        sbatch: Whether the value is passed to the option of sbatch with this name.
        excludes: Names of fields that cannot be given together with this one.
        complete: Name of the shell completion, see `cli/options.py`.
        verbs: The verbs, such as "run", that have the option; empty for all verbs that take the dataclass's options.
        group: Group of the option in help texts.
    """

    name: str
    kind: type
    is_list: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    minimum: float | None = None
    maximum: float | None = None
    exceeds: float | None = None
    parse: Callable[[str], Any] | None = None
    format: Callable[[Any], str] | None = None
    sbatch: bool = False
    excludes: tuple[str, ...] = ()
    complete: str = ""
    verbs: tuple[str, ...] = ()
    group: Group = "Options"

    def __post_init__(self) -> None:
        if self.default not in (None, "", (), False) and "[default:" not in self.help:
            object.__setattr__(self, "help", f"{self.help} [default: {self.to_text(self.default)}]")
        if not self.metavar:
            found = "SECONDS" if self.is_seconds else "|".join(self.choices) or _METAVARS.get(self.kind, "TEXT")
            object.__setattr__(self, "metavar", found)

    @property
    def key(self) -> str:
        """The long name on the command line and in settings files."""
        return key_of(self.name)

    @property
    def keys(self) -> tuple[str, ...]:
        """`key` and the other long names of the option."""
        return (self.key, *(flag[2:] for flag in self.flags if flag.startswith("--")))

    @property
    def is_seconds(self) -> bool:
        """Whether the value is a time in seconds. As text it may have units, such as "5m"."""
        return self.name.endswith(SECONDS_SUFFIX)

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.kind is bool

    @property
    def is_repeatable(self) -> bool:
        """Whether the flag may be given several times."""
        return self.is_list and self.parse is None

    def convert(self, value: Any) -> Any:
        """Convert a text, a TOML value or a Python value to the field's type. None becomes the default value.

        Raises:
            OptionError: The value is invalid.
        """
        try:
            if value is None or value is self.default:
                return self.default
            return self._checked(self._parsed(value))
        except (ValueError, TypeError, OverflowError) as error:
            raise OptionError(f"--{self.key}: {error}", option=self.key) from error

    def to_text(self, value: Any) -> str:
        """Return a value, or one item of a repeatable option, as text that `convert` reads."""
        if self.format is not None:
            return self.format(value)
        if isinstance(value, float):
            return str(int(value)) if value == int(value) else repr(value)
        return str(value)

    def to_arguments(self, value: Any) -> list[str]:
        """Return the command-line arguments that set this value."""
        if self.is_switch:
            return [f"--{self.key}" if value else f"--no-{self.key}"]
        items = value if self.is_repeatable else [value]
        return [word for item in items for word in (f"--{self.key}", self.to_text(item))]

    def _parsed(self, value: Any) -> Any:
        if self.parse is not None:
            if isinstance(value, (str, int)):
                return self.parse(str(value))
            text = self.to_text(tuple(value))
            return self.parse(text) if text else self.default
        if self.is_list:
            items = tuple(shlex.split(value) if isinstance(value, str) else value)
            if not all(isinstance(item, str) for item in items):
                raise ValueError(f"{value!r} is not a list of texts.")
            return items
        if self.is_switch:
            if str(value).lower() not in _BOOLS:
                raise ValueError(f"{value!r} is not true or false.")
            return _BOOLS[str(value).lower()]
        if self.is_seconds and isinstance(value, str):
            return parse_seconds(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, (str, self.kind)) or (is_number and self.kind in (float, str)):
            with contextlib.suppress(ValueError):
                return self.kind(value)
        raise ValueError(f"{value!r} is not {_NAMES[self.kind]}.")

    def _checked(self, value: Any) -> Any:
        if self.choices and value not in self.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}.")
        if self.kind in (int, float) and not self.is_list:
            if not math.isfinite(value):
                raise ValueError(f"{value!r} is not a finite number.")
            if self.minimum is not None and value < self.minimum:
                raise ValueError(f"{value} is less than {self.minimum:g}.")
            if self.maximum is not None and value > self.maximum:
                raise ValueError(f"{value} is greater than {self.maximum:g}.")
            if self.exceeds is not None and value <= self.exceeds:
                raise ValueError(f"{value} is not greater than {self.exceeds:g}.")
        return value


_METAVARS: Mapping[type, str] = {int: "N", float: "NUMBER", Path: "PATH"}
_NAMES: Mapping[type, str] = {int: "an integer", float: "a number", str: "a text", Path: "a path"}


def option(default: Any, help: str, **declaration: Any) -> Any:
    """Return a dataclass field that is an option. `declaration` contains further attributes of `Option`."""
    return dataclasses.field(default=default, metadata={_METADATA: {"help": help, **declaration}})


def key_of(name: str) -> str:
    """Return the long name of an option, such as "grace-period" for the field `grace_period_seconds`."""
    return name.removesuffix(SECONDS_SUFFIX).replace("_", "-")


def options_of(cls: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by field name."""
    return _options_of(cls)


@functools.cache
def _options_of(cls: type) -> Mapping[str, Option]:
    hints = typing.get_type_hints(cls)
    return types.MappingProxyType(
        {
            field.name: Option(field.name, *_kind_of(hints[field.name]), field.default, **field.metadata[_METADATA])
            for field in dataclasses.fields(cls)
            if _METADATA in field.metadata
        }
    )


def options_by_key(cls: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by each of their long names on the command line."""
    return {key: each for each in options_of(cls).values() for key in each.keys}


def to_fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with their keys converted to field names of `cls`.

    A key of `values` is a field name or a long name of an option, with _ or -.

    Raises:
        OptionError: A name is unknown. The message suggests similar names.
    """
    names = {key: each.name for key, each in options_by_key(cls).items()} | {name: name for name in options_of(cls)}
    found = {}
    for name, value in values.items():
        key = name if name in names else name.replace("_", "-")
        if key not in names:
            raise OptionError(unknown(name, options_of(cls), "an option of a job"), option=key)
        found[names[key]] = value
    return found


def unknown(name: str, names: Iterable[str], what: str) -> str:
    """Return the error message "NAME is not WHAT" for an unknown name, with the most similar of the known `names`."""
    return f"{name!r} is not {what}.{did_you_mean(nearest(name, names))}"


def did_you_mean(names: Sequence[str]) -> str:
    """Return " Did you mean 'a' or 'b'?" for the end of an error message, or "" without names."""
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return at most three known names that `name` may be a misspelling of, the most similar first."""
    if len(name) < _SHORTEST:
        return []
    scores = {each: _similarity(name.lower().replace("_", "-"), each.lower().replace("_", "-")) for each in names}
    best = max(scores.values(), default=0.0)
    found = [each for each, score in scores.items() if score >= max(_SIMILAR, best - _AS_SIMILAR)]
    return sorted(found, key=lambda each: -scores[each])[:_MOST_SIMILAR]


def _similarity(name: str, known: str) -> float:
    """Return how similar a typed name is to a known name, from 0 to 1.

    A typed name that lacks the end of the known name loses 0.01 per missing letter. A prefix of the typed name, such as
    "num-", is ignored.
    """
    name = _NUMBER_PREFIX.sub("", name)
    if known.startswith(name):
        return 1.0 - 0.01 * (len(known) - len(name))
    if name.startswith(f"{known}-"):
        return _WITHOUT_SUFFIX
    ratios = (difflib.SequenceMatcher(None, name, each).ratio() for each in (known, known[: len(name)]))
    return max(factor * ratio for factor, ratio in zip((1.0, _BEGINNING), ratios, strict=True))


def _kind_of(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """Return three facts about a type hint: the type of a value, whether it is a tuple, and the values of a Literal."""
    if typing.get_origin(hint) is typing.Literal:
        return str, False, typing.get_args(hint)
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    return (str if str in kinds else kinds[0]), typing.get_origin(hint) is tuple, ()
