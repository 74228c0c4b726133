"""The control service of a job: a gRPC server with one method, which each task calls once per connection.

The call is a bidirectional stream of messages over TLS. A task sends its `Registration`, then each change of its
`ObservedState`. The service sends each change of the cluster and of the task's `DesiredState`, and requests heartbeats
(see `messages.py`). A task that reads slowly receives only the latest state.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hmac
import itertools
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.clock import JobClock
from tf4slurm.control.credentials import ServiceCredentials, handshake_seconds
from tf4slurm.control.messages import (
    HEARTBEAT,
    MAX_STATE_BYTES,
    METHOD,
    SERVICE,
    TOKEN_METADATA,
    DesiredState,
    ObservedState,
    Registration,
    decode,
    encode,
    encode_cluster,
)
from tf4slurm.control.receiver import Receiver
from tf4slurm.control.records import Phase
from tf4slurm.control.state import JobState
from tf4slurm.errors import MessageError, RendezvousClosedError
from tf4slurm.network.ports import HeldPort, hold_port
from tf4slurm.spec.job_spec import JobSpec

if TYPE_CHECKING:  # generic for type checkers only
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[bytes, bytes]

logger = logging.getLogger(__name__)

_OBJECTS_PER_TASK = 100  # Python's default spends a third of a large rendezvous in garbage collection
_TICKS_PER_INTERVAL = 5
_RECENT = 0.25  # part of the heartbeat interval; after messages within it, no heartbeat is requested
_PUBLISH_SECONDS = 0.02  # minimum time between two calls of `_send_changed` that send
_STOP_SECONDS = 0.2  # for calls to end after `close`
_CLOSE_SECONDS = 2.0
_UNAUTHENTICATED_CONNECTIONS = 4096  # in addition to two per task
_OWN_FILES = 128  # pipes and logs of this process; connections and four files per task are added
_MAX_METADATA_BYTES = 4096
_MAX_STREAMS = 2  # per connection; a task uses one
_MAX_READ_BYTES = 32_768  # per connection: with 4,096 clients that flood, memory is 0.8 GB, not 2 GB (grpcio 1.85)
_MAX_DETAIL_CHARACTERS = 900  # of an error, which gRPC sends as metadata


def max_gap_seconds(spec: JobSpec) -> float:
    """Return the longest time in seconds between two readings of the job's clock that does not count as a pause.

    It is at least two ticks, because each tick (a fifth of the heartbeat interval) reads the clock. If possible, it is
    at most half of `JobSpec.reconnect_seconds`, so that tasks have the other half to reconnect after a pause.
    """
    interval = spec.heartbeat_interval_seconds
    return max(2 * interval / _TICKS_PER_INTERVAL, min(interval, spec.reconnect_seconds / 2))


class ControlService:
    """Serves one job until `close`. Call `publish` after a change of `state`, to send it to the tasks.

    Attributes:
        clock: The clock of the job time. All times in `state` are job times.
    """

    def __init__(self, state: JobState, credentials: ServiceCredentials, clock: JobClock | None = None) -> None:
        """`clock` is the clock by which `state` was created. The default is a new clock."""
        self.state = state
        self.receiver = Receiver(state)
        self.credentials = credentials
        self.clock = clock or JobClock(max_gap_seconds(state.spec))
        self._server: grpc.aio.Server | None = None
        self._port: HeldPort | None = None
        self._connections: dict[int, _Connection] = {}
        self._registered: set[int] = set()  # ranks that have registered at least once
        self._ended = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._encoded_cluster: tuple[Cluster | None, bytes] = (None, b"")
        self._next_publication: asyncio.TimerHandle | None = None

    async def start(self, host: str = "") -> int:
        """Start to listen at `host` (default: all addresses of this host). Return the port.

        Raises:
            PortsInUseError: None of the ports in the job's spec is free.
            OSError: This host does not have the address `host`.
        """
        port = await self._start_server(host)
        self.clock.start(self.state.watches.pauses.note)
        self._ticker = asyncio.create_task(self._tick())
        return port

    async def _start_server(self, host: str) -> int:
        """Start the gRPC server, in which `_serve` handles each call. Return the port."""
        num_tasks = len(self.state.tasks)
        gc.set_threshold(max(gc.get_threshold()[0], _OBJECTS_PER_TASK * num_tasks))
        self._server = grpc.aio.server(
            interceptors=(_TokenInterceptor(self.credentials.shared.token),),
            options=_server_options(num_tasks),
        )
        handlers: dict[str, _Handler] = {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._port = hold_port(self.state.spec.service_ports)  # so that no other process of tf4slurm takes this port
        pair = (self.credentials.private_key, self.credentials.shared.certificate.encode())
        address = Address(host or "::", self._port.port)
        try:
            self._server.add_secure_port(str(address), grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"The control service cannot listen at {address}: {error}") from error
        await self._server.start()
        return self._port.port

    async def wait_for_end(self) -> None:
        """Wait until the job's phase is ENDED. The deadlines in `state` ensure that the job reaches it."""
        assert self._ticker is not None
        await self._ticker

    def publish(self) -> None:
        """Send the desired states that have changed, and a new cluster. At the end of the job, end `wait_for_end`, too.

        After each time that something is sent, nothing is sent for 20 ms. Later changes are sent together, which takes
        less processor time.
        """
        if self.state.phase is Phase.ENDED:
            self._ended.set()
        if self._next_publication is None:
            self._send_changed()

    def _send_changed(self) -> None:
        self._next_publication = None
        if changed := self.state.desired.take_changed():
            self._next_publication = asyncio.get_running_loop().call_later(_PUBLISH_SECONDS, self._send_changed)
        for rank in changed:
            if rank in self._connections:
                self._connections[rank].notify()

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await self._stop_server()

    async def _stop_server(self) -> None:
        if self._server is not None:
            # Clients that keep sending can delay gRPC's `stop`.
            await asyncio.wait({asyncio.create_task(self._server.stop(_STOP_SECONDS))}, timeout=_CLOSE_SECONDS)
            # gRPC's own tasks end now: if asyncio.run cancelled them, they would print tracebacks.
            await asyncio.sleep(0)
        if self._port is not None:
            self._port.close()

    async def _tick(self) -> None:
        spec = self.state.spec
        tick_seconds = spec.heartbeat_interval_seconds / _TICKS_PER_INTERVAL
        interval = spec.heartbeat_interval_of(len(self.state.tasks))
        num_batches = round(interval / spec.heartbeat_interval_seconds)
        for tick in itertools.count():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), tick_seconds)
                return
            self.state.on_tick(self.clock.now())
            self.publish()
            if tick % _TICKS_PER_INTERVAL == 0:
                # Batches of every n-th task take a quarter of the processor time of single requests.
                batch = tick // _TICKS_PER_INTERVAL % num_batches
                for rank, connection in self._connections.items():
                    if rank % num_batches == batch:
                        connection.request_heartbeat(_RECENT * interval)

    async def _serve(self, _: AsyncIterator[bytes], context: _Context) -> None:
        rank = await self._register(context)
        if rank is None:
            return
        # No await between the registration and the new `_Connection`: the end of an earlier call in between would count
        # as the end of this one.
        connection = _Connection(self, rank, context)
        if rank in self._registered:
            connection.request_heartbeat()  # a new connection does not reset the heartbeat timeout
        self._registered.add(rank)
        before, self._connections[rank] = self._connections.get(rank), connection
        if before is not None:
            before.close()
        connection.notify()
        self.publish()
        sending = None
        try:
            await context.send_initial_metadata(())  # confirms the registration to the task
            sending = asyncio.create_task(connection.send())
            await self._receive(connection, context)
        except asyncio.CancelledError:
            if self._connections.get(rank) is connection:
                raise  # the connection is lost
            await context.abort(grpc.StatusCode.ABORTED, "the task has made another call")
        except grpc.aio.BaseError:
            raise  # the call has ended
        except Exception as error:  # including bugs: otherwise the task would repeat the message for ever
            if not isinstance(error, MessageError):
                logger.exception("rank %d: a message could not be handled", rank)
            self.receiver.on_rejected(rank, str(error) or repr(error), self.clock.now())
            self.publish()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_MAX_DETAIL_CHARACTERS])
        finally:
            if sending is not None:
                sending.cancel()
            if self._connections.get(rank) is connection:
                del self._connections[rank]
                self.receiver.on_disconnect(rank, self.clock.now())
                self.publish()

    async def _register(self, context: _Context) -> int | None:
        """Register the task that makes this call. Return its rank, or None if the call ends first."""
        payload = await context.read()
        if not isinstance(payload, bytes):
            return None
        try:
            return self.receiver.on_registration(decode(payload, Registration), self.clock.now()).rank
        except RendezvousClosedError as error:
            self.publish()  # a refusal may end the job
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.reason[:_MAX_DETAIL_CHARACTERS])
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_MAX_DETAIL_CHARACTERS])

    async def _receive(self, connection: _Connection, context: _Context) -> None:
        """Handle the messages in this call until the task has terminated or made another call, or this call ends."""
        observed = ObservedState()
        while isinstance(payload := await context.read(), bytes):
            if self._connections.get(connection.rank) is not connection:
                return  # a late message: the task has reconnected
            if payload == HEARTBEAT:
                self.receiver.on_heartbeat(connection.rank, self.clock.now())
                continue
            observed = decode(payload, ObservedState, observed)
            self.receiver.on_observed_state(connection.rank, observed, self.clock.now())
            self.publish()
            if observed.state == "terminated":
                return

    def encoded_cluster(self) -> bytes:
        if self._encoded_cluster[0] is not self.state.cluster:
            assert self.state.cluster is not None
            self._encoded_cluster = (self.state.cluster, encode_cluster(self.state.attempt, self.state.cluster))
        return self._encoded_cluster[1]


