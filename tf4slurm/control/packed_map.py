"""The wire form of a map: it is the one large message, and the same for all tasks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from tf4slurm.control.messages import Map
from tf4slurm.errors import MessageError

_LEVEL = 6
_COLUMNS = (str, int, str, str, int)
_MAX_BYTES = 32 * 2**20  # more than that of 100,000 tasks


def pack_map(map_: Map) -> bytes:
    """Return the wire form of a map.

    It goes by columns, and each column character by character, so that what is alike stands together: the last digits
    of all names, and before them what never changes. Compressed so, its ports are most of it.
    """
    columns = map(_transpose, zip(*map_.entries, strict=True))
    return zlib.compress(json.dumps([map_.attempt, len(map_.entries), *columns]).encode(), _LEVEL)


def is_packed_map(payload: bytes) -> bool:
    """Whether these bytes are a packed map, and not another message."""
    return payload[:1] != b"["


def unpack_map(payload: bytes) -> Map:
    """Read a packed map.

    Raises:
        MessageError: It is cut, too large, or none.
    """
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(payload, _MAX_BYTES)
        if not inflater.eof:
            raise ValueError("it is cut, or too large")
        attempt, size, *columns = json.loads(content)
        if type(attempt) is not int or type(size) is not int or size < 1:
            raise TypeError("its attempt and its size are no numbers")
        transposed = [_transpose_back(column, size, kind) for column, kind in zip(columns, _COLUMNS, strict=True)]
        return Map(attempt, tuple(zip(*transposed, strict=True)))
    except (zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        text = f"{payload[:80]!r} is not a map of this version of tf4slurm ({error})."
        raise MessageError(f"{text} Install the same version on all hosts.") from error


def _transpose(values: Sequence[object]) -> str:
    """Return the first characters of all values, then their second ones, and so on; they are aligned at the right."""
    texts = [f"|{value}" for value in values]
    width = max(map(len, texts))
    whole = "".join(text.rjust(width) for text in texts)
    return "".join(whole[place::width] for place in range(width))


def _transpose_back(transposed: str, size: int, kind: type[Any]) -> list[Any]:
    if len(transposed) % size:
        raise ValueError("a column is cut")
    return [kind(transposed[place::size].split("|", 1)[1]) for place in range(size)]
