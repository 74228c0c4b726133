"""The points of a sweep: the varied arguments of each element of a job array, and the labels that show them."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tf4slurm.cluster import PLACEHOLDERS
from tf4slurm.errors import OptionError
from tf4slurm.slurm.job_id import MAX_INDEX, parse_indices

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_VALUE = re.compile(r'(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[^",][^,]*))(?P<end>,|\Z)')


@dataclass(frozen=True)
class ArrayElement:
    """One element of a job array: its index in the array, and the names and values of its varied arguments.

    `name` and `runs_directory` are those of its run directory, if they do not follow from the array's: the array was
    submitted without tf4slurm, and the element registered itself.
    """

    index: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    runs_directory: str = ""


@dataclass(frozen=True)
class Uniform:
    """Random numbers between `low` and `high`, all equally likely.

    Raises:
        OptionError: `low` is not less than `high`, or one of them is not finite.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_bounds(self, -math.inf)

    def at(self, fraction: float) -> float:
        """Return the number that is greater than this fraction of all numbers. `fraction` is from 0 to 1."""
        return self.low + fraction * (self.high - self.low)


@dataclass(frozen=True)
class LogUniform:
    """Random numbers between `low` and `high`, whose logarithms are all equally likely.

    Raises:
        OptionError: `low` is not greater than 0 and less than `high`, or one of them is not finite.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_bounds(self, 0)

    def at(self, fraction: float) -> float:
        """Return the number that is greater than this fraction of all numbers. `fraction` is from 0 to 1."""
        return math.exp(Uniform(math.log(self.low), math.log(self.high)).at(fraction))


def _check_bounds(bounds: Uniform | LogUniform, exceeds: float) -> None:
    if not exceeds < bounds.low < bounds.high < math.inf:
        above = "" if exceeds == -math.inf else f", greater than {exceeds:g}"
        raise OptionError(f"{bounds!r}: expected finite numbers{above}, the lower one first.", option="grid")


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse the values of --grid, such as "lr=0.1,0.01". Return the values by name.

    A value that contains a comma, is empty, or starts with a quote or a space is enclosed in double quotes. Inside of
    them, "" is one quote.

    Raises:
        OptionError: A text is not NAME=VALUE,VALUE with a valid name (see `make_points`), or a name or value is
            repeated.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            raise OptionError(f"--grid {text!r}: expected NAME=VALUE,VALUE, such as lr=0.1,0.01.", option="grid")
        if name in grid:
            raise OptionError(f"--grid has {name!r} twice. Give all of its values in one --grid.", option="grid")
        _check_point_name(name)
        grid[name] = _parse_values(text, values)
    return grid


def _parse_values(text: str, values: str) -> tuple[str, ...]:
    """Return the values in one text of --grid. `text` is all of it, for errors, and `values` the part after "="."""
    if not values:
        raise OptionError(f"--grid {text!r} has no values. Give some, such as lr=0.1,0.01.", option="grid")
    found: list[str] = []
    position, end = 0, ","
    while end:
        match = _VALUE.match(values, position)
        if match is None or (match["plain"] or "") != (match["plain"] or "").strip():
            where = f"at {values[position:]!r}" if values[position:] else "after the last comma"
            raise OptionError(
                f"--grid {text!r}: expected a value {where}. Enclose a value in double quotes if it is empty, has a "
                "comma, or begins or ends with a space, such as 'name=\"a,b\",c'.",
                option="grid",
            )
        quoted = match["quoted"]
        value = match["plain"] if quoted is None else quoted.replace('""', '"')
        if value in found:
            raise OptionError(f"--grid {text!r} has the value {value!r} twice. Leave one out.", option="grid")
        found.append(value)
        position, end = match.end(), match["end"]
    return tuple(found)


def make_points(grid: Mapping[str, Sequence[object]]) -> tuple[dict[str, str], ...]:
    """Return each combination of the values in `grid`, as texts. The last name varies fastest.

    Args:
        grid: The values by name. A name consists of letters, digits, "_" and "-", starts with a letter or "_", and is
            no placeholder of the cluster, such as "ps_hosts".

    Raises:
        OptionError: There is no name, a name is invalid or has no values, the values are one text, or the combinations
            are more than the elements of Slurm's largest array.
    """
    for name, values in grid.items():
        if isinstance(values, str) or len(values) == 0:  # of an array of numpy, no truth value is defined
            text = f"The values of {name!r} are {values!r}: expected a list of one or more values."
            raise OptionError(text, option="grid")
    number = math.prod(map(len, grid.values()))
    if number > MAX_INDEX + 1:
        text = f"The grid has {number} combinations. Slurm's largest array has {MAX_INDEX + 1} elements."
        raise OptionError(text, option="grid")
    combinations = itertools.product(*grid.values())
    return check_points([dict(zip(grid, values, strict=True)) for values in combinations])


def random_points(
    space: Mapping[str, Sequence[object] | Uniform | LogUniform], number: int, seed: int
) -> tuple[dict[str, str], ...]:
    """Return random points. The same arguments always return the same points.

    Args:
        space: For each name, a list of values, `Uniform(low, high)` or `LogUniform(low, high)`. Names are as in
            `make_points`. Numbers between two bounds are written with six significant digits.
        number: Number of points.
        seed: Seed of the random numbers.

    Raises:
        OptionError: There is no name, a name is invalid or has no values, or `number` is less than 1.
    """
    if number < 1:
        raise OptionError(f"{number} random points: expected 1 or more.", option="grid")
    make_points({name: ("",) if isinstance(each, (Uniform, LogUniform)) else each[:1] for name, each in space.items()})
    generator = random.Random(seed)
    # Only the method random() promises the same numbers in all versions of Python.
    return check_points(
        [{name: _pick(each, generator.random()) for name, each in space.items()} for _ in range(number)]
    )


def _pick(each: Sequence[object] | Uniform | LogUniform, fraction: float) -> object:
    if isinstance(each, (Uniform, LogUniform)):
        return f"{each.at(fraction):.6g}"
    return each[int(fraction * len(each))]


def check_points(points: Iterable[Mapping[str, object]]) -> tuple[dict[str, str], ...]:
    """Return the points with their values as texts.

    Raises:
        OptionError: A point is empty or has other names than the first one, or a name is invalid.
    """
    found = tuple({name: str(value) for name, value in point.items()} for point in points)
    for number, point in enumerate(found):
        if not point or point.keys() != found[0].keys():
            text = f"Point {number} has the names {list(point)}: expected the same names in each point, at least one."
            raise OptionError(text, option="grid")
    for name in found[0] if found else ():
        _check_point_name(name)
    return found


def fill_point(command: Sequence[str], point: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with the values of `point` in place of placeholders such as {lr}. Keep other braces.

    Each name without a placeholder in the command is appended as an argument, such as "--lr=0.1".
    """
    if not point:
        return tuple(command)
    in_braces = re.compile(rf"\{{({'|'.join(map(re.escape, point))})\}}")
    used = {name for word in command for name in in_braces.findall(word)}
    words = (in_braces.sub(lambda match: point[match[1]], word) for word in command)
    return (*words, *(f"--{name}={value}" for name, value in point.items() if name not in used))


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Parse the values of --label, such as "lr=0.1". Return the values by name.

    Raises:
        OptionError: A text is not NAME=VALUE, or a name is repeated.
    """
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise OptionError(
                f"--label {text!r}: expected NAME=VALUE with a name of letters, digits, _ and -, such as lr=0.1.",
                option="label",
            )
        if name in labels:
            raise OptionError(f"--label has {name!r} twice. Leave one out.", option="label")
        labels[name] = value
    return labels


def format_labels(labels: Mapping[str, str]) -> list[str]:
    """Return labels as the texts that `parse_labels` reads."""
    return [f"{name}={value}" for name, value in labels.items()]


def parse_array(text: str) -> tuple[int, ...]:
    """Parse the value of --array, such as "0-9:3%2,20". Return the indices of the elements, in ascending order.

    Raises:
        OptionError: The text is not numbers and ranges, or an index is larger than Slurm accepts.
    """
    try:
        return parse_indices(text)
    except ValueError as error:
        raise OptionError(f"--array {error}.", option="array") from error


def check_indices(array: str, number: int, option: str) -> None:
    """Check that each element of --array has arguments.

    Args:
        array: The value of --array, such as "0-9%2".
        number: Number of elements that have varied arguments; 0 if the arguments do not vary.
        option: The option that varies the arguments.

    Raises:
        OptionError: An element has no arguments, or the value of --array is invalid.
    """
    last = parse_array(array)[-1]
    if number and last >= number:
        hint = " Blank lines and comments do not count." if option == "--array-args" else ""
        raise OptionError(
            f"--array {array} has an element {last}, but {option} has arguments for the elements 0 to "
            f"{number - 1}.{hint}",
            option="array",
        )


def _check_point_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"{name!r} is not the name of an argument. Give it without dashes before it, of letters, digits, _ and -, "
            "such as lr.",
            option="grid",
        )
    if name in PLACEHOLDERS:
        text = f"{{{name}}} is filled in for each task of the cluster. Give the varied argument another name."
        raise OptionError(text, option="grid")
