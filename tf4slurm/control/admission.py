"""Decide whether a process that registers may take part in the job. No function here has side effects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tf4slurm import __version__
from tf4slurm.control.messages import Registration
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.task_table import TaskTable
from tf4slurm.errors import RendezvousClosedError
from tf4slurm.roles import can_grow


@dataclass(frozen=True)
class Refusal:
    """The reason why a process cannot take part in the job.

    Attributes:
        reason: The reason, as a clause.
        is_mismatch: Whether the versions or the number of tasks show that the job was started wrongly. If its cluster
            has not formed yet, the job then ends.
    """

    reason: str
    is_mismatch: bool = False

    def to_error(self) -> RendezvousClosedError:
        text = f"The control service refused this task: {self.reason}."
        return RendezvousClosedError(text, reason=self.reason)


def admit_member(registration: Registration, tasks: TaskTable) -> TaskRecord | Refusal:
    """Decide whether a process may take part as a member, which is any task except a joined worker.

    A task registers again after each broken connection.

    Returns:
        The record of the member, or the reason of a refusal.
    """
    rank, members = registration.rank, tasks.members
    if registration.version != __version__:
        return Refusal(
            f"it runs tf4slurm {registration.version}, the launcher {__version__}; install one version for all tasks, "
            "on a file system that their hosts share",
            is_mismatch=True,
        )
    if not 0 <= rank < len(members):
        return Refusal(f"rank {rank} is not one of this job's {len(members)} tasks", is_mismatch=True)
    record = members[rank]
    if record.is_gone:
        return Refusal(f"rank {rank} {f'is lost: {record.loss}' if record.loss else 'has terminated'}")
    if registration.incarnation in record.former_incarnations:
        return Refusal(f"this process has left rank {rank}")
    if record.has_registered and record.incarnation != registration.incarnation:
        process_id = record.observed.process_id
        where = record.node if process_id is None else f"{record.node} (process {process_id})"
        return Refusal(f"rank {rank} was taken by an earlier process, on {where}")
    return record


def admit_joined_worker(
    registration: Registration, tasks: TaskTable, *, is_ending: bool, workers_error: str
) -> TaskRecord | Refusal | None:
    """Decide whether a worker may join the job, or register again after it has joined.

    Args:
        is_ending: Whether the job was asked to stop, or its outcome is known.
        workers_error: The reason why the chief's script cannot use more workers. Empty if it has reported none.

    Returns:
        The record of a worker that registers again. None for a new worker that may join. Else the reason of a refusal.
    """
    if registration.version != __version__:
        return Refusal(f"it runs tf4slurm {registration.version}, the job {__version__}; use the job's version")
    known = next((each for each in tasks.joined_workers if each.incarnation == registration.incarnation), None)
    if known is not None:
        return known
    if registration.joined_rank is not None:
        return Refusal("this worker has left the job")
    if registration.failure is not None:
        return Refusal(registration.failure.removesuffix("."))
    if is_ending:
        return Refusal("the job is ending")
    if not can_grow(Counter(record.task.task_type for record in tasks.members)):
        return Refusal("only a job with a chief and ps can use more workers")
    return Refusal(workers_error) if workers_error else None
