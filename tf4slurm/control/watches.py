"""Notice jobs that do not train: no new steps, no TensorFlow servers, no sign of work. This module does no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tf4slurm.control.idleness import IdleWatch
from tf4slurm.control.messages import CheckpointState, ScriptState
from tf4slurm.control.records import Failure, Outcome, TaskRecord
from tf4slurm.control.waits import WaitWatch, describe_waits, group_waits
from tf4slurm.errors import EXIT_NOT_FORMED, EXIT_TASK_LOST
from tf4slurm.spec.job_spec import JobSpec

_SERVER_SECONDS = 60.0  # until a warning that no TensorFlow server runs; importing TensorFlow takes less
_QUICK_SECONDS = 1.0  # Python alone takes 0.02 s, the import of TensorFlow more than a second
_GROWTH = 2  # a warning of waits is repeated when so many times as many tasks wait
_SIGNAL_SECONDS = 120  # from Slurm's signal to the time limit, as `tf4slurm submit --requeue` requests it
_NEVER = float("inf")


class StepWatch:
    """Notices that no task has reported a new step within the stall timeout."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._last_step_at = _NEVER

    def note_step(self, now: float) -> None:
        self._last_step_at = now

    def reset(self) -> None:
        """Stop the stall timeout. It starts again when a task reports the next step."""
        self._last_step_at = _NEVER

    def find_stall(self, members: Sequence[TaskRecord], now: float) -> TaskRecord | None:
        """Return the task with the highest step if training has stalled, else None. Each stall is returned once.

        Steps are sent with heartbeats, so a new step may arrive late. The result is None until each task that reports
        steps has sent a message later than half a heartbeat interval before the end of the stall timeout.
        """
        seconds = self._spec.stall_timeout_seconds
        if seconds is None or now - self._last_step_at <= seconds:
            return None
        asked_at = self._last_step_at + seconds - self._spec.heartbeat_interval_seconds / 2
        reporting = (r for r in members if r.observed.script.step is not None and not r.is_gone)
        if not all(record.last_message_at > asked_at for record in reporting):
            return None
        self.reset()
        return max(members, key=lambda record: record.observed.script.step or 0)


class ServerWatch:
    """Notices that none of several tasks in the cluster spec has started a TensorFlow server, in any attempt."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._has_server = False
        self._started_at = _NEVER

    def note_server(self) -> None:
        self._has_server = True

    def note_start(self, now: float) -> None:
        """Record that the children of an attempt start. The time limits of `has_failed` and `is_late` begin `now`."""
        self._started_at = now

    def lacks_servers(self, members: Sequence[TaskRecord]) -> bool:
        """Return whether no server has ever answered, although several tasks are in the cluster spec.

        The result is False under plain srun, because sidecars do not look for servers.
        """
        tasks = [record for record in members if record.role.is_in_cluster]
        return not self._has_server and len(tasks) > 1 and all(record.owns_child for record in tasks)

    def has_failed(self, members: Sequence[TaskRecord], now: float) -> bool:
        """Return whether the job must end because it lacks servers.

        This is so if `JobSpec.require_servers` is set and `lacks_servers` is still true after the start timeout.
        """
        is_over = now - self._started_at >= self._spec.start_timeout_seconds
        return self._spec.require_servers and is_over and self.lacks_servers(members)

    def is_late(self, members: Sequence[TaskRecord], now: float) -> bool:
        """Return whether `lacks_servers` is true 60 s after the start of the children, or after the start timeout."""
        limit = min(_SERVER_SECONDS, self._spec.start_timeout_seconds)
        return now - self._started_at >= limit and self.lacks_servers(members)

    def describe(self, members: Sequence[TaskRecord], when: str = "", either: str = "") -> str:
        count = sum(record.role.is_in_cluster for record in members)
        return (
            f"None of the {count} tasks in the cluster spec has started a TensorFlow server{when}: "
            f"{either}each runs the script alone. Let the script read TF_CONFIG, by TensorFlow or "
            "tf4slurm.tensorflow, or run one copy: --ps 0 --workers 0."
        )


class PauseWatch:
    """Remembers the latest pause of the launcher that was long enough for agents to count the launcher as lost.

    Attributes:
        noted_at: The job time at the end of that pause. Only a later loss can be its consequence.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.noted_at = 0.0
        self._outcome: Outcome | None = None
        self._excuses_until = 0.0

    def note(self, seconds: float, now: float) -> None:
        """Remember a pause of the launcher that lasted `seconds` and ended at `now`.

        Ignore it if it was so short that no agent can have counted the launcher as lost and ended its task.
        """
        limit = self._spec.launcher_loss_seconds
        if seconds + self._spec.heartbeat_interval_seconds > limit:  # agents count from the last message
            reason = f"The launcher was paused for {seconds:.0f} s (Ctrl-Z, SIGSTOP or a suspended host). Agents end "
            reason += f"their tasks after {limit:g} s without the launcher (--heartbeat-timeout)."
            self._outcome = Outcome(EXIT_TASK_LOST, reason)
            self.noted_at = now
            self._excuses_until = now + self._spec.termination_seconds

    def outcome_of_pause(self, now: float) -> Outcome | None:
        """Return the outcome of the job if a pause of the launcher can be the cause of a loss at `now`, else None.

        A pause can be the cause until `JobSpec.termination_seconds` after its end. The outcome names the pause as the
        reason, and no task as the cause.
        """
        return self._outcome if now < self._excuses_until else None


