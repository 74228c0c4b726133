"""Some tasks of a peer in one process, each in a thread of its own. Imports nothing of tf4slurm.

A word on standard input is done by all tasks; the time at which the last was done (CLOCK_MONOTONIC, which all processes
of a machine share) goes to standard output. With the end of standard input the process ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

PATIENCE_SECONDS = 120


class Task(Protocol):
    rank: int

    def rendezvous(self) -> None:
        """Tell the own address; return with those of all."""

    def verify(self) -> None:
        """Fail if the map is not whole."""

    def barrier(self) -> None:
        """Return when all tasks have come."""

    def leave(self) -> None:
        """Return when all tasks have asked to leave."""


def address_of(rank: int) -> str:
    """Return what a task says of itself: its host's name, its address and port."""
    return f"node{rank:05} 10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}:40001"


def _leave_out_dns() -> None:
    """Let this process look names up in /etc/hosts only.

    torch asks for the name of every peer's address. Where DNS is slow to say that 127.0.0.1 has none, that was seen to
    cost 5 to 15 s of a rendezvous of 100, which is the machine's and not torch's.
    """
    ctypes.CDLL("libc.so.6").__nss_configure_lookup(b"hosts", b"files")


def begin(serve: Callable[[int], None], make_task: Callable[[int, int, int], Task]) -> None:
    """Be what the command line says: the service of so many tasks, or some of them, made by (tasks, port, rank)."""
    _leave_out_dns()
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        num_tasks, port, first, step = map(int, sys.argv[2:])
        _play([make_task(num_tasks, port, rank) for rank in range(first, num_tasks, step)])


def serve_until_told(port: int) -> None:
    """Tell where the service listens, and let it live until standard input ends."""
    say(port)
    sys.stdin.read()
    os._exit(0)  # some services wait for their tasks, which are gone


def _play(tasks: Sequence[Task]) -> None:
    """Do what is asked until standard input ends.

    `part` lets all but rank 0 ask to leave, and answers at once; `leave` lets rank 0 ask too, and waits for all.
    """
    pool = ThreadPoolExecutor(len(tasks))
    together = threading.Barrier(len(tasks))
    list(pool.map(lambda _: together.wait(), tasks))  # every thread has been started
    parting: list[Future[None]] = []
    say("ready")
    for line in sys.stdin:
        what = line.strip()
        if what == "part":
            parting = [pool.submit(task.leave) for task in tasks if task.rank != 0]
        elif what == "leave":
            parting += [pool.submit(task.leave) for task in tasks if task.rank == 0]
            for each in parting:
                each.result()
        else:
            for each in [pool.submit(getattr(task, what)) for task in tasks]:
                each.result()
        say(time.monotonic())
        if what == "rendezvous":
            for task in tasks:
                task.verify()
    os._exit(0)


def say(word: object) -> None:
    print(word, flush=True)
