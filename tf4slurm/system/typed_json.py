"""Conversion of JSON to frozen dataclasses and back, by the types of their fields.

Reading tolerates damage: unknown keys are ignored, and a missing or mistyped value becomes the field's default. The
JSON is strict: NaN and infinite numbers are written as null.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_LARGEST = 1e15  # no job writes larger numbers; damaged files may contain them
_T = TypeVar("_T")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return dataclasses and plain values as strict JSON; NaN and infinite numbers become null."""
    separators = (",", ":") if indent is None else None
    dump = functools.partial(json.dumps, indent=indent, separators=separators, default=vars, allow_nan=False)
    try:
        return dump(value)
    except ValueError:
        return dump(_without_nan(value))


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; return None if the file is missing, unreadable or not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_lines(path: Path, kind: type[_T]) -> list[_T]:
    """Read a file with one JSON object per line; skip incomplete or damaged lines."""
    result = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(line)
                if isinstance(content, dict):
                    result.append(from_json(kind, content))
    return result


def from_json(kind: type[_T], content: Mapping[str, Any]) -> _T:
    """Convert a JSON object to a dataclass; ignore unknown keys, and replace mistyped values by defaults."""
    values = {}
    readers: dict[str, _Reader] = _field_readers(kind)  # type: ignore[arg-type]
    for name, read in readers.items():
        if name in content:
            with contextlib.suppress(_MistypedError):
                values[name] = read(content[name])
    return kind(**values)


class _MistypedError(Exception):
    """A JSON value is not of the type that the field declares."""


_Reader = Callable[[Any], Any]
_MISSING = object()


@functools.cache
def _field_readers(kind: type[Any]) -> dict[str, _Reader]:
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return the function that reads a JSON value of this type, or raises _MistypedError."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return functools.partial(_read_tuple, arguments[0])
    if get_origin(hint) is collections.abc.Mapping:
        return functools.partial(_read_mapping, arguments[1])
    if isinstance(hint, types.UnionType):  # X | None
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    return functools.partial(_read_dataclass if dataclasses.is_dataclass(hint) else _read_scalar, hint)


def _read_dataclass(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _MistypedError
    return from_json(kind, value)


def _read_tuple(hint: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _MistypedError
    items = (_read_item(hint, item) for item in value)
    return tuple(item for item in items if item is not _MISSING)


def _read_mapping(hint: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _MistypedError
    items = {name: _read_item(hint, item) for name, item in value.items()}
    return {name: item for name, item in items.items() if item is not _MISSING}


def _read_item(hint: Any, value: Any) -> Any:
    """Read an item. A mistyped item becomes None or an empty dataclass, so that other items keep their positions."""
    try:
        return _reader(hint)(value)
    except _MistypedError:
        if isinstance(hint, types.UnionType):
            return None
        return _read_dataclass(hint, {}) if dataclasses.is_dataclass(hint) else _MISSING


def _read_scalar(kind: type[Any], value: Any) -> Any:
    if kind is Any:
        return value
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise _MistypedError
    if kind in (int, float) and not -_LARGEST < value < _LARGEST:
        raise _MistypedError
    return value


def _without_nan(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