def describe_no_work(members: Sequence[TaskRecord]) -> str | None:
    """Return a warning if the children have done nothing, else None.

    They have done nothing if at least one has ended, each that has ended exited with 0 within 1 s and printed nothing,
    and no child had a server, was restarted or reported anything.
    """
    ended = [record for record in members if record.observed.returncode is not None]
    if not ended or any(map(_has_worked, members)) or not all(map(_ended_at_once, ended)):
        return None
    return (
        f"Every task exited with code 0 within {_QUICK_SECONDS:g} s and printed nothing, started no TensorFlow server "
        "and reported no step: the command has probably run nothing. Check it; a task has no standard input."
    )


def _has_worked(record: TaskRecord) -> bool:
    observed = record.observed
    return observed.has_server or observed.start_count > 1 or observed.script != ScriptState()


def _ended_at_once(record: TaskRecord) -> bool:
    seconds = (record.ended_at or 0.0) - (record.started_at or 0.0)
    return record.observed.returncode == 0 and record.observed.printed_nothing and seconds < _QUICK_SECONDS


@dataclass
class Findings:
    """What a check of `Watches` has found.

    Attributes:
        outcome: The outcome of the job if the job must end, else None.
        failure: The failure of the attempt if training has stalled, or if TensorFlow waits in vain, else None.
        warnings: New warnings, as sentences.
        withdrawn: Earlier warnings that are not true any more.
        vain_waits: The names of the ended tasks for which TensorFlow in a task waits, by the rank of this task.
    """

    outcome: Outcome | None = None
    failure: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    vain_waits: dict[int, tuple[str, ...]] = field(default_factory=dict)


