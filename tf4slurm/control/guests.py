"""Workers of a running job: guests, which `tf4slurm join` adds, and spares that replace lost workers.

A guest takes no part in a rendezvous, at a barrier or in the job's outcome. Its child starts when the chief's script
can use it. In another attempt it chooses a new port, and joins again when that attempt trains. No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tf4slurm.control.records import TaskEvent, TaskRecord
from tf4slurm.errors import EXIT_NOT_FORMED
from tf4slurm.spec import JobSpec

_LEAVE_SECONDS = 20.0  # for the closure that runs on the guest; Slurm kills a cancelled job 30 s after SIGTERM
_NEVER = float("inf")


@dataclass
class _Guest:
    """One present guest. Times are job times.

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
        return not (self.record.is_done or self.dismissal or self.leaves_by < _NEVER)


@dataclass
class GuestChanges:
    """What a call has changed.

    Attributes:
        events: Events of guests.
        ranks: The tasks whose desired state has changed.
        usable: The guests that the chief can use.
    """

    events: list[TaskEvent] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    usable: list[TaskRecord] = field(default_factory=list)


class Guests:
    """The present guests of a job, and the workers that the chief should use."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._guests: dict[int, _Guest] = {}
        self._workers: tuple[tuple[int, str], ...] = ()
        self._has_replacement = False

    @property
    def has_changes(self) -> bool:
        """Whether the workers may differ from those of the rendezvous."""
        return self._has_replacement or bool(self._guests or self._workers)

    @property
    def workers(self) -> tuple[tuple[int, str], ...]:
        """The index and address of each worker that the chief should use; empty before the first change."""
        return self._workers

    def dismissal_of(self, rank: int) -> tuple[str, int]:
        """Return the reason why the guest of this rank must end, and its exit code; "" and 0 if it need not."""
        guest = self._guests.get(rank)
        return (guest.dismissal, guest.exit_code) if guest is not None else ("", 0)

    def add(self, record: TaskRecord, now: float) -> None:
        self._guests[record.rank] = _Guest(record, now + self._spec.start_timeout_seconds)

    def remove(self, rank: int) -> None:
        """Forget a guest that is gone. The chief's workers change with the next `update`."""
        self._guests.pop(rank, None)

    def leave(self, record: TaskRecord, why: str, now: float) -> GuestChanges:
        """Release a guest that has received a stop signal: the chief gives it no more work. Idempotent."""
        changes, guest = GuestChanges(), self._guests[record.rank]
        if guest.may_be_used:
            guest.leaves_by = now + _LEAVE_SECONDS
            changes.events.append(TaskEvent("leaving", record, f"leaves the job: {why}"))
            if not guest.is_used:
                _dismiss(guest, "it leaves", 0, changes)
        return changes

    def dismiss(self, record: TaskRecord, why: str, exit_code: int = 0) -> GuestChanges:
        """Let a guest end now, with this exit code. Idempotent."""
        changes = GuestChanges()
        _dismiss(self._guests[record.rank], why, exit_code, changes)
        return changes

    def note_replacement(self) -> None:
        """Give the chief the workers, one of which has moved to a spare."""
        self._has_replacement = True

    def begin_attempt(self) -> GuestChanges:
        """Keep the guests for the next attempt, but those that leave."""
        changes = GuestChanges()
        for guest in self._guests.values():
            guest.has_served = guest.is_used = False
            if guest.leaves_by < _NEVER:
                _dismiss(guest, "it leaves", 0, changes)
        self._workers, self._has_replacement = (), False
        return changes

    def begin_training(self, now: float) -> None:
        for guest in self._guests.values():
            guest.waits_until = now + self._spec.start_timeout_seconds

    def update(self, members: Sequence[TaskRecord], chief: TaskRecord, now: float) -> GuestChanges:
        """Dismiss guests as the states of the chief and the guests require; find those that the chief can use.

        Level-triggered: call this during training after each change of the chief or a guest, and regularly.
        """
        changes, script = GuestChanges(), chief.observed.script
        used, errors = script.workers or (), dict(script.unusable_workers)
        for guest in self._guests.values():
            record = guest.record
            if guest.dismissal:
                guest.is_used = False
                continue
            guest.has_served = guest.has_served or record.observed.has_server
            is_used = record.task.task_index in used
            if is_used and not guest.is_used:
                changes.events.append(TaskEvent("joined", record, "takes part in training"))
            guest.is_used = is_used
            error = errors.get(record.task.task_index)
            why, exit_code = self._find_dismissal(guest, chief, error, now)
            if why:
                _dismiss(guest, why, exit_code, changes)
            elif guest.leaves_by == _NEVER and script.workers is not None:
                changes.usable.append(record)
        self._update_workers(members, chief, changes)
        return changes

    def _find_dismissal(self, guest: _Guest, chief: TaskRecord, error: str | None, now: float) -> tuple[str, int]:
        """Return the reason why a guest must end, and its exit code; "" and 0 if it need not."""
        record, script = guest.record, chief.observed.script
        if script.workers_error:
            return script.workers_error, EXIT_NOT_FORMED
        if chief.is_done:
            return "training is over", 0
        if record.is_done:
            return "its script has ended", 0
        if error is not None:
            return f"the first closure on it failed: {error}", EXIT_NOT_FORMED
        if guest.leaves_by < _NEVER:
            return ("it leaves", 0) if not guest.is_used or now >= guest.leaves_by else ("", 0)
        if guest.is_used:
            guest.waits_until = now + self._spec.start_timeout_seconds
        elif now >= guest.waits_until:
            what = f"the chief did not connect to {record.address}"
            if script.workers is None:
                what = "the script of the chief made no strategy with tf4slurm.tensorflow"
            return f"{what} within {self._spec.start_timeout_seconds:g} s", EXIT_NOT_FORMED
        return "", 0

    def _update_workers(self, members: Sequence[TaskRecord], chief: TaskRecord, changes: GuestChanges) -> None:
        served = [each.record for each in self._guests.values() if each.has_served and each.may_be_used]
        if not (served or self._workers or self._has_replacement):
            return
        own = [record for record in members if record.task.task_type == "worker"]
        workers = tuple(sorted((record.task.task_index, str(record.address)) for record in [*own, *served]))
        if workers != self._workers:
            self._workers = workers
            changes.ranks.add(chief.rank)


def _dismiss(guest: _Guest, why: str, exit_code: int, changes: GuestChanges) -> None:
    if guest.dismissal:
        return
    guest.dismissal, guest.exit_code = why, exit_code
    changes.ranks.add(guest.record.rank)
    if guest.leaves_by == _NEVER:
        changes.events.append(TaskEvent("dismissed", guest.record, f"must leave: {why}"))