class _Connection:
    """Sends desired states and the cluster to one task, in that task's gRPC call."""

    def __init__(self, service: ControlService, rank: int, context: _Context) -> None:
        self.rank = rank
        self._service = service
        self._context = context
        self._handler = asyncio.current_task()
        self._sent_cluster: Cluster | None = None
        self._sent_state = DesiredState()
        self._has_changed = False
        self._is_heartbeat_due = False
        self._is_due = asyncio.Event()
        self._sent_at = 0.0

    def notify(self) -> None:
        self._has_changed = True
        self._is_due.set()

    def request_heartbeat(self, recent_seconds: float = 0.0) -> None:
        """Let `send` send a heartbeat, which the task answers with a heartbeat.

        Do nothing if the last message to the task and the last one from it are both at most `recent_seconds` old.
        """
        record = self._service.state.tasks.get(self.rank)
        last_message_at = record.last_message_at if record is not None else 0.0
        if min(self._sent_at, last_message_at) < self._service.clock.now() - recent_seconds:
            self._is_heartbeat_due = True
            self._is_due.set()

    def close(self) -> None:
        if self._handler is not None:
            self._handler.cancel()

    async def send(self) -> None:
        """Send a message whenever one is due, until the call ends. If the task reads slowly, gRPC delays messages."""
        try:
            while True:
                await self._is_due.wait()
                self._is_due.clear()
                while (payload := self._next_message()) is not None:
                    await self._context.write(payload)
                    self._sent_at = self._service.clock.now()
        except grpc.aio.BaseError as error:
            logger.debug("rank %d: nothing can be sent any more: %s", self.rank, error)  # `_receive` sees the end

    def _next_message(self) -> bytes | None:
        state = self._service.state
        if self._has_changed:
            if state.cluster is not None and state.cluster is not self._sent_cluster:
                self._sent_cluster = state.cluster
                return self._service.encoded_cluster()
            self._has_changed = False
            if (desired := state.desired.of(self.rank)) != self._sent_state:
                self._sent_state = desired
                return encode(desired) if desired.shards else _encode_desired_state(desired)
        if self._is_heartbeat_due:
            self._is_heartbeat_due = False
            return HEARTBEAT
        return None