class Watches:
    """All checks that one job trains, such as `StepWatch` and `describe_no_work`, and the current warnings."""

    def __init__(self, spec: JobSpec) -> None:
        self.steps, self.servers, self.pauses = StepWatch(spec), ServerWatch(spec), PauseWatch(spec)
        self._spec = spec
        self._idleness = IdleWatch()
        self._waits = WaitWatch(spec)
        self._warnings: dict[str, str] = {}  # by subject, such as "servers", or "waits" and the ended ranks
        self._wait_counts: dict[frozenset[int], int] = {}  # tasks that waited at the last warning, by the ended ranks
        self._withdrawn: list[str] = []  # since the last check

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings.values())

    def note_server(self) -> None:
        """Record that a TensorFlow server has answered. A warning of missing servers ends."""
        self.servers.note_server()
        self._withdraw("servers")

    def check(self, members: Sequence[TaskRecord], now: float, *, is_training: bool) -> Findings:
        """Look for a stall, missing servers, idle tasks and vain waits. Call this in each tick of the control service.

        Without `is_training` (the phase TRAINING), only warnings of idle tasks are reported.
        """
        found = Findings()
        if is_training:
            self._check_waits(members, now, found)
        furthest = self.steps.find_stall(members, now)
        if furthest is not None and is_training and found.failure is None:
            seconds, step = self._spec.stall_timeout_seconds, furthest.observed.script.step
            text = f"no task has reported a new step for {seconds:g} s; the last was step {step} of {furthest}."
            outcome = Outcome(EXIT_TASK_LOST, f"Training has stalled: {text}", furthest.task)
            found.failure = Failure(outcome, now, furthest)
        if is_training and self.servers.has_failed(members, now):
            when = f" within {self._spec.start_timeout_seconds:g} s"
            found.outcome = Outcome(EXIT_NOT_FORMED, self.servers.describe(members, when))
        elif is_training and "servers" not in self._warnings and self.servers.is_late(members, now):
            either = "either TensorFlow is still being imported, or "
            self._warn("servers", self.servers.describe(members, either=either), found)
        if self._idleness.is_due(now):
            is_explained = any(subject not in ("idle", "save") for subject in self._warnings)
            text_or_none = self._idleness.check(members, now, is_explained=is_explained)
            if text_or_none is not None and "idle" not in self._warnings:
                self._warn("idle", text_or_none, found)
            elif self._idleness.is_active:
                self._withdraw("idle")
        found.withdrawn, self._withdrawn = self._withdrawn, []
        return found

    def _check_waits(self, members: Sequence[TaskRecord], now: float, found: Findings) -> None:
        waits = self._waits.check(members, now)
        groups = group_waits(waits)
        for ended in [each for each in self._wait_counts if each not in groups]:
            del self._wait_counts[ended]
            text = self._warnings.pop(_wait_subject(ended))
            if not any(ended < others for others in groups):  # otherwise a warning that names more tasks replaces it
                self._withdrawn.append(text)
        for ended, equal in groups.items():
            text = describe_waits(equal)
            if len(equal) >= _GROWTH * self._wait_counts.get(ended, 0):
                self._wait_counts[ended] = len(equal)
                self._warn(_wait_subject(ended), text, found)
            self._warnings[_wait_subject(ended)] = text
        if waits:
            self._withdraw("idle")
            found.vain_waits = {wait.record.rank: tuple(str(each.task) for each in wait.ended) for wait in waits}
            found.failure = self._waits.find_failure(waits, members, now)

    def check_save(self, record: TaskRecord, checkpoint: CheckpointState) -> Findings:
        """Warn once if a save took more than half of the grace period: that of a stop may not end in time."""
        found, limit = Findings(), self._spec.grace_period_seconds
        if limit and checkpoint.seconds > limit / 2 and "save" not in self._warnings:
            option = "grace_period_seconds=" if self._spec.external_chief else "--grace-period "
            seconds = math.ceil(4 * checkpoint.seconds)
            text = f"{record} took {checkpoint.seconds:.1f} s to save {checkpoint.newest}. A stop leaves {limit:g} s "
            text += f"to save: give more with {option}{seconds}"
            if seconds > _SIGNAL_SECONDS:
                text += f", and if Slurm sends the stop request before the time limit, --signal USR1@{seconds + 60}"
            self._warn("save", f"{text}.", found)
        return found

    def check_at_completion(self, members: Sequence[TaskRecord]) -> Findings:
        """When the job would end with success, check that a TensorFlow server has answered in it.

        If `ServerWatch.lacks_servers` is true, the result has an outcome (with `JobSpec.require_servers`) or a warning
        (without it, and if there was no warning before).
        """
        found = Findings()
        self._wait_counts.clear()
        for subject in [each for each in self._warnings if each not in ("servers", "save")]:
            self._withdraw(subject)
        found.withdrawn, self._withdrawn = self._withdrawn, []
        if self.servers.lacks_servers(members):
            text = self.servers.describe(members)
            if self._spec.require_servers:
                found.outcome = Outcome(EXIT_NOT_FORMED, text)
                return found
            if "servers" not in self._warnings:
                found.warnings.append(text)
            self._warnings["servers"] = text  # an earlier warning may be less certain
        return found

    def check_at_end(self, members: Sequence[TaskRecord]) -> Findings:
        """After the end of the job, warn if its tasks have done nothing. If a task has failed, do not warn."""
        found = Findings()
        text = None if any(record.has_failed for record in members) else describe_no_work(members)
        if text is not None:
            self._warn("work", text, found)
        return found

    def _withdraw(self, subject: str) -> None:
        if subject in self._warnings:
            self._withdrawn.append(self._warnings.pop(subject))

    def _warn(self, subject: str, text: str, found: Findings) -> None:
        self._warnings[subject] = text
        found.warnings.append(text)


def _wait_subject(ended: frozenset[int]) -> str:
    return f"waits {sorted(ended)}"
