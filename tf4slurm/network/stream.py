"""One gRPC stream that has a connection to itself, over asyncio.

Any gRPC peer can be at the other end. Header fields are passed over: there is one method, and its messages prove whom
they are from. What a peer may say is bounded, and one that does not keep to HTTP/2 is not listened to any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tf4slurm.network.frames import (
    ACK,
    CONNECTION,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    Frame,
    pack,
    pack_fields,
    pack_settings,
    read_settings,
    take_frames,
)

OK, UNAUTHENTICATED = 0, 16
"""How a stream ends, by gRPC's codes."""
LAST_WORDS = {status: pack_fields(("grpc-status", str(status))) for status in (OK, UNAUTHENTICATED)}
"""The header fields that say so."""

_MAX_FIELDS_BYTES = 8_192
_BUFFER_BYTES = 16_384
_PREFIX_BYTES = 5  # of each message: whether it is compressed, and its length
_WIDE_BYTES = 2**20  # a server may say that much at a time: the maps of most jobs
_WIDE = b"".join(
    (
        pack_settings({INITIAL_WINDOW_SIZE: _WIDE_BYTES, MAX_FRAME_SIZE: _WIDE_BYTES}),
        pack(WINDOW_UPDATE, 0, CONNECTION, (_WIDE_BYTES - WINDOW_BYTES).to_bytes(4, "big")),
    )
)


