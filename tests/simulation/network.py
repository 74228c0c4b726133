"""The simulated network: the calls of clients to the control service, message by message.

A connection keeps the order of its messages in each direction, as TCP does. Messages take a random time. They wait
while one of the hosts is cut off, and are lost if the connection breaks before they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio

from tests.simulation.world import Handle, Process
from tf4slurm.cluster import Address
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import Credentials
from tf4slurm.control.messages import is_encoded_cluster
from tf4slurm.control.service import ControlService

_REFUSED = (grpc.StatusCode.UNAVAILABLE, "connection refused")
_RESET = (grpc.StatusCode.UNAVAILABLE, "connection reset")
_OK = (grpc.StatusCode.OK, "")
_Status = tuple[grpc.StatusCode, str]


@dataclass
class Host:
    """A host of the job.

    Attributes:
        is_lost: The host has no power: no message leaves it, not even the end of a connection.
        cuts_in, cuts_out: Number of partitions that stop messages to this host, and from it.
    """

    name: str
    address: str
    is_lost: bool = False
    cuts_in: int = 0
    cuts_out: int = 0
    num_ports: int = 0

    @property
    def is_cut(self) -> bool:
        return bool(self.is_lost or self.cuts_in or self.cuts_out)

    def next_port(self) -> int:
        self.num_ports += 1
        return 4000 + self.num_ports


class Network:
    """All connections of a job."""

    def __init__(self, latency: Callable[[], float]) -> None:
        self.latency = latency
        self.service: SimulatedService | None = None
        self.connections: list[Connection] = []
        self.largest_message = 0
        self.clusters: set[bytes] = set()
        self.on_cluster: Callable[[bytes], None] = lambda _: None

    def heal(self) -> None:
        """Deliver what has waited, where no host is cut off any more."""
        for connection in self.connections:
            connection.to_client.flush()
            connection.to_server.flush()

    def end_of(self, process: Process) -> None:
        """Close the connections of a process that has ended."""
        for connection in self.connections:
            if connection.client is process:
                connection.to_server.send(("broken", _RESET))
            elif connection.server is process:
                connection.to_client.send(("broken", _RESET))


@dataclass
class _Direction:
    """One direction of a connection: messages to the process `receiver`, in order."""

    network: Network
    source: Host
    target: Host
    receiver: Process
    deliver: Callable[[Any], None]
    arrives_at: float = 0.0
    waiting: deque[Any] = field(default_factory=deque)
    in_flight: list[Handle] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        source, target = self.source, self.target
        return source is not target and bool(source.is_lost or target.is_lost or source.cuts_out or target.cuts_in)

    def send(self, message: Any) -> None:
        if self.is_cut or self.waiting:
            self.waiting.append(message)
        else:
            self._send(message)

    def _send(self, message: Any) -> None:
        self.arrives_at = max(self.arrives_at, self.receiver.world.now + self.network.latency())
        self.in_flight = [handle for handle in self.in_flight if handle.at > self.receiver.world.now]
        self.in_flight.append(self.receiver.at(self.arrives_at, self.deliver, message))

    def flush(self) -> None:
        if not self.is_cut:
            while self.waiting:
                self._send(self.waiting.popleft())

    def drop(self) -> None:
        """Lose the messages that have not arrived."""
        self.waiting.clear()
        for handle in self.in_flight:
            if handle.at > self.receiver.world.now:
                handle.cancel()


class Connection:
    """One connection with one call, from the client's first message to its end."""

    def __init__(self, network: Network, client: Process, host: Host, service: SimulatedService) -> None:
        self.client = client
        self.server = service.process
        self.call = Call(self, client)
        self.context = Context(self, service)
        self.to_server = _Direction(network, host, service.host, service.process, self.context.receive)
        self.to_client = _Direction(network, service.host, host, client, self.call.receive)

    def break_now(self) -> None:
        """Lose all messages that have not arrived, and tell both ends, where they can be reached."""
        for direction in (self.to_server, self.to_client):
            direction.drop()
            direction.send(("broken", _RESET))


