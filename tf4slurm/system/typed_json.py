"""Convert JSON to frozen dataclasses and back, by the types of their fields.

`from_json` is for files that may be damaged: it ignores unknown keys, and replaces missing and mistyped values by the
fields' defaults. `from_exact_json` refuses unknown keys and mistyped values. `to_json` writes NaN and infinity as null.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_LARGEST = 1e15  # no job writes larger numbers; damaged files may contain them
_T = TypeVar("_T")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return the JSON text of a dataclass, mapping, sequence or plain value. NaN and infinity become null.

    Without `indent`, the text is one line, without spaces between items.
    """
    separators = (",", ":") if indent is None else None
    dump = functools.partial(json.dumps, indent=indent, separators=separators, default=vars, allow_nan=False)
    try:
        return dump(value)
    except ValueError:
        return dump(_without_nan(value))


def read_object(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file cannot be read or does not contain a JSON object.

    `read` is called with the path and returns the content. For example, it can check the file's owner first.
    """
    try:
        content = json.loads(read(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_lines(path: Path, kind: type[_T]) -> list[_T]:
    """Read a file with one JSON object per line. Convert each object with `from_json`.

    Damaged lines are skipped. If the file cannot be read, the result is empty.
    """
    result = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(line)
                if isinstance(content, dict):
                    result.append(from_json(kind, content))
    return result


def from_json(kind: type[_T], content: Mapping[str, Any]) -> _T:
    """Convert a JSON object to the dataclass `kind`. Unknown keys are ignored.

    A missing or mistyped value becomes the field's default. So does a number of 1e15 or more, which no job writes.

    Raises:
        TypeError: A field without a default is missing or mistyped.
    """
    values = {}
    readers: dict[str, _Reader] = _field_readers(kind, False)  # type: ignore[arg-type]
    for name, read in readers.items():
        if name in content:
            with contextlib.suppress(ValueError):
                values[name] = read(content[name])
    return kind(**values)


def from_exact_json(kind: type[_T], content: Any, before: _T | None = None) -> _T:
    """Convert a JSON object to the dataclass `kind`, and refuse unknown keys and mistyped values.

    Missing fields are taken from `before`, an earlier value of this type. If `before` is None, they get the defaults.

    Raises:
        ValueError: The content is not an object, has an unknown key, or a value of a wrong type.
        TypeError: A field without a default is missing, and `before` is None.
    """
    readers: dict[str, _Reader] = _field_readers(kind, True)  # type: ignore[arg-type]
    try:
        values = {name: readers[name](value) for name, value in _expect(dict, content).items()}
    except KeyError as error:
        raise ValueError(f"unknown key {error}") from error
    return kind(**values) if before is None else kind(**{**vars(before), **values})


_Reader = Callable[[Any], Any]  # raises ValueError if a JSON value is not of the declared type
_DROPPED = object()


@functools.cache
def _field_readers(kind: type[Any], is_exact: bool) -> dict[str, _Reader]:
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name], is_exact) for field in dataclasses.fields(kind)}


def _reader(hint: Any, is_exact: bool) -> _Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if type(None) in arguments:  # X | None
        read = _reader(arguments[0], is_exact)
        return lambda value: None if value is None else read(value)
    if origin is Literal:
        return functools.partial(_read_literal, arguments)
    if origin is tuple and arguments[-1] is ...:
        return functools.partial(_read_list, _item_reader(arguments[0], is_exact))
    if origin is tuple:
        return functools.partial(_read_tuple, [_reader(each, is_exact) for each in arguments])
    if origin is collections.abc.Mapping:
        return functools.partial(_read_mapping, _item_reader(arguments[1], is_exact))
    if dataclasses.is_dataclass(hint):
        convert: Callable[..., Any] = from_exact_json if is_exact else _read_dataclass
        return functools.partial(convert, hint)
    return functools.partial(_expect if is_exact else _read_bounded, hint)


def _item_reader(hint: Any, is_exact: bool) -> _Reader:
    """Return a function that reads an item of a JSON list or object. `hint` is the type of the item.

    If `is_exact`, a mistyped item is an error. Otherwise it is replaced, so that other items keep their positions: by
    None if its type allows None, or by a dataclass with default values. An item of any other type is dropped.
    """
    read = _reader(hint, is_exact)
    if is_exact:
        return read
    empty = _read_dataclass(hint, {}) if dataclasses.is_dataclass(hint) else _DROPPED
    default = None if type(None) in get_args(hint) else empty

    def read_or_replace(value: Any) -> Any:
        try:
            return read(value)
        except ValueError:
            return default

    return read_or_replace


def _expect(kind: Any, value: Any) -> Any:
    if type(value) is not kind and not (kind is float and type(value) is int) and kind is not Any:
        raise ValueError(f"{value!r} is not {kind}")
    return value


def _read_bounded(kind: Any, value: Any) -> Any:
    if type(_expect(kind, value)) in (int, float) and not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{value!r} is too large")
    return value


def _read_dataclass(kind: Any, value: Any) -> Any:
    return from_json(kind, _expect(dict, value))


def _read_literal(choices: tuple[Any, ...], value: Any) -> Any:
    if value not in choices:
        raise ValueError(f"{value!r} is not one of {choices}")
    return value


def _read_list(read: _Reader, value: Any) -> tuple[Any, ...]:
    return tuple(item for item in map(read, _expect(list, value)) if item is not _DROPPED)


def _read_tuple(readers: Sequence[_Reader], value: Any) -> tuple[Any, ...]:
    return tuple(read(item) for read, item in zip(readers, _expect(list, value), strict=True))


def _read_mapping(read: _Reader, value: Any) -> dict[str, Any]:
    items = {name: read(item) for name, item in _expect(dict, value).items()}
    return {name: item for name, item in items.items() if item is not _DROPPED}


def _without_nan(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
