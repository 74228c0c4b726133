"""gRPC streams of our own, with grpcio's client and server at the other end, with each other, and with nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf4slurm.network.frames import (
    ACK,
    CONNECTION,
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
    WINDOW_UPDATE,
    Frame,
    pack,
    pack_settings,
    read_settings,
    take_frames,
)
from tf4slurm.network.listener import Listener, ServedStream
from tf4slurm.network.stream import OK, UNAUTHENTICATED, Call

METHOD = "/service/method"
LARGE = bytes(range(256)) * 8_000  # 2 MB: more than any window and any frame
SIZES = [0, 1, 4_091, 16_379, 16_380, 65_530, 65_531, 70_000, len(LARGE)]
Serve = Callable[[ServedStream], Coroutine[Any, Any, None]]


def live(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


@contextlib.asynccontextmanager
async def listening(serve: Serve, patience_seconds: float = 10, max_connections: int = 10) -> AsyncIterator[int]:
    listener = Listener(serve, patience_seconds=patience_seconds, max_connections=max_connections)
    port = await listener.start("127.0.0.1")
    try:
        yield port
    finally:
        await listener.close()


async def echo(stream: ServedStream) -> None:
    """Say back what is said, between a letter before and one after: an empty message is the end."""
    stream.trust(len(LARGE) + 2)
    while message := await stream.read():
        stream.say(b"<" + message[1:-1] + b">")
    stream.end()


def between(size: int) -> tuple[bytes, bytes]:
    return b"?" + LARGE[:size] + b"?", b"<" + LARGE[:size] + b">"


@contextlib.asynccontextmanager
async def calling(port: int, max_bytes: int = len(LARGE) + 2) -> AsyncIterator[Call]:
    call = Call(max_bytes, METHOD)
    await asyncio.get_running_loop().create_connection(lambda: call, "127.0.0.1", port)
    try:
        yield call
    finally:
        call.abort()


@contextlib.asynccontextmanager
async def grpcio_call(port: int) -> AsyncIterator[Any]:
    options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel.stream_stream(METHOD)()


class Raw:
    """A connection on which any frame can be said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.received = bytearray()

    def say(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def hear(self) -> Frame | None:
        """Return the next frame; None at the end."""
        while not (frames := list(take_frames(self.received, 2**24))):
            data = await asyncio.wait_for(self.reader.read(65_536), 10)
            if not data:
                return None
            self.received += data
        for frame in reversed(frames[1:]):
            self.received[:0] = pack(*frame[:3], frame.payload)
        return frames[0]

    async def hear_data(self) -> bytes:
        """Return what the next frame of data carries, whatever comes before it."""
        while frame := await self.hear():
            if frame.kind == DATA:
                return frame.payload
        raise AssertionError("the connection has ended")


@contextlib.asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


OPEN = pack(HEADERS, END_HEADERS, STREAM, b"\x83")


# With grpcio


def test_grpcio_understands_our_server() -> None:
    async def story() -> None:
        async with listening(echo) as port, grpcio_call(port) as call:
            for size in SIZES:
                said, expected = between(size)
                await call.write(said)
                assert await call.read() == expected
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    live(story)


def test_our_client_understands_grpcio() -> None:
    async def handler(_: object, context: Any) -> None:
        while isinstance(said := await context.read(), bytes) and said != b"bye":
            await context.write(b"<" + said[1:-1] + b">")

    async def story() -> None:
        options = (("grpc.max_receive_message_length", -1),)
        server = grpc.aio.server(options=options)
        handlers: Any = {"method": grpc.stream_stream_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with calling(port) as call:
            for size in SIZES:
                said, expected = between(size)
                call.say(said)
                assert await call.read() == expected
            call.say(b"bye")
            assert await call.read() == b""
        await server.stop(None)

    live(story)


@pytest.mark.parametrize(
    ("status", "code"), [(OK, grpc.StatusCode.OK), (UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED)]
)
@pytest.mark.parametrize("has_spoken", [True, False])
def test_both_clients_are_told_how_a_stream_ends(status: int, code: grpc.StatusCode, has_spoken: bool) -> None:
    async def serve(stream: ServedStream) -> None:
        await stream.read()
        if has_spoken:
            stream.say(b"word")
        stream.end(status)

    async def story() -> None:
        async with listening(serve) as port:
            async with grpcio_call(port) as theirs:
                await theirs.write(b"hello")
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await theirs.read() == (b"word" if has_spoken else grpc.aio.EOF)
                assert await theirs.code() is code
            async with calling(port) as ours:
                ours.say(b"hello")
                assert await ours.read() == (b"word" if has_spoken else b"")
                assert await ours.read() == b""
                assert ours.status == status

    live(story)


# With each other


def test_our_ends_understand_each_other() -> None:
    async def story() -> None:
        async with listening(echo) as port, calling(port) as call:
            for size in SIZES:
                said, expected = between(size)
                call.say(said)
                assert await call.read() == expected
            for size in SIZES[:-1]:  # without waiting
                call.say(between(size)[0])
            for size in SIZES[:-1]:
                assert await call.read() == between(size)[1]

    live(story)


def test_who_does_not_read_fills_no_memory_and_is_told_the_rest_later() -> None:
    """The latest only, where it is asked for: `on_room` is called once there is room."""
    rooms: list[bool] = []

    async def serve(stream: ServedStream) -> None:
        stream.trust(100)
        stream.on_room = lambda: rooms.append(stream.is_free)
        stream.say(b"a" * 100_000)
        assert not stream.is_free
        await stream.read()

    async def story() -> None:
        async with listening(serve) as port, raw_client(port) as raw:
            raw.say(PREFACE, pack_settings({INITIAL_WINDOW_SIZE: 10}), OPEN)
            assert await raw.hear_data() == message(b"a" * 100_000)[:10]
            assert rooms == []
            raw.say(pack(WINDOW_UPDATE, 0, STREAM, (7).to_bytes(4, "big")))
            assert len(await raw.hear_data()) == 7
            # The stream has room for all now; the connection has not.
            raw.say(pack_settings({INITIAL_WINDOW_SIZE: 200_000, MAX_FRAME_SIZE: 30_000}))
            assert len(await raw.hear_data()) == 30_000
            assert len(await raw.hear_data()) == 30_000
            assert len(await raw.hear_data()) == 65_535 - 17 - 60_000
            assert rooms == []
            raw.say(pack(WINDOW_UPDATE, 0, CONNECTION, (100_000).to_bytes(4, "big")))
            assert [len(await raw.hear_data()), len(await raw.hear_data())] == [30_000, 100_005 - 65_535 - 30_000]
            while not rooms:
                await asyncio.sleep(0.01)
            assert rooms == [True]

    live(story)


def test_the_peer_is_given_credit_for_what_was_taken() -> None:
    async def story() -> None:
        async with listening(echo) as port, raw_client(port) as raw:
            raw.say(PREFACE, pack_settings({}), OPEN, pack(DATA, 0, STREAM, message(b"?")))
            assert await raw.hear_data() == message(b"<>")  # it is trusted now
            raw.say(pack(WINDOW_UPDATE, 0, CONNECTION, (10**6).to_bytes(4, "big")))
            raw.say(pack(WINDOW_UPDATE, 0, STREAM, (10**6).to_bytes(4, "big")))
            said = 6
            credit = {CONNECTION: 0, STREAM: 0}
            while said < 300_000:
                raw.say(pack(DATA, 0, STREAM, message(b"m" * 16_000)))
                said += 16_005
                while said - credit[STREAM] > 65_535 - 16_005 or said - credit[CONNECTION] > 65_535 - 16_005:
                    frame = await raw.hear()
                    assert frame is not None
                    if frame.kind == WINDOW_UPDATE:
                        credit[frame.stream] += int.from_bytes(frame.payload, "big")
            assert max(credit.values()) <= said

    live(story)


def test_settings_and_pings_are_answered() -> None:
    async def story() -> None:
        async with listening(echo) as port, raw_client(port) as raw:
            raw.say(PREFACE, pack_settings({INITIAL_WINDOW_SIZE: 1}), pack(PING, 0, CONNECTION, b"12345678"))
            said = await raw.hear()
            assert said is not None
            assert (said.kind, said.flags, said.stream) == (SETTINGS, 0, CONNECTION)
            assert read_settings(said.payload) == {INITIAL_WINDOW_SIZE: 4096}  # what a stranger may say
            assert await raw.hear() == (SETTINGS, ACK, CONNECTION, b"")
            assert await raw.hear() == (PING, ACK, CONNECTION, b"12345678")

    live(story)


def test_a_conversation_byte_by_byte() -> None:
    async def story() -> None:
        async with listening(echo) as port, raw_client(port) as raw:
            for byte in PREFACE + pack_settings({}) + OPEN + pack(DATA, 0, STREAM, message(b"?slow?")):
                raw.say(bytes((byte,)))
                await raw.writer.drain()
                await asyncio.sleep(0.001)
            assert await raw.hear_data() == message(b"<slow>")

    live(story)


# Limits


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        PREFACE + b"\xff" * 9,
        PREFACE + pack(DATA, 0, STREAM, b"x" * 16_385),
        PREFACE + OPEN + pack(DATA, PADDED, STREAM, b"x"),
        PREFACE + OPEN + pack(DATA, 0, STREAM, b"\1\0\0\0\1x"),
        PREFACE + OPEN + pack(DATA, 0, STREAM, b"\0\0\0\x10\1"),
        PREFACE + OPEN + pack(DATA, 0, STREAM, message(b"x") * 1_000),
        PREFACE + OPEN + pack(DATA, 0, 3, message(b"x")),
        PREFACE + OPEN + pack(HEADERS, END_HEADERS, 3, b"\x83"),
        PREFACE + OPEN + pack(HEADERS, 0, STREAM, b"\x83" * 9_000),
        PREFACE + OPEN + pack(DATA, END_STREAM, STREAM),
        PREFACE + OPEN + pack(RESET, 0, STREAM, bytes(4)),
        PREFACE + OPEN + pack(GOAWAY, 0, CONNECTION, bytes(8)),
    ],
)
def test_who_does_not_keep_to_the_protocol_is_not_listened_to(words: bytes) -> None:
    """The connection ends by itself, well before a silent one would, with all that was allowed before it read."""
    ended = asyncio.Event()

    async def serve(stream: ServedStream) -> None:
        read = 0
        while await stream.read():
            await asyncio.sleep(0)
            read += 1
        assert read < 1_000
        stream.end(UNAUTHENTICATED)
        ended.set()

    async def story() -> None:
        async with listening(serve, patience_seconds=60) as port, raw_client(port) as raw:
            raw.say(words)
            with contextlib.suppress(ConnectionError):
                while await raw.hear():
                    pass
            if words.startswith(PREFACE + OPEN):
                await asyncio.wait_for(ended.wait(), 5)

    live(story)


