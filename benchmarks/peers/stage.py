"""Some tasks of a peer in one process, each in its own thread. Imports nothing of tf4slurm.

Each line on standard input names an operation, which all tasks run; the time at which the last was done
(CLOCK_MONOTONIC, which all processes of a machine share) goes to standard output. The process exits at the end of
standard input.
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
        """Publish the own address; return when those of all tasks have arrived."""

    def verify(self) -> None:
        """Fail if an address is missing or wrong."""

    def barrier(self) -> None:
        """Return when all tasks have arrived."""

    def leave(self) -> None:
        """Return when all tasks have asked to leave."""


def address_of(rank: int) -> str:
    """Return what a task publishes: its host name, address and port."""
    return f"node{rank:05} 10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}:40001"


def _leave_out_dns() -> None:
    """Make this process look up names in /etc/hosts only.

    torch looks up the name of every peer's address. Where DNS answers slowly for 127.0.0.1, this took 5 to 15 s of a
    rendezvous of 100, which is a cost of the machine and not of torch.
    """
    ctypes.CDLL("libc.so.6").__nss_configure_lookup(b"hosts", b"files")


def begin(serve: Callable[[int], None], make_task: Callable[[int, int, int], Task]) -> None:
    """Run what the command line names: the service, or some tasks, made by make_task(num_tasks, port, rank)."""
    _leave_out_dns()
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        num_tasks, port, first, step = map(int, sys.argv[2:])
        _play([make_task(num_tasks, port, rank) for rank in range(first, num_tasks, step)])


def serve_until_told(port: int) -> None:
    """Print the port of the service, and keep it running until standard input ends."""
    say(port)
    sys.stdin.read()
    os._exit(0)  # some services wait for their tasks, which are gone


def _play(tasks: Sequence[Task]) -> None:
    """Run the operations from standard input until it ends.

    `part` starts to leave in all ranks but 0, and answers at once; `leave` starts it in rank 0 too, and waits for all.
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