class _End:
    """One end of a call: the messages that were received, and the status at the end."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.inbox: deque[bytes] = deque()
        self.status: _Status | None = None
        self.has_metadata = False
        self._waiters: list[asyncio.Future[None]] = []

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = self.process.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Call(_End):
    """The client's end, with the methods of `grpc.aio.StreamStreamCall` that `ControlClient` uses."""

    def __init__(self, connection: Connection, process: Process) -> None:
        super().__init__(process)
        self._connection = connection

    def receive(self, message: Any) -> None:
        kind, content = message
        if self.status is not None:
            return
        if kind == "data":
            self.inbox.append(content)
        elif kind == "metadata":
            self.has_metadata = True
        else:
            self.status = content
        self._wake()

    def _error(self) -> grpc.aio.AioRpcError:
        assert self.status is not None
        code, details = self.status
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)

    async def write(self, payload: bytes) -> None:
        if self.status is not None:
            if self.status[0] is grpc.StatusCode.OK:
                raise asyncio.InvalidStateError("the call has ended")
            raise self._error()
        self._connection.to_server.send(("data", payload))

    async def read(self) -> Any:
        while not self.inbox:
            if self.status is not None:
                if self.status[0] is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self._error()
            await self._wait()
        return self.inbox.popleft()

    async def initial_metadata(self) -> None:
        while not self.has_metadata and self.status is None:
            await self._wait()

    async def wait_for_connection(self) -> None:
        if self.status is not None and self.status[0] is not grpc.StatusCode.OK:
            raise self._error()

    def cancel(self) -> None:
        if self.status is None:
            self.status = (grpc.StatusCode.CANCELLED, "")
            if not self.process.is_dead:
                self._connection.to_server.send(("broken", _RESET))


class Context(_End):
    """The service's end, with the methods of `grpc.aio.ServicerContext` that `ControlService` uses."""

    def __init__(self, connection: Connection, service: SimulatedService) -> None:
        super().__init__(service.process)
        self._connection = connection
        self._service = service
        self._handler: asyncio.Task[None] | None = None
        self._abortion: _Status | None = None

    def receive(self, message: Any) -> None:
        kind, content = message
        if kind == "broken":
            if self.status is None:
                self.status = content
                self.inbox.clear()
                if self._handler is not None:
                    self._handler.cancel()
            return
        if self.status is not None:
            return
        if self._handler is None:
            if not self._service.is_open:
                self.status = _REFUSED
                self._connection.to_client.send(("end", _REFUSED))
                return
            serving = self._service._serve(cast(Any, None), cast(Any, self))
            self._handler = self.process.create_task(serving)
            self._handler.add_done_callback(self._end)
        self.inbox.append(content)
        self._wake()

    def _end(self, handler: asyncio.Task[None]) -> None:
        if self.status is not None:
            if not handler.cancelled():
                handler.exception()
            return
        if handler.cancelled():
            status: _Status = (grpc.StatusCode.CANCELLED, "")
        elif (error := handler.exception()) is None:
            status = _OK
        elif self._abortion is not None:
            status = self._abortion
        else:
            status = (grpc.StatusCode.UNKNOWN, repr(error))
            self.process.world.errors.append(f"a handler of the service has failed: {error!r}")
        self.status = status
        self._connection.to_client.send(("end", status))

    async def read(self) -> Any:
        while not self.inbox:
            if self.status is not None:
                return grpc.aio.EOF
            await self._wait()
        return self.inbox.popleft()

    async def write(self, payload: bytes) -> None:
        if self.status is not None:
            raise grpc.aio.UsageError("the call has ended")
        network = self._connection.to_client.network
        network.largest_message = max(network.largest_message, len(payload))
        if is_encoded_cluster(payload) and payload not in network.clusters:  # not one that is sent again
            network.clusters.add(payload)
            network.on_cluster(payload)
        self._connection.to_client.send(("data", payload))

    async def send_initial_metadata(self, _: Any) -> None:
        if self.status is not None:
            raise grpc.aio.UsageError("the call has ended")
        self._connection.to_client.send(("metadata", None))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._abortion = (code, details)
        raise grpc.aio.AbortError("aborted")


class SimulatedClient(ControlClient):
    """The client of a simulated agent: gRPC's channel is a `Connection`."""

    network: Network
    process: Process
    host: Host

    @contextlib.asynccontextmanager
    async def _open_call(self, address: Address, credentials: Credentials) -> AsyncIterator[Any]:
        service = self.network.service
        assert service is not None
        connection = Connection(self.network, self.process, self.host, service)
        connections = self.network.connections
        connections.append(connection)
        connection.to_server.arrives_at = self.process.world.now + 2 * self.network.latency()  # the handshake
        if service.process.is_dead:
            connection.to_client.send(("end", _REFUSED))  # by the kernel of its host
        try:
            yield connection.call
        finally:
            connection.call.cancel()


class SimulatedService(ControlService):
    """The control service of a simulated job: gRPC's server is a `Network`."""

    network: Network
    process: Process
    host: Host
    is_open = False

    async def _start_server(self, host: str) -> int:
        self.network.service, self.is_open = self, True
        return 4000

    async def _stop_server(self) -> None:
        self.is_open = False
        self.network.end_of(self.process)
