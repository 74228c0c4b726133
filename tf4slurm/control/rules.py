"""The rules of a job as tables: when a task is lost, and what follows an exit, a loss, a failure or a stop request.

The functions are pure: `JobState` calls them and acts on the answers. docs/concepts/failures.md has the same tables. A
test compares them. Two events count as a failure of the attempt: a stall, and --finish-timeout after a ps has exited
early. Others end the job directly, without these rules: an invalid registration, an address that other tasks cannot
reach, the timeouts of the rendezvous and of the phases that end the job, and the exit of srun.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from typing import NamedTuple, get_args

from tf4slurm.control.messages import DesiredState, KilledBy, PortFailure
from tf4slurm.control.records import Failure, Outcome, Phase, TaskRecord
from tf4slurm.errors import EXIT_TASK_LOST, exit_code_of
from tf4slurm.roles import Role
from tf4slurm.spec.job_spec import HoldPorts, JobSpec
from tf4slurm.system.exec_child import NOW_SIGNAL

# The exit of a child


class AfterExit(enum.Enum):
    """What follows the exit of a child process.

    FINISHED and GO_ON have the same effect: the task is done. Only GO_ON emits an event, "not_restarted".
    """

    FINISHED = "it has finished"
    RESTART = "restarted in place"
    GO_ON = "the job goes on without it"
    EARLY = "the others have --finish-timeout to exit"
    FAILURE = "the attempt fails"
    NOTHING = "nothing"


#   role               exit code 0                             failure
#                      a restart is left   none is left        a restart is left   none is left
AFTER_EXIT = {
    "chief":          (AfterExit.FINISHED, AfterExit.FINISHED, AfterExit.FAILURE,  AfterExit.FAILURE),
    "leading worker": (AfterExit.FINISHED, AfterExit.FINISHED, AfterExit.FAILURE,  AfterExit.FAILURE),
    "worker":         (AfterExit.FINISHED, AfterExit.FINISHED, AfterExit.RESTART,  AfterExit.FAILURE),
    "joined worker":  (AfterExit.FINISHED, AfterExit.FINISHED, AfterExit.RESTART,  AfterExit.GO_ON),
    "evaluator":      (AfterExit.FINISHED, AfterExit.FINISHED, AfterExit.RESTART,  AfterExit.GO_ON),
    "ps":             (AfterExit.EARLY,    AfterExit.EARLY,    AfterExit.FAILURE,  AfterExit.FAILURE),
    "data server":    (AfterExit.RESTART,  AfterExit.GO_ON,    AfterExit.RESTART,  AfterExit.FAILURE),
    "spare":          (AfterExit.NOTHING,  AfterExit.NOTHING,  AfterExit.NOTHING,  AfterExit.NOTHING),
}  # fmt: skip
"""What follows an exit during training, by `Role.name`. A spare has no child.

An evaluator's exit never fails the attempt, because no other task needs an evaluator. A data server runs until it is
killed, so it is restarted even after an exit with code 0.
"""


def after_exit(
    role: Role,
    returncode: int,
    phase: Phase,
    *,
    is_restart_left: bool,
    shared: DesiredState,
) -> AfterExit:
    """Return what follows the exit of a child.

    While the scripts save and stop, each child that exits has finished, whatever its exit code. Before training and
    after the outcome, an exit has no consequence.

    Args:
        role: The role of the task.
        returncode: The exit code, or minus the number of a signal.
        phase: The phase of the job.
        is_restart_left: --max-worker-restarts allows another restart of the task, which has not failed twice with the
            same exception on the same line before its server ran.
        shared: The part of the desired state that is the same for all tasks. When training is over, a ps that exits
            with 0 has finished. When only evaluators are not done (`is_finishing`), no exit fails the attempt.
    """
    if phase is Phase.STOPPING:
        return AfterExit.FINISHED
    if phase is not Phase.TRAINING:
        return AfterExit.NOTHING
    success_left, success_none, failure_left, failure_none = AFTER_EXIT[role.name]
    if returncode == 0:
        consequence = success_left if is_restart_left else success_none
    else:
        consequence = failure_left if is_restart_left else failure_none
    if consequence is AfterExit.EARLY and (shared.is_training_over or shared.is_finishing):
        return AfterExit.FINISHED
    return AfterExit.GO_ON if consequence is AfterExit.FAILURE and shared.is_finishing else consequence


def exit_code_after(returncode: int, killed_by: KilledBy | None) -> int:
    """Return the job's exit code after a child has failed: 7 if tf4slurm killed it, else that of the child.

    The exit code of a child that another process killed by signal n is 128 + n.
    """
    return exit_code_of(returncode) if killed_by is None else EXIT_TASK_LOST


class AfterPortFailure(enum.Enum):
    """What follows a failure of a child whose server could not listen on the port of its task."""

    OTHER_PORTS = "the cluster forms again on other ports"
    RELEASED_PORTS = "the same, and the agents release the ports before the scripts start"
    FAILURE = "the attempt fails"


#             --hold-ports auto                always                        never
AFTER_PORT_FAILURE = {
    "taken": (AfterPortFailure.OTHER_PORTS,    AfterPortFailure.OTHER_PORTS, AfterPortFailure.OTHER_PORTS),
    "held":  (AfterPortFailure.RELEASED_PORTS, AfterPortFailure.FAILURE,     AfterPortFailure.FAILURE),
}  # fmt: skip
"""What follows such a failure, by `ObservedState.port_failure` and the option. It counts as no attempt and no restart.

