"""The interface of spawners, which start agents and report their output and their exit to the launcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import IO, Protocol

from tf4slurm.system.program import LineSplitter


class SpawnerListener(Protocol):
    """Receives the reports of a spawner."""

    def on_output(self, line: str) -> None:
        """Handle a line that an agent has printed."""

    def on_agent_exit(self, rank: int, returncode: int) -> None:
        """Handle the exit of one task's agent."""

    def on_all_exit(self, returncode: int, message: str) -> None:
        """Handle the exit of srun and of all agents; `message` contains srun's last error lines."""


class Spawner(Protocol):
    """Starts one agent per task. After `close` no agent runs."""

    is_local: bool

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        """Start the agents, and add `environment` to their environment variables."""

    async def close(self, grace_period_seconds: float) -> None:
        """Wait at most `grace_period_seconds` for the agents to exit, then kill the rest."""


async def read_lines(pipe: IO[bytes] | None, on_line: Callable[[str], None]) -> None:
    """Call `on_line` with each line from a pipe, until the pipe is closed."""
    assert pipe is not None
    stream, splitter = asyncio.StreamReader(), LineSplitter()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    while data := await stream.read(65536):
        for line in splitter.split(data):
            on_line(line)
    for line in splitter.finish():
        on_line(line)