class Stream(asyncio.BufferedProtocol):
    """What both ends of a stream have in common. One coroutine reads.

    Attributes:
        max_bytes: How long a message of the peer may be; all that it has said and nobody has read may be as much.
        on_room: Is called when there is room, whenever that may not have been so before.
    """

    def __init__(
        self, max_bytes: int, buffer: memoryview, *, credit_bytes: int = WINDOW_BYTES, frame_bytes: int = FRAME_BYTES
    ) -> None:
        """What is received comes by `buffer`, which all streams of an event loop may have in common.

        `credit_bytes` and `frame_bytes` are what the peer has been told that it may say at a time.
        """
        self.max_bytes = max_bytes
        self.on_room: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_over = False
        """Nothing that the peer says counts any more."""

        self._buffer = buffer
        self._received = bytearray()
        self._credit_bytes = credit_bytes
        self._frame_bytes = frame_bytes
        self._taken_bytes = 0
        self._fields_bytes = 0
        self._message = b""
        """The beginning of one."""
        self._messages: deque[bytes] = deque()
        self._unread_bytes = 0
        self._reading: asyncio.Future[None] | None = None

        self._frames: list[bytes] = []
        """What is said next."""
        self._outgoing = b""
        """What waits for room."""
        self._windows = {CONNECTION: WINDOW_BYTES, STREAM: WINDOW_BYTES}
        self._settings = {INITIAL_WINDOW_SIZE: WINDOW_BYTES, MAX_FRAME_SIZE: FRAME_BYTES}
        self._is_full = False

    async def read(self) -> bytes:
        """Return the next message; nothing at the end, whatever brought it."""
        while not self._messages:
            if self._is_over:
                return b""
            self._reading = self._loop.create_future()
            await self._reading
        message = self._messages.popleft()
        self._unread_bytes -= _PREFIX_BYTES + len(message)
        return message

    @property
    def is_free(self) -> bool:
        """Whether all that was said is on its way, so that a message would be at once."""
        return not (self._outgoing or self._is_full or self._is_over)

    def say(self, message: bytes) -> None:
        """Say a message, now or as soon as there is room.

        Raises:
            ConnectionError: The stream is over.
        """
        if self._is_over:
            raise ConnectionError("the other end has closed the connection")
        self._outgoing += b"\0%b%b" % (len(message).to_bytes(4, "big"), message)
        self._send()
        self._flush()

    def stop(self) -> None:
        """Listen no more; whoever reads is told that the stream is over."""
        self._is_over = True
        self._received.clear()
        self._message = b""
        self._wake()

    def abort(self) -> None:
        """Hang up at once."""
        self.stop()
        if self._transport is not None:
            self._transport.abort()

    # What asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_over:
            transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.stop()

    def eof_received(self) -> None:
        self.abort()  # asyncio would wait until all that we have said is taken, if need be for ever

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._go_on()
        self._flush()

    def get_buffer(self, _: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_over:
            return
        self._received += self._buffer[:nbytes]
        try:
            self._take(self._received)
        except ConnectionError:
            self._give_up()
        if self._frames and self._is_full:  # it asks and asks, and takes no answer
            self.abort()
        elif self._frames:
            self._loop.call_soon(self._flush)  # or with what is said until then

    # What the peer says

    def _take(self, received: bytearray) -> None:
        for frame in take_frames(received, self._frame_bytes):
            self._take_frame(frame)
            if self._is_over:
                return

    def _take_frame(self, frame: Frame) -> None:
        kind, flags, stream, payload = frame
        if kind == DATA and stream == STREAM and not flags & PADDED:
            self._take_data(payload)
            if flags & END_STREAM:
                self.stop()
        elif kind in (HEADERS, CONTINUATION) and stream == STREAM:
            self._fields_bytes += len(payload)
            self._take_fields(flags, payload)
            if self._fields_bytes > _MAX_FIELDS_BYTES:
                raise ConnectionError("it sends too many header fields")
        elif kind == SETTINGS:
            if not flags & ACK:
                self._take_settings(read_settings(payload))
        elif kind == WINDOW_UPDATE:
            if stream in self._windows:
                self._windows[stream] += int.from_bytes(payload, "big")
                self._go_on()
        elif kind == PING:
            if not flags & ACK:
                self._frames.append(pack(PING, ACK, CONNECTION, payload))
        elif kind in (DATA, HEADERS, CONTINUATION, RESET, GOAWAY):
            raise ConnectionError("it ends the stream, or speaks of another one")

    def _take_fields(self, flags: int, payload: bytes) -> None:
        """Take a frame of header fields."""

    def _take_data(self, payload: bytes) -> None:
        self._taken_bytes += len(payload)
        if self._taken_bytes >= self._credit_bytes // 2:
            credit = self._taken_bytes.to_bytes(4, "big")
            self._frames += [pack(WINDOW_UPDATE, 0, number, credit) for number in self._windows]
            self._taken_bytes = 0
        said = self._message + payload
        while len(said) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(said[1:_PREFIX_BYTES], "big")
            # Of one behind others counts what is here: it may be as long as is allowed when they have been read.
            held = min(end, len(said)) if self._messages else end
            if said[0] or self._unread_bytes + held > _PREFIX_BYTES + self.max_bytes:
                raise ConnectionError("a message is compressed, or too long")
            if len(said) < end:
                break
            self._messages.append(said[_PREFIX_BYTES:end])
            self._unread_bytes += end
            said = said[end:]
            self._wake()
        self._message = said

    def _take_settings(self, settings: dict[int, int]) -> None:
        before = self._settings[INITIAL_WINDOW_SIZE]
        self._settings = {key: settings.get(key, value) for key, value in self._settings.items()}
        self._windows[STREAM] += self._settings[INITIAL_WINDOW_SIZE] - before
        self._frames.append(pack(SETTINGS, ACK, CONNECTION))
        self._go_on()

    def _give_up(self) -> None:
        """Wait no more for what the peer says: whoever reads ends the stream."""
        self.stop()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # What we say

    def _send(self) -> None:
        """Say as much of what is to be said as the peer takes now."""
        while self._outgoing and not self._is_full:
            room = min(*self._windows.values(), max(FRAME_BYTES, self._settings[MAX_FRAME_SIZE]))
            if room <= 0:
                return
            piece, self._outgoing = self._outgoing[:room], self._outgoing[room:]
            for number in self._windows:
                self._windows[number] -= len(piece)
            self._frames.append(pack(DATA, 0, STREAM, piece))

    def _go_on(self) -> None:
        self._send()
        if self.on_room is not None and self.is_free:
            self._loop.call_soon(self.on_room)

    def _flush(self) -> None:
        if self._frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._frames))
        self._frames.clear()


class Call(Stream):
    """The end of a client.

    Attributes:
        status: How the server has ended the stream: OK, UNAUTHENTICATED, or None for any other way and before its end.
    """

    def __init__(self, max_bytes: int, method: str) -> None:
        """Call a method: "/service/name"."""
        fields = (
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost")),
            *(("te", "trailers"), ("content-type", "application/grpc")),
        )
        call = pack(HEADERS, END_HEADERS, STREAM, pack_fields(*fields))
        super().__init__(max_bytes, new_buffer(), credit_bytes=_WIDE_BYTES, frame_bytes=_WIDE_BYTES)
        self.status: int | None = None
        self._frames.append(PREFACE + _WIDE + call)

    def _take_fields(self, flags: int, payload: bytes) -> None:
        if flags & END_STREAM:
            self.status = next((status for status, words in LAST_WORDS.items() if words == payload), None)
            self.stop()


def new_buffer() -> memoryview:
    """Return a buffer to receive into."""
    return memoryview(bytearray(_BUFFER_BYTES))