A cluster that has formed again five times fails instead. So does one whose agents have released the ports before, if a
port is held: the script then waits for a port of its own.
"""

MOST_OTHER_PORTS = 5


def after_port_failure(
    port_failure: PortFailure, hold_ports: HoldPorts, *, num_before: int, are_released: bool
) -> AfterPortFailure:
    """Return what follows the failure of a child whose server could not listen, during training.

    Args:
        port_failure: Why it could not.
        hold_ports: The option --hold-ports.
        num_before: How many times the cluster has formed again on other ports.
        are_released: The agents have released the ports.
    """
    options: tuple[HoldPorts, ...] = get_args(HoldPorts)
    consequence = AFTER_PORT_FAILURE[port_failure][options.index(hold_ports)]
    if num_before >= MOST_OTHER_PORTS or (are_released and consequence is AfterPortFailure.RELEASED_PORTS):
        return AfterPortFailure.FAILURE
    return consequence


# The loss of a task


class Loss(NamedTuple):
    """Why a task is lost.

    Attributes:
        why: The reason, without the name of the task.
        is_orphan: The agent may have ended because it lost the launcher. If the launcher was paused, this pause is
            then the reason of the outcome, and no task is its cause. See `JobState.lose`.
    """

    why: str
    is_orphan: bool


def loss_of(record: TaskRecord, spec: JobSpec, now: float) -> Loss | None:
    """Return why a task is lost: it had no connection, or sent no message, for too long. None if it is not lost.

    A task is also lost when the exit of its agent is noticed; see `receiver.py`.
    """
    if not record.has_registered or record.is_gone:
        return None
    if not record.is_connected and now - record.disconnected_at > spec.reconnect_seconds:
        return Loss("its connection broke and was not restored", is_orphan=True)
    if now - record.last_message_at > spec.task_loss_seconds:
        return Loss(f"it sent no heartbeat for {spec.task_loss_seconds:g} s", is_orphan=False)
    return None


def outcome_of_loss(record: TaskRecord, why: str) -> Outcome:
    """Return the outcome of a job that ends because this task is lost: exit code 7."""
    return Outcome(EXIT_TASK_LOST, f"{record} is lost: {why}.", record.task, is_loss=True)


class AfterLoss(enum.Enum):
    """What follows the loss of a task: its agent or its host has ended, or cannot be reached."""

    REPLACE_BEFORE_TRAINING = "a spare takes its place"
    REPLACE_IN_TRAINING = "a spare takes its place in the same attempt"
    FORM_WITHOUT = "the cluster forms without it"
    FAILURE = "the attempt fails"
    END = "the job ends with exit code 7"
    GO_ON = "the job goes on without it"
    STOP = "the scripts save and stop, then the step is cancelled"  # under plain srun, if `JobSpec.cancels_step` is set


_SPARE = (AfterLoss.REPLACE_BEFORE_TRAINING, AfterLoss.FAILURE)
_REPLACE = (AfterLoss.REPLACE_IN_TRAINING, AfterLoss.FAILURE)
_WITHOUT = (AfterLoss.FORM_WITHOUT,)
_FAIL = (AfterLoss.FAILURE,)
_END = (AfterLoss.END,)
_GO_ON = (AfterLoss.GO_ON,)

#   role               rendezvous  checking  training   stopping
AFTER_LOSS = {
    "chief":          (_SPARE,     _FAIL,    _FAIL,     _END),
    "leading worker": (_SPARE,     _FAIL,    _FAIL,     _END),
    "worker":         (_SPARE,     _FAIL,    _REPLACE,  _END),
    "joined worker":  (_GO_ON,     _GO_ON,   _GO_ON,    _GO_ON),
    "evaluator":      (_SPARE,     _FAIL,    _FAIL,     _END),
    "ps":             (_SPARE,     _FAIL,    _FAIL,     _END),
    "data server":    (_SPARE,     _FAIL,    _FAIL,     _END),
    "spare":          (_WITHOUT,   _FAIL,    _GO_ON,    _GO_ON),
}  # fmt: skip
"""What follows a loss, by `Role.name` and phase. The first possible consequence of a cell applies.

