"""The agent's end of the script channel: a Unix socket between an agent and its script.

Each message is a line of JSON: a `ScriptState` or `ScriptReport` from the script, or a `DesiredState` from the agent.
Only processes of the same user and of root may connect.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf4slurm.control.messages import DesiredState, ScriptState, ShardRequest, decode, encode
from tf4slurm.control.script_reports import ScriptReport
from tf4slurm.errors import MessageError
from tf4slurm.script_channel import to_socket_address

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

MAX_STATE_BYTES = 65_536
"""Maximum length of a `ScriptState`."""

_MAX_MESSAGE_BYTES = 4 * MAX_STATE_BYTES  # a report has up to three values of each metric
_MAX_ENDED = 64
_REPORT = f'["{ScriptReport.__name__}"'.encode()


class ScriptChannelServer:
    """Listens for scripts from `open` to `close`.

    Attributes:
        name: The value of SCRIPT_CHANNEL_VARIABLE for the child.
        was_used: Whether a script has ever connected.
    """

    def __init__(
        self, on_state: Callable[[ScriptState], None], on_report: Callable[[ScriptReport], None] = lambda _: None
    ) -> None:
        self.name = ""
        self.was_used = False
        self._on_state = on_state
        self._on_report = on_report
        self._desired = DesiredState()
        self._writers: set[asyncio.StreamWriter] = set()
        self._reading: set[asyncio.Task[None]] = set()
        self._shards: dict[asyncio.StreamWriter, tuple[ShardRequest, ...]] = {}
        self._strategies: dict[asyncio.StreamWriter, ScriptState] = {}  # states of processes with a strategy
        self._ended_shards = collections.deque[ShardRequest](maxlen=_MAX_ENDED)  # the last requests of ended processes
        self._server: asyncio.AbstractServer | None = None
        self._directory: TemporaryDirectory[str] | None = None

    async def open(self) -> None:
        if sys.platform == "linux":  # an abstract socket, which ends with this process
            self.name = f"@tf4slurm-{os.getpid()}-{os.urandom(8).hex()}"
        else:
            from tempfile import TemporaryDirectory  # imported here, because that takes 5 ms and Linux does not need it

            self._directory = TemporaryDirectory(prefix="tf4slurm-")
            self.name = str(Path(self._directory.name) / "channel")
        self._server = await asyncio.start_unix_server(
            self._serve, to_socket_address(self.name), limit=_MAX_MESSAGE_BYTES
        )

    def send(self, desired: DesiredState) -> None:
        """Send the desired state to the script, now and after each reconnect."""
        if desired != self._desired:
            self._desired = desired
            for writer in self._writers:
                _write(writer, desired)

    async def drain(self, timeout_seconds: float) -> None:
        """Read the remaining messages of a script that has ended."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=timeout_seconds)

    def disconnect(self) -> None:
        """Close all connections and ignore their unread messages, before another child starts."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._shards.clear()
        self._strategies.clear()
        self._ended_shards.clear()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.disconnect()
        if self._directory is not None:
            self._directory.cleanup()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reading = asyncio.create_task(self._read(reader, writer))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state: ScriptState | None = None
        try:
            if not _is_own_user(writer.get_extra_info("socket")):
                return
            self.was_used = True
            self._writers.add(writer)
            _write(writer, self._desired)
            while (line := await reader.readline()) and writer in self._writers:
                if line.startswith(_REPORT):
                    self._on_report(decode(line, ScriptReport))
                    continue
                if len(line) > MAX_STATE_BYTES:
                    return
                state = decode(line, ScriptState)
                self._on_state(self._merge(writer, state))
        except asyncio.CancelledError:
            pass  # the agent exits; asyncio would log it as an error
        except (OSError, MessageError, ValueError):  # ValueError: a line that is too long
            pass  # not a script that uses tf4slurm's own functions
        finally:
            if state is not None and writer in self._writers:  # a disconnected script waits at no barrier
                self._ended_shards.extend(dataclasses.replace(each, capacity=0) for each in state.shards)
                state = dataclasses.replace(state, barrier=None, stop_signal=None, shards=())
                self._on_state(self._merge(writer, state))
                del self._shards[writer]
                self._strategies.pop(writer, None)
            self._writers.discard(writer)
            writer.close()

    def _merge(self, writer: asyncio.StreamWriter, state: ScriptState) -> ScriptState:
        """Return the state of one process with the shards and the workers of all processes of the script."""
        self._shards[writer] = state.shards
        if state.workers is not None or state.workers_error:
            self._strategies[writer] = state
        changes: dict[str, Any] = {}
        requests = (*self._ended_shards, *(each for requests in self._shards.values() for each in requests))
        if requests != state.shards:
            changes["shards"] = requests
        if writer not in self._strategies and self._strategies:
            latest = next(reversed(self._strategies.values()))
            changes |= {name: getattr(latest, name) for name in ("workers", "workers_error", "unusable_workers")}
        return dataclasses.replace(state, **changes) if changes else state


def _write(writer: asyncio.StreamWriter, desired: DesiredState) -> None:
    """Send the desired state to the script, without losing unread messages of the script if this fails.

    After a failed write, as to a script that has exited, asyncio's transport would drop these messages. Therefore this
    function writes to the socket directly if it can.
    """
    line = encode(desired) + b"\n"
    if not writer.transport.get_write_buffer_size():
        try:
            line = line[os.write(writer.get_extra_info("socket").fileno(), line) :]
        except BlockingIOError:
            pass  # the script reads slowly
        except OSError:
            return
    writer.write(line)


def _is_own_user(connection: socket.socket) -> bool:
    if sys.platform != "linux":
        return True  # the socket is in a directory that only this user can enter
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (os.getuid(), 0)
