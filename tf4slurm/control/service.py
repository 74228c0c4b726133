"""The control service of a job: a gRPC server with one method, which each task calls once per connection.

The call is a bidirectional stream of JSON messages inside TLS. A task sends its `Registration`, then its
`ObservedState` whenever it changes; the service sends the cluster spec (`Map`) and the task's desired state
(`DesiredState`) whenever they change, and an empty message to request a heartbeat. Messages describe states, not
changes: a task that reads slowly skips the states in between, and after a broken connection both sides send their
current state again.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tf4slurm.cluster import Address
from tf4slurm.control.access import TokenInterceptor, server_options
from tf4slurm.control.credentials import ServiceCredentials
from tf4slurm.control.messages import (
    HEARTBEAT,
    METHOD,
    SERVICE,
    DesiredState,
    Map,
    ObservedState,
    Registration,
    decode,
    encode,
    encode_map,
)
from tf4slurm.control.state import JobState, Phase
from tf4slurm.errors import MessageError, RendezvousClosedError
from tf4slurm.network.ports import HeldPort, hold_port

if TYPE_CHECKING:  # generic for type checkers only
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[bytes, bytes]

logger = logging.getLogger(__name__)

_OBJECTS_PER_TASK = 100  # Python's collector otherwise took a third of the processor time of a large rendezvous
_TICKS_PER_BEAT = 5
_STOP_SECONDS = 0.2  # for calls to end after `close`
_CLOSE_SECONDS = 2.0
_MAX_DETAIL_CHARACTERS = 900  # of a status, which travels as metadata


class ControlService:
    """Serves one job until `close`. Call `publish` after each change of `state`."""

    def __init__(self, state: JobState, credentials: ServiceCredentials) -> None:
        self.state = state
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._port: HeldPort | None = None
        self._sessions: dict[int, _Session] = {}
        self._registered: set[int] = set()
        """The ranks that have registered at least once."""
        self._ended = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._encoded_map: tuple[Map | None, bytes] = (None, b"")
        self._tick_seconds = state.limits.heartbeat_interval_seconds / _TICKS_PER_BEAT
        self._turns = round(
            state.limits.heartbeat_interval_of(len(state.records)) / state.limits.heartbeat_interval_seconds
        )

    async def start(self, host: str = "", ports: Sequence[int] = ()) -> int:
        """Listen on one address of this host, or on all of them; return the port.

        Args:
            host: The address; empty for all.
            ports: The ports to choose from; empty for any free one.

        Raises:
            PlacementError: None of `ports` is free.
            OSError: This host has no such address.
        """
        num_tasks = len(self.state.records)
        gc.set_threshold(max(gc.get_threshold()[0], _OBJECTS_PER_TASK * num_tasks))
        self._server = grpc.aio.server(
            interceptors=(TokenInterceptor(self._credentials.shared.token),),
            options=server_options(num_tasks),
        )
        handlers: dict[str, _Handler] = {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._port = hold_port(ports)  # held as the agents hold theirs: no other process of tf4slurm takes it
        pair = (self._credentials.private_key, self._credentials.shared.certificate.encode())
        address = Address(host or "::", self._port.port)
        try:
            self._server.add_secure_port(str(address), grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"The control service cannot listen at {address}: {error}") from error
        await self._server.start()
        self._ticker = asyncio.create_task(self._tick())
        return self._port.port

    async def wait_for_end(self) -> None:
        """Wait until the state's phase is ENDED, which its own deadlines guarantee."""
        ended = asyncio.create_task(self._ended.wait())
        assert self._ticker is not None
        await asyncio.wait({ended, self._ticker}, return_when=asyncio.FIRST_COMPLETED)
        if self._ticker.done():
            self._ticker.result()  # without its clock the job would never end: raise its error instead

    def publish(self) -> None:
        """Send the orders that have changed."""
        for rank in self.state.take_changed():
            if rank in self._sessions:
                self._sessions[rank].notify()
        if self.state.phase is Phase.ENDED:
            self._ended.set()

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            # Bounded, because clients that keep sending can hold up gRPC's own end.
            await asyncio.wait({asyncio.create_task(self._server.stop(_STOP_SECONDS))}, timeout=_CLOSE_SECONDS)
            await asyncio.sleep(0)  # gRPC's own tasks end now: cancelled with the loop, they would print tracebacks
        if self._port is not None:
            self._port.close()

    async def _tick(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(self._tick_seconds)
            self.state.on_tick(time.monotonic())
            self.publish()
            if tick % _TICKS_PER_BEAT == 0:
                self._request_heartbeats(tick // _TICKS_PER_BEAT % self._turns)

    def _request_heartbeats(self, turn: int) -> None:
        """Request a heartbeat from the tasks of this turn: batches cost a quarter of the processor time."""
        for rank in range(turn, len(self.state.records), self._turns):
            if rank in self._sessions:
                self._sessions[rank].request_heartbeat()

    async def _serve(self, _: AsyncIterator[bytes], context: _Context) -> None:
        """Serve one call of an authenticated task, from its `Registration` to its end."""
        hello = await self._register(context)
        if hello is None:
            return
        # Nothing is awaited from the registration to the new session: the end of an earlier call of this task, noticed
        # in between, would count as the end of this one.
        session = _Session(self, hello.rank, context)
        if hello.rank in self._registered:
            session.request_heartbeat()  # to reconnect does not reset the heartbeat timeout
        self._registered.add(hello.rank)
        before, self._sessions[hello.rank] = self._sessions.get(hello.rank), session
        if before is not None:
            before.close()
        session.notify()
        self.publish()
        sending = None
        try:
            await context.send_initial_metadata(())  # confirms the registration to the task
            sending = asyncio.create_task(session.send())
            await self._receive(session, context)
        except asyncio.CancelledError:
            if self._sessions.get(hello.rank) is session:
                raise  # the connection is lost
            await context.abort(grpc.StatusCode.ABORTED, "the task has made another call")
        except grpc.aio.BaseError:
            raise  # the call has ended
        except Exception as error:  # of a message; one of ours, too, or the task would send it again and again
            if not isinstance(error, MessageError):
                logger.exception("rank %d: a message could not be handled", hello.rank)
            self.state.on_rejected(hello.rank, str(error) or repr(error), time.monotonic())
            self.publish()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_MAX_DETAIL_CHARACTERS])
        finally:
            if sending is not None:
                sending.cancel()
            if self._sessions.get(hello.rank) is session:
                del self._sessions[hello.rank]
                self.state.on_disconnect(hello.rank, time.monotonic())
                self.publish()

    async def _register(self, context: _Context) -> Registration | None:
        """Read a task's `Registration` and register the task; None if the call ends without one."""
        payload = await context.read()
        if not isinstance(payload, bytes):
            return None
        try:
            hello = decode(payload, Registration)
            self.state.on_hello(hello, time.monotonic())
            return hello
        except RendezvousClosedError as error:
            self.publish()  # a refusal may end the job
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.reason[:_MAX_DETAIL_CHARACTERS])
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_MAX_DETAIL_CHARACTERS])
        return None

    async def _receive(self, session: _Session, context: _Context) -> None:
        """Read a task's messages until it has left or the call ends.

        Raises:
            MessageError: A message that this service does not accept.
        """
        status = ObservedState()
        while isinstance(payload := await context.read(), bytes):
            if self._sessions.get(session.rank) is not session:
                return  # a late message: the task has reconnected since
            if payload == HEARTBEAT:
                self.state.on_sign_of_life(session.rank, time.monotonic())
                continue
            status = decode(payload, ObservedState, status)
            self.state.on_status(session.rank, status, time.monotonic())
            self.publish()
            if status.state == "terminated":
                return

    def encoded_map(self) -> bytes:
        """Return the message with the state's cluster spec, which is made once for all tasks."""
        if self._encoded_map[0] is not self.state.map:
            assert self.state.map is not None
            self._encoded_map = (self.state.map, encode_map(self.state.map))
        return self._encoded_map[1]


