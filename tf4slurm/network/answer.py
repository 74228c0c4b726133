"""Does a gRPC server answer? Asked as any HTTP/2 client would, on a fresh connection, so that nothing is left of it.

TensorFlow's server ends connections that send keepalive pings ("too_many_pings"); a preface it answers for ever.
"""

from __future__ import annotations

import asyncio

from tf4slurm.cluster import Address
from tf4slurm.network.frames import HEADER_BYTES, PREFACE, SETTINGS, pack_settings


async def is_answering(address: Address, timeout_seconds: float) -> bool | None:
    """Ask once: True if an HTTP/2 server answers, False if it is silent, None if there is none (or another kind)."""
    writer = None
    try:
        opening = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(opening, timeout_seconds)
        writer.write(PREFACE + pack_settings({}))
        header = await asyncio.wait_for(reader.readexactly(HEADER_BYTES), timeout_seconds)
        return True if header[3] == SETTINGS else None
    except asyncio.TimeoutError:
        return False
    except (OSError, EOFError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