Whatever the cell is, the job goes on if the lost task has finished, or if only evaluators are not done. No cell has
STOP: only `after_script_end` returns it, for scripts that plain srun has started.

The loss of an evaluator fails the attempt, although its exit does not: without an agent it cannot be restarted in
place. In the next attempt a spare replaces it.

The loss of a spare while addresses are checked fails the attempt, because the spare is in the cluster: another task
would find its address unreachable.
"""

_LOSS_PHASES = (Phase.RENDEZVOUS, Phase.CHECKING, Phase.TRAINING, Phase.STOPPING)


def after_loss(
    role: Role,
    phase: Phase,
    *,
    is_replaceable: bool,
    accepts_workers: bool,
    owns_child: bool,
    is_done: bool,
    shared: DesiredState,
) -> AfterLoss:
    """Return what follows the loss of a task.

    Args:
        role: The role of the lost task.
        phase: The phase of the job.
        is_replaceable: There is a spare for each lost task, and no earlier failure waits. A failure waits until each
            disconnected task has reconnected or is lost. The attempt then fails, even if spares are left.
        accepts_workers: The chief's script can use another process in place of a worker.
        owns_child: The agent has started the child. False for a sidecar beside a plain srun script: during training and
            while scripts stop, the result is then that of `after_script_end`.
        is_done: The child has ended, and is not started again in this attempt.
        shared: See `after_exit`.
    """
    if phase not in _LOSS_PHASES or is_done or shared.is_finishing:
        return AfterLoss.GO_ON
    if not owns_child and phase in (Phase.TRAINING, Phase.STOPPING):
        return after_script_end(role, phase, shared)
    is_possible = {
        AfterLoss.REPLACE_BEFORE_TRAINING: is_replaceable,
        AfterLoss.REPLACE_IN_TRAINING: is_replaceable and accepts_workers,
    }
    return next(each for each in AFTER_LOSS[role.name][_LOSS_PHASES.index(phase)] if is_possible.get(each, True))


def after_script_end(role: Role, phase: Phase, shared: DesiredState, returncode: int | None = None) -> AfterLoss:
    """Return what follows the end or the loss of a script that plain srun has started.

    The variables of a ps are lost with it, and no restart brings them back. The end of any other script has no
    consequence, because srun reports its exit code. A ps that exits with 0 has none either: training may be done.

    Args:
        returncode: The exit code of the script: 0, or 1 after an exception. None if the script was killed or is lost.
    """
    is_needed = role.name == "ps" and phase is Phase.TRAINING and not shared.is_training_over
    return AfterLoss.STOP if is_needed and returncode != 0 else AfterLoss.GO_ON


# The wait of a task for one that has ended


class AfterWait(enum.Enum):
    """What follows if TensorFlow in a task waits for a task that has ended: a warning, and possibly a failure."""

    WARNING = "a warning"
    STALL = "a warning; after --stall-timeout the attempt fails"
    FINAL = "a warning; after 60 s the attempt fails"


#                              others go on       all others have ended
AFTER_WAIT = {
    "without --stall-timeout": (AfterWait.WARNING, AfterWait.FINAL),
    "with --stall-timeout":    (AfterWait.STALL,   AfterWait.FINAL),
}  # fmt: skip
"""What follows such a wait, by option. "All others": the tasks that the job waits for, except evaluators.

