"""The errors of tf4slurm, and their exit codes.

Tf4SlurmError
├─ SlurmEnvironmentError       this process is not in a Slurm step, or a variable is missing or invalid
├─ NodelistError               text that is not a valid list of nodes (also ValueError)
├─ LayoutError                 the node of each rank cannot be determined, or is contradictory
├─ InterfaceError              no such network interface, or it has no address
├─ PlacementError              the numbers of tasks, nodes or ports do not match (also ValueError)
├─ CommandError                the command cannot be started
├─ RunDirectoryError           the run directory cannot be created or written
├─ SchemaVersionError          a newer version of tf4slurm wrote the job's file
├─ RendezvousError
│  ├─ RendezvousTimeoutError     not all tasks registered in time (also TimeoutError)
│  ├─ RendezvousConnectionError  the control service cannot be reached (also ConnectionError)
│  ├─ RendezvousClosedError      the control service refused this task
│  ├─ BarrierError               a task did not arrive at a barrier in time, or cannot arrive
│  └─ AuthenticationError        the token is wrong, or MUNGE cannot open the credentials
├─ ShutdownError               a ps or a worker cannot signal the end of training
│  └─ ShutdownTimeoutError       not all workers signalled in time (also TimeoutError)
├─ KerasError                  Keras 3 does not support a call under a multi-process strategy
├─ TrainingError               training cannot continue
│  ├─ ParameterServerLostError   a ps is lost, with its variables
│  └─ TrainingTimeoutError       no worker returned a result in time (also TimeoutError)
├─ CheckpointError             a checkpoint cannot be written or restored
├─ UnknownJobError             no job has this id, name or path
├─ UnknownTaskError            no task of the job has this name
│  └─ NoLogsError               the job has no logs yet
├─ JobStateError               the job cannot be resumed or cancelled in its present state
├─ WaitTimeoutError            jobs did not end in time (also TimeoutError)
├─ MessageError                bytes that are not a valid control message (also ValueError)
├─ OptionError                 an option of a job is unknown or invalid (also ValueError)
├─ MissingDependencyError      a required package or program is not installed (also ImportError)
├─ ProfileError                a settings file cannot be read, or has an unknown key
├─ UntrustedFileError          other users can write a file that the user did not name
└─ LaunchError                 a program that launches tasks failed
   └─ RefusedError               sbatch refused the job
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_REFUSED = 4
EXIT_UNKNOWN_JOB = 5
EXIT_NOT_FORMED = 6
EXIT_TASK_LOST = 7
EXIT_REQUEUED = 75
EXIT_WAIT_TIMEOUT = 124


class Tf4SlurmError(Exception):
    """Base class of all errors of tf4slurm. `exit_code` is the exit code of the command line."""

    exit_code = EXIT_PREFLIGHT


class SlurmEnvironmentError(Tf4SlurmError):
    """The environment variable `variable` is missing, or its `value` is invalid."""

    def __init__(self, message: str, *, variable: str, value: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable
        self.value = value


class NodelistError(Tf4SlurmError, ValueError):
    """The text `nodelist` is not a list of nodes; `position` is the 0-based position of the first error."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, nodelist: str, position: int) -> None:
        super().__init__(message)
        self.nodelist = nodelist
        self.position = position


class LayoutError(Tf4SlurmError):
    """The node of each rank cannot be determined from the environment, or contradicts a task's own variables."""

    def __init__(self, message: str, *, distribution: str | None, reason: str) -> None:
        super().__init__(message)
        self.distribution = distribution
        self.reason = reason


