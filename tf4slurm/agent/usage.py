"""What a child uses: memory, processor time, and the bytes over its port."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tf4slurm.control.messages import Usage
from tf4slurm.network.traffic import read_traffic
from tf4slurm.system.child_process import children_of

_PAUSE_SECONDS = 5.0
_TASKS_PER_SECOND = 100  # as often as the launcher samples them
_FIRST_SECONDS = 1.0


async def watch_usage(process_id: int, port: int | None, tell: Callable[[Usage], None], num_tasks: int = 1) -> None:
    """Tell what a child uses, every few seconds, for as long as it runs: cancel this.

    `port` is where it listens; None if it does not. Where /proc does not tell, nothing is told. In a job of many tasks
    each tells it more seldom.
    """
    pause = _FIRST_SECONDS
    connections: dict[int, tuple[int, int]] = {}  # those that have ended, too
    while True:
        await asyncio.sleep(pause)
        pause = max(_PAUSE_SECONDS, num_tasks / _TASKS_PER_SECOND)
        if port is not None:
            connections.update(read_traffic(port))
        try:
            memory, cpu = _measure(process_id)
        except (OSError, ValueError, IndexError):
            continue  # it has just ended, or this is no Linux
        sent, received = (sum(each) for each in zip(*connections.values(), strict=True)) if connections else (0, 0)
        tell(Usage(memory, round(cpu, 2), sent, received))


def _measure(process_id: int) -> tuple[int, float]:
    """Return (resident memory in bytes, processor seconds) of a process and what it has started."""
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    memory, ticks = 0, 0
    for each in _family(process_id):
        fields = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
        memory += int(fields[21]) * page
        ticks += sum(map(int, fields[11:15]))  # its own and those of its children that have ended
    return memory, ticks / tick


def _family(process_id: int) -> Iterator[int]:
    yield process_id
    with contextlib.suppress(OSError):  # ended meanwhile
        for child in children_of(process_id):
            yield from _family(child)