class _Session:
    """The sending half of one task's call."""

    def __init__(self, service: ControlService, rank: int, context: _Context) -> None:
        self.rank = rank
        self._service = service
        self._context = context
        self._handler = asyncio.current_task()
        self._sent_map: Map | None = None
        self._sent_order = service.state.first_order
        self._has_changed = False
        self._is_heartbeat_due = False
        self._is_due = asyncio.Event()

    def notify(self) -> None:
        """Send the cluster spec and the order if they differ from those sent before."""
        self._has_changed = True
        self._is_due.set()

    def request_heartbeat(self) -> None:
        self._is_heartbeat_due = True
        self._is_due.set()

    def close(self) -> None:
        """End the call: the task has made a new one."""
        if self._handler is not None:
            self._handler.cancel()

    async def send(self) -> None:
        """Send what is due until the call ends; gRPC's flow control makes this wait for a task that reads slowly."""
        try:
            while True:
                await self._is_due.wait()
                self._is_due.clear()
                while (payload := self._next_message()) is not None:
                    await self._context.write(payload)
        except grpc.aio.BaseError as error:
            logger.debug("rank %d: nothing can be sent any more: %s", self.rank, error)  # `_receive` sees the end

    def _next_message(self) -> bytes | None:
        state = self._service.state
        if self._has_changed:
            if state.map is not None and state.map is not self._sent_map:
                self._sent_map = state.map
                return self._service.encoded_map()
            self._has_changed = False
            if (order := state.order_for(self.rank)) != self._sent_order:
                self._sent_order = order
                return _encode_order(order)
        if self._is_heartbeat_due:
            self._is_heartbeat_due = False
            return HEARTBEAT
        return None


@functools.lru_cache(maxsize=16)
def _encode_order(order: DesiredState) -> bytes:
    """Return the message with an order: most tasks have the same."""
    return encode(order)
