"""The control service: one gRPC method, one stream per task, and the job's state behind it.

The messages are JSON: no generated code, so TensorFlow alone decides on protobuf's version. Orders are levels, not
events: a task is sent what it should do *now*, so nothing queues up for a slow one.

Anybody can connect. Who does not prove within 3 s (`handshake_seconds`: more where many tasks come at the same time)
that it knows the secret is sent away, at whatever step it stops: before it speaks HTTP/2, opens a stream, says its
nonce or its hello. Until then it is told nothing of the job, may say 4 KB, and is one of a bounded number; a task that
finds no place among them tries again.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import resource
import time
from collections.abc import Callable

from tf4slurm.control import auth
from tf4slurm.control.limits import handshake_seconds
from tf4slurm.control.messages import (
    NOTHING_NEW,
    Hello,
    Map,
    Order,
    Refusal,
    Status,
    decode,
    encode,
)
from tf4slurm.control.packed_map import pack_map
from tf4slurm.control.state import JobState, Phase
from tf4slurm.errors import AuthenticationError, MessageError, RendezvousClosedError, RendezvousError
from tf4slurm.network.listener import Listener, ServedStream
from tf4slurm.network.stream import OK, UNAUTHENTICATED

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 65536
_STRANGERS = 500  # connections beside two of each task; a silent one costs about 3 KB
_OWN_FILES = 128  # of this process, beside its connections and four of each task: pipes, logs
_OBJECTS_PER_TASK = 100  # that stay: to look through all of them again and again took a third of a large rendezvous
_TICKS_PER_BEAT = 5


class ControlService:
    """Serves one job until `close`. Whoever changes its state calls `publish` afterwards."""

    def __init__(self, state: JobState, secret: str) -> None:
        self.state = state
        self._secret = secret
        self._listener: Listener | None = None
        self._sessions: dict[int, _Session] = {}
        self._met: set[int] = set()
        """The ranks that have had a session."""
        self._ended = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._packed: tuple[Map | None, bytes] = (None, b"")
        self._tick_seconds = state.limits.beat_seconds / _TICKS_PER_BEAT
        self._turns = round(state.limits.beat_of(len(state.records)) / state.limits.beat_seconds)

    async def start(self, host: str = "") -> int:
        """Listen on one address of this host, or on all of them; return the port.

        Raises:
            OSError: This host has no such address.
        """
        num_tasks = len(self.state.records)
        gc.set_threshold(max(gc.get_threshold()[0], _OBJECTS_PER_TASK * num_tasks))
        self._listener = Listener(
            self._serve, patience_seconds=handshake_seconds(num_tasks), max_connections=_make_room(num_tasks)
        )
        port = await self._listener.start(host)
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
        if self._listener is not None:
            await self._listener.close()

    async def _tick(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(self._tick_seconds)
            self.state.on_tick(time.monotonic())
            self.publish()
            if tick % _TICKS_PER_BEAT == 0:
                self._ask(tick // _TICKS_PER_BEAT % self._turns)

    def _ask(self, turn: int) -> None:
        """Ask those whose turn it is whether they live: many at a time costs less than one after the other."""
        for rank in range(turn, len(self.state.records), self._turns):
            if rank in self._sessions:
                self._sessions[rank].ask()

    async def _serve(self, stream: ServedStream) -> None:
        """Serve one connection, from its handshake to its end."""
        status = UNAUTHENTICATED  # and no other word: it may be anybody
        try:
            incoming, outgoing, said = await self._shake_hands(stream)
            status = OK
            stream.trust(_MAX_MESSAGE_BYTES)
            await self._welcome(stream, incoming, outgoing, said)
        except (AuthenticationError, ConnectionError) as error:
            logger.debug("a connection ended: %s", error)
        finally:
            stream.end(status)

    async def _welcome(self, stream: ServedStream, incoming: auth.Seal, outgoing: auth.Seal, said: bytes) -> None:
        """Serve one who has shown the secret, and has said this."""
        try:
            hello = decode(said, Hello)
            self.state.on_hello(hello, time.monotonic())
        except (RendezvousClosedError, MessageError) as error:
            self.publish()  # a refusal may be a verdict
            reason = error.reason if isinstance(error, RendezvousClosedError) else str(error)
            stream.say(outgoing.seal(encode(Refusal(reason))))
            return
        session = _Session(self.state, hello.rank, outgoing, stream, self._pack_map)
        if hello.rank in self._met:
            session.ask()  # a task that is back may have little of the dead time left to hear of us
        self._met.add(hello.rank)
        before = self._sessions.get(hello.rank)
        self._sessions[hello.rank] = session
        if before is not None:
            before.close()
        session.tell()
        self.publish()
        try:
            await self._read(session, incoming, stream)
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

    async def _shake_hands(self, stream: ServedStream) -> tuple[auth.Seal, auth.Seal, bytes]:
        """Return the seals of what comes in and what goes out, and the hello, which opened with them."""
        answer, incoming, outgoing = auth.answer_task(self._secret, await stream.read())
        stream.say(answer)
        return incoming, outgoing, incoming.open(await stream.read())

    async def _read(self, session: _Session, incoming: auth.Seal, stream: ServedStream) -> None:
        status = Status()
        while data := await stream.read():
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
        self, state: JobState, rank: int, seal: auth.Seal, stream: ServedStream, pack_map: Callable[[], bytes]
    ) -> None:
        self.rank = rank
        self._state = state
        self._seal = seal
        self._stream = stream
        self._pack_map = pack_map
        self._said_map: Map | None = None
        self._said_order = state.first_order
        self._has_changed = False
        self._is_asking = False
        stream.on_room = self._say

    def tell(self) -> None:
        """Tell the map or the order, if they are others than those told before; what changes until then goes along."""
        if not self._has_changed:
            self._has_changed = True
            asyncio.get_running_loop().call_soon(self._say)

    def ask(self) -> None:
        """Let the task say what is new, and hear that we live."""
        self._is_asking = True
        self._say()

    def close(self) -> None:
        self._stream.stop()

    def _say(self) -> None:
        """Say what is to be said, as far as there is room: a task that takes nothing gets the latest of all, later."""
        while self._stream.is_free and (payload := self._next()) is not None:
            self._stream.say(self._seal.seal(payload))

    def _next(self) -> bytes | None:
        if self._has_changed:
            if self._state.map is not None and self._state.map is not self._said_map:
                self._said_map = self._state.map
                return self._pack_map()
            self._has_changed = False
            if (order := self._state.order_for(self.rank)) != self._said_order:
                self._said_order = order
                return _encode_order(order)
        if self._is_asking:
            self._is_asking = False
            return NOTHING_NEW
        return None


@functools.lru_cache(maxsize=16)
def _encode_order(order: Order) -> bytes:
    """Return the wire form of an order: most tasks have the same."""
    return encode(order)


def _make_room(num_tasks: int) -> int:
    """Return how many connections may be open at a time; raise the limit of open files if that takes it.

    At the limit of files no new connection is taken, this process can open nothing, and the silence of those that
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
