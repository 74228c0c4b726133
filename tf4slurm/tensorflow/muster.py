"""`Muster`: who of those that train is there, told through queues on ps 0."""

from __future__ import annotations

import threading

from tf4slurm.cluster import Task
from tf4slurm.errors import ShutdownError
from tf4slurm.server_dictionary import ServerDictionary
from tf4slurm.tensorflow.queues import PsQueue

_musters: dict[Task, Muster] = {}


class Muster:
    """The coming together of all tasks that train, seen from one of them.

    Each task that has its session arrives. The leader's arrival tells the others that the variables are there; when all
    have arrived, it tells that too. Both hold for the rest of the job: who comes again does not wait.
    """

    def __init__(self, own: ServerDictionary) -> None:
        self._own = own
        address = own.ps_addresses[0]
        self._leader_is_here = PsQueue(address, 0, "tf4slurm_leader_is_here")
        self._arrivals = PsQueue(address, 0, "tf4slurm_arrivals")
        self._all_are_here = PsQueue(address, 0, "tf4slurm_all_are_here")
        self._missing = set(own.training_tasks) - {own.task}
        self._collector: threading.Thread | None = None

    @property
    def missing(self) -> tuple[Task, ...]:
        """Those that have not arrived yet; only the leader knows."""
        return tuple(task for task in self._own.training_tasks if task in self._missing)

    def arrive(self) -> None:
        """Tell that this task has its session; the leader begins to collect the others.

        Raises:
            ShutdownError: ps 0 does not answer.
        """
        if not self._own.leads:
            self._arrivals.put(self._own.training_tasks.index(self._own.task))
            return
        self._leader_is_here.put(1)
        if self._collector is None:
            self._collector = threading.Thread(target=self._collect, daemon=True)
            self._collector.start()

    def wait_for_leader(self, timeout_seconds: float) -> None:
        """Wait until the leader has arrived.

        Raises:
            TimeoutError: It did not within the time.
            ShutdownError: ps 0 is gone.
        """
        if not self._own.leads:
            self._leader_is_here.wait_until_filled(timeout_seconds)

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Wait until all have arrived.

        Raises:
            TimeoutError: Not all did within the time.
            ShutdownError: ps 0 is gone.
        """
        self._all_are_here.wait_until_filled(timeout_seconds)

    def _collect(self) -> None:
        tasks = self._own.training_tasks
        try:
            while self._missing:
                self._missing.discard(tasks[self._arrivals.take(None)])
            self._all_are_here.put(1)
        except ShutdownError:  # the training session meets the same, and tells it
            pass


def own_muster(own: ServerDictionary) -> Muster:
    """Return this process's part of the muster, the same for all its hooks."""
    return _musters.setdefault(own.task, Muster(own))
