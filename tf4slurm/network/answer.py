"""Does a gRPC server answer? Asked as any HTTP/2 client would, on a fresh connection, so that nothing is left of it.

TensorFlow's server ends connections that send keepalive pings ("too_many_pings"); a preface it answers for ever.
"""

from __future__ import annotations

import asyncio

from tf4slurm.cluster import Address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # RFC 9113: and empty SETTINGS
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4


async def is_answering(address: Address, timeout_seconds: float) -> bool | None:
    """Ask once: True if an HTTP/2 server answers, False if it is silent, None if there is none (or another kind)."""
    writer = None
    try:
        opening = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(opening, timeout_seconds)
        writer.write(_PREFACE)
        header = await asyncio.wait_for(reader.readexactly(_FRAME_HEADER_BYTES), timeout_seconds)
        return True if header[3] == _SETTINGS else None
    except asyncio.TimeoutError:
        return False
    except (OSError, EOFError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