@pytest.mark.parametrize("words", [b"", PREFACE[:10], PREFACE, PREFACE + OPEN])
def test_who_is_not_trusted_in_time_is_sent_away(words: bytes) -> None:
    async def serve(stream: ServedStream) -> None:
        assert await stream.read() == b""
        stream.end(UNAUTHENTICATED)

    async def story() -> None:
        async with listening(serve, patience_seconds=0.2) as port, raw_client(port) as raw:
            raw.say(words)
            with contextlib.suppress(ConnectionError):
                while await raw.hear():
                    pass

    live(story)


def test_who_is_trusted_stays() -> None:
    async def story() -> None:
        async with listening(echo, patience_seconds=2) as port, calling(port) as call:
            call.say(b"?before?")
            assert await call.read() == b"<before>"
            await asyncio.sleep(2.5)
            call.say(b"?after?")
            assert await call.read() == b"<after>"

    live(story)


def test_there_are_no_more_connections_than_there_may_be() -> None:
    async def story() -> None:
        async with listening(echo, max_connections=2) as port, calling(port) as first, calling(port) as second:
            for call in (first, second):
                call.say(b"?here?")
                assert await call.read() == b"<here>"
            async with calling(port) as third:
                assert await third.read() == b""
            second.abort()
            await asyncio.sleep(0.2)  # until the other end has seen it
            async with calling(port) as fourth:
                fourth.say(b"?now?")
                assert await fourth.read() == b"<now>"

    live(story)


