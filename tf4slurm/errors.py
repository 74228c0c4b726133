"""The error family of tf4slurm, and the exit code of each.

Tf4SlurmError
├─ SlurmEnvironmentError       not inside a step, or a variable is absent or unreadable
├─ NodelistError               text that Slurm refuses or answers with nonsense (also ValueError)
├─ LayoutError                 which node has which rank cannot be told, or a task contradicts it
├─ InterfaceError              no such interface, or no address on it
├─ PlacementError              counts, nodes and ports do not fit (also ValueError)
├─ CommandError                the command to run cannot be started
├─ RunDirectoryError           the run directory cannot be made or written
├─ SchemaVersionError          a newer version of tf4slurm wrote a job's file
├─ RendezvousError
│  ├─ RendezvousTimeoutError     not all tasks came in time (also TimeoutError)
│  ├─ RendezvousConnectionError  the control service cannot be reached (also ConnectionError)
│  ├─ RendezvousClosedError      the control service refused this task, for a reason it gave
│  ├─ BarrierError               not all tasks came to a barrier in time, or one never will
│  └─ AuthenticationError        a call lacks the job's token, or MUNGE does not open it
├─ ShutdownError               a ps or a worker cannot tell the other that training is over
│  └─ ShutdownTimeoutError       not all workers signalled in time (also TimeoutError)
├─ KerasError                  Keras 3 cannot do this under a strategy of several processes
├─ TrainingError               training cannot go on
│  ├─ ParameterServerLostError   a ps is gone, and its variables
│  └─ TrainingTimeoutError       nothing came back from any worker in time (also TimeoutError)
├─ CheckpointError             a checkpoint cannot be written, or none can be read
├─ UnknownJobError             no job of that id, name or path
├─ UnknownTaskError            no task of the job has this name
├─ JobStateError               the job cannot be resumed or cancelled now
├─ WaitTimeoutError            jobs did not end in time (also TimeoutError)
├─ MessageError                a control message that is not one (also ValueError)
├─ OptionError                 an option of a job is unknown or invalid (also ValueError)
├─ MissingDependencyError      a package or program that is needed here is not (also ImportError)
├─ ProfileError                a file of settings cannot be read, or says something unknown
├─ UntrustedFileError          a file that was found, not named, could be another user's work
└─ LaunchError                 a program that was started to launch tasks failed
   └─ RefusedError               sbatch did not take the job
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
    """Root of all errors of tf4slurm. `exit_code` is what the command line exits with."""

    exit_code = EXIT_PREFLIGHT


class SlurmEnvironmentError(Tf4SlurmError):
    """This process is not where it says it is: `variable` is absent or its `value` unreadable."""

    def __init__(self, message: str, *, variable: str, value: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable
        self.value = value


class NodelistError(Tf4SlurmError, ValueError):
    """Text that is no list of nodes: the `nodelist`, and the 0-based `position` of what is wrong in it."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, nodelist: str, position: int) -> None:
        super().__init__(message)
        self.nodelist = nodelist
        self.position = position


class LayoutError(Tf4SlurmError):
    """Which node has which rank cannot be told from the environment, or contradicts what a task knows of itself."""

    def __init__(self, message: str, *, distribution: str | None, reason: str) -> None:
        super().__init__(message)
        self.distribution = distribution
        self.reason = reason


class InterfaceError(Tf4SlurmError):
    """No such network interface on this host, or no address on it; `available` names those that exist."""

    def __init__(self, message: str, *, interface: str, available: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.interface = interface
        self.available = tuple(available)


class PlacementError(Tf4SlurmError, ValueError):
    """What was asked (`requested`) does not fit what is there (`available`): tasks, nodes or ports."""

    def __init__(self, message: str, *, requested: int, available: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available


class CommandError(Tf4SlurmError):
    """The command after `--` cannot be started: no such program or script, or not executable."""

    def __init__(self, message: str, *, command: Sequence[str]) -> None:
        super().__init__(message)
        self.command = tuple(command)


class RunDirectoryError(Tf4SlurmError):
    """The run directory `path` cannot be made or written."""

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
    """The tasks of the job did not find together."""

    exit_code = EXIT_NOT_FORMED


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Not all tasks came in time; the text names those that did not."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The control service at `address` cannot be reached, or has been silent for too long."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


class RendezvousClosedError(RendezvousError):
    """The control service refused this task and gave a `reason`; trying again does not help."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BarrierError(RendezvousError):
    """The barrier `name` broke: the text names the tasks that did not arrive."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class AuthenticationError(RendezvousError):
    """The control service does not accept this job's token, or MUNGE does not open the credentials on this host."""


class ShutdownError(Tf4SlurmError):
    """A ps cannot wait for its workers, or a worker cannot tell a ps that it is done."""

    exit_code = EXIT_TASK_LOST


class ShutdownTimeoutError(ShutdownError, TimeoutError):
    """After `seconds` the tasks in `missing`, such as "worker/1", had not signalled."""

    def __init__(self, message: str, *, missing: Sequence[str], seconds: float) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.seconds = seconds


class KerasError(Tf4SlurmError):
    """Keras 3 cannot do this under a strategy of several processes; the text says which ways there are."""


class TrainingError(Tf4SlurmError):
    """Training cannot go on."""

    exit_code = EXIT_TASK_LOST


class ParameterServerLostError(TrainingError):
    """A ps is gone, and its variables with it: another attempt has to resume from the checkpoint."""


class TrainingTimeoutError(TrainingError, TimeoutError):
    """Nothing came back from any worker for the given time."""


class CheckpointError(Tf4SlurmError):
    """A checkpoint cannot be written, or there are some and none can be restored."""


class UnknownJobError(Tf4SlurmError):
    """There is no `job` of that id, name or path."""

    exit_code = EXIT_UNKNOWN_JOB

    def __init__(self, message: str, *, job: str) -> None:
        super().__init__(message)
        self.job = job


class UnknownTaskError(Tf4SlurmError):
    """No task of the job matches `patterns`; `tasks` are those that have logs."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, patterns: Sequence[str], tasks: Sequence[str]) -> None:
        super().__init__(message)
        self.patterns = tuple(patterns)
        self.tasks = tuple(tasks)


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
    """Bytes that are not a control message of this version."""


class OptionError(Tf4SlurmError, ValueError):
    """An option of a job is unknown or invalid, or contradicts another one; `option` is its name."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, option: str) -> None:
        super().__init__(message)
        self.option = option


class MissingDependencyError(Tf4SlurmError, ImportError):
    """Something that is needed for this is not installed: `package`."""

    def __init__(self, message: str, *, package: str) -> None:
        super().__init__(message)
        self.package = package


class ProfileError(Tf4SlurmError):
    """Settings that cannot be used: the file (or variable) that has them is `source`."""

    def __init__(self, message: str, *, source: str) -> None:
        super().__init__(message)
        self.source = source


class UntrustedFileError(Tf4SlurmError):
    """The file `path`, which was found rather than named, has another owner or may be written by others."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class LaunchError(Tf4SlurmError):
    """A program that tf4slurm started to launch tasks failed: its `command`, `returncode` and end of `stderr`."""

    def __init__(self, message: str, *, command: Sequence[str], returncode: int, stderr: str) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.returncode = returncode
        self.stderr = stderr


class RefusedError(LaunchError):
    """sbatch did not take the job; `stderr` has its own words."""

    exit_code = EXIT_REFUSED