When all of them have ended or wait in the same way, nothing can end the wait.
"""

_FINAL_WAIT_SECONDS = 60.0  # a timeout of the session itself may end the wait earlier


def wait_limit_seconds(spec: JobSpec, *, is_final: bool) -> float | None:
    """Return after how many seconds of such a wait the attempt fails. None if it does not.

    `is_final` is true if all other tasks that the job waits for have ended. A shorter stall timeout applies then, too.
    """
    seconds = spec.stall_timeout_seconds
    consequence = AFTER_WAIT["without --stall-timeout" if seconds is None else "with --stall-timeout"][is_final]
    if consequence is AfterWait.FINAL:
        return min(_FINAL_WAIT_SECONDS, seconds or _FINAL_WAIT_SECONDS)
    return seconds if consequence is AfterWait.STALL else None


# The failure of an attempt


class AfterFailure(enum.Enum):
    """What follows the failure of an attempt."""

    NEXT_ATTEMPT = "another attempt begins"
    NO_PROGRESS = "the job ends with exit code 8"
    END = "the job ends with the exit code of the failure"


def after_failure(*, is_attempt_left: bool, is_stuck: bool, spares_suffice: bool) -> AfterFailure:
    """Return what follows a failure.

    Args:
        is_attempt_left: --max-attempts allows another attempt.
        is_stuck: Two attempts in a row had no new step.
        spares_suffice: A spare can take the place of each lost task. Without enough spares no attempt can have all
            tasks, because Slurm does not start a single task of a step again.
    """
    if not is_attempt_left or not spares_suffice:
        return AfterFailure.END
    return AfterFailure.NO_PROGRESS if is_stuck else AfterFailure.NEXT_ATTEMPT


RESTART_SECONDS = 300.0
"""Seconds for which a failed attempt waits for `restart()` of an external chief: time to read the error in a notebook
and to run a cell. An allocation whose notebook nobody watches is not held longer."""


def awaits_restart(chief: TaskRecord | None, spec: JobSpec, *, failed_seconds: float, spares_suffice: bool) -> bool:
    """Return whether the job waits for `restart()` of its external chief, before the rules of a failure apply.

    Args:
        chief: The chief. It must run: its own end or loss is not waited for.
        failed_seconds: Seconds since the failure.
        spares_suffice: As for `after_failure`. The loss of an agent or host is final.
    """
    is_present = chief is not None and chief.observed.state == "running" and not chief.is_gone
    return spec.external_chief and is_present and spares_suffice and failed_seconds < RESTART_SECONDS


class AfterLeave(enum.Enum):
    """What follows when an external chief has left with `restart()`."""

    RESTART = "ps and workers are started again, for another chief"
    FINISHED = "it has finished"
    NOTHING = "nothing"


AFTER_LEAVE = {
    Phase.TRAINING: AfterLeave.RESTART,
    Phase.STOPPING: AfterLeave.FINISHED,
}
"""What follows when an external chief has left with `restart()`, by phase. In all other phases nothing.

