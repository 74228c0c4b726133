"""A server that only sends the first answer of a gRPC server, and free ports for servers of tests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@contextlib.contextmanager
def http2_server(port: int = 0) -> Iterator[int]:
    """Answer on this host, in a thread, for as long as the block lasts; the value is the port."""
    ready, port_of = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(SETTINGS)
            await reader.read()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port)
        port_of.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        server.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield port_of[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that are free now.

    They lie below the range from which the kernel chooses. The search starts anywhere: other tests look too.
    """
    lowest, choices = 20000, 12000
    start = random.randrange(choices)
    for number in range(choices):
        first = lowest + (start + number) % choices
        try:
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError(f"No {count} ports in a row are free.")
