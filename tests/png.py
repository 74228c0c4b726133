"""A reader of the PNG files of screenshots: 8 bits per channel, with or without transparency."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from pathlib import Path

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {2: 3, 6: 4}


def count_colors(path: Path) -> Counter[bytes]:
    """Return how many pixels have each color (3 bytes: red, green, blue)."""
    data = path.read_bytes()
    assert data.startswith(_SIGNATURE), f"{path} is no PNG"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8, f"{depth} bits a channel"
    step = _CHANNELS[kind]
    packed, position = b"", len(_SIGNATURE)
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            packed += data[position + 8 : position + 8 + length]
        position += 12 + length
    lines, size = zlib.decompress(packed), width * step
    above = bytearray(size)
    found: Counter[bytes] = Counter()
    for number in range(height):
        start = number * (size + 1)
        above = _unfilter(lines[start], bytearray(lines[start + 1 : start + 1 + size]), above, step)
        found.update(bytes(above[pixel : pixel + 3]) for pixel in range(0, size, step))
    return found


def _unfilter(kind: int, row: bytearray, above: bytearray, step: int) -> bytearray:
    """Undo one of the five filters, which encode a row relative to its neighbours (https://www.w3.org/TR/png/#9Filters)."""
    for position in range(len(row)) if kind else ():
        left = row[position - step] if position >= step else 0
        up = above[position]
        corner = above[position - step] if position >= step else 0
        if kind == 4:
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        else:
            near = (0, left, up, (left + up) // 2)[kind]
        row[position] = (row[position] + near) & 255
    return row
