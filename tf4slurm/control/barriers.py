"""Barriers, at which scripts wait for each other: the arrived tasks, and the end of each barrier. No side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tf4slurm.cluster import format_tasks
from tf4slurm.control.messages import BarrierArrival
from tf4slurm.control.records import TaskRecord


@dataclass
class _Barrier:
    """One barrier: the time of the first arrival, the expected ranks, and (token, deadline) of each arrived rank."""

    opened_at: float
    expected: frozenset[int]
    arrived: dict[int, tuple[str, float]] = field(default_factory=dict)


class Barriers:
    """All barriers of a job. A barrier ends when all expected tasks have arrived, or breaks if one cannot arrive."""

    def __init__(self, records: Sequence[TaskRecord], changed: set[int]) -> None:
        """`changed` receives the ranks of the records whose `released_barrier` and `barrier_error` were set."""
        self._records = records
        self._changed = changed
        self._open: dict[tuple[str, tuple[str, ...]], _Barrier] = {}

    def arrive(self, record: TaskRecord, arrival: BarrierArrival, now: float) -> float | None:
        """Record an arrival, which replaces an earlier one; after the last, return the seconds since the first."""
        key = (arrival.name, arrival.roles)
        is_first = key not in self._open
        if is_first:
            self._open[key] = _Barrier(now, self._ranks_of(arrival.roles))
        barrier = self._open[key]
        barrier.arrived[record.rank] = (arrival.token, now + arrival.timeout_seconds)
        if record.rank not in barrier.expected:
            self._end(key, f"barrier {arrival.name!r} is not for a {record.task.task_type}")
        elif len(barrier.arrived) == len(barrier.expected):
            self._end(key, "")
            return now - barrier.opened_at
        elif is_first:  # only once: a check at each arrival would take quadratic time
            self._break_if_impossible(key)
        return None

    def withdraw(self, record: TaskRecord) -> None:
        for barrier in self._open.values():
            barrier.arrived.pop(record.rank, None)

    def check(self, now: float) -> None:
        """Break the barriers whose timeout has expired, or where an expected task can no longer arrive."""
        for key, barrier in list(self._open.items()):
            if any(deadline <= now for _, deadline in barrier.arrived.values()):
                self._end(key, f"{format_tasks(self._missing(barrier))} did not arrive at barrier {key[0]!r} in time")
            else:
                self._break_if_impossible(key)

    def clear(self) -> None:
        self._open.clear()

    def _ranks_of(self, roles: tuple[str, ...]) -> frozenset[int]:
        return frozenset(r.rank for r in self._records if (r.task.task_type in roles if roles else not r.role.program))

    def _missing(self, barrier: _Barrier) -> list[TaskRecord]:
        return [self._records[rank] for rank in sorted(barrier.expected - barrier.arrived.keys())]

    def _break_if_impossible(self, key: tuple[str, tuple[str, ...]]) -> None:
        ended = [record for record in self._missing(self._open[key]) if record.is_gone or record.is_done]
        if ended:
            self._end(key, f"{format_tasks(ended)} ended without arriving at barrier {key[0]!r}")

    def _end(self, key: tuple[str, tuple[str, ...]], error: str) -> None:
        barrier = self._open.pop(key)
        for rank, (token, _) in barrier.arrived.items():
            record = self._records[rank]
            record.released_barrier, record.barrier_error = token, error
            self._changed.add(rank)
