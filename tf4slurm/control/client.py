"""A task's client of the control service.

The client makes one gRPC call, which lasts as long as the connection. After a broken connection it makes the call
again, until the service refuses this task or has sent nothing for the heartbeat timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.clock import JobClock
from tf4slurm.control.credentials import TLS_NAME, ControlEndpoint, Credentials, handshake_seconds
from tf4slurm.control.messages import (
    HEARTBEAT,
    METHOD,
    SERVICE,
    TOKEN_METADATA,
    DesiredState,
    ObservedState,
    Registration,
    ScriptState,
    Usage,
    decode,
    decode_cluster,
    encode,
    is_encoded_cluster,
    shrink,
)
from tf4slurm.errors import MessageError, RendezvousClosedError, RendezvousConnectionError
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.threads import in_thread

if TYPE_CHECKING:  # generic for type checkers only
    _Call = grpc.aio.StreamStreamCall[bytes, bytes]

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_CHECKS = 4  # time without a reading of the clock is a pause from `launcher_loss_seconds` / 4 on
_END_OF_CALL_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 16 * 2**20  # more than the cluster spec of 100,000 tasks
_OPTIONS = (
    ("grpc.ssl_target_name_override", TLS_NAME),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # each attempt is a new connection, without the previous one's backoff
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.http2.bdp_probe", 0),
)


class ControlClient:
    """One task's client of the control service.

    Run `run()` as an asyncio task. `wait_for_change` waits for new data from the service.

    Attributes:
        desired: The latest desired state from the service.
        observed: The state of this task. Change it with `update` and `begin_attempt`.
        exited_at: Monotonic time in seconds when the last child exited. None while a child runs, and before the first.
            The client sends how long ago that was, because the clocks of hosts differ.
        cluster: The latest cluster from the service. None before the first.
        cluster_attempt: The attempt that formed `cluster`. 0 without a cluster.
        service_address: The address of the service where this task last registered. None before the registration.
        token: The job's token. Empty until `find_service` has returned it.
    """

    def __init__(
        self,
        find_service: Callable[[], ControlEndpoint | None],
        make_registration: Callable[[Address], Registration],
        spec: JobSpec,
        num_tasks: int = 1,
    ) -> None:
        """Create a client that is not connected yet.

        Args:
            find_service: Returns the service's addresses and credentials, or None while they are unknown. Called in a
                thread before each connection, because it may read a file.
            make_registration: Returns the registration for a service at the given address. Called in a thread, because
                it may resolve a name. After the service has accepted the result, each later call sends the same one.
            num_tasks: Number of tasks of the job. The time limit to connect and register grows with it.
        """
        self.desired = DesiredState()
        self.observed = ObservedState()
        self.exited_at: float | None = None
        self.cluster: Cluster | None = None
        self.cluster_attempt = 0
        self.service_address: Address | None = None
        self.token = ""
        self._find_service = find_service
        self._make_registration = make_registration
        self._registration: Registration | None = None
        self._spec = spec
        self._connect_seconds = handshake_seconds(num_tasks)
        self._clock: JobClock  # set by `run`
        self._deadline = float("inf")
        self._changed = asyncio.Event()
        self._is_due = asyncio.Event()
        self._is_heartbeat_due = False
        self._sent = ObservedState()
        self._disconnected_at = float("inf")

    def update(self, **changes: Any) -> None:
        """Change fields of `observed`. They are sent at once or, while there is no connection, after the reconnect."""
        self.observed = dataclasses.replace(self.observed, **changes)
        self._is_due.set()

    def update_usage(self, usage: Usage) -> None:
        """Set the child's resource usage. It is sent with the next heartbeat or change of `observed`."""
        self.observed = dataclasses.replace(self.observed, usage=usage)

    def update_script(self, script: ScriptState) -> None:
        """Set the state of the script, and send it. If only its progress differs, send it with the next heartbeat."""
        before = self.observed.script
        progress = {name: getattr(before, name) for name in ("step", "steps_per_second", "metrics")}
        self.observed = dataclasses.replace(self.observed, script=script)
        if dataclasses.replace(script, **progress) != before:
            self._is_due.set()

    def begin_attempt(self, attempt: int, **changes: Any) -> None:
        """Send the first observed state of an attempt: the default with `changes` and with the last stop signal."""
        self.exited_at = None
        self.observed = ObservedState(attempt=attempt, stop_signal=self.observed.stop_signal)
        self.update(**changes)

    async def wait_for_change(self) -> None:
        """Wait until the service sends a desired state or a cluster, or accepts a registration.

        Return at once if that has happened since the last call.
        """
        await self._changed.wait()
        self._changed.clear()

    async def run(self) -> None:
        """Register this task, and exchange states with the service until this task has terminated.

        A task that has terminated waits for the service's confirmation. If the connection breaks before that, the
        method tries to reconnect for `JobSpec.reconnect_seconds`, and then returns. After this time the service counts
        the task as lost.

        Raises:
            RendezvousClosedError: The service refuses this task.
            RendezvousConnectionError: No service accepts this task within the start timeout, or later the service sends
                nothing for the heartbeat timeout.
            AuthenticationError: `find_service` cannot open the credentials.
        """
        self._clock = JobClock(self._spec.launcher_loss_seconds / _CHECKS, asyncio.get_running_loop().time)
        self._clock.start()
        keeping_time = asyncio.create_task(self._keep_time())
        try:
            await self._run()
        finally:
            keeping_time.cancel()

    async def _keep_time(self) -> None:
        """Read the clock regularly, so that it notices and leaves out pauses of this process."""
        while True:
            await asyncio.sleep(self._spec.launcher_loss_seconds / _CHECKS / 2)
            self._now()

    def _now(self) -> float:
        return self._clock.now()

    @property
    def paused_seconds(self) -> float:
        """The time in seconds for which this process was paused since `run` was called. No deadline includes it."""
        return self._clock.paused_seconds

    async def _run(self) -> None:
        at = error = ""
        start_deadline = self._deadline = self._now() + self._spec.start_timeout_seconds
        while self._now() < self._deadline:
            endpoint = await self._find_in_time()
            addresses = endpoint.addresses if endpoint is not None else ()
            for address in sorted(addresses, key=lambda address: address != self.service_address):
                if endpoint is None or (left := self._deadline - self._now()) <= 0:
                    break
                try:
                    if await self._connect(address, endpoint.credentials, min(self._connect_seconds, left)):
                        return
                    says_less = self._deadline == start_deadline
                    limit = "until the start timeout" if says_less else "for the heartbeat timeout"
                    reason = f"it sent nothing {limit}"
                except RendezvousClosedError:
                    if self.observed.state == "terminated":
                        return  # `terminated` was sent on the previous connection, and this refusal confirms it
                    raise
                except (MessageError, OSError, asyncio.TimeoutError) as failure:
                    reason = str(failure) or "it does not answer"
                    is_cut_short = isinstance(failure, asyncio.TimeoutError) and left < self._connect_seconds
                    says_less = is_cut_short or isinstance(failure, _GrpcInternalError)
                    logger.debug("no connection to the control service at %s: %s", address, reason)
                if not (error and says_less):  # an earlier reason stays
                    at, error = str(address), reason
            patience = self._spec.reconnect_seconds if addresses else 0
            if self.observed.state == "terminated" and self._now() - self._disconnected_at > patience:
                return
            await asyncio.sleep(_RETRY_SECONDS)
        raise RendezvousConnectionError(
            f"The launcher has ended or was not started: the control service cannot be reached at "
            f"{at or 'any address'} ({error or 'no address is known yet'}). See the launcher's output.",
            address=at,
        )

    async def _find_in_time(self) -> ControlEndpoint | None:
        """Return the result of `find_service`, or None if it has no result at the deadline: a file system may stall."""
        try:
            endpoint = await asyncio.wait_for(in_thread(self._find_service), self._deadline - self._now())
        except asyncio.TimeoutError:
            return None
        if endpoint is not None:
            self.token = endpoint.credentials.token
        return endpoint

    async def _connect(self, address: Address, credentials: Credentials, connect_seconds: float) -> bool:
        """Open a call to the service, register in it, and exchange messages until it ends.

        Returns:
            True if this task has terminated, False if the service sent nothing until `_deadline`.
        """
        registration = self._registration
        if registration is not None and self.desired.rank is not None:
            registration = dataclasses.replace(registration, joined_rank=self.desired.rank)
        if registration is None:
            registration = await asyncio.wait_for(in_thread(self._make_registration, address), connect_seconds)
        try:
            async with self._open_call(address, credentials) as call:
                await asyncio.wait_for(self._register(call, registration, address), connect_seconds)
                return await self._serve(call)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, address) from error

    @contextlib.asynccontextmanager
    async def _open_call(self, address: Address, credentials: Credentials) -> AsyncIterator[_Call]:
        """Connect to the service and call its method. Cancel the call and disconnect at the end of the block."""
        tls = grpc.ssl_channel_credentials(credentials.certificate.encode())
        metadata = ((TOKEN_METADATA, credentials.token),)
        async with grpc.aio.secure_channel(_target(address), tls, options=_OPTIONS) as channel:
            call: _Call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=metadata)
            try:
                yield call
            finally:
                call.cancel()

    async def _register(self, call: _Call, registration: Registration, address: Address) -> None:
        await call.write(encode(registration))  # over TLS, so that only the job's own service receives it
        await call.initial_metadata()  # the service sends them after it has registered this task
        await call.wait_for_connection()  # raises if the call has ended instead
        self._registration, self.service_address = registration, address
        self._deadline = min(self._deadline, self._now() + self._spec.launcher_loss_seconds)
        self._changed.set()

    async def _serve(self, call: _Call) -> bool:
        """Exchange messages in a call until it ends.

        Returns:
            True if this task has terminated, False if the service sent nothing until `_deadline`.

        Raises:
            ConnectionError: The service has closed the connection.
        """
        self._sent = ObservedState()
        self._is_heartbeat_due = False
        self._is_due.set()
        receiving = asyncio.create_task(self._receive(call))
        sending = asyncio.create_task(self._send(call))
        try:
            await self._wait_for_one(receiving, sending)
            if sending.done():  # after `terminated`, or a write error
                await asyncio.wait({receiving}, timeout=_END_OF_CALL_SECONDS)
            if receiving.done():
                receiving.result()
                if self._sent.state == "terminated":
                    return True
            if self._now() >= self._deadline:
                return False
            raise ConnectionError("the control service closed the connection")
        finally:
            self._disconnected_at = self._now()
            receiving.cancel()
            sending.cancel()
            await asyncio.gather(receiving, sending, return_exceptions=True)

    async def _wait_for_one(self, *tasks: asyncio.Task[None]) -> None:
        """Wait until one of the asyncio tasks is done, at most until `_deadline`, which each received message moves."""
        while (left := self._deadline - self._now()) > 0:
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return

    async def _receive(self, call: _Call) -> None:
        while isinstance(payload := await call.read(), bytes):
            if payload == HEARTBEAT:
                self._is_heartbeat_due = True
                self._is_due.set()
            elif is_encoded_cluster(payload):
                self.cluster_attempt, self.cluster = decode_cluster(payload)
                self._changed.set()
            else:
                self.desired = decode(payload, DesiredState)
                self._changed.set()
            self._deadline = self._now() + self._spec.launcher_loss_seconds

    async def _send(self, call: _Call) -> None:
        # If the call has ended, `_receive` raises its error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while self._sent.state != "terminated":
                await self._is_due.wait()
                self._is_due.clear()
                if self.observed != self._sent:
                    age = 0.0 if self.exited_at is None else asyncio.get_running_loop().time() - self.exited_at
                    self.observed = shrink(dataclasses.replace(self.observed, exit_age_seconds=round(age, 4)))
                    payload = encode(self.observed, self._sent)
                    self._sent = self.observed
                    self._is_heartbeat_due = False
                    await call.write(payload)
                elif self._is_heartbeat_due:
                    self._is_heartbeat_due = False
                    await call.write(HEARTBEAT)


class _GrpcInternalError(ConnectionError):
    """A call failed in gRPC itself, which replaces the service's status if the call ends during a write."""


def _target(address: Address) -> str:
    """Return gRPC's target for an address. "ipv4:" or "ipv6:" before an IP address avoids a name lookup."""
    try:
        return f"ipv{ipaddress.ip_address(address.host.partition('%')[0]).version}:{address}"
    except ValueError:
        return f"dns:{address}"


def _translate(error: grpc.aio.AioRpcError, address: Address) -> Exception:
    code, reason = error.code(), (error.details() or "").removesuffix(".")
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
        return RendezvousClosedError(f"The control service at {address} refused this task: {reason}.", reason=reason)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return ConnectionError(f"The control service at {address} does not accept this job's token.")
    error_type = _GrpcInternalError if code == grpc.StatusCode.INTERNAL else ConnectionError
    return error_type(f"{code.name}: {reason}")