class InterfaceError(Tf4SlurmError):
    """The network interface does not exist on this host or has no address; `available` lists usable interfaces."""

    def __init__(self, message: str, *, interface: str, available: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.interface = interface
        self.available = tuple(available)


class PlacementError(Tf4SlurmError, ValueError):
    """The `requested` number of tasks, nodes or ports does not match the `available` number."""

    def __init__(self, message: str, *, requested: int, available: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available


class CommandError(Tf4SlurmError):
    """The command after `--` cannot be started: the program or script does not exist or is not executable."""

    def __init__(self, message: str, *, command: Sequence[str]) -> None:
        super().__init__(message)
        self.command = tuple(command)


class RunDirectoryError(Tf4SlurmError):
    """The run directory `path` cannot be created or written."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SchemaVersionError(Tf4SlurmError):
    """A newer version of tf4slurm wrote the file `path` of a job; `version` is its schema version."""

    def __init__(self, message: str, *, path: str, version: int) -> None:
        super().__init__(message)
        self.path = path
        self.version = version


class RendezvousError(Tf4SlurmError):
    """The tasks of the job did not form a cluster."""

    exit_code = EXIT_NOT_FORMED


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Not all tasks registered in time; the message names the missing tasks."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The control service at `address` cannot be reached, or sent nothing for the heartbeat timeout."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


class RendezvousClosedError(RendezvousError):
    """The control service refused this task; `reason` has the cause. A retry would not help."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BarrierError(RendezvousError):
    """The barrier `name` broke; the message names the tasks that did not arrive."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class AuthenticationError(RendezvousError):
    """The control service does not accept the token, or MUNGE cannot open the credentials on this host."""


class ShutdownError(Tf4SlurmError):
    """A ps cannot wait for its workers, or a worker cannot send its completion signal to a ps."""

    exit_code = EXIT_TASK_LOST


class ShutdownTimeoutError(ShutdownError, TimeoutError):
    """The tasks in `missing`, such as "worker/1", sent no completion signal within `seconds`."""

    def __init__(self, message: str, *, missing: Sequence[str], seconds: float) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.seconds = seconds


class KerasError(Tf4SlurmError):
    """Keras 3 does not support a call under a multi-process strategy; the message names the alternatives."""


class TrainingError(Tf4SlurmError):
    """Training cannot continue."""

    exit_code = EXIT_TASK_LOST


class ParameterServerLostError(TrainingError):
    """A ps is lost with its variables; another attempt must resume from a checkpoint."""


class TrainingTimeoutError(TrainingError, TimeoutError):
    """No worker returned a result within the timeout."""


class CheckpointError(Tf4SlurmError):
    """A checkpoint cannot be written, or no existing checkpoint can be restored."""


class UnknownJobError(Tf4SlurmError):
    """No job has the id, name or path `job`."""

    exit_code = EXIT_UNKNOWN_JOB

    def __init__(self, message: str, *, job: str) -> None:
        super().__init__(message)
        self.job = job


class UnknownTaskError(Tf4SlurmError):
    """No task of the job matches `patterns`; `tasks` lists the tasks that have logs."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, patterns: Sequence[str], tasks: Sequence[str]) -> None:
        super().__init__(message)
        self.patterns = tuple(patterns)
        self.tasks = tuple(tasks)


class NoLogsError(UnknownTaskError):
    """The job has no logs yet."""

    exit_code = 1


class JobStateError(Tf4SlurmError):
    """The `job` cannot be resumed or cancelled in its `state`, such as RUNNING."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, job: str, state: str) -> None:
        super().__init__(message)
        self.job = job
        self.state = state


class WaitTimeoutError(Tf4SlurmError, TimeoutError):
    """The `jobs` did not end within `seconds`; they continue to run."""

    exit_code = EXIT_WAIT_TIMEOUT

    def __init__(self, message: str, *, jobs: Sequence[str], seconds: float) -> None:
        super().__init__(message)
        self.jobs = tuple(jobs)
        self.seconds = seconds


class MessageError(Tf4SlurmError, ValueError):
    """A payload is not a valid control message of this version."""


class OptionError(Tf4SlurmError, ValueError):
    """An option of a job is unknown or invalid, or contradicts another one; `option` is its name."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, option: str) -> None:
        super().__init__(message)
        self.option = option


class MissingDependencyError(Tf4SlurmError, ImportError):
    """The required `package` is not installed."""

    def __init__(self, message: str, *, package: str) -> None:
        super().__init__(message)
        self.package = package


class ProfileError(Tf4SlurmError):
    """Settings cannot be used; `source` is the file or variable that contains them."""

    def __init__(self, message: str, *, source: str) -> None:
        super().__init__(message)
        self.source = source


class UntrustedFileError(Tf4SlurmError):
    """Another user owns or can write the file `path`, which this user has not named."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class LaunchError(Tf4SlurmError):
    """A program that launches tasks failed; `stderr` is the end of its error output."""

    def __init__(self, message: str, *, command: Sequence[str], returncode: int, stderr: str) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.returncode = returncode
        self.stderr = stderr


class RefusedError(LaunchError):
    """sbatch refused the job; `stderr` is its error output."""

    exit_code = EXIT_REFUSED