@pytest.mark.parametrize("call", [b"", OPEN + pack(DATA, 0, STREAM, message(b"trusted"))])
def test_who_asks_and_takes_no_answer_is_cut_off(call: bytes) -> None:
    async def story() -> None:
        async with listening(echo, patience_seconds=60) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(PREFACE + pack_settings({}) + call)
            await asyncio.sleep(0.1)
            with contextlib.suppress(ConnectionError):
                while not writer.is_closing():
                    writer.write(pack(PING, 0, CONNECTION, bytes(8)) * 10_000)
                    await writer.drain()
            assert reader.exception() is not None or writer.is_closing()

    live(story)


@pytest.mark.parametrize("words", [b"GET /", PREFACE + pack(12, 0, CONNECTION) * 100 + OPEN])
def test_who_speaks_something_else_or_too_much_before_a_call_is_cut_off_at_once(words: bytes) -> None:
    async def story() -> None:
        async with listening(echo, patience_seconds=60) as port, raw_client(port) as raw:
            raw.say(words)
            with contextlib.suppress(ConnectionError):
                while (frame := await raw.hear()) is not None:
                    assert frame.kind == SETTINGS

    live(story)


def test_who_says_too_much_with_the_call_itself_is_answered() -> None:
    async def story() -> None:
        async with listening(echo, patience_seconds=60) as port, raw_client(port) as raw:
            raw.say(PREFACE, pack_settings({}), pack(HEADERS, 0, STREAM, b"\x83" * FRAME_BYTES))
            while (frame := await raw.hear()) is not None and not (frame.kind == HEADERS and frame.flags & END_STREAM):
                pass
            assert frame is not None, "it was cut off without a last word"

    live(story)


