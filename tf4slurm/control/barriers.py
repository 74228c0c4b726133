"""Barriers at which scripts wait for each other. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tf4slurm.cluster import format_tasks
from tf4slurm.control.messages import BarrierArrival
from tf4slurm.control.records import TaskRecord

_Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class BarrierEnd:
    """The end of a barrier.

    Attributes:
        name: The name that the scripts gave to `barrier()`.
        tokens: The token (see `BarrierArrival`) of each call of `barrier()` that ends, by the rank of the task.
        error: The reason why the barrier broke. Empty if all tasks have arrived.
        waited_seconds: Seconds from the first arrival to the end.
    """

    name: str
    tokens: dict[int, str]
    error: str
    waited_seconds: float


@dataclass
class _Barrier:
    """One open barrier.

    Attributes:
        opened_at: Job time of the first arrival.
        expected: The ranks of the tasks that must arrive.
        arrived: (token, job time of the deadline) of each task that has arrived, by rank.
    """

    opened_at: float
    expected: frozenset[int]
    arrived: dict[int, tuple[str, float]] = field(default_factory=dict)


class Barriers:
    """All barriers of a job.

    A barrier ends when all expected tasks have arrived. It breaks when the timeout of a waiting task expires, when an
    expected task has ended without arriving, or when a task arrives that is not expected. The expected tasks are the
    members of the requested task types, by default all members that run a script. If a spare has replaced a lost task,
    the spare is expected instead.
    """

    def __init__(self) -> None:
        self._open: dict[_Key, _Barrier] = {}

    def arrive(
        self, members: Sequence[TaskRecord], record: TaskRecord, arrival: BarrierArrival, now: float
    ) -> list[BarrierEnd]:
        """Record the arrival of a task at a barrier. Forget an earlier arrival of this task at any barrier.

        Returns:
            The end of the barrier if it ends or breaks now, else an empty list.
        """
        self.withdraw(record)
        key = (arrival.name, arrival.roles)
        is_first = key not in self._open
        if is_first:
            self._open[key] = _Barrier(now, _expected(members, arrival.roles))
        barrier = self._open[key]
        barrier.arrived[record.rank] = (arrival.token, now + arrival.timeout_seconds)
        # A full check at each arrival would take quadratic time.
        if is_first or record.rank not in barrier.expected or len(barrier.arrived) >= len(barrier.expected):
            return self._check_one(members, key, now)
        return []

    def withdraw(self, record: TaskRecord) -> None:
        """Forget the arrival of a task, because its script no longer waits at the barrier."""
        for key, barrier in list(self._open.items()):
            if barrier.arrived.pop(record.rank, None) is not None and not barrier.arrived:
                del self._open[key]

    def check(self, members: Sequence[TaskRecord], now: float) -> list[BarrierEnd]:
        """Remove the barriers that end or break now, and return their ends."""
        return [end for key in list(self._open) for end in self._check_one(members, key, now)]

    def clear(self) -> None:
        self._open.clear()

    def _check_one(self, members: Sequence[TaskRecord], key: _Key, now: float) -> list[BarrierEnd]:
        name, roles = key
        barrier = self._open[key]
        barrier.expected = _expected(members, roles)  # a spare may have taken the place of a task
        missing = [members[rank] for rank in sorted(barrier.expected - barrier.arrived.keys())]
        ended = [record for record in missing if record.is_gone or record.is_done]
        unexpected = [members[rank] for rank in barrier.arrived.keys() - barrier.expected]
        error = ""
        if unexpected:
            error = f"barrier {name!r} is not for a {unexpected[0].task.task_type}"
        elif ended:
            error = f"{format_tasks(ended)} ended without arriving at barrier {name!r}"
        elif any(deadline <= now for _, deadline in barrier.arrived.values()) and missing:
            error = f"{format_tasks(missing)} did not arrive at barrier {name!r} in time"
        elif missing:
            return []
        del self._open[key]
        tokens = {rank: token for rank, (token, _) in barrier.arrived.items()}
        return [BarrierEnd(name, tokens, error, now - barrier.opened_at)]


def _expected(members: Sequence[TaskRecord], roles: tuple[str, ...]) -> frozenset[int]:
    """Return the ranks of the tasks of these task types that run a script. Empty `roles` stand for all types."""
    return frozenset(
        record.rank for record in members if record.role.runs_script and (not roles or record.task.task_type in roles)
    )
