"""Where scripts wait for each other: who has come to which barrier, and when it is over. Pure, like `state.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tf4slurm.cluster import format_tasks
from tf4slurm.control.messages import BarrierArrival
from tf4slurm.control.task_record import TaskRecord


@dataclass
class _Barrier:
    """One barrier that somebody waits at: who is still to come, and who has, with the time until which they wait."""

    awaited: frozenset[int]
    opened_at: float
    missing: set[int]
    come: dict[int, tuple[str, float]] = field(default_factory=dict)


class Barriers:
    """All barriers of a job. A barrier is over when every awaited task has come, or breaks when one never will."""

    def __init__(
        self,
        records: Sequence[TaskRecord],
        on_release: Callable[[TaskRecord], None],
        on_complete: Callable[[str, TaskRecord, float], None] = lambda *_: None,
    ) -> None:
        """`on_release(record)` is told after `record.released_barrier` and `record.barrier_error` are set.

        `on_complete(name, last, seconds)` is told who came last, so many seconds after the first.
        """
        self._on_complete = on_complete
        self._records = records
        self._on_release = on_release
        self._open: dict[tuple[str, tuple[str, ...]], _Barrier] = {}

    def arrive(self, record: TaskRecord, waiting: BarrierArrival, now: float) -> None:
        """The script of a task waits from now on; what it said before of this barrier is replaced."""
        key = (waiting.name, waiting.roles)
        is_first = key not in self._open
        if is_first:
            self._open[key] = self._make_barrier(waiting.roles, now)
        barrier = self._open[key]
        barrier.come[record.rank] = (waiting.token, now + waiting.timeout_seconds)
        barrier.missing.discard(record.rank)
        if record.rank not in barrier.awaited:
            self._end(key, f"barrier {waiting.name!r} is not for a {record.task.task_type}")
        elif not barrier.missing:
            self._end(key, "")
            self._on_complete(waiting.name, record, now - barrier.opened_at)
        elif is_first:  # later ones `settle` finds: to look at all for each that comes would cost the square of them
            self._break_if_hopeless(key)

    def depart(self, record: TaskRecord) -> None:
        """The script of a task waits no more, or is gone; it may come again."""
        for barrier in self._open.values():
            if barrier.come.pop(record.rank, None) is not None and record.rank in barrier.awaited:
                barrier.missing.add(record.rank)

    def settle(self, now: float) -> None:
        """Break those barriers for which somebody has waited long enough, or somebody never comes."""
        for key, barrier in list(self._open.items()):
            if any(deadline <= now for _, deadline in barrier.come.values()):
                self._end(key, f"{format_tasks(self._missing(barrier))} did not come to barrier {key[0]!r} in time")
            else:
                self._break_if_hopeless(key)

    def forget(self) -> None:
        """A new attempt begins: nobody waits any more."""
        self._open.clear()

    def _make_barrier(self, roles: tuple[str, ...], now: float) -> _Barrier:
        records = (r for r in self._records if (r.task.task_type in roles if roles else not r.role.program))
        awaited = frozenset(record.rank for record in records)
        return _Barrier(awaited, now, set(awaited))

    def _missing(self, barrier: _Barrier) -> list[TaskRecord]:
        return [self._records[rank] for rank in sorted(barrier.missing)]

    def _break_if_hopeless(self, key: tuple[str, tuple[str, ...]]) -> None:
        ended = [record for record in self._missing(self._open[key]) if record.is_gone or record.is_done]
        if ended:
            self._end(key, f"{format_tasks(ended)} ended without coming to barrier {key[0]!r}")

    def _end(self, key: tuple[str, tuple[str, ...]], error: str) -> None:
        barrier = self._open.pop(key)
        for rank, (token, _) in barrier.come.items():
            record = self._records[rank]
            record.released_barrier, record.barrier_error = token, error
            self._on_release(record)
