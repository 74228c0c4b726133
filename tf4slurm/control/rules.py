"""The rules of a job as tables: what follows the exit, the loss or the failure of a task, and a stop request.

The functions are pure: `JobState` calls them and acts on the answers. docs/concepts/failures.md has the same tables; a
test compares them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from tf4slurm.control.messages import KilledBy
from tf4slurm.control.records import Failure, Outcome, Phase, TaskRecord
from tf4slurm.errors import EXIT_TASK_LOST, exit_code_of
from tf4slurm.roles import Role

# The exit of a child


class AfterExit(enum.Enum):
    """What follows the exit of a child process."""

    FINISHED = "it has finished"
    RESTART = "restarted in place"
    GO_ON = "the job goes on without it"
    EARLY = "too early, unless training is over"
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
"""What follows an exit during training, by `Role.name`. A spare has no child."""


def after_exit(role: Role, returncode: int, phase: Phase, *, is_restart_left: bool) -> AfterExit:
    """Return what follows the exit of a child with `returncode`, which is negative after a signal.

    While the scripts save and stop, each child that exits has finished, whatever its exit code. Before training and
    after the outcome, an exit has no consequence.
    """
    if phase is Phase.STOPPING:
        return AfterExit.FINISHED
    if phase is not Phase.TRAINING:
        return AfterExit.NOTHING
    success_left, success_none, failure_left, failure_none = AFTER_EXIT[role.name]
    if returncode == 0:
        return success_left if is_restart_left else success_none
    return failure_left if is_restart_left else failure_none


def exit_code_after(returncode: int, killed_by: KilledBy | None) -> int:
    """Return the job's exit code for the failure of a child: 7 if tf4slurm killed it, else the child's own."""
    return exit_code_of(returncode) if killed_by is None else EXIT_TASK_LOST


# The loss of a task


class AfterLoss(enum.Enum):
    """What follows the loss of a task: its agent or its host has ended, or cannot be reached."""

    REFORM = "a spare takes its place"
    REPLACE = "a spare takes its place in the same attempt"
    FAILURE = "the attempt fails"
    END = "the job ends"
    GO_ON = "the job goes on without it"


_REFORM = (AfterLoss.REFORM, AfterLoss.FAILURE, AfterLoss.END)
_REPLACE = (AfterLoss.REPLACE, AfterLoss.FAILURE, AfterLoss.END)
_FAIL = (AfterLoss.FAILURE, AfterLoss.END)
_END = (AfterLoss.END,)
_GO_ON = (AfterLoss.GO_ON,)

#   role               rendezvous  checking  training   stopping
AFTER_LOSS = {
    "chief":          (_REFORM,    _FAIL,    _FAIL,     _END),
    "leading worker": (_REFORM,    _FAIL,    _FAIL,     _END),
    "worker":         (_REFORM,    _FAIL,    _REPLACE,  _END),
    "joined worker":  (_GO_ON,     _GO_ON,   _GO_ON,    _GO_ON),
    "evaluator":      (_REFORM,    _FAIL,    _FAIL,     _END),
    "ps":             (_REFORM,    _FAIL,    _FAIL,     _END),
    "data server":    (_REFORM,    _FAIL,    _FAIL,     _END),
    "spare":          (_REFORM,    _FAIL,    _GO_ON,    _GO_ON),
}  # fmt: skip
"""What follows a loss, by `Role.name` and phase. The first possible one of each cell applies; see `after_loss`."""

_LOSS_PHASES = (Phase.RENDEZVOUS, Phase.CHECKING, Phase.TRAINING, Phase.STOPPING)


def after_loss(
    role: Role, phase: Phase, *, has_spares: bool, is_spare_free: bool, accepts_workers: bool, owns_child: bool
) -> AfterLoss:
    """Return what follows the loss of a task.

    Args:
        role: The role of the lost task.
        phase: The phase of the job.
        has_spares: The job was started with --spares. Without, no further attempt could have all tasks.
        is_spare_free: A spare can take the place of each lost task, and no failure is held back.
        accepts_workers: The chief's script can use another process in place of a worker.
        owns_child: The agent has started the child. After the cluster has formed, the loss of a sidecar is no failure,
            because Slurm has started the script and reports its exit.
    """
    if phase not in _LOSS_PHASES:
        return AfterLoss.GO_ON
    if not owns_child and phase in (Phase.TRAINING, Phase.STOPPING):
        return AfterLoss.GO_ON
    is_possible = {
        AfterLoss.REFORM: is_spare_free,
        AfterLoss.REPLACE: is_spare_free and accepts_workers,
        AfterLoss.FAILURE: has_spares,
        AfterLoss.END: True,
        AfterLoss.GO_ON: True,
    }
    return next(each for each in AFTER_LOSS[role.name][_LOSS_PHASES.index(phase)] if is_possible[each])


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
        spares_suffice: A spare can take the place of each lost task.
    """
    if not is_attempt_left:
        return AfterFailure.END
    if is_stuck:
        return AfterFailure.NO_PROGRESS
    return AfterFailure.NEXT_ATTEMPT if spares_suffice else AfterFailure.END


def first_failure(one: Failure | None, other: Failure) -> Failure:
    """Return the earlier one of two failures, by the times of the exits or losses; `one` at the same time."""
    return one if one is not None and one.at <= other.at else other


def outcome_after(failure: Failure, exited_early: TaskRecord | None) -> Outcome:
    """Return the outcome if a failure ends the job. A ps that has exited early is the cause of later failures."""
    outcome = failure.outcome
    if exited_early is None or exited_early.task == outcome.cause:
        return outcome
    reason = f"{exited_early} exited with code 0 before the job was done. Then: {outcome.reason}"
    return Outcome(EXIT_TASK_LOST, reason, exited_early.task)


# The end of a job


class Completion(enum.Enum):
    """How far the tasks that the job waits for are done."""

    NOT_DONE = "the job goes on"
    BOUNDED_WAIT = "only evaluators are not done: they have --finish-timeout"
    DONE = "the job is complete"


def completion_of(records: Iterable[TaskRecord]) -> Completion:
    """Return how far the tasks that the job waits for are done."""
    not_done = [record for record in records if record.role.is_waited_for and not record.is_done]
    if not not_done:
        return Completion.DONE
    return Completion.BOUNDED_WAIT if all(record.role.is_wait_bounded for record in not_done) else Completion.NOT_DONE


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
    Phase.STOPPING:    (AfterStop.NOTHING,   AfterStop.NOTHING),
    Phase.TERMINATING: (AfterStop.NOTHING,   AfterStop.NOTHING),
    Phase.ENDED:       (AfterStop.NOTHING,   AfterStop.NOTHING),
}  # fmt: skip
"""What follows a stop request, by phase, with and without a grace period."""


def is_stop_over(records: Iterable[TaskRecord]) -> bool:
    """Whether the grace period can end: all tasks that the job waits for have saved or exited, or a ps has exited.

    Without a ps the other tasks can no longer save. Evaluators are not awaited.
    """
    records = list(records)
    waited = [record for record in records if record.role.is_waited_for and not record.role.is_wait_bounded]
    has_lost_ps = any(record.is_done for record in records if record.role.name == "ps")
    return has_lost_ps or all(record.is_done or record.observed.script.has_saved for record in waited)
