"""Records of the control service: the phase of a job, its tasks, its kinds of events, and its outcome."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from tf4slurm.cluster import Address, Task
from tf4slurm.control.messages import ObservedState, ScriptState
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.errors import COMPLETED, FAILED, STOPPED
from tf4slurm.roles import Role

_MAX_ATTEMPTS_WITHOUT_STEP = 2
IMPORT_SECONDS = 60.0
"""Maximum time in seconds for which a script is shown as "importing". Some scripts start no server and report nothing,
so nothing else ends this state."""


class Phase(enum.Enum):
    """The phase of a job. A new attempt returns to RENDEZVOUS. All other transitions move forward."""

    RENDEZVOUS = "rendezvous"  # not all tasks have registered
    CHECKING = "checking"  # tasks check that the addresses of other tasks are reachable
    TRAINING = "training"  # the child processes run
    STOPPING = "stopping"  # the scripts are asked to save and stop
    TERMINATING = "terminating"  # the outcome is known, and every task must terminate
    ENDED = "ended"

    @property
    def is_ending(self) -> bool:
        """Whether the job was asked to stop, or its outcome is known."""
        return self in (Phase.STOPPING, Phase.TERMINATING, Phase.ENDED)


@dataclass
class TaskRecord:
    """The control service's record of one task. Times are job times.

    Attributes:
        is_placed: Whether `task` and `role` are final. With placement "spread" they are not before all tasks have
            registered.
        owns_child: See `Registration`.
        attempt: The last attempt for which the task has sent an address. 0 before the task has registered.
        is_connected: Whether the connection is open, or was open when the agent terminated or was lost.
        is_gone: The agent has terminated or is lost.
        loss: Why the task is lost, without the name of the task. Empty if it is not lost.
        is_done: The child has ended and is not started again in this attempt. Not set by an exit that fails the
            attempt.
        last_message_at: Time of the last accepted message, or of the first registration.
        disconnected_at: Time when the connection broke, if `is_connected` is False.
        desired_start_count, released_barrier, barrier_error: See `DesiredState`.
        vain_waits: The names of the ended tasks for which TensorFlow in this task waits, or waited at its end.
        started_at: Time when the last start of the child was reported. None before the first in this attempt.
        serving_at: Time when the first server at the port of the child was reported. None before that.
        ended_at: Time when the child exited, or when the agent terminated or was lost before that.
        early_failures: What ended the children of this attempt that failed soon after their start, before they had a
            server, by the number of the start.
        former_incarnations: The `incarnation` of each earlier process of this rank that has left. See `vacate`.
    """

    rank: int
    task: Task
    role: Role
    is_placed: bool = True
    owns_child: bool = True
    node: str = ""
    address: Address | None = None
    attempt: int = 0
    incarnation: str = ""
    is_connected: bool = False
    is_gone: bool = False
    loss: str = ""
    is_done: bool = False
    last_message_at: float = 0.0
    disconnected_at: float = 0.0
    desired_start_count: int = 0
    observed: ObservedState = field(default_factory=ObservedState)
    started_at: float | None = None
    serving_at: float | None = None
    ended_at: float | None = None
    released_barrier: str = ""
    barrier_error: str = ""
    early_failures: dict[int, ScriptFailure] = field(default_factory=dict)
    vain_waits: tuple[str, ...] = ()
    former_incarnations: frozenset[str] = frozenset()

    def begin_attempt(self, attempt: int) -> None:
        self.observed = ObservedState(attempt=attempt, stop_signal=self.observed.stop_signal)
        self.desired_start_count = 0
        self.is_done = False
        self.started_at = self.serving_at = self.ended_at = None
        self.early_failures = {}
        self.vain_waits = ()

    def vacate(self) -> None:
        """Let another process register for this task, because its process has left."""
        self.former_incarnations |= {self.incarnation}
        self.incarnation = self.node = ""
        self.address, self.attempt = None, 0
        self.is_connected = self.is_gone = False
        self.loss = ""
        self.begin_attempt(self.attempt)

    def note_failure(self, now: float) -> None:
        """Remember what ended the last child if it failed soon after its start, before it had a server."""
        observed = self.observed
        is_early = self.started_at is not None and (self.ended_at or now) - self.started_at < IMPORT_SECONDS
        may_serve = self.role.is_in_cluster and not observed.has_server
        if observed.failure is not None and is_early and may_serve:
            self.early_failures[observed.start_count] = observed.failure

    @property
    def repeats_failure(self) -> bool:
        """Whether the last two children failed soon after their start with the same exception, on the same line."""
        count = self.observed.start_count
        one, other = (self.early_failures.get(each) for each in (count - 1, count))
        return one is not None and other is not None and one.has_same_place(other)

    def is_importing(self, now: float) -> bool:
        """Return whether the script is probably still importing TensorFlow. False from 60 s after its start."""
        observed = self.observed
        if observed.state != "running" or observed.has_server or observed.script != ScriptState():
            return False
        return self.started_at is not None and now - self.started_at < IMPORT_SECONDS

    def lost_at(self, now: float, task_loss_seconds: float) -> float:
        """Return the earliest job time at which this task may have been lost, if its loss is noticed at `now`.

        This is the end of its connection, if that is broken. Otherwise it is the time of its last message, if that is
        more than `task_loss_seconds` ago, else `now`.
        """
        if self.has_registered and not self.is_connected:
            return self.disconnected_at
        return self.last_message_at if now - self.last_message_at > task_loss_seconds else now

    @property
    def needs_others(self) -> bool:
        """Whether this task has not finished training, so that it still needs the ps."""
        return self.role.trains and not (self.is_done or self.is_gone or self.observed.script.completion)

    @property
    def has_failed(self) -> bool:
        """Whether the task is lost, or its child or script has failed."""
        is_lost = self.is_gone and self.observed.state != "terminated"
        return is_lost or self.observed.script.completion == "failed" or bool(self.observed.returncode)

    @property
    def is_hidden_from_slurm(self) -> bool:
        """Whether Slurm may not notice the end of this task.

        True if its agent or its plain srun script is suspended, or if its host or its slurmstepd is lost. False if an
        agent, the agent's parent process (the guard) or a sidecar is killed: Slurm then notices the end.
        """
        if self.is_gone and self.is_connected and self.observed.state != "terminated":
            return True
        killed_by = self.observed.killed_by
        return killed_by == "slurmstepd" or (killed_by == "liveness_probe" and not self.owns_child)

    @property
    def has_registered(self) -> bool:
        return bool(self.incarnation)

    @property
    def name(self) -> str:
        return str(self.task) if self.is_placed else f"rank {self.rank}"

    def __str__(self) -> str:
        place = f" on {self.node}" if self.node else f" (rank {self.rank})" if self.is_placed else ""
        return f"{self.name}{place}"


@dataclass
class JobProgress:
    """The progress of a job in its attempts, or of a requeued job in its runs.

    Attributes:
        furthest_step: The highest step that a task has reported. None before the first report.
        num_without_step: How many attempts in a row, up to the latest, had no new step. Attempts before the first step
            do not count, because not every script reports steps.
    """

    furthest_step: int | None = None
    num_without_step: int = 0
    _has_new_step: bool = False

    def note_step(self, step: int | None) -> None:
        if step is not None and (self.furthest_step is None or step > self.furthest_step):
            self.furthest_step = step
            self._has_new_step = True

    def end_attempt(self) -> None:
        self.num_without_step = 0 if self._has_new_step or self.furthest_step is None else self.num_without_step + 1
        self._has_new_step = False

    @property
    def is_stuck(self) -> bool:
        """Whether two attempts (or runs) in a row had no new step, so that another one would be useless."""
        return self.num_without_step >= _MAX_ATTEMPTS_WITHOUT_STEP

    def __str__(self) -> str:
        return (
            f"No progress: {self.num_without_step} times in a row no step after step {self.furthest_step} was reported."
        )


class EventKind(NamedTuple):
    """A kind of event in events.jsonl, and whether the terminal and the report's timeline show it."""

    meaning: str
    is_on_terminal: bool = False
    is_in_timeline: bool = False


