"""The agent's end of the script channel: a Unix socket between an agent and its script.

Each message is a line of JSON: a `ScriptState` or `StepMetrics` from the script, or a `DesiredState` from the agent.
Only processes of the same user and of root may connect.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tf4slurm.agent.script_processes import ScriptProcesses
from tf4slurm.control.messages import MAX_SCRIPT_BYTES, DesiredState, ScriptState, ShardGrant, decode, encode
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.control.step_rate import StepRate
from tf4slurm.errors import MessageError
from tf4slurm.scripts.channel import to_socket_address

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

_MAX_LINE_BYTES = 2 * MAX_SCRIPT_BYTES
_METRICS = f'["{StepMetrics.__name__}"'.encode()


class ScriptChannelServer:
    """Accepts connections of the processes of the script, from `open` to `close`.

    Attributes:
        name: Name of the socket, which the child finds in the variable SCRIPT_CHANNEL_VARIABLE. Empty before `open`.
        was_used: Whether a process of a script has ever connected.
    """

    def __init__(
        self, on_state: Callable[[ScriptState], None], on_metrics: Callable[[StepMetrics], None] = lambda _: None
    ) -> None:
        self.name = ""
        self.was_used = False
        self._on_state = on_state
        self._on_metrics = on_metrics
        self._desired = DesiredState()
        self._writers: dict[asyncio.StreamWriter, tuple[ShardGrant, ...]] = {}  # refused shard requests
        self._reading: set[asyncio.Task[None]] = set()
        self._processes = ScriptProcesses()  # by writer
        self._server: asyncio.AbstractServer | None = None
        self._directory: TemporaryDirectory[str] | None = None

    async def open(self) -> None:
        if sys.platform == "linux":  # an abstract socket, which ends with this process
            self.name = f"@tf4slurm-{os.getpid()}-{os.urandom(8).hex()}"
        else:
            from tempfile import TemporaryDirectory  # imported here, because that takes 5 ms and Linux does not need it

            self._directory = TemporaryDirectory(prefix="tf4slurm-")
            self.name = str(Path(self._directory.name) / "channel")
        self._server = await asyncio.start_unix_server(self._serve, to_socket_address(self.name), limit=_MAX_LINE_BYTES)

    def send(self, desired: DesiredState) -> None:
        """Send a changed desired state to each connected process, and to each that connects later."""
        if desired != self._desired:
            self._desired = desired
            for writer in self._writers:
                self._write(writer)

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until the remaining messages of a script that has ended are read, at most `timeout_seconds`."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=timeout_seconds)

    def disconnect(self) -> None:
        """Close all connections and ignore their unread messages, before another child starts."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._processes.clear()

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
        try:
            if not _is_own_user(writer.get_extra_info("socket")):
                return
            self.was_used = True
            self._writers[writer] = ()
            self._write(writer)
            step_rate = StepRate()
            while (line := await reader.readline()) and writer in self._writers:
                if line.startswith(_METRICS):
                    metrics = decode(line, StepMetrics)
                    if metrics.step is not None and metrics.time is not None:
                        step_rate.add(metrics.step, metrics.time)
                    self._on_metrics(metrics)
                    continue
                state = dataclasses.replace(decode(line, ScriptState), steps_per_second=step_rate.steps_per_second)
                self._on_state(self._update(writer, state))
        except asyncio.CancelledError:
            pass  # the agent exits; asyncio would log it as an error
        except (OSError, MessageError, ValueError):  # ValueError: a line that is too long
            pass  # not a script that uses tf4slurm's own functions
        finally:
            if writer in self._processes:
                self._on_state(self._processes.end(writer))
            self._writers.pop(writer, None)
            writer.close()

    def _update(self, writer: asyncio.StreamWriter, state: ScriptState) -> ScriptState:
        """Replace the state of the process at the other end of `writer`. Return the merged state of all processes.

        If shard requests make the merged state longer than `MAX_SCRIPT_BYTES`, the requests of this process are
        refused.
        """
        merged = self._processes.update(writer, state)
        refused: tuple[ShardGrant, ...] = ()
        if state.shards and (num_bytes := len(encode(merged))) > MAX_SCRIPT_BYTES:
            error = f"the processes of this task together send {num_bytes:,} bytes, at most {MAX_SCRIPT_BYTES:,} are "
            error += "possible. Take fewer shards ahead, or start fewer processes"
            refused = tuple(ShardGrant(request.token, error=error) for request in state.shards)
            merged = self._processes.update(writer, dataclasses.replace(state, shards=()))
        if refused != self._writers[writer]:
            self._writers[writer] = refused
            self._write(writer)
        return merged

    def _write(self, writer: asyncio.StreamWriter) -> None:
        refused = self._writers[writer]
        _write(writer, dataclasses.replace(self._desired, shards=(*self._desired.shards, *refused)))


def _write(writer: asyncio.StreamWriter, desired: DesiredState) -> None:
    """Send the desired state to the script. A failure does not lose messages from the script that are not read yet.

    asyncio's transport would drop these messages after a failed write, for example to a script that has exited.
    Therefore this function writes to the socket itself, unless earlier data waits in the transport's buffer.
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
