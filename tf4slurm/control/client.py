"""A task's end of the control plane: one stream, made again when it breaks, until the launcher counts as dead."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tf4slurm.cluster import Address
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
    Report,
    Status,
    Usage,
    decode,
    encode,
    is_packed_map,
    unpack_map,
)
from tf4slurm.errors import AuthenticationError, MessageError, RendezvousClosedError, RendezvousConnectionError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_GOODBYE_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 16 * 2**20  # more than the map of 100,000 tasks
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
)
_Call = Any  # grpc.aio.StreamStreamCall: grpcio ships no types


class Membership:
    """The membership of one task.

    Run `run()` as a task; it ends when the launcher has taken note of the leave, and raises when the launcher refuses
    this task or is gone. `order` and `map` (`packed_map` as it came) are what the launcher said last;
    `wait_for_change` waits for the next.
    """

    def __init__(
        self,
        find_service: Callable[[], tuple[Sequence[Address], str]],
        make_hello: Callable[[Address], Hello],
        *,
        dead_after_seconds: float,
        join_seconds: float,
        num_tasks: int = 1,
    ) -> None:
        """`find_service()` tells where the service may listen, and the secret; it is asked before each try.

        `make_hello(address)` is asked once, with the address of the service that proved itself first. A service of many
        tasks (`num_tasks`) is given more time to answer.
        """
        self.order = Order()
        self.packed_map = b""
        self._map: Map | None = None
        self.status = Status()
        self._find_service = find_service
        self._make_hello = make_hello
        self._hello: Hello | None = None
        self._at = ""
        self._dead_after_seconds = dead_after_seconds
        self._connect_seconds = handshake_seconds(num_tasks)
        self._deadline = time.monotonic() + join_seconds
        self._changed = asyncio.Event()
        self._woken = asyncio.Event()
        self._is_asked = False

    @property
    def map(self) -> Map | None:
        """The agreed cluster of the latest attempt; None before the first."""
        if self._map is None and self.packed_map:
            self._map = unpack_map(self.packed_map)
        return self._map

    def report(self, **changes: Any) -> None:
        """Change fields of `status` and tell the launcher; on a broken connection, as soon as there is one again."""
        self.status = dataclasses.replace(self.status, **changes)
        self._woken.set()

    def mention(self, usage: Usage) -> None:
        """Change what the child uses; it goes out when the service asks next."""
        self.status = dataclasses.replace(self.status, usage=usage)

    def note(self, report: Report) -> None:
        """Change the script's report; what is only progress goes out when the service asks next."""
        before, self.status = self.status, dataclasses.replace(self.status, report=report)
        if dataclasses.replace(report, step=before.report.step, metrics=before.report.metrics) != before.report:
            self._woken.set()

    def begin_attempt(self, attempt: int, **changes: Any) -> None:
        """Forget what was of the last attempt."""
        self.status = Status(attempt=attempt, stop_signal=self.status.stop_signal)
        self.report(**changes)

    async def wait_for_change(self) -> None:
        """Wait until this task has joined, or the launcher has said something new, since the last call."""
        await self._changed.wait()
        self._changed.clear()

    async def run(self) -> None:
        """Be a member until this task has left.

        Raises:
            RendezvousClosedError: The service refuses this task.
            RendezvousConnectionError: No service answers in time, or it has been silent for the dead time.
        """
        grpc.aio.init_grpc_aio()  # for good: its shutdown at the last object's end has been seen to hang
        at, error = "", "no address is known yet"
        while (left := self._deadline - time.monotonic()) > 0:
            addresses, secret = self._find_service()
            for address in addresses:
                at, error = str(address), "it fell silent"
                try:
                    if await self._serve(address, secret, min(self._connect_seconds, left)):
                        return
                except (AuthenticationError, MessageError, OSError, asyncio.TimeoutError) as failure:
                    error = str(failure) or type(failure).__name__
                    logger.debug("no connection to the control service at %s: %s", at, error)
            await asyncio.sleep(_RETRY_SECONDS)
        raise RendezvousConnectionError(
            f"The launcher is gone, or was never there: no control service answers at {at or 'any address'} "
            f"({error}). Look at the launcher's own output.",
            address=at,
        )

    async def _serve(self, address: Address, secret: str, connect_seconds: float) -> bool:
        """Connect once and serve that connection to its end; return whether the leave was told, or raise."""
        self._at = str(address)
        async with grpc.aio.insecure_channel(str(address), options=_OPTIONS) as channel:
            call: _Call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            try:
                incoming, outgoing = await asyncio.wait_for(self._shake_hands(call, address, secret), connect_seconds)
                return await self._converse(call, incoming, outgoing)
            except grpc.aio.AioRpcError as error:
                raise _translated(error, address) from error
            except asyncio.InvalidStateError as error:  # what a write says once the call has ended
                raise ConnectionError("the connection ended") from error
            finally:
                call.cancel()

    async def _shake_hands(self, call: _Call, address: Address, secret: str) -> tuple[auth.Seal, auth.Seal]:
        client_nonce = auth.new_nonce()
        await call.write(client_nonce)
        incoming, outgoing = auth.check_service(secret, client_nonce, await _read(call))
        if self._hello is None:
            self._hello = self._make_hello(address)
        await call.write(outgoing.seal(encode(self._hello)))
        self._deadline = min(self._deadline, time.monotonic() + self._dead_after_seconds)
        self._changed.set()
        return incoming, outgoing

    async def _converse(self, call: _Call, incoming: auth.Seal, outgoing: auth.Seal) -> bool:
        reading = asyncio.create_task(self._listen(call, incoming))
        writing = asyncio.create_task(self._speak(call, outgoing))
        try:
            while not writing.done() and (silence := self._deadline - time.monotonic()) > 0:
                await asyncio.wait({reading, writing}, timeout=silence, return_when=asyncio.FIRST_COMPLETED)
                if self.status.state == "left":
                    await asyncio.wait({writing}, timeout=_GOODBYE_SECONDS)
                    break
                if reading.done():
                    reading.result()
            return writing.done() and writing.result()
        finally:
            _forget(writing)
            _forget(reading)

    async def _listen(self, call: _Call, incoming: auth.Seal) -> None:
        while True:
            self._receive(incoming.open(await _read(call)))

    def _receive(self, payload: bytes) -> None:
        self._deadline = time.monotonic() + self._dead_after_seconds
        if payload == NOTHING_NEW:
            self._is_asked = True
            self._woken.set()
            return
        if is_packed_map(payload):
            self.packed_map, self._map = payload, None
            self._changed.set()
            return
        message = decode(payload, Order | Refusal)  # type: ignore[arg-type]
        if isinstance(message, Refusal):
            text = f"The control service at {self._at} refused this task: {message.reason.removesuffix('.')}."
            raise RendezvousClosedError(text, reason=message.reason)
        if isinstance(message, Order):
            self.order = message
            self._changed.set()

    async def _speak(self, call: _Call, outgoing: auth.Seal) -> bool:
        """Say what is new of the status, and when asked that there is nothing; return whether the leave was noted."""
        said = Status()
        while True:
            status = self.status
            if status != said or self._is_asked:
                self._is_asked = False
                await call.write(outgoing.seal(encode(status, said) if status != said else NOTHING_NEW))
                said = status
            if status.state == "left":
                await call.done_writing()
                code = asyncio.ensure_future(call.code())
                await asyncio.wait({code}, timeout=_GOODBYE_SECONDS)
                return code.done() and code.result() is grpc.StatusCode.OK
            await self._woken.wait()
            self._woken.clear()


def _forget(task: asyncio.Task[Any]) -> None:
    """Wait no more; an error that has come with the connection's end is not told as one that nobody saw."""
    if not task.cancel() and not task.cancelled():
        task.exception()


async def _read(call: _Call) -> bytes:
    data = await call.read()
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise ConnectionError("the control service closed the connection")
    return data


def _translated(error: grpc.aio.AioRpcError, address: Address) -> Exception:
    """Return a reason to try again, never one to give up: anybody who listens at that address can say such a code."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"The service at {address} is another job's.")
    return ConnectionError(f"{error.code().name}: {error.details()}")
