"""The errors of tf4slurm, the exit codes of its command line, and the final states of a job."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_REFUSED = 4
EXIT_UNKNOWN_JOB = 5
EXIT_NOT_FORMED = 6
EXIT_TASK_LOST = 7
EXIT_NO_PROGRESS = 8
EXIT_REQUEUED = 75
EXIT_WAIT_TIMEOUT = 124

COMPLETED = "COMPLETED"  # the chief, or without one every worker, has exited with 0; an evaluator may have failed
FAILED = "FAILED"
STOPPED = "STOPPED"  # a person, a time limit or preemption requested the end
REQUEUED = "REQUEUED"  # stopped, and back in Slurm's queue


def exit_code_of(returncode: int) -> int:
    """Return the exit code that a shell reports for a `subprocess` returncode.

    If signal n has killed the process, the returncode is -n and the result is 128 + n.
    """
    return 128 - returncode if returncode < 0 else returncode


def describe_end(returncode: int) -> str:
    """Return the end of a process as text: "exited with code 3" or "was killed by signal 9 (SIGKILL)"."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-returncode} ({name})"


@dataclass(eq=False, repr=False)
class Tf4SlurmError(Exception):
    """Base class of all errors. `exit_code` is the exit code of the command `tf4slurm` after this error.

    The fields of a subclass are facts about the error. Each is a keyword argument of the constructor and an attribute.
    """

    exit_code = EXIT_PREFLIGHT
    message: InitVar[str]

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling. Pickle's default would call the constructor without its required keyword arguments."""
        return _restore, (type(self), self.args), vars(self)


def _restore(cls: type[Tf4SlurmError], args: tuple[Any, ...]) -> Tf4SlurmError:
    error = cls.__new__(cls)
    error.args = args
    return error


@dataclass(eq=False, repr=False, kw_only=True)
class SlurmEnvironmentError(Tf4SlurmError):
    """The environment variable `variable` is missing, is invalid, or shows that the call is not possible here.

    `value` is the value of the variable. It is None if the variable is missing or its value does not matter.
    """

    variable: str
    value: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class NodelistError(Tf4SlurmError, ValueError):
    """The text `nodelist` is not a list of nodes.

    `position` is the 0-based position of the first mistake in the text.
    """

    exit_code = EXIT_USAGE
    nodelist: str
    position: int


class LayoutError(Tf4SlurmError):
    """The node of each rank cannot be determined from Slurm's environment variables.

    They are not sufficient, or they contradict given host names or this rank's own node.
    """


@dataclass(eq=False, repr=False, kw_only=True)
class InterfaceError(Tf4SlurmError):
    """The network interface does not exist on this host or cannot be used. `available` lists usable interfaces."""

    interface: str
    available: Sequence[str] = ()


class PlacementError(Tf4SlurmError, ValueError):
    """Task types, or numbers of tasks, nodes, ports or GPUs, contradict each other or exceed a limit."""

    exit_code = EXIT_USAGE


class PortsInUseError(PlacementError):
    """All ports that the job may use are in use on this host."""

    exit_code = EXIT_PREFLIGHT


@dataclass(eq=False, repr=False, kw_only=True)
class CommandError(Tf4SlurmError):
    """The `command` of the tasks cannot be started, for example because its program or script does not exist."""

    exit_code = EXIT_USAGE
    command: Sequence[str]


@dataclass(eq=False, repr=False, kw_only=True)
class RunDirectoryError(Tf4SlurmError):
    """The run directory, or another file or directory of a job, is missing or cannot be written. `path` names it."""

    path: str


@dataclass(eq=False, repr=False, kw_only=True)
class SchemaVersionError(Tf4SlurmError):
    """A newer version of tf4slurm wrote the file `path` of a job. `version` is its schema version."""

    path: str
    version: int


class RendezvousError(Tf4SlurmError):
    """The tasks of the job did not form a cluster."""

    exit_code = EXIT_NOT_FORMED


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The cluster did not form in time, or not all TensorFlow servers started in time.

    The message names the missing tasks, or has the launcher's output.
    """


@dataclass(eq=False, repr=False, kw_only=True)
class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The control service at `address` cannot be reached or sends nothing, or this process has no agent."""

    address: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class RendezvousClosedError(RendezvousError):
    """The control service refused this task for the given `reason`. A retry would not help."""

    reason: str


