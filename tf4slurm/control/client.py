"""A task's end of the control plane: one stream, made again when it breaks, until the launcher counts as dead."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

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
)
from tf4slurm.control.packed_map import is_packed_map, unpack_map
from tf4slurm.errors import AuthenticationError, MessageError, RendezvousClosedError, RendezvousConnectionError
from tf4slurm.network.stream import OK, UNAUTHENTICATED, Call

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_CHECKS = 4  # in the dead time
_GOODBYE_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 16 * 2**20  # more than the map of 100,000 tasks
_MAX_PROOF_BYTES = 4096


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
        self._proved: Address | None = None
        """Where the service was last."""
        self._at = ""
        self._dead_after_seconds = dead_after_seconds
        self._connect_seconds = handshake_seconds(num_tasks)
        self._deadline = time.monotonic() + join_seconds
        self._changed = asyncio.Event()
        self._call: Call | None = None
        self._outgoing: auth.Seal | None = None
        self._said = Status()
        self._is_asked = False
        self._will_say = False

    @property
    def map(self) -> Map | None:
        """The agreed cluster of the latest attempt; None before the first."""
        if self._map is None and self.packed_map:
            self._map = unpack_map(self.packed_map)
        return self._map

    def report(self, **changes: Any) -> None:
        """Change fields of `status` and tell the launcher; on a broken connection, as soon as there is one again."""
        self.status = dataclasses.replace(self.status, **changes)
        self._tell()

    def mention(self, usage: Usage) -> None:
        """Change what the child uses; it goes out when the service asks next."""
        self.status = dataclasses.replace(self.status, usage=usage)

    def note(self, report: Report) -> None:
        """Change the script's report; what is only progress goes out when the service asks next."""
        before, self.status = self.status, dataclasses.replace(self.status, report=report)
        if dataclasses.replace(report, step=before.report.step, metrics=before.report.metrics) != before.report:
            self._tell()

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
        at = error = ""
        while time.monotonic() < self._deadline:
            addresses, secret = self._find_service()
            for address in sorted(addresses, key=lambda address: address != self._proved):  # there is little time
                if (left := self._deadline - time.monotonic()) <= 0:
                    break  # it has been silent for the dead time, wherever else it may be
                try:
                    if await self._serve(address, secret, min(self._connect_seconds, left)):
                        return
                    why, is_cut_short = "it fell silent", False
                except RendezvousClosedError:
                    if self.status.state == "left":
                        return  # it was told on the connection before, and the launcher was held up
                    raise
                except (AuthenticationError, MessageError, OSError, asyncio.TimeoutError) as failure:
                    why = str(failure) or "it does not answer"
                    is_cut_short = isinstance(failure, asyncio.TimeoutError) and left < self._connect_seconds
                    logger.debug("no connection to the control service at %s: %s", address, why)
                if not (error and is_cut_short):  # what an earlier try has found says more
                    at, error = str(address), why
            await asyncio.sleep(_RETRY_SECONDS)
        raise RendezvousConnectionError(
            f"The launcher is gone, or was never there: no control service answers at {at or 'any address'} "
            f"({error or 'no address is known yet'}). Look at the launcher's own output.",
            address=at,
        )

    async def _serve(self, address: Address, secret: str, connect_seconds: float) -> bool:
        """Connect once and serve that connection to its end; return whether the leave was told, or raise."""
        self._at = str(address)
        call = Call(_MAX_PROOF_BYTES, f"/{SERVICE}/{METHOD}")
        try:
            incoming, outgoing = await asyncio.wait_for(self._shake_hands(call, address, secret), connect_seconds)
            return await self._converse(call, incoming, outgoing)
        finally:
            self._call = None
            call.abort()

    async def _shake_hands(self, call: Call, address: Address, secret: str) -> tuple[auth.Seal, auth.Seal]:
        await asyncio.get_running_loop().create_connection(lambda: call, address.host, address.port)
        client_nonce = auth.new_nonce()
        call.say(client_nonce)
        if not (answer := await call.read()):
            raise _ended(call, self._at)
        incoming, outgoing = auth.check_service(secret, client_nonce, answer)
        call.max_bytes = _MAX_MESSAGE_BYTES
        self._proved = address
        if self._hello is None:
            self._hello = self._make_hello(address)
        call.say(outgoing.seal(encode(self._hello)))
        self._deadline = min(self._deadline, time.monotonic() + self._dead_after_seconds)
        self._changed.set()
        return incoming, outgoing

    async def _converse(self, call: Call, incoming: auth.Seal, outgoing: auth.Seal) -> bool:
        self._call, self._outgoing, self._said, self._is_asked = call, outgoing, Status(), False
        call.on_room = self._say
        self._tell()
        self._watch(call, time.monotonic())
        while said := await call.read():
            self._receive(incoming.open(said))
        if call.status == OK and self._said.state == "left":
            return True
        if time.monotonic() >= self._deadline:
            return False
        raise _ended(call, self._at)

    def _watch(self, call: Call, due: float) -> None:
        """End the call when the service has been silent for the dead time. This was to be called when it is `due`.

        Time in which this process did not run itself (the whole job was suspended) does not count.
        """
        if call is self._call:
            now = time.monotonic()
            self._deadline = min(self._deadline + now - due, now + self._dead_after_seconds)
            silence = self._deadline - now
            if silence > 0:
                pause = min(silence, self._dead_after_seconds / _CHECKS)
                asyncio.get_running_loop().call_later(pause, self._watch, call, now + pause)
            else:
                call.stop()

    def _receive(self, payload: bytes) -> None:
        self._deadline = time.monotonic() + self._dead_after_seconds
        if payload == NOTHING_NEW:
            self._is_asked = True
            self._say()
            return
        if is_packed_map(payload):
            self.packed_map, self._map = payload, None
            self._changed.set()
            return
        message = decode(payload, (Order, Refusal))
        if isinstance(message, Refusal):
            text = f"The control service at {self._at} refused this task: {message.reason.removesuffix('.')}."
            raise RendezvousClosedError(text, reason=message.reason)
        if isinstance(message, Order):
            self.order = message
            self._changed.set()

    def _tell(self) -> None:
        """Say what is new, with all that changes until then."""
        if self._call is not None and not self._will_say:
            self._will_say = True
            asyncio.get_running_loop().call_soon(self._say)

    def _say(self) -> None:
        """Say what is new of the status, and when asked that there is nothing; without room, as soon as there is."""
        self._will_say = False
        if self._call is None or self._outgoing is None or not self._call.is_free:
            return
        if self.status != self._said:
            self._call.say(self._outgoing.seal(encode(self.status, self._said)))
            self._said = self.status
            if self._said.state == "left":
                asyncio.get_running_loop().call_later(_GOODBYE_SECONDS, self._call.stop)
        elif self._is_asked:
            self._call.say(self._outgoing.seal(NOTHING_NEW))
        self._is_asked = False


def _ended(call: Call, at: str) -> Exception:
    """Return why to try again: never to give up, for anybody who listens at that address can end a call so."""
    if call.status == UNAUTHENTICATED:
        return AuthenticationError(f"The service at {at} is another job's.")
    return ConnectionError("the control service closed the connection")
