"""Whether TensorFlow's gRPC server answers: by the first bytes of HTTP/2, on a connection of their own.

grpcio is not used for it, because TensorFlow's server closes connections that send keepalive pings ("too_many_pings"),
while it answers the preface each time.
"""

from __future__ import annotations

import asyncio

from tf4slurm.cluster import Address

_NO_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _NO_SETTINGS  # RFC 9113, section 3.4
_HEADER_BYTES = 9
_SETTINGS = 4  # the kind of a frame, its fourth byte


async def is_answering(address: Address, timeout_seconds: float) -> bool | None:
    """Ask once: True if an HTTP/2 server answers, False if it is silent, None if there is none (or another kind)."""
    writer = None
    try:
        opening = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(opening, timeout_seconds)
        writer.write(_PREFACE)
        header = await asyncio.wait_for(reader.readexactly(_HEADER_BYTES), timeout_seconds)
        return True if header[3] == _SETTINGS else None
    except asyncio.TimeoutError:
        return False
    except (OSError, EOFError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