EVENT_KINDS = {
    # of a task
    "registered": EventKind("The agent has registered with the address of its task."),
    "started": EventKind("The child process was started."),
    "serving": EventKind("The TensorFlow server of the child process answers."),
    "first_step": EventKind("The script has reported its first training step."),
    "saved": EventKind("The script has saved a checkpoint.", is_in_timeline=True),
    "not_saved": EventKind("A save of a checkpoint has failed. The script has logged the reason.", is_in_timeline=True),
    "blocked": EventKind("TensorFlow in the task waits for a task that has ended.", False, True),
    "unblocked": EventKind("This wait is over."),
    "barrier": EventKind("The task was the last at a barrier; the first had waited for 1 s or longer."),
    "exited": EventKind("The child process has exited or was killed.", is_in_timeline=True),
    "restarting": EventKind("The child process is started again.", True, True),
    "not_restarted": EventKind("No restart of the child process is left, or would help.", True, True),
    "exited_early": EventKind("A ps has exited with 0 while other tasks still needed it.", True, True),
    "disconnected": EventKind("The agent has lost its connection to the launcher, and may reconnect.", True, True),
    "reconnected": EventKind("The agent is connected again.", True, True),
    "replaced": EventKind("A spare takes the place of a lost task, or of one on a node that failed twice.", True, True),
    "joined": EventKind("The chief trains with a worker that has joined the running job.", True, True),
    "leaving": EventKind("A worker that has joined is asked to leave, by its Slurm job or a person.", True, True),
    "dismissed": EventKind("A worker that has joined must end.", True, True),
    "lost": EventKind("The task counts as lost: its agent ended, is silent or sent an invalid message.", True, True),
    "terminated": EventKind("The agent has terminated its child process, and exits."),
    # of the job
    "staging": EventKind("The environment is copied to the nodes' local disks (--stage-env).", True, True),
    "rendezvous": EventKind("A new attempt begins: every task registers again."),
    "checking": EventKind("All tasks have registered, and check that they reach each other's addresses.", True),
    "training": EventKind("All addresses are reachable, and the child processes start.", True),
    "stopping": EventKind("A stop was requested, and the scripts have the grace period to save.", True, True),
    "stop_repeated": EventKind("Ctrl-C was pressed while the scripts save after another stop request.", True),
    "shards": EventKind("All data shards of a name are done."),
    "grace_period_over": EventKind("The grace period is over, or a request skips the rest of it.", True, True),
    "other_ports": EventKind("A server could not listen on its port, so the cluster forms on other ports.", True, True),
    "attempt": EventKind("The attempt has failed, so another attempt follows.", True, True),
    "failed": EventKind("The attempt has failed. The job waits for `restart()` of its external chief.", True, True),
    "vacant": EventKind("The external chief has left after `restart()`. The job waits for another one.", True, True),
    "warning": EventKind("No task has a TensorFlow server, shows a sign of work or has done anything.", True),
    "withdrawn": EventKind("An earlier warning is not true any more.", True),
    "outcome": EventKind("The exit code of the job is known.", True, True),
    "terminating": EventKind("All tasks are asked to terminate."),
    "not_terminated": EventKind("Some tasks did not terminate in time.", True, True),
}


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: The exit code of `tf4slurm run`.
        reason: The reason why the job ended, as a sentence.
        cause: The task that failed first. None if no single task is the cause.
        tail: The last lines that the child of `cause` printed. If `cause` is a ps that exited early, the lines are
            those of the task that failed afterwards.
        has_timed_out: The cluster did not form in time.
        is_stop: A person, a time limit or preemption stopped the job.
        failure: What ended the script of `cause`. None if the cause is no failure of a script, or is not known yet.
        is_loss: `cause` is lost, and its agent could not report why.
    """

    exit_code: int
    reason: str
    cause: Task | None = None
    tail: tuple[str, ...] = ()
    has_timed_out: bool = False
    is_stop: bool = False
    failure: ScriptFailure | None = None
    is_loss: bool = field(default=False, compare=False)  # it follows from the other fields

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0

    @property
    def state(self) -> str:
        """The final state of the job: COMPLETED, FAILED or STOPPED."""
        return STOPPED if self.is_stop else COMPLETED if self.is_success else FAILED


@dataclass(frozen=True)
class Failure:
    """The failure of an attempt: a task failed or is lost, or training has stalled.

    Attributes:
        outcome: The outcome of the job if no other attempt follows.
        at: Job time in seconds of the exit, the loss or the end of a timeout.
        record: The task whose last lines explain the failure.
    """

    outcome: Outcome
    at: float
    record: TaskRecord


class TaskEvent(NamedTuple):
    """An event of a task. `kind` is a key of `EVENT_KINDS`. `text` follows the name of the task in a sentence."""

    kind: str
    record: TaskRecord
    text: str
