"""A task's end of the control plane: one gRPC call, made again when it breaks, until the launcher counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tf4slurm.cluster import Address
from tf4slurm.control.access import handshake_seconds
from tf4slurm.control.credentials import TLS_NAME, Credentials
from tf4slurm.control.messages import (
    HEARTBEAT,
    METHOD,
    SERVICE,
    TOKEN_METADATA,
    DesiredState,
    Map,
    ObservedState,
    Registration,
    ScriptState,
    Usage,
    decode,
    decode_map,
    encode,
    is_encoded_map,
    shrink,
)
from tf4slurm.errors import MessageError, RendezvousClosedError, RendezvousConnectionError
from tf4slurm.spec import JobSpec
from tf4slurm.system.background import in_thread

if TYPE_CHECKING:  # generic for type checkers only
    _Call = grpc.aio.StreamStreamCall[bytes, bytes]

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_CHECKS = 4  # per heartbeat timeout
_GOODBYE_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 16 * 2**20  # more than the cluster spec of 100,000 tasks
_OPTIONS = (
    ("grpc.ssl_target_name_override", TLS_NAME),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # each try is a new connection, without the backoff of the one before
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.http2.bdp_probe", 0),
)


class Membership:
    """The membership of one task.

    Run `run()` as a task; it ends when the service has accepted that this task leaves, and raises when the service
    refuses this task or is lost. `order` and `map` are the latest that the service sent; `wait_for_change` waits for
    the next.
    """

    def __init__(
        self,
        find_service: Callable[[], tuple[Sequence[Address], Credentials | None]],
        make_hello: Callable[[Address], Registration],
        *,
        heartbeat_timeout_seconds: float,
        join_seconds: float,
        num_tasks: int = 1,
    ) -> None:
        """Create a membership that has not begun.

        Args:
            find_service: Returns where the service may listen, and the job's credentials; called before each try, in a
                thread, because it may read a file.
            make_hello: Returns the first message for the service at an address; not called again once it is accepted.
                Called in a thread, because it may look up a name.
            heartbeat_timeout_seconds: Heartbeat timeout: the launcher is lost after so many seconds without a message.
            join_seconds: How long the service is looked for.
            num_tasks: How many tasks the job has; a service of many gets more time to answer.
        """
        self.order = DesiredState()
        self.encoded_map = b""
        self._map: Map | None = None
        self.status = ObservedState()
        self._find_service = find_service
        self._make_hello = make_hello
        self._hello: Registration | None = None
        self._last_address: Address | None = None
        self._dead_after_seconds = heartbeat_timeout_seconds
        self._connect_seconds = handshake_seconds(num_tasks)
        self._deadline = time.monotonic() + join_seconds
        self._changed = asyncio.Event()
        self._is_due = asyncio.Event()
        self._is_heartbeat_due = False
        self._sent = ObservedState()
        self._disconnected_at = float("inf")

    @property
    def map(self) -> Map | None:
        """The cluster spec of the latest attempt; None before the first."""
        if self._map is None and self.encoded_map:
            self._map = decode_map(self.encoded_map)
        return self._map

    @property
    def service_address(self) -> Address | None:
        """The address at which the service last registered this task."""
        return self._last_address

    def report(self, **changes: Any) -> None:
        """Change fields of `status` and send it; without a connection, as soon as there is one again."""
        self.status = dataclasses.replace(self.status, **changes)
        self._is_due.set()

    def mention(self, usage: Usage) -> None:
        """Change what the child uses; it is sent with the next heartbeat."""
        self.status = dataclasses.replace(self.status, usage=usage)

    def note(self, report: ScriptState) -> None:
        """Change the script's report; a new step or metric is sent with the next heartbeat, all else at once."""
        before, self.status = self.status, dataclasses.replace(self.status, report=report)
        if dataclasses.replace(report, step=before.report.step, metrics=before.report.metrics) != before.report:
            self._is_due.set()

    def begin_attempt(self, attempt: int, **changes: Any) -> None:
        """Reset the status for another attempt."""
        self.status = ObservedState(attempt=attempt, stop_signal=self.status.stop_signal)
        self.report(**changes)

    async def wait_for_change(self) -> None:
        """Wait until the service sends another order or cluster spec, or has registered this task."""
        await self._changed.wait()
        self._changed.clear()

    async def run(self) -> None:
        """Be a member until this task has left.

        A task that leaves waits for a lost service for `JobSpec.reconnect_seconds` only: then it counts as gone itself.

        Raises:
            RendezvousClosedError: The service refuses this task.
            RendezvousConnectionError: No service answers in time, or it sent nothing for the heartbeat timeout.
            AuthenticationError: `find_service` cannot open the credentials.
        """
        at = error = ""
        while time.monotonic() < self._deadline:
            addresses, credentials = await self._find_in_time()
            for address in sorted(addresses, key=lambda address: address != self._last_address):
                if (left := self._deadline - time.monotonic()) <= 0 or credentials is None:
                    break
                try:
                    if await self._connect(address, credentials, min(self._connect_seconds, left)):
                        return
                    reason, is_cut_short = "it sent nothing for the heartbeat timeout", False
                except RendezvousClosedError:
                    if self.status.state == "terminated":
                        return  # `terminated` was sent on the previous connection, and this refusal confirms it
                    raise
                except (MessageError, OSError, asyncio.TimeoutError) as failure:
                    reason = str(failure) or "it does not answer"
                    is_cut_short = isinstance(failure, asyncio.TimeoutError) and left < self._connect_seconds
                    logger.debug("no connection to the control service at %s: %s", address, reason)
                if not (error and is_cut_short):  # keep the earlier error if this try had too little time
                    at, error = str(address), reason
            patience = JobSpec.reconnect_seconds if addresses else 0
            if self.status.state == "terminated" and time.monotonic() - self._disconnected_at > patience:
                return
            await asyncio.sleep(_RETRY_SECONDS)
        raise RendezvousConnectionError(
            f"The launcher is gone, or was never there: no control service answers at {at or 'any address'} "
            f"({error or 'no address is known yet'}). Look at the launcher's own output.",
            address=at,
        )

    async def _find_in_time(self) -> tuple[Sequence[Address], Credentials | None]:
        """Return what `find_service` finds; nothing if it waits for a file system until the deadline."""
        try:
            return await asyncio.wait_for(in_thread(self._find_service), self._deadline - time.monotonic())
        except asyncio.TimeoutError:
            return (), None

    async def _connect(self, address: Address, credentials: Credentials, connect_seconds: float) -> bool:
        """Make one call and serve it to its end; return whether this task has left.

        Raises:
            RendezvousClosedError: The service refuses this task for good.
            OSError: There is no connection, or not any more, or the service has another token.
            asyncio.TimeoutError: The service does not answer.
            MessageError: The service sent something else than a message.
        """
        hello = self._hello
        if hello is None:
            hello = await asyncio.wait_for(in_thread(self._make_hello, address), connect_seconds)
        tls = grpc.ssl_channel_credentials(credentials.certificate.encode())
        metadata = ((TOKEN_METADATA, credentials.token),)
        async with grpc.aio.secure_channel(_target(address), tls, options=_OPTIONS) as channel:
            call: _Call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=metadata)
            try:
                await asyncio.wait_for(self._register(call, hello, address), connect_seconds)
                return await self._serve(call)
            except grpc.aio.AioRpcError as error:
                raise _translate(error, address) from error
            finally:
                call.cancel()

    async def _register(self, call: _Call, hello: Registration, address: Address) -> None:
        """Send the hello; TLS makes sure that only a service with the job's certificate gets it."""
        await call.write(encode(hello))
        await call.initial_metadata()  # the service sends it when it has registered this task
        await call.wait_for_connection()  # raises if the call has ended instead
        self._hello, self._last_address = hello, address
        self._deadline = min(self._deadline, time.monotonic() + self._dead_after_seconds)
        self._changed.set()

    async def _serve(self, call: _Call) -> bool:
        """Send and receive until the call ends; return whether this task has left, or False if the service is lost."""
        self._sent, self._is_heartbeat_due = ObservedState(), False
        self._is_due.set()
        receiving = asyncio.create_task(self._receive(call))
        sending = asyncio.create_task(self._send(call))
        watching = asyncio.create_task(self._wait_for_silence())
        tasks = (receiving, sending, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not watching.done():  # after `terminated`, or a write error
                await asyncio.wait({receiving}, timeout=_GOODBYE_SECONDS)
            if receiving.done():
                receiving.result()
                if self._sent.state == "terminated":
                    return True
            if time.monotonic() >= self._deadline:
                return False
            raise ConnectionError("the control service closed the connection")
        finally:
            self._disconnected_at = time.monotonic()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, call: _Call) -> None:
        while isinstance(payload := await call.read(), bytes):
            if payload == HEARTBEAT:
                self._is_heartbeat_due = True
                self._is_due.set()
            elif is_encoded_map(payload):
                self.encoded_map, self._map = payload, None
                self._changed.set()
            else:
                self.order = decode(payload, DesiredState)
                self._changed.set()
            self._deadline = time.monotonic() + self._dead_after_seconds

    async def _send(self, call: _Call) -> None:
        """Send the status whenever it has changed, and a heartbeat when it is requested, until this task has left."""
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError
        ):  # the call ended: `_receive` raises its error
            while self._sent.state != "terminated":
                await self._is_due.wait()
                self._is_due.clear()
                if self.status != self._sent:
                    self.status = shrink(self.status)
                    payload = encode(self.status, self._sent)
                    self._sent, self._is_heartbeat_due = self.status, False
                    await call.write(payload)
                elif self._is_heartbeat_due:
                    self._is_heartbeat_due = False
                    await call.write(HEARTBEAT)

    async def _wait_for_silence(self) -> None:
        """Return when the service has sent nothing for the heartbeat timeout.

        Time in which this process did not run (the whole job was suspended) does not count.
        """
        while (left := self._deadline - time.monotonic()) > 0:
            pause = min(left, self._dead_after_seconds / _CHECKS)
            due = time.monotonic() + pause
            await asyncio.sleep(pause)
            now = time.monotonic()
            self._deadline = min(self._deadline + now - due, now + self._dead_after_seconds)


def _target(address: Address) -> str:
    """Return gRPC's name of an address, which lets it look nothing up that is an address already."""
    try:
        return f"ipv{ipaddress.ip_address(address.host.partition('%')[0]).version}:{address}"
    except ValueError:
        return f"dns:{address}"


def _translate(error: grpc.aio.AioRpcError, address: Address) -> Exception:
    """Return the error that the end of a call means."""
    code, reason = error.code(), (error.details() or "").removesuffix(".")
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
        return RendezvousClosedError(f"The control service at {address} refused this task: {reason}.", reason=reason)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return ConnectionError(f"The control service at {address} does not accept this job's token.")
    return ConnectionError(f"{code.name}: {reason}")