class BarrierError(RendezvousError):
    """A barrier broke. The message has the reason, such as the tasks that did not arrive."""


class DataShardsError(Tf4SlurmError):
    """The launcher does not lease data shards to this script, or send their position. The message has the reason."""


class AuthenticationError(RendezvousError):
    """MUNGE does not work on this host, or the job's secret was not encrypted by this user for this user."""


class ShutdownError(Tf4SlurmError):
    """A ps cannot wait for its workers, or a worker cannot send its completion signal to a ps."""

    exit_code = EXIT_TASK_LOST


@dataclass(eq=False, repr=False, kw_only=True)
class ShutdownTimeoutError(ShutdownError, TimeoutError):
    """Not all tasks sent their completion signals to a ps in time.

    `missing` lists the tasks that sent none, such as "worker/1". With method="barrier" it lists all training tasks,
    because a ps does not know which of them still train.
    """

    missing: Sequence[str]


class KerasError(Tf4SlurmError):
    """Keras 3 does not support a call under a multi-process strategy. The message names the alternatives."""

    __init__ = Exception.__init__  # with another __init__, AutoGraph replaces the error of a traced function


class TrainingError(Tf4SlurmError):
    """Training cannot continue."""

    __init__ = Exception.__init__  # as KerasError

    exit_code = EXIT_TASK_LOST


class ParameterServerLostError(TrainingError):
    """A ps is lost with its variables. Another attempt must resume from a checkpoint."""


class TrainingTimeoutError(TrainingError, TimeoutError):
    """No worker returned a result within the timeout."""


class CheckpointError(Tf4SlurmError):
    """A checkpoint cannot be written, or the existing checkpoints cannot be restored."""


@dataclass(eq=False, repr=False, kw_only=True)
class UnknownJobError(Tf4SlurmError):
    """No job has the id, name or path `job`. If it is empty, this user has no job yet, or a `Job` was not started."""

    exit_code = EXIT_UNKNOWN_JOB
    job: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class UnknownTaskError(Tf4SlurmError):
    """No task of the job has one of the requested names. `tasks` lists the tasks that have logs."""

    exit_code = EXIT_USAGE
    tasks: Sequence[str] = ()


class NoLogsError(UnknownTaskError):
    """The job has no logs yet."""

    exit_code = 1


@dataclass(eq=False, repr=False, kw_only=True)
class JobStateError(Tf4SlurmError):
    """The `job` cannot be resumed or cancelled, or get workers or another chief, in its `state`, such as RUNNING."""

    exit_code = EXIT_USAGE
    job: str
    state: str


@dataclass(eq=False, repr=False, kw_only=True)
class WaitTimeoutError(Tf4SlurmError, TimeoutError):
    """The `jobs` did not end in time. They continue to run."""

    exit_code = EXIT_WAIT_TIMEOUT
    jobs: Sequence[str]


class MessageError(Tf4SlurmError, ValueError):
    """A payload is not a valid control message of this version."""


@dataclass(eq=False, repr=False, kw_only=True)
class OptionError(Tf4SlurmError, ValueError):
    """The `option` of a job is unknown or invalid, or contradicts another one."""

    exit_code = EXIT_USAGE
    option: str


@dataclass(eq=False, repr=False, kw_only=True)
class MissingDependencyError(Tf4SlurmError, ImportError):
    """The required `package` is not installed."""

    package: str


@dataclass(eq=False, repr=False, kw_only=True)
class SettingsError(Tf4SlurmError):
    """Settings cannot be used. `source` is the file or variable that contains them."""

    exit_code = EXIT_USAGE
    source: str


@dataclass(eq=False, repr=False, kw_only=True)
class UntrustedFileError(Tf4SlurmError):
    """Another user owns or can write the file `path`, which this user did not name explicitly."""

    path: str


@dataclass(eq=False, repr=False, kw_only=True)
class LaunchError(Tf4SlurmError):
    """The program `command` failed, could not be started, or had no valid output.

    `returncode` is negative after a timeout or a signal, and if the program was not started. `stderr` is its error
    output.
    """

    command: Sequence[str]
    returncode: int = 0
    stderr: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class RefusedError(LaunchError):
    """Slurm refused the job. If `may_be_queued`, it is unknown whether Slurm accepted the job."""

    exit_code = EXIT_REFUSED
    may_be_queued: bool = False
