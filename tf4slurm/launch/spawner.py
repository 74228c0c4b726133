"""What every spawner offers the launcher: agents started somewhere, their output, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import IO, Protocol

from tf4slurm.system.output import LineSplitter


class SpawnerListener(Protocol):
    """Who is told what the spawner sees."""

    def on_output(self, line: str) -> None:
        """An agent printed a line."""

    def on_agent_exit(self, rank: int, returncode: int) -> None:
        """The agent of one task has ended."""

    def on_all_exit(self, returncode: int, words: str) -> None:
        """No agent is left, nor will be; `words` are the last that the program that started them said."""


class Spawner(Protocol):
    """Starts one agent per task. Its processes are its own: after `close` none is left."""

    is_local: bool

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        """Start the agents; `environment` is what they must have beyond this process's own."""

    async def close(self, grace_period_seconds: float) -> None:
        """Wait for the end of what was started, for `grace_period_seconds`; then kill it."""


async def read_lines(pipe: IO[bytes] | None, on_line: Callable[[str], None]) -> None:
    """Pass on what comes through a pipe, line by line, to its end."""
    assert pipe is not None
    stream, splitter = asyncio.StreamReader(), LineSplitter()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    while data := await stream.read(65536):
        for line in splitter.split(data):
            on_line(line)
    for line in splitter.finish():
        on_line(line)
