"""The control service: one gRPC method, one stream per task, and the job's state behind it.

The handler is generic and the messages are JSON: no generated code, so TensorFlow alone decides on protobuf's version.
Orders are levels, not events: a task is sent what it should do *now*, so nothing queues up for a slow one.

Anybody can connect. Who does not prove within 3 s (`handshake_seconds`: more where many tasks come at the same time)
that it knows the secret is sent away, at whatever step it stops: before it speaks HTTP/2, opens a stream, says its
nonce or its hello. Until then it is told nothing of the job, may say 4 KB, and is one of a bounded number; a task that
finds no place among them tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tf4slurm.control import auth
from tf4slurm.control.limits import handshake_seconds
from tf4slurm.control.messages import (
    METHOD,
    NOTHING_NEW,
    SERVICE,
    Hello,
    Map,
    Order,
    Refusal,
    Status,
    decode,
    encode,
    pack_map,
)
from tf4slurm.control.state import JobState, Phase
from tf4slurm.errors import AuthenticationError, MessageError, RendezvousClosedError, RendezvousError
from tf4slurm.network.connections import hang_up

logger = logging.getLogger(__name__)

_HANG_UP_SECONDS = 1.0  # for a refused one to take the refusal
_MAX_HELLO_BYTES = 4096
_MAX_MESSAGE_BYTES = 65536
_STRANGERS = 500  # connections beside two of each task; a silent one costs about 15 KB
_OWN_FILES = 128  # of this process, beside its connections and four of each task: pipes, logs, gRPC's own
_TICKS_PER_BEAT = 5
_MAPS_AT_A_TIME = 200  # on their way: gRPC copies each, and that of 10,000 tasks is 75 KB
_STOP_SECONDS = 0.2  # for handlers to end by themselves: else clients log that they were cut off
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.http2.bdp_probe", 0),  # for large transfers: it would answer each small message with a ping
    ("grpc.per_message_decompression", 0),  # no task compresses: 64 KB could become 64 MB
)

_Context = Any  # grpc.aio.ServicerContext[bytes, bytes]: grpcio ships no types


class ControlService:
    """Serves one job until `close`. Whoever changes its state calls `publish` afterwards."""

    def __init__(self, state: JobState, secret: str) -> None:
        self.state = state
        self._secret = secret
        self._server: Any = None  # grpc.aio.Server: it belongs to the event loop in which it is made
        self._sessions: dict[int, _Session] = {}
        self._met: set[int] = set()
        """The ranks that have had a session."""
        self._ended = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._handshake_seconds = handshake_seconds(len(state.records))
        self._packed: tuple[Map | None, bytes] = (None, b"")
        self._tick_seconds = state.limits.beat_seconds / _TICKS_PER_BEAT
        self._turns = round(state.limits.beat_of(len(state.records)) / state.limits.beat_seconds)
        self._map_turns = asyncio.Semaphore(_MAPS_AT_A_TIME)
        self._strangers: dict[str, float] = {}
        """The peers that have not shown the secret yet, and when their connection ends if they do not."""

    async def start(self, host: str = "[::]") -> int:
        """Listen on one address of this host, or on all of them; return the port."""
        grpc.aio.init_grpc_aio()  # for good: its shutdown at the last object's end has been seen to hang
        patience = int(self._handshake_seconds * 1000)
        options = (
            *_OPTIONS,
            ("grpc.max_allowed_incoming_connections", _make_room(len(self.state.records))),
            ("grpc.server_handshake_timeout_ms", patience),
            ("grpc.max_connection_idle_ms", patience),  # idle is without a stream: no task ever is
        )
        self._server = grpc.aio.server(options=options)
        handlers: Any = {METHOD: grpc.stream_stream_rpc_method_handler(self._join)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port: int = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        self._ticker = asyncio.create_task(self._tick())
        return port

    async def wait_for_end(self) -> None:
        """Wait until the state's phase is ENDED. Its own deadlines see to it that this comes."""
        ended = asyncio.create_task(self._ended.wait())
        assert self._ticker is not None
        await asyncio.wait({ended, self._ticker}, return_when=asyncio.FIRST_COMPLETED)
        if self._ticker.done():
            self._ticker.result()  # without its clock the job would never end: better a traceback

    def publish(self) -> None:
        """Send out the orders that have changed."""
        for rank in self.state.take_changed():
            if rank in self._sessions:
                self._sessions[rank].tell()
        if self.state.phase is Phase.ENDED:
            self._ended.set()

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            await self._server.stop(grace=_STOP_SECONDS)

    async def _tick(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(self._tick_seconds)
            self.state.on_tick(time.monotonic())
            self.publish()
            if tick % _TICKS_PER_BEAT == 0:
                self._ask(tick // _TICKS_PER_BEAT % self._turns)
            self._hang_up(time.monotonic())

    def _ask(self, turn: int) -> None:
        """Ask those whose turn it is whether they live: many at a time costs less than one after the other."""
        for rank in range(turn, len(self.state.records), self._turns):
            if rank in self._sessions:
                self._sessions[rank].ask()

    def _hang_up(self, now: float) -> None:
        """End the connections of strangers: they could open stream after stream, or never take the refusal."""
        late = [peer for peer, deadline in self._strangers.items() if now >= deadline]
        for peer in late:
            del self._strangers[peer]
        if late:
            hang_up(late)

    async def _join(self, _: object, context: _Context) -> None:
        # The peer is gone, or does not take what is said to it, or we end: nothing to tell gRPC's log.
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.InternalError):
            await self._serve(context)

    async def _serve(self, context: _Context) -> None:
        """Serve one connection, from its handshake to its end."""
        self._strangers.setdefault(context.peer(), time.monotonic() + self._handshake_seconds + _HANG_UP_SECONDS)
        try:
            incoming, outgoing, said = await asyncio.wait_for(self._shake_hands(context), self._handshake_seconds)
        except (AuthenticationError, asyncio.TimeoutError):
            logger.debug("%s does not show the job's secret", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED)  # without a word: it may be anybody
        self._strangers.pop(context.peer(), None)
        try:
            hello = decode(said, Hello)
            self.state.on_hello(hello, time.monotonic())
        except (RendezvousClosedError, MessageError) as error:
            self.publish()  # a refusal may be a verdict
            reason = error.reason if isinstance(error, RendezvousClosedError) else str(error)
            await context.write(outgoing.seal(encode(Refusal(reason))))
            return
        session = _Session(self.state, hello.rank, outgoing, context, self._pack_map, self._map_turns)
        if hello.rank in self._met:
            session.ask()  # a task that is back may have little of the dead time left to hear of us
        self._met.add(hello.rank)
        before = self._sessions.get(hello.rank)
        self._sessions[hello.rank] = session
        if before is not None:
            before.close()
        self.publish()
        try:
            await self._read(session, incoming, context)
        except (RendezvousError, MessageError) as error:
            logger.warning("rank %d: connection ended: %s", hello.rank, error)
        finally:
            session.close()
            if self._sessions.get(hello.rank) is session:
                del self._sessions[hello.rank]
                self.state.on_disconnect(hello.rank, time.monotonic())
                self.publish()

    def _pack_map(self) -> bytes:
        """Return the wire form of the state's map, which is made once for all tasks."""
        if self._packed[0] is not self.state.map:
            assert self.state.map is not None
            self._packed = (self.state.map, pack_map(self.state.map))
        return self._packed[1]

    async def _shake_hands(self, context: _Context) -> tuple[auth.Seal, auth.Seal, bytes]:
        """Return the seals of what comes in and what goes out, and the hello, which opened with them."""
        answer, incoming, outgoing = auth.answer_task(self._secret, await _read_bytes(context))
        await context.write(answer)
        sealed = await _read_bytes(context)
        if len(sealed) > _MAX_HELLO_BYTES:
            raise AuthenticationError("A task's hello is never this long.")
        return incoming, outgoing, incoming.open(sealed)

    async def _read(self, session: _Session, incoming: auth.Seal, context: _Context) -> None:
        status = Status()
        while data := await _read_bytes(context):
            payload = incoming.open(data)
            if self._sessions.get(session.rank) is not session:
                return  # the task has connected again: this is an old one's late word
            if payload == NOTHING_NEW:
                self.state.on_sign_of_life(session.rank, time.monotonic())
                continue
            status = decode(payload, Status, status)
            self.state.on_status(session.rank, status, time.monotonic())
            self.publish()
            if status.state == "left":
                return


class _Session:
    """The sending half of one connection: says the map and the order of its rank whenever they have changed."""

    def __init__(
        self,
        state: JobState,
        rank: int,
        seal: auth.Seal,
        context: _Context,
        pack_map: Callable[[], bytes],
        map_turns: asyncio.Semaphore,
    ) -> None:
        self.rank = rank
        self._state = state
        self._seal = seal
        self._context = context
        self._pack_map = pack_map
        self._map_turns = map_turns
        self._woken = asyncio.Event()
        self._has_changed = True
        self._is_asking = False
        self._writing = asyncio.create_task(self._write())

    def tell(self) -> None:
        """Tell the map or the order, if they are others than those told before."""
        self._has_changed = True
        self._woken.set()

    def ask(self) -> None:
        """Let the task say what is new, and hear that we live."""
        self._is_asking = True
        self._woken.set()

    def close(self) -> None:
        self._writing.cancel()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # the connection has ended: its reader tells
            await self._write_on()

    async def _write_on(self) -> None:
        said_map: Map | None = None
        said_order = self._state.first_order
        while True:
            if self._has_changed:
                self._has_changed = False
                if self._state.map is not None and self._state.map is not said_map:
                    async with self._map_turns:  # who holds one for ever is lost for his silence
                        if (said_map := self._state.map) is not None:
                            await self._say(self._pack_map())
                if (order := self._state.order_for(self.rank)) != said_order:
                    said_order = order
                    await self._say(_encode_order(order))
            if self._is_asking:
                self._is_asking = False
                await self._say(NOTHING_NEW)
            await self._woken.wait()
            self._woken.clear()

    async def _say(self, payload: bytes) -> None:
        await self._context.write(self._seal.seal(payload))


@functools.lru_cache(maxsize=16)
def _encode_order(order: Order) -> bytes:
    """Return the wire form of an order: most tasks have the same."""
    return encode(order)


def _make_room(num_tasks: int) -> int:
    """Return how many connections may be open at a time; raise the limit of open files if that takes it.

    At the limit of files gRPC takes no new connection, this process can open nothing, and the silence of those that
    are connected is not even noticed: so connections are refused well before.
    """
    connections, own = _STRANGERS + 2 * num_tasks, _OWN_FILES + 4 * num_tasks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= connections + own:
        return connections
    most = connections + own if hard == resource.RLIM_INFINITY else min(connections + own, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(2 * num_tasks, most - own)


async def _read_bytes(context: _Context) -> bytes:
    """Return the next message of the stream; nothing at its end."""
    data = await context.read()
    return data if isinstance(data, bytes) else b""
