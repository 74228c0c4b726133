"""Workers that join or leave a running job, and the list of workers that the chief should use. No I/O here.

The list has the joined workers and the other workers, because a spare that replaces a worker has another address.

A joined worker takes no part in the rendezvous, in barriers or in the job's outcome. Its child starts when the chief's
script can use the worker. When a new attempt begins, the worker chooses a new port. It joins again when that attempt
trains. To dismiss a joined worker is to let its agent terminate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tf4slurm.control.records import TaskEvent, TaskRecord
from tf4slurm.errors import EXIT_NOT_FORMED
from tf4slurm.spec.job_spec import JobSpec

_LEAVE_SECONDS = 20.0  # for the closure that runs on the worker; Slurm kills a cancelled job 30 s after SIGTERM
_NEVER = float("inf")


@dataclass
class _JoinedWorker:
    """One joined worker that has not left. Times are job times.

    Attributes:
        waits_until: Time when the worker is dismissed (its agent terminates) if the chief does not use it.
        leaves_by: Time when a worker that was asked to leave is dismissed, even if the chief still uses it. Infinite
            for a worker that was not asked to leave.
        has_served: Whether the child's server has answered in this attempt.
        is_used: Whether the chief uses the worker.
        dismissal: The reason why the joined worker must end. Empty if it need not end.
        exit_code: The exit code of a joined worker that must end.
    """

    record: TaskRecord
    waits_until: float
    leaves_by: float = _NEVER
    has_served: bool = False
    is_used: bool = False
    dismissal: str = ""
    exit_code: int = 0

    @property
    def may_be_used(self) -> bool:
        return not (self.record.is_done or self.dismissal or self.leaves_by < _NEVER)


@dataclass
class WorkerChanges:
    """The changes that a method of `JoinedWorkers` has made.

    Attributes:
        events: New events of joined workers.
        ranks: The ranks of the tasks whose desired state has changed.
        usable: After `update`, the joined workers that the chief's script accepts. Their children need not run yet.
    """

    events: list[TaskEvent] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    usable: list[TaskRecord] = field(default_factory=list)


class JoinedWorkers:
    """The joined workers of a job that have not left, and the list of all workers that the chief should use.

    This class also keeps whether a spare has replaced a worker: the list then has the spare's address.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._joined_workers: dict[int, _JoinedWorker] = {}
        self._workers: tuple[tuple[int, str], ...] = ()
        self._has_replacement = False

    @property
    def has_changes(self) -> bool:
        """Whether the chief may have to use other workers, or other addresses, than those of the formed cluster."""
        return self._has_replacement or bool(self._joined_workers or self._workers)

    @property
    def workers(self) -> tuple[tuple[int, str], ...]:
        """The index and address of each worker that the chief should use.

        Either the tuple has all workers, or it is empty and the chief uses the workers of the cluster spec. It is empty
        until a joined worker can be used or a spare has replaced a worker.
        """
        return self._workers

    def dismissal_of(self, rank: int) -> tuple[str, int]:
        """Return why the joined worker of this rank must end, and its exit code. Return "" and 0 if it need not end."""
        worker = self._joined_workers.get(rank)
        return (worker.dismissal, worker.exit_code) if worker is not None else ("", 0)

    def describe_wait(self, rank: int, chief: TaskRecord | None, obstacle: str) -> str:
        """Return why the chief does not use a joined worker yet, in words. Return "" for another task, or if it does.

        `obstacle` is the reason why no worker can join, or "" (`TaskTable.find_workers_obstacle`).
        """
        worker = self._joined_workers.get(rank)
        if worker is None or worker.is_used or chief is None:
            return ""
        if worker.dismissal:
            return f"it must leave: {worker.dismissal}"
        if worker.leaves_by < _NEVER:
            return "it leaves"
        if obstacle:
            return obstacle
        if chief.observed.script.workers is None:
            return "the script of the chief has made no strategy with tf4slurm.tensorflow yet"
        if worker.has_served:
            return "the chief has not connected to it yet"
        return "its script has not started its TensorFlow server yet"

    def add(self, record: TaskRecord, now: float) -> None:
        self._joined_workers[record.rank] = _JoinedWorker(record, now + self._spec.start_timeout_seconds)

    def remove(self, rank: int) -> None:
        """Remove a joined worker that is gone. The next `update` removes it from `workers`, too."""
        self._joined_workers.pop(rank, None)

    def leave(self, record: TaskRecord, why: str, now: float) -> WorkerChanges:
        """Let a joined worker leave the job. Idempotent.

        The chief gives it no more work. It is dismissed when the chief no longer uses it, at the latest after 20 s.
        """
        changes = WorkerChanges()
        worker = self._joined_workers[record.rank]
        if worker.may_be_used:
            worker.leaves_by = now + _LEAVE_SECONDS
            changes.events.append(TaskEvent("leaving", record, f"leaves the job: {why}"))
            if not worker.is_used:
                _dismiss(worker, "it leaves", 0, changes)
        return changes

    def dismiss(self, record: TaskRecord, why: str, exit_code: int = 0) -> WorkerChanges:
        """Let a joined worker's agent terminate now, with this exit code. Later calls have no effect."""
        changes = WorkerChanges()
        _dismiss(self._joined_workers[record.rank], why, exit_code, changes)
        return changes

    def note_replacement(self) -> None:
        """Note that a spare has replaced a worker. The next `update` gives the chief the new address."""
        self._has_replacement = True

    def begin_attempt(self) -> WorkerChanges:
        """Prepare the joined workers for a new attempt. Dismiss those that were asked to leave."""
        changes = WorkerChanges()
        for worker in self._joined_workers.values():
            worker.has_served = worker.is_used = False
            if worker.leaves_by < _NEVER:
                _dismiss(worker, "it leaves", 0, changes)
        self._workers = ()
        self._has_replacement = False
        return changes

    def begin_training(self, now: float) -> None:
        for worker in self._joined_workers.values():
            worker.waits_until = now + self._spec.start_timeout_seconds

    def update(self, members: Sequence[TaskRecord], chief: TaskRecord, now: float) -> WorkerChanges:
        """Dismiss the joined workers that must end, and find those that the chief can use.

        Call this after each change of the chief or of a joined worker. Call it regularly, too, because some workers are
        dismissed after a time. Additional calls have no effect.
        """
        changes = WorkerChanges()
        script = chief.observed.script
        used = script.workers or ()
        errors = dict(script.unusable_workers)
        for worker in self._joined_workers.values():
            record = worker.record
            if worker.dismissal:
                worker.is_used = False
                continue
            worker.has_served = worker.has_served or record.observed.has_server
            is_used = record.task.task_index in used
            if is_used and not worker.is_used:
                changes.events.append(TaskEvent("joined", record, "takes part in training"))
            worker.is_used = is_used
            error = errors.get(record.task.task_index)
            why, exit_code = self._find_dismissal(worker, chief, error, now)
            if why:
                _dismiss(worker, why, exit_code, changes)
            elif worker.leaves_by == _NEVER and script.workers is not None:
                changes.usable.append(record)
        self._update_workers(members, chief, changes)
        return changes

    def _find_dismissal(
        self, worker: _JoinedWorker, chief: TaskRecord, error: str | None, now: float
    ) -> tuple[str, int]:
        """Return why a joined worker must end, and its exit code. Return "" and 0 if it need not end.

        `error` is the error of the first closure that ran on the worker. None if there was no error.
        """
        record, script = worker.record, chief.observed.script
        if script.workers_error:
            return script.workers_error, EXIT_NOT_FORMED
        if chief.is_done:
            return "training is over", 0
        if record.is_done:
            return "its script has ended", 0
        if error is not None:
            return f"the first closure on it failed: {error}", EXIT_NOT_FORMED
        if worker.leaves_by < _NEVER:
            return ("it leaves", 0) if not worker.is_used or now >= worker.leaves_by else ("", 0)
        if worker.is_used:
            worker.waits_until = now + self._spec.start_timeout_seconds
        elif now >= worker.waits_until:
            what = f"the chief did not connect to {record.address}"
            if script.workers is None:
                what = "the script of the chief made no strategy with tf4slurm.tensorflow"
            return f"{what} within {self._spec.start_timeout_seconds:g} s", EXIT_NOT_FORMED
        return "", 0

    def _update_workers(self, members: Sequence[TaskRecord], chief: TaskRecord, changes: WorkerChanges) -> None:
        served = [each.record for each in self._joined_workers.values() if each.has_served and each.may_be_used]
        if not (served or self._workers or self._has_replacement):
            return
        own = [record for record in members if record.task.task_type == "worker"]
        workers = tuple(sorted((record.task.task_index, str(record.address)) for record in [*own, *served]))
        if workers != self._workers:
            self._workers = workers
            changes.ranks.add(chief.rank)


def _dismiss(worker: _JoinedWorker, why: str, exit_code: int, changes: WorkerChanges) -> None:
    if worker.dismissal:
        return
    worker.dismissal, worker.exit_code = why, exit_code
    changes.ranks.add(worker.record.rank)
    if worker.leaves_by == _NEVER:
        changes.events.append(TaskEvent("dismissed", worker.record, f"must leave: {why}"))
