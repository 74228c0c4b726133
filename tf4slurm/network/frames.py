"""HTTP/2 (RFC 9113) as far as one gRPC stream needs it: frames, their kinds, and header fields in the plainest form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 1
END_HEADERS, PADDED = 4, 8
CONNECTION, STREAM = 0, 1
"""Numbers of streams: what concerns the connection as a whole, and the first that a client opens."""
WINDOW_BYTES = 65_535
"""What may be on its way, of a connection and of a stream, until the other end says otherwise."""
HEADER_BYTES = 9
"""Of each frame; the fourth is its kind."""
FRAME_BYTES = 16_384
"""What a frame may carry, until the other end says otherwise."""
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
"""What settings say: the first `WINDOW_BYTES` of a stream, and `FRAME_BYTES`."""

_SETTING_BYTES = 6
_FROM_TABLE = {":method": b"\x83", ":scheme": b"\x86", ":status": b"\x88"}
"""POST, http and 200: whole fields of HPACK's table (RFC 7541)."""


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def pack(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame's bytes."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def take_frames(received: bytearray, max_bytes: int) -> Iterator[Frame]:
    """Take all whole frames from what was received.

    Raises:
        ConnectionError: One carries more than `max_bytes`.
    """
    while len(received) >= HEADER_BYTES:
        length = int.from_bytes(received[:3], "big")
        if length > max_bytes:
            raise ConnectionError("a frame is too long")
        end = HEADER_BYTES + length
        if len(received) < end:
            return
        kind, flags, stream = received[3], received[4], int.from_bytes(received[5:HEADER_BYTES], "big")
        with memoryview(received) as view:
            payload = bytes(view[HEADER_BYTES:end])
        del received[:end]
        yield Frame(kind, flags, stream, payload)


def pack_fields(*fields: tuple[str, str]) -> bytes:
    """Return a block of header fields, which any HPACK decoder reads; values are short."""
    return b"".join(
        _FROM_TABLE.get(name) or b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in fields
    )


def pack_settings(settings: Mapping[int, int]) -> bytes:
    """Return a frame that says how much its sender takes."""
    content = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in settings.items())
    return pack(SETTINGS, 0, CONNECTION, content)


def read_settings(payload: bytes) -> dict[int, int]:
    """Return what a frame of settings says."""
    return {
        int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + _SETTING_BYTES], "big")
        for at in range(0, len(payload), _SETTING_BYTES)
    }