def test_settings_that_nobody_asks_for_are_not_kept() -> None:
    async def story() -> None:
        call = Call(4096, METHOD)
        call.connection_made(_Transport())
        for start in range(0, 2**16, 2**10):
            words = pack_settings(dict.fromkeys(range(start, start + 2**10), 2**15))
            call.get_buffer(-1)[: len(words)] = words
            call.buffer_updated(len(words))
        assert call._settings == {INITIAL_WINDOW_SIZE: 2**15, MAX_FRAME_SIZE: 2**15}

    live(story)


# How connections end


@pytest.mark.parametrize("is_trusted", [True, False])
def test_who_takes_nothing_and_hangs_up_halfway_does_not_stay(is_trusted: bool) -> None:
    """What we have said waits for ever: the connection ends all the same."""
    served: list[ServedStream] = []

    async def serve(stream: ServedStream) -> None:
        served.append(stream)
        if is_trusted:
            stream.trust(100)
        stream.say(bytes(20_000_000))
        await stream.read()
        stream.end()

    async def story() -> None:
        wide = (20_000_000).to_bytes(4, "big")
        async with listening(serve, patience_seconds=60) as port, raw_client(port) as raw:
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            raw.say(PREFACE, *(pack(WINDOW_UPDATE, 0, number, wide) for number in (CONNECTION, STREAM)), OPEN)
            while not (served and served[0]._is_full):
                await asyncio.sleep(0.01)
            raw.writer.write_eof()
            while served[0] in served[0]._listener._streams:
                await asyncio.sleep(0.01)
            assert served[0] not in served[0]._listener._streams

    live(story)


