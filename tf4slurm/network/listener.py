"""Accepts gRPC streams, from anybody: a bounded number of them, and each for a bounded time until it is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from tf4slurm.network.frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    RESET,
    STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    Frame,
    pack,
    pack_fields,
    pack_settings,
)
from tf4slurm.network.stream import LAST_WORDS, OK, Stream, new_buffer

_MAX_STRANGER_BYTES = 4096
_MAX_STRANGER_WORK, _FRAME_WORK = 16_384, 256  # bytes in frames, of which each counts as so many at least
_GOODBYE_SECONDS = 0.5  # for the peer to take our last word, and again to hang up
_BACKLOG = 4096  # connections that the system takes for us: all tasks may come at the same time
_AT_A_TIME = 32  # that we take from it: those that are too many are turned away before the next
_STOP_SECONDS = 0.2  # for streams to end by themselves
_ANSWER = pack(HEADERS, END_HEADERS, STREAM, pack_fields((":status", "200"), ("content-type", "application/grpc")))


class ServedStream(Stream):
    """The end of a server. It is a stranger's until it is trusted: it ends by itself, and may say 4 KB in 64 frames."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(_MAX_STRANGER_BYTES, listener.buffer)
        self._listener = listener
        self._preface = bytearray(PREFACE)
        """What is still to come of it."""
        self._work_left: float = _MAX_STRANGER_WORK
        self._serving: asyncio.Task[None] | None = None
        self._patience = self._loop.call_later(listener.patience_seconds, self._give_up)

    def trust(self, max_bytes: int) -> None:
        """Let it stay, and say messages of this length; it learns so with what is said to it next."""
        self.max_bytes = max_bytes
        self._work_left = math.inf
        self._patience.cancel()
        more = WINDOW_BYTES - _MAX_STRANGER_BYTES
        self._frames.append(pack(WINDOW_UPDATE, 0, STREAM, more.to_bytes(4, "big")))

    def end(self, status: int = OK) -> None:
        """Say the last word, and hang up when the peer has had time to take it and has not."""
        self._patience.cancel()
        self._frames.append(pack(HEADERS, END_HEADERS | END_STREAM, STREAM, LAST_WORDS[status]))
        self._frames.append(pack(RESET, 0, STREAM, bytes(4)))  # what it would still say is not read
        self._flush()
        self.stop()
        self._loop.call_later(_GOODBYE_SECONDS, self._hang_up)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.on_connection(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._patience.cancel()
        self._listener.on_connection_lost(self)

    def _take(self, received: bytearray) -> None:
        if self._preface:
            length = min(len(self._preface), len(received))
            if received[:length] != self._preface[:length]:
                raise ConnectionError("it does not speak HTTP/2")
            del received[:length], self._preface[:length]
            if self._preface:
                return
            self._frames.append(pack_settings({INITIAL_WINDOW_SIZE: _MAX_STRANGER_BYTES}))
        super()._take(received)

    def _take_frame(self, frame: Frame) -> None:
        super()._take_frame(frame)
        self._work_left -= max(_FRAME_WORK, len(frame.payload))
        if self._work_left < 0:  # now that one who has called can be answered
            raise ConnectionError("a stranger says too much")

    def _take_fields(self, flags: int, payload: bytes) -> None:
        if self._serving is None:
            self._frames.append(_ANSWER)
            self._serving = self._listener.on_stream(self)

    def _hang_up(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):  # it has just reset the connection
                self._transport.write_eof()
            self._loop.call_later(_GOODBYE_SECONDS, self.abort)

    def _give_up(self) -> None:
        super()._give_up()
        if self._serving is None:
            self.abort()


class Listener:
    """Listens on one port and serves each stream that is opened there, until `close`."""

    def __init__(
        self,
        serve: Callable[[ServedStream], Coroutine[Any, Any, None]],
        *,
        patience_seconds: float,
        max_connections: int,
    ) -> None:
        """`serve(stream)` runs as a task for each stream; a stream that it has not trusted by then has ended."""
        self.patience_seconds = patience_seconds
        self.buffer = new_buffer()
        self._serve = serve
        self._max_connections = max_connections
        self._streams: set[ServedStream] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "") -> int:
        """Listen on one address of this host, or on all of them; return the port.

        Raises:
            OSError: This host has no such address.
        """
        loop = asyncio.get_running_loop()
        listening = _bind(host)
        self._server = await loop.create_server(lambda: ServedStream(self), sock=listening, backlog=_AT_A_TIME)
        listening.listen(_BACKLOG)  # asyncio has one number for both
        port: int = listening.getsockname()[1]
        return port

    async def close(self) -> None:
        """Hang up everywhere, and let those who serve end by themselves before."""
        if self._server is not None:
            self._server.close()
        self._max_connections = 0  # those that are on their way to us come too late
        if self._serving:
            await asyncio.wait(self._serving, timeout=_STOP_SECONDS)
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for stream in self._streams:
            stream.abort()

    # What streams tell

    def on_connection(self, stream: ServedStream) -> None:
        self._streams.add(stream)
        if len(self._streams) > self._max_connections:
            stream.abort()

    def on_connection_lost(self, stream: ServedStream) -> None:
        self._streams.discard(stream)

    def on_stream(self, stream: ServedStream) -> asyncio.Task[None]:
        serving = asyncio.create_task(self._serve(stream))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        return serving


def _bind(host: str) -> socket.socket:
    if not host:
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):  # this host has no IPv6
            return socket.create_server(("", 0))
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
