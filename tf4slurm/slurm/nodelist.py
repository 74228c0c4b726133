"""Expand and fold Slurm's nodelists: "n[001-003],gpu7" stands for n001, n002, n003, gpu7.

The results equal those of `scontrol show hostnames` (22.05). A text that scontrol refuses, or expands wrongly ("n[1"
becomes "n]", "n[1-]" becomes "n1"), raises NodelistError.

    names       separated by commas or white space; order and duplicates are kept
    ranges      n[1-3,7] is n1 n2 n3 n7; zeros pad numbers to the width of the first: n[08-10] is n08 n09 n10
    brackets    several are allowed, but no text after the last: r[1-2]n[1-2] is valid, n[1-2]x is not
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from tf4slurm.errors import NodelistError

MAX_NODES = 1_000_000
"""Maximum number of nodes in a nodelist; the largest clusters have some ten thousand."""

_MAX_RANGE = 65536  # MAX_RANGE of Slurm's hostlist.c
_MAX_NUMBER = 2**64 - 2  # Slurm replaces larger numbers with 2**64 - 1
_MAX_NAME = 255  # limit of DNS

_SEPARATORS = re.compile(r"[, \t\n]*")
_PART = re.compile(r"(?P<text>[\w.-]+)|\[(?P<ranges>[^][]*)\]")
_NAME = re.compile(r"[\w.-]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_DIGITS = "0123456789"
_TAILS = tuple(f"{number:03}" for number in range(1000))


class _Range(NamedTuple):
    first: int
    last: int
    width: int


@dataclass(frozen=True)
class _Term:
    """A name, or a name with brackets: `texts[i]` precedes `brackets[i]`."""

    texts: tuple[str, ...]
    brackets: tuple[tuple[_Range, ...], ...]

    def count_names(self) -> int:
        return math.prod(sum(last - first + 1 for first, last, _ in ranges) for ranges in self.brackets)


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expand a Slurm nodelist into node names, in Slurm's order, duplicates kept.

    Args:
        nodelist: Compressed names as in SLURM_STEP_NODELIST, such as "n[001-003],gpu7".

    Returns:
        One name per node: ("n001", "n002", "n003", "gpu7"). Zero padding is kept.

    Raises:
        NodelistError: There is no node, there are more than `MAX_NODES`, or the text is invalid at `position`.
    """
    names: list[str] = []
    for term in _parse(nodelist):
        names += _expand_term(term)
    return tuple(names)


def count_nodes(nodelist: str) -> int:
    """Count the nodes of a nodelist, including duplicates; raises the same errors as `expand_nodelist`."""
    return sum(term.count_names() for term in _parse(nodelist))


def fold_nodelist(nodes: Iterable[str]) -> str:
    """Return the nodelist that expands to exactly these node names, with order and duplicates kept.

    Args:
        nodes: Node names: ("n9", "n10", "gpu7") become "n[9-10],gpu7", as with `scontrol show hostlist`.

    Raises:
        NodelistError: There is no node, or the name in the attribute `nodelist` is invalid.
    """
    groups = itertools.groupby(map(_split_name, nodes), key=lambda parts: (parts[0], bool(parts[1])))
    terms = [_fold_group(prefix, [digits for _, digits in group]) for (prefix, _), group in groups]
    return ",".join(terms) or _refuse("", 0, "It has no node")


def _parse(nodelist: str) -> list[_Term]:
    terms, count = [], 0
    position = _SEPARATORS.match(nodelist).end()  # type: ignore[union-attr]  # it also matches the empty text
    while position < len(nodelist):
        start = position
        term, position = _parse_term(nodelist, start)
        count += term.count_names()
        if count > MAX_NODES:
            _refuse(nodelist, start, f"It has more than {MAX_NODES} nodes")
        terms.append(term)
        position = _SEPARATORS.match(nodelist, position).end()  # type: ignore[union-attr]
    return terms or _refuse(nodelist, 0, "It has no node")