def test_who_resets_while_we_hang_up_is_no_error() -> None:
    errors: list[dict[str, Any]] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        ended: list[ServedStream] = []

        async def serve(stream: ServedStream) -> None:
            stream.end()
            ended.append(stream)

        async with listening(serve) as port:
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(PREFACE + OPEN)
                while not ended:
                    await asyncio.sleep(0.01)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            asyncio.get_running_loop().call_soon(ended[0]._hang_up)  # before the loop has seen the reset
            await asyncio.sleep(0.1)

    live(story)
    assert errors == []


def test_our_client_speaks_first_whenever_a_server_does() -> None:
    """A server may say its settings before it has heard anything: our answer comes after our first words."""

    async def story() -> None:
        heard = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(pack_settings({}))
            while data := await reader.read(65_536):
                heard.extend(data)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with calling(server.sockets[0].getsockname()[1]) as call:
            await asyncio.sleep(0.1)
            call.say(b"hello")
            await asyncio.sleep(0.1)
        server.close()
        assert heard.startswith(PREFACE)
        assert heard.endswith(message(b"hello"))

    live(story)


def test_who_was_on_the_way_when_the_listener_closed_is_turned_away() -> None:
    async def story() -> None:
        listener = Listener(echo, patience_seconds=10, max_connections=10)
        before, after = _Transport(), _Transport()
        ServedStream(listener).connection_made(before)
        late = ServedStream(listener)
        assert not before.is_aborted
        await listener.close()
        late.connection_made(after)
        assert before.is_aborted
        assert after.is_aborted

    live(story)


# Nonsense


class _Transport(asyncio.Transport):
    """Takes everything."""

    said = 0
    is_aborted = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.said += len(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


_FRAMES = st.builds(
    pack,
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 1, 2, 3, 2**31 - 1]),
    st.one_of(st.binary(max_size=40), st.binary(max_size=40).map(message), st.builds(bytes, st.just(16_384))),
)
_TALK = st.lists(
    st.one_of(_FRAMES, st.just(OPEN), st.just(pack_settings({INITIAL_WINDOW_SIZE: 0})), st.binary(max_size=20))
)


@given(talk=_TALK, piece=st.integers(1, 5_000), is_server=st.booleans(), is_trusted=st.booleans())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_nonsense_does_no_harm(talk: list[bytes], piece: int, is_server: bool, is_trusted: bool) -> None:
    async def serve(stream: ServedStream) -> None:
        while await stream.read():
            stream.say(b"answer")
        stream.end(UNAUTHENTICATED)

    async def story() -> None:
        listener = Listener(serve, patience_seconds=10, max_connections=10)
        stream = ServedStream(listener) if is_server else Call(4096, METHOD)
        words = (PREFACE if is_server else b"") + b"".join(talk)
        transport = _Transport()
        stream.connection_made(transport)
        if isinstance(stream, ServedStream) and is_trusted:
            stream.trust(4096)
        for start in range(0, len(words), piece):
            part = words[start : start + piece]
            stream.get_buffer(-1)[: len(part)] = part
            stream.buffer_updated(len(part))
            assert stream._unread_bytes <= 5 + stream.max_bytes
            assert len(stream._received) + len(stream._message) < 2**16
            await asyncio.sleep(0)
        stream.connection_lost(None)
        while await stream.read():
            pass
        await listener.close()
        assert transport.said <= 200 + 2 * len(words) + 100 * len(talk)

    asyncio.run(asyncio.wait_for(story(), 20))


@given(st.dictionaries(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)))
def test_settings_are_read_as_they_were_written(values: dict[int, int]) -> None:
    (frame,) = take_frames(bytearray(pack_settings(values)), 2**24)
    assert read_settings(frame.payload) == values
