"""The desired states of all tasks, and which of them have changed since the service last sent them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from tf4slurm.control.joined_workers import JoinedWorkers
from tf4slurm.control.messages import DesiredState, ShardGrant
from tf4slurm.control.records import Outcome
from tf4slurm.control.task_table import TaskTable
from tf4slurm.errors import EXIT_TASK_LOST


class DesiredStates:
    """The desired states of all tasks.

    Attributes:
        shared: The fields that are the same for all tasks. `of` returns them with the fields of one task.
    """

    def __init__(
        self, tasks: TaskTable, joined_workers: JoinedWorkers, grants_of: Callable[[int], tuple[ShardGrant, ...]]
    ) -> None:
        """`grants_of` returns the data shards that are leased to the task of a rank."""
        self.shared = DesiredState()
        self._tasks = tasks
        self._joined_workers = joined_workers
        self._grants_of = grants_of
        self._changed: set[int] = set()

    def change(self, **changes: Any) -> None:
        """Change fields in the desired states of all tasks."""
        self.shared = dataclasses.replace(self.shared, **changes)
        self.note_all()

    def begin_attempt(self, attempt: int, *, releases_ports: bool = False) -> None:
        releases_ports = releases_ports or self.shared.releases_ports
        self.shared = DesiredState(attempt=attempt, releases_ports=releases_ports)
        self.note_all()

    def terminate(self, outcome: Outcome) -> None:
        """Request that all tasks terminate, because `outcome` is known."""
        code = outcome.exit_code if self._tasks.members[0].is_hidden_from_slurm else 0
        reason, has_timed_out = outcome.reason, outcome.has_timed_out
        self.change(terminate=True, terminate_reason=reason, has_timed_out=has_timed_out, exit_code=code)

    def start(self, rank: int, start_count: int) -> None:
        """Request the `start_count`-th start of a task's child in this attempt."""
        self._tasks[rank].desired_start_count = start_count
        self._changed.add(rank)

    def release(self, rank: int, token: str, error: str) -> None:
        """End the script's call of `barrier()` with this token. It raises BarrierError if `error` is not empty."""
        record = self._tasks[rank]
        record.released_barrier, record.barrier_error = token, error
        self._changed.add(rank)

    def note(self, ranks: Iterable[int]) -> None:
        """Mark the tasks of these ranks: the service must send them their desired states, or a new cluster."""
        self._changed.update(ranks)

    def note_all(self) -> None:
        self._changed.update(record.rank for record in self._tasks)

    def take_changed(self) -> set[int]:
        """Return the ranks whose desired state or cluster may have changed since the last call."""
        changed = self._changed.copy()
        self._changed.clear()
        return changed

    def of(self, rank: int) -> DesiredState:
        """Return the desired state of a task. A lost task that sends messages again must terminate."""
        record = self._tasks.get(rank)
        shared = self.shared
        has_joined = record is None or record.role.has_joined
        dismissal, exit_code = self._joined_workers.dismissal_of(rank)
        if record is None or record.is_gone:
            dismissal, exit_code = f"{record or 'this worker'} was lost", EXIT_TASK_LOST
        fields: dict[str, Any] = {
            "terminate": shared.terminate or bool(dismissal),
            "terminate_reason": shared.terminate_reason or dismissal,
            "rank": rank if has_joined else None,
            "exit_code": exit_code if has_joined else shared.exit_code,
        }
        if record is not None:
            fields |= {
                "workers": self._joined_workers.workers if record.task.task_type == "chief" else (),
                "start_count": record.desired_start_count,
                "released_barrier": record.released_barrier,
                "barrier_error": record.barrier_error,
                "shards": self._grants_of(rank),
            }
        return dataclasses.replace(shared, **fields)