The restart counts as no attempt: the chief itself asks for it.
"""


def first_failure(one: Failure | None, other: Failure) -> Failure:
    """Return the failure with the earlier time of exit or loss. Return `one` if the times are equal."""
    return one if one is not None and one.at <= other.at else other


def outcome_after(failure: Failure, exited_early: TaskRecord | None) -> Outcome:
    """Return the outcome if a failure ends the job.

    `exited_early` is the first ps that exited with 0 while other tasks needed it, if any. It is the cause of each later
    failure.
    """
    outcome = failure.outcome
    if exited_early is None or exited_early.task == outcome.cause:
        return outcome
    reason = f"{exited_early} exited with code 0 before the job was done. Then: {outcome.reason}"
    return Outcome(EXIT_TASK_LOST, reason, exited_early.task)


# The end of a job


class Completion(enum.Enum):
    """Which of the tasks that the job waits for are not done. See `Role.is_waited_for`."""

    NOT_DONE = "the job goes on"
    BOUNDED_WAIT = "only evaluators are not done: they have --finish-timeout"
    DONE = "the job is complete"


def completion_of(records: Iterable[TaskRecord]) -> Completion:
    """Return whether all tasks that the job waits for are done, or all but evaluators. `records` are the members."""
    not_done = [record for record in records if record.role.is_waited_for and not record.is_done]
    if not not_done:
        return Completion.DONE
    return Completion.BOUNDED_WAIT if all(record.role.is_wait_bounded for record in not_done) else Completion.NOT_DONE


# Stop requests


class StopRequest(enum.Enum):
    """Who requests a stop. `stop_request_of` returns it for a signal to the launcher."""

    SIGNAL = "a signal: `tf4slurm cancel`, `scancel`, the time limit, preemption"
    CTRL_C = "Ctrl-C"
    NOW = "`tf4slurm cancel --now`"


#                        the first one  each later one
LEAVES_GRACE_PERIOD = {
    StopRequest.SIGNAL: (True,          True),
    StopRequest.CTRL_C: (True,          False),
    StopRequest.NOW:    (False,         False),
}  # fmt: skip
"""Whether the scripts have the grace period after a stop request: the first one of its kind, and each later one."""

FORWARDED_SECONDS = 0.3
"""A second Ctrl-C within this time is no request: a program such as `timeout` has forwarded the first one."""


def stop_request_of(number: int, *, has_person: bool) -> StopRequest:
    """Return who requests a stop with a signal to the launcher.

    Args:
        number: The signal.
        has_person: SIGINT comes from the terminal or the program of a person. Otherwise, as in a batch script, only
            `scancel` sends it, and does so for `tf4slurm cancel`.
    """
    if number == NOW_SIGNAL:
        return StopRequest.NOW
    return StopRequest.CTRL_C if number == signal.SIGINT and has_person else StopRequest.SIGNAL


class AfterStop(enum.Enum):
    """What follows a stop request."""

    SAVE = "the scripts save and stop"
    TERMINATE = "all tasks are terminated"
    NOTHING = "nothing"


#                    a grace period       none
AFTER_STOP = {
    Phase.RENDEZVOUS:  (AfterStop.TERMINATE, AfterStop.TERMINATE),
    Phase.CHECKING:    (AfterStop.TERMINATE, AfterStop.TERMINATE),
    Phase.TRAINING:    (AfterStop.SAVE,      AfterStop.TERMINATE),
    Phase.STOPPING:    (AfterStop.NOTHING,   AfterStop.TERMINATE),
    Phase.TERMINATING: (AfterStop.NOTHING,   AfterStop.NOTHING),
    Phase.ENDED:       (AfterStop.NOTHING,   AfterStop.NOTHING),
}  # fmt: skip
"""What follows a stop request, by phase: first with a grace period, then without one.

A request has none if `LEAVES_GRACE_PERIOD` says so, or if the job has none (--grace-period 0). While the scripts save,
a request with a grace period changes nothing: neither the time that is left nor the outcome.
"""


def is_stop_over(records: Iterable[TaskRecord]) -> bool:
    """Return whether the grace period can end.

    It ends when all tasks that the job waits for, except evaluators, have saved or exited. It also ends when a ps has
    exited and other tasks still need it, because they can no longer save.
    """
    records = list(records)
    waited = [record for record in records if record.role.is_waited_for and not record.role.is_wait_bounded]
    has_ended_ps = any(record.is_done for record in records if record.role.name == "ps")
    is_needed = any(record.needs_others for record in records)
    return (has_ended_ps and is_needed) or all(map(_has_saved, waited))


def not_stopped(records: Iterable[TaskRecord]) -> list[TaskRecord]:
    """Return the tasks that the job waits for, except evaluators, that run and have not saved after a stop request."""
    waited = (record for record in records if record.role.is_waited_for and not record.role.is_wait_bounded)
    return [each for each in waited if each.observed.state == "running" and not (each.is_gone or _has_saved(each))]


def _has_saved(record: TaskRecord) -> bool:
    """Return whether the end of the grace period need not wait for a task: it has saved or exited, or will not save.

    A script of plain srun will not save if it is lost or does not check for stop requests. It ends with the step.
    """
    script = record.observed.script
    checks_for_stop = record.owns_child or (script.handles_stop and not record.is_gone)
    return record.is_done or script.has_saved or not checks_for_stop