@functools.lru_cache(maxsize=16)
def _encode_desired_state(desired: DesiredState) -> bytes:
    return encode(desired)


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses each call that does not have the job's token in its metadata, before gRPC reads a message of the call."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_METADATA:
                token = value if isinstance(value, bytes) else value.encode()
                if hmac.compare_digest(token, self._token):
                    return await continuation(handler_call_details)
        return _REFUSE


# A stream handler, because gRPC reads the message of a unary call before the handler runs.
async def _refuse(_: AsyncIterator[bytes], context: _Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")  # no detail, because the client is unauthenticated


_REFUSE: _Handler = grpc.stream_stream_rpc_method_handler(_refuse)


def _server_options(num_tasks: int) -> Sequence[tuple[str, int]]:
    """Return the options of the gRPC server. They limit unauthenticated clients, and save time and bytes.

    With them gRPC closes a connection whose TLS handshake takes too long. It also closes an idle or too old connection
    that has no open call. A task's call lasts as long as its connection, so a task's connection is never closed.
    """
    timeout_ms = round(1000 * handshake_seconds(num_tasks))
    pending = 1000 + 2 * num_tasks
    return (
        ("grpc.max_allowed_incoming_connections", _raise_file_limit(num_tasks)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_receive_message_length", MAX_STATE_BYTES),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", timeout_ms),
        ("grpc.max_connection_idle_ms", timeout_ms),
        # Otherwise a client could keep a connection open by refused calls. Open calls continue without a time limit.
        ("grpc.max_connection_age_ms", timeout_ms),
        ("grpc.experimental.tcp_max_read_buffer_size", _MAX_READ_BYTES),
        # By default 1,000, but all tasks may connect at the same time.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", 2 * pending),
        ("grpc.so_reuseport", 1),  # because another socket of this process holds the port
        ("grpc.http2.bdp_probe", 0),  # no bandwidth measurement: its pings are half of the traffic in steady state
    )


def _raise_file_limit(num_tasks: int) -> int:
    """Raise this process's limit of open files if necessary. Return how many connections gRPC may accept.

    gRPC must refuse further connections, so that this process can still open files.
    """
    connections, own = _UNAUTHENTICATED_CONNECTIONS + 2 * num_tasks, _OWN_FILES + 4 * num_tasks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= connections + own:
        return connections
    most = connections + own if hard == resource.RLIM_INFINITY else min(connections + own, hard)
    if most < 2 * num_tasks + own:
        logger.warning(
            "a limit of %d open files is low for %d tasks: raise the hard limit (ulimit -Hn)", most, num_tasks
        )
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(2 * num_tasks, most - own)
