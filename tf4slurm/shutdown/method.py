"""`ShutdownMethod`: what every way of telling a ps that training is over can do, and what the ps learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tf4slurm.cluster import Task
from tf4slurm.completion_signal import CompletionSignal


@dataclass(frozen=True)
class Ending:
    """How the tasks that train have ended, each in one of the two, in the order of the cluster.

    Attributes:
        done: Those that signalled that they are done.
        failed: Those that signalled that they failed.
    """

    done: tuple[Task, ...]
    failed: tuple[Task, ...]


class ShutdownMethod(Protocol):
    """One way to tell, for one task of one cluster."""

    def wait_for_workers(self, timeout_seconds: float | None) -> Ending:
        """Wait on a ps until every task that trains has signalled; signals of the system are served meanwhile.

        Raises:
            ShutdownTimeoutError: Not all have signalled within the time; None waits for ever.
        """
        ...

    def completion_signal(self) -> CompletionSignal:
        """Return what a task that trains says to every ps; the same one at each call in a process."""
        ...