def _parse_term(nodelist: str, start: int) -> tuple[_Term, int]:
    texts, brackets, text, position = [], [], "", start
    while part := _PART.match(nodelist, position):
        if part["text"] is not None:
            text = part["text"]
        else:
            brackets.append(tuple(_parse_ranges(nodelist, part.start("ranges"), part["ranges"])))
            texts.append(text)
            text = ""
        position = part.end()
    if position < len(nodelist) and nodelist[position] not in ", \t\n":
        what = "the bracket is not closed" if nodelist[position] == "[" else "this character is not valid in a name"
        _refuse(nodelist, position, f"At {nodelist[position]!r} {what}")
    if text and brackets:
        _refuse(nodelist, position - len(text), f"{text!r} follows the last bracket, which Slurm does not allow")
    if not brackets:
        texts.append(text)
    if sum(map(len, texts)) + sum(max(r.width for r in ranges) for ranges in brackets) > _MAX_NAME:
        _refuse(nodelist, start, f"A name has more than {_MAX_NAME} characters")
    if not brackets:
        _check_number(nodelist, start, text)
    return _Term(tuple(texts), tuple(brackets)), position


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
        yield _Range(first, last, len(match[1]))
        position += len(item) + 1


def _expand_term(term: _Term) -> Sequence[str]:
    if not term.brackets:
        return term.texts
    *outer, inner = term.brackets
    *texts, text = term.texts
    # Slurm's order: the last bracket runs fastest, then the first, the second, ...
    combinations = itertools.product(*(_numbers("", ranges) for ranges in reversed(outer)))
    prefixes = ["".join(map("".join, zip(texts, reversed(numbers), strict=True))) + text for numbers in combinations]
    return [name for prefix in prefixes for name in _numbers(prefix, inner)] if outer else _numbers(text, inner)


def _numbers(prefix: str, ranges: Iterable[_Range]) -> list[str]:
    """Return a prefix with each number of the ranges, in blocks of 1,000, which halves the time."""
    names: list[str] = []
    for first, last, width in ranges:
        names += [prefix + str(number).zfill(width) for number in range(first, min(last, 999) + 1)]
        for thousand in range(max(first, 1000) // 1000, last // 1000 + 1):
            head = prefix + str(thousand).zfill(width - 3)
            start = thousand * 1000
            names += [head + tail for tail in _TAILS[max(first - start, 0) : last - start + 1]]
    return names


def _split_name(name: str) -> tuple[str, str]:
    """Split a node name before its trailing digits."""
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        _refuse(name, 0, "That is not a node name")
    _check_number(name, 0, name)
    prefix = name.rstrip(_DIGITS)
    return prefix, name[len(prefix) :]


def _fold_group(prefix: str, group: Sequence[str]) -> str:
    """Fold names with one prefix; either all or none of them have trailing digits."""
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
    """Return whether these digits are the next number of a range, with the same width."""
    first, last = bounds
    number = int(last) + 1
    return digits == f"{number:0{len(first)}}" and number - int(first) < _MAX_RANGE


def _check_number(nodelist: str, position: int, name: str) -> None:
    """Refuse a name whose trailing digits Slurm would change."""
    digits = name[len(name.rstrip(_DIGITS)) :]
    if len(digits) >= len(str(_MAX_NUMBER)) and int(digits) > _MAX_NUMBER:
        _refuse(nodelist, position, f"{digits} is greater than Slurm's largest number")


def _refuse(nodelist: str, position: int, what: str) -> NoReturn:
    shown = nodelist if len(nodelist) <= 80 else f"{nodelist[:80]}…"
    raise NodelistError(
        f"{what} (position {position} of the nodelist {shown!r}). Expected Slurm's notation, such as "
        '"n[001-003],gpu7".',
        nodelist=nodelist,
        position=position,
    )
