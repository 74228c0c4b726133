"""Expand Slurm's nodelists into node names, and fold names into a nodelist: "n[1-3],gpu7" is n1, n2, n3, gpu7.

The results are those of `scontrol show hostnames` (22.05). A text that scontrol refuses or expands wrongly ("n[1-]"
becomes "n1") is an error. The notation:

    terms       separated by commas or white space; order and duplicates are kept
    ranges      n[1-3,7] is n1 n2 n3 n7; zeros pad numbers to the width of the first: n[08-10] is n08 n09 n10
    brackets    several are allowed, but no text after the last: r[1-2]n[1-2] is valid, n[1-2]x is not
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from tf4slurm.errors import NodelistError

MAX_NODES = 1_000_000
"""Maximum number of nodes in a nodelist. The largest clusters have some ten thousand nodes."""

_MAX_RANGE = 65536  # MAX_RANGE of Slurm's hostlist.c
_MAX_NUMBER = 2**64 - 2  # Slurm replaces larger numbers with 2**64 - 1
_MAX_NAME = 255  # limit of DNS

_TERM = re.compile(r"(?:\[[^][]*\]|[^, \t\n])+")
_PART = re.compile(r"(?P<text>[\w.-]*)\[(?P<ranges>[^][]*)\]")
_NAME = re.compile(r"[\w.-]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class _Range(NamedTuple):
    numbers: range
    width: int


class _Part(NamedTuple):
    """A bracket and the text before it. In the nodelist "r[1-2]n[1-3,7],gpu7", the first term has two parts."""

    text: str
    ranges: list[_Range]

    def expand(self, prefix: str = "") -> list[str]:
        start = prefix + self.text
        return [start + str(number).zfill(width) for numbers, width in self.ranges for number in numbers]


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expand a nodelist such as "n[001-003],gpu7" into node names, in Slurm's order and with duplicates.

    Raises:
        NodelistError: There are no nodes, more than `MAX_NODES`, or the syntax is wrong. The error's attribute
            `position` is the position of the fault in the text.
    """
    names: list[str] = []
    for term in _TERM.finditer(nodelist):
        parts = _parse_term(nodelist, *term.span())
        count = math.prod(sum(len(numbers) for numbers, _ in part.ranges) for part in parts)
        if len(names) + count > MAX_NODES:
            _refuse(nodelist, term.start(), f"It has more than {MAX_NODES} nodes")
        names += _expand_parts(parts) if parts else [term[0]]
    return tuple(names) or _refuse(nodelist, 0, "It has no node")


def fold_nodelist(nodes: Iterable[str]) -> str:
    """Return the nodelist that expands to these names in this order: "n[9-10],gpu7" for "n9", "n10", "gpu7".

    Raises:
        NodelistError: There is no node, or a name is invalid. The error's attribute `nodelist` is the invalid name.
    """
    names = list(nodes)
    for name in names:
        if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            _refuse(name, 0, "That is not a node name")
    split = [_split_number(name, 0, name) for name in names]
    groups = itertools.groupby(split, key=lambda parts: (parts[0], bool(parts[1])))
    terms = [_fold_group(prefix, [digits for _, digits in group]) for (prefix, _), group in groups]
    return ",".join(terms) or _refuse("", 0, "It has no node")


def _parse_term(nodelist: str, start: int, end: int) -> list[_Part]:
    """Return the parts of the term `nodelist[start:end]`. A term without brackets, which is a name, has none."""
    parts = []
    position = start
    while match := _PART.match(nodelist, position, end):
        parts.append(_Part(match["text"], list(_parse_ranges(nodelist, match.start("ranges"), match["ranges"]))))
        position = match.end()
    rest = _NAME.match(nodelist, position, end)
    text = rest[0] if rest else ""
    position += len(text)
    if position < end:
        what = "the bracket is not closed" if nodelist[position] == "[" else "this character is not valid in a name"
        _refuse(nodelist, position, f"At {nodelist[position]!r} {what}")
    if text and parts:
        _refuse(nodelist, position - len(text), f"{text!r} follows the last bracket, which Slurm does not allow")
    if len(text) + sum(len(part.text) + max(width for _, width in part.ranges) for part in parts) > _MAX_NAME:
        _refuse(nodelist, start, f"A name has more than {_MAX_NAME} characters")
    _split_number(nodelist, start, text)  # only to refuse an invalid number
    return parts


def _parse_ranges(nodelist: str, position: int, text: str) -> Iterator[_Range]:
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or len(item) > _MAX_NAME:
            _refuse(nodelist, position, f'{item[:40]!r} is not a range: expected "first-last" or one number')
        first, last = int(match[1]), int(match[2] or match[1])
        if last > _MAX_NUMBER:
            _refuse(nodelist, position, f"{last} is greater than Slurm's largest number")
        if first > last:
            _refuse(nodelist, position, f"The range {item!r} is reversed: expected the smaller number first")
        if last - first >= _MAX_RANGE:
            _refuse(nodelist, position, f"The range {item!r} has more than the {_MAX_RANGE} nodes that Slurm allows")
        yield _Range(range(first, last + 1), len(match[1]))
        position += len(item) + 1


def _expand_parts(parts: Sequence[_Part]) -> list[str]:
    """Return the names that the parts of a term stand for, in Slurm's order.

    The last bracket changes fastest, then the first, the second, and so on.
    """
    *outer, last = parts
    combinations = itertools.product(*(part.expand() for part in reversed(outer)))
    return [name for combination in combinations for name in last.expand("".join(reversed(combination)))]


def _fold_group(prefix: str, group: Sequence[str]) -> str:
    if len(group) == 1 or not group[0]:
        return ",".join(prefix + digits for digits in group)
    ranges: list[list[str]] = []
    for digits in group:
        if ranges and _follows(ranges[-1], digits):
            ranges[-1][1] = digits
        else:
            ranges.append([digits, digits])
    return f"{prefix}[{','.join(first if first == last else f'{first}-{last}' for first, last in ranges)}]"


def _follows(bounds: list[str], digits: str) -> bool:
    first, last = bounds
    number = int(last) + 1
    return digits == f"{number:0{len(first)}}" and number - int(first) < _MAX_RANGE


def _split_number(nodelist: str, position: int, name: str) -> tuple[str, str]:
    """Split a name into the text before its trailing digits, and these digits ("" if there are none).

    A number above 2**64 - 2, which Slurm would change, is refused. `nodelist` and `position` are for this error.
    """
    prefix = name.rstrip(string.digits)
    digits = name[len(prefix) :]
    if digits and int(digits) > _MAX_NUMBER:
        _refuse(nodelist, position, f"{digits} is greater than Slurm's largest number")
    return prefix, digits


def _refuse(nodelist: str, position: int, what: str) -> NoReturn:
    shown = nodelist if len(nodelist) <= 80 else f"{nodelist[:80]}…"
    raise NodelistError(
        f"{what} (position {position} of the nodelist {shown!r}). Expected Slurm's notation, such as "
        '"n[001-003],gpu7".',
        nodelist=nodelist,
        position=position,
    )
