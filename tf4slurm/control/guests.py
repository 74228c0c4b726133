"""Workers of a running job: guests, which `tf4slurm join` adds, and spares that replace lost workers.

A guest takes no part in a rendezvous, at a barrier or in the job's outcome. Its child starts when the chief's script
can use it. In another attempt it chooses a new port, and joins again when that attempt trains. No side effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tf4slurm.cluster import Task
from tf4slurm.control.records import TaskRecord
from tf4slurm.errors import EXIT_NOT_FORMED
from tf4slurm.roles import GUEST_WORKER
from tf4slurm.spec import JobSpec

_LEAVE_SECONDS = 20.0  # for the closure that runs on the guest; Slurm kills a cancelled job 30 s after SIGTERM
_NEVER = float("inf")


@dataclass
class _Guest:
    """One guest.

    Attributes:
        waits_until: Time when the guest is dismissed if the chief does not use it.
        leaves_by: Time when a guest that leaves is dismissed, although the chief still uses it.
        has_served: Whether the child's server has answered in this attempt.
        is_used: Whether the chief uses the worker.
        dismissal: The reason why the guest must end; empty if it need not.
        exit_code: The exit code of a guest that must end.
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
        return not (self.record.is_gone or self.record.is_done or self.dismissal or self.leaves_by < _NEVER)


class Guests:
    """All guests of a job, also those that have left: their ranks and indices are not used again."""

    def __init__(
        self, members: list[TaskRecord], spec: JobSpec, changed: set[int], emit: Callable[[str, TaskRecord, str], None]
    ) -> None:
        """`changed` receives the ranks whose desired state has changed; `emit` is called for each event."""
        self._members = members
        self._spec = spec
        self._changed = changed
        self._emit = emit
        self._guests: dict[int, _Guest] = {}
        self._workers: tuple[tuple[int, str], ...] = ()
        self._has_replacement = False

    @property
    def has_changes(self) -> bool:
        """Whether the workers may differ from those of the rendezvous."""
        return self._has_replacement or bool(self._guests)

    @property
    def workers(self) -> tuple[tuple[int, str], ...]:
        """The index and address of each worker that the chief should use; empty before the first change."""
        return self._workers

    def dismissal_of(self, rank: int) -> tuple[str, int]:
        """Return the reason why the guest of this rank must end, and its exit code; "" and 0 if it need not."""
        guest = self._guests.get(rank)
        return (guest.dismissal, guest.exit_code) if guest is not None else ("", 0)

    def find(self, incarnation: str) -> TaskRecord | None:
        """Return the guest that has registered with this incarnation."""
        return next((each.record for each in self._guests.values() if each.record.incarnation == incarnation), None)

    def add(self, rank: int, now: float) -> TaskRecord:
        """Add a guest with the next free index of a worker; return its record."""
        index = len(self._guests) + sum(record.task.task_type == "worker" for record in self._members)
        record = TaskRecord(rank, Task("worker", index), GUEST_WORKER)
        self._guests[rank] = _Guest(record, now + self._spec.start_timeout_seconds)
        return record

    def leave(self, record: TaskRecord, why: str, now: float) -> None:
        """Release a guest that has received a stop signal: the chief gives it no more work. Idempotent."""
        guest = self._guests[record.rank]
        if guest.may_be_used:
            guest.leaves_by = now + _LEAVE_SECONDS
            self._emit("leaving", record, f"leaves the job: {why}")
            if not guest.is_used:
                self.dismiss(record, "it leaves")

    def dismiss(self, record: TaskRecord, why: str, exit_code: int = 0) -> None:
        """Let a guest end now, with this exit code. Idempotent."""
        guest = self._guests[record.rank]
        if not (guest.dismissal or record.is_gone):
            guest.dismissal, guest.exit_code = why, exit_code
            self._changed.add(record.rank)
            if guest.leaves_by == _NEVER:
                self._emit("dismissed", record, f"must leave: {why}")

    def note_replacement(self) -> None:
        """Give the chief the workers, one of which has moved to a spare."""
        self._has_replacement = True

    def begin_attempt(self) -> None:
        for guest in self._guests.values():
            guest.has_served = guest.is_used = False
            if guest.leaves_by < _NEVER:
                self.dismiss(guest.record, "it leaves")
        self._workers, self._has_replacement = (), False

    def extend_deadlines(self, seconds: float) -> None:
        for guest in self._guests.values():
            guest.waits_until += seconds
            guest.leaves_by += seconds

    def begin_training(self, now: float) -> None:
        for guest in self._guests.values():
            guest.waits_until = now + self._spec.start_timeout_seconds

    def update(self, chief: TaskRecord, now: float) -> list[TaskRecord]:
        """Dismiss guests as the states of the chief and the guests require; return those that the chief can use.

        Level-triggered: call this during training after each change of the chief or a guest, and regularly.
        """
        script = chief.observed.script
        errors, usable = dict(script.unusable_workers), []
        for guest in self._guests.values():
            record = guest.record
            if record.is_gone or guest.dismissal:
                guest.is_used = False
                continue
            self._note_use(guest, script.workers or ())
            if script.workers_error:
                self.dismiss(record, script.workers_error, EXIT_NOT_FORMED)
            elif chief.is_done:
                self.dismiss(record, "training is over")
            elif record.is_done:
                self.dismiss(record, "its script has ended")
            elif (error := errors.get(record.task.task_index)) is not None:
                self.dismiss(record, f"the first closure on it failed: {error}", EXIT_NOT_FORMED)
            elif guest.leaves_by < _NEVER:
                if not guest.is_used or now >= guest.leaves_by:
                    self.dismiss(record, "it leaves")
            elif guest.is_used:
                guest.waits_until = now + self._spec.start_timeout_seconds
                usable.append(record)
            elif now >= guest.waits_until:
                what = f"the chief did not connect to {record.address}"
                if script.workers is None:
                    what = "the script of the chief made no strategy with tf4slurm.tensorflow"
                why = f"{what} within {self._spec.start_timeout_seconds:g} s"
                self.dismiss(record, why, EXIT_NOT_FORMED)
            elif script.workers is not None:
                usable.append(record)
        self._update_workers(chief)
        return usable

    def _note_use(self, guest: _Guest, used: tuple[int, ...]) -> None:
        record = guest.record
        guest.has_served = guest.has_served or record.observed.has_server
        is_used = record.task.task_index in used
        if is_used and not guest.is_used:
            self._emit("joined", record, "takes part in training")
        guest.is_used = is_used

    def _update_workers(self, chief: TaskRecord) -> None:
        served = [each.record for each in self._guests.values() if each.has_served and each.may_be_used]
        if not (served or self._workers or self._has_replacement):
            return
        members = [record for record in self._members if record.task.task_type == "worker"]
        workers = tuple(sorted((record.task.task_index, str(record.address)) for record in [*members, *served]))
        if workers != self._workers:
            self._workers = workers
            self._changed.add(chief.rank)
