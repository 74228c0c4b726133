"""Notice jobs that do not train: no new steps, no TensorFlow servers, or no computing. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tf4slurm.control.messages import ScriptState
from tf4slurm.control.records import Failure, Outcome, TaskRecord
from tf4slurm.errors import EXIT_NOT_FORMED, EXIT_TASK_LOST
from tf4slurm.spec.job_spec import JobSpec

_IDLE_SECONDS = 60.0
_IDLE_CHECK_SECONDS = 5.0
_IDLE_CORES = 0.02  # processor cores per task; an idle TensorFlow server uses less
_SERVER_SECONDS = 60.0  # until a warning that no TensorFlow server runs; importing TensorFlow takes less
_QUICK_SECONDS = 1.0  # Python alone takes 0.02 s, the import of TensorFlow more than a second
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
        """Return whether `lacks_servers` is true 60 s after the start of the children or later."""
        return now - self._started_at >= _SERVER_SECONDS and self.lacks_servers(members)

    def describe(self, members: Sequence[TaskRecord], when: str = "", either: str = "") -> str:
        count = sum(record.role.is_in_cluster for record in members)
        return (
            f"None of the {count} tasks in the cluster spec has started a TensorFlow server{when}: "
            f"{either}each runs the script alone. Let the script read TF_CONFIG, by TensorFlow or "
            "tf4slurm.tensorflow, or run one copy: --ps 0 --workers 0."
        )


class IdleWatch:
    """Notices that all tasks run but do not compute, for example because TensorFlow waits for a chief."""

    def __init__(self) -> None:
        self._starts: tuple[object, ...] = ()
        self._since = 0.0
        self._cpu_seconds = 0.0
        self._has_warned = False
        self._due_at = 0.0
        self.is_active = False  # whether a task has reported a step, or computed in the current 60 s

    def is_due(self, now: float) -> bool:
        """Return whether 5 s have passed since this method last returned True. More checks would be expensive."""
        if now < self._due_at:
            return False
        self._due_at = now + _IDLE_CHECK_SECONDS
        return True

    def check(self, records: Sequence[TaskRecord], now: float) -> str | None:
        """Return a warning if the tasks of a job with ps run but do nothing, else None.

        They do nothing if all tasks in the cluster spec run, none has reported a step in this attempt, and each has
        used at most 2 % of a core for 60 s, on average over the tasks. The warning is repeated only after a task has
        started, ended or computed.
        """
        tasks = [record for record in records if record.role.is_in_cluster]
        states = [record.observed for record in tasks]
        starts = tuple((state.attempt, state.start_count, state.state) for state in states)
        cpu_seconds = sum(state.usage.cpu_seconds for state in states)
        is_known = all(state.state == "running" and state.usage.cpu_seconds for state in states)
        has_stepped = any(state.script.step is not None for state in states)
        has_computed = cpu_seconds - self._cpu_seconds > _IDLE_CORES * _IDLE_SECONDS * len(tasks)
        has_changed = starts != self._starts
        is_over = now - self._since >= _IDLE_SECONDS
        self.is_active = has_stepped or (has_computed and not has_changed)
        if has_changed or self.is_active:
            self._has_warned = False
        if has_changed or self.is_active or not is_known or is_over:
            self._starts, self._since, self._cpu_seconds = starts, now, cpu_seconds
        if is_over and is_known and not (has_changed or self.is_active or self._has_warned):
            self._has_warned = True
            return _describe_idleness({record.task.task_type for record in tasks})
        return None


def _describe_idleness(task_types: set[str]) -> str | None:
    """Return a warning that no task computes, with the likely cause.

    In a job without a chief, the script may wait for one. In a job with a chief, the script may expect none. Return
    None if `task_types`, those of the cluster spec, have no "ps".
    """
    seen = f"All tasks run, but none has computed or reported a step for {_IDLE_SECONDS:g} s"
    if "ps" not in task_types:
        return None
    if "chief" not in task_types:
        return (
            f"{seen}. This job has no chief: if the script waits for one, as ParameterServerStrategy does, start it "
            "without --no-chief."
        )
    return f"{seen}. This job has a chief: if worker 0 leads in the script, start it with --no-chief."


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
        failure: The failure of the attempt if training has stalled, else None.
        warnings: New warnings, as sentences.
    """

    outcome: Outcome | None = None
    failure: Failure | None = None
    warnings: list[str] = field(default_factory=list)


class Watches:
    """All checks that one job trains, such as `StepWatch` and `describe_no_work`, and the current warnings."""

    def __init__(self, spec: JobSpec) -> None:
        self.steps, self.servers, self.pauses = StepWatch(spec), ServerWatch(spec), PauseWatch(spec)
        self._spec = spec
        self._idleness = IdleWatch()
        self._warnings: dict[str, str] = {}  # by subject: "servers", "idle" or "work"

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings.values())

    def note_server(self) -> None:
        """Record that a TensorFlow server has answered. A warning of missing servers ends."""
        self.servers.note_server()
        self._warnings.pop("servers", None)

    def check(self, members: Sequence[TaskRecord], now: float, *, is_training: bool) -> Findings:
        """Look for a stall of training, missing servers and idle tasks. Call this in each tick of the control service.

        Without `is_training` (the phase TRAINING), neither a stall nor missing servers are reported.
        """
        found = Findings()
        furthest = self.steps.find_stall(members, now)
        if furthest is not None and is_training:
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
            text_or_none = self._idleness.check(members, now)
            if text_or_none is not None and "servers" not in self._warnings:  # missing servers are the cause
                self._warn("idle", text_or_none, found)
            elif self._idleness.is_active:
                self._warnings.pop("idle", None)
        return found

    def check_at_completion(self, members: Sequence[TaskRecord]) -> Findings:
        """When the job would end with success, check that a TensorFlow server has answered in it.

        If `ServerWatch.lacks_servers` is true, the result has an outcome (with `JobSpec.require_servers`) or a warning
        (without it, and if there was no warning before).
        """
        found = Findings()
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

    def _warn(self, subject: str, text: str, found: Findings) -> None:
        self._warnings[subject] = text
        found.warnings.append(text)
