"""Create, write and read the run directory of a job.

runs/<name>-<id>/
    job.json          command, options and versions
    control.json      address and credentials of the control service, sealed with MUNGE if MUNGE works. It exists only
                      for tasks that the launcher does not start: tasks of plain srun, and joined workers
    worker_arrays.jsonl      job arrays of Slurm that add workers to this job. If it exists, control.json is written
    worker-<array>_<element>.out        output of the Slurm job of a joined worker, by default
    events.jsonl      every change of state
    slurm.json        resources that Slurm allocated to the job, its time limit, and the times of submission and start
    status.json       state of the job and its tasks, a few seconds old
    samples.jsonl     steps, memory, processor time and bytes over time
    metrics/<role>-<index>.<attempt>.jsonl  steps and metrics that the task's script reported
    logs/<role>-<index>.<attempt>.log   output of the task's child process
    logs/<role>-<index>.<attempt>.times lines "byte seconds": output from this byte on was printed at that time or later
    work/<role>-<index>.<attempt>/      files of a tf.data service server
    lost/<role>-<index>.json            last state of a task whose agent lost the launcher
    result.json       how the job ended
    .result.json.reserved    reserved disk space for result.json
    report.html       the job's report

`schema.py` defines the JSON files. All files that tf4slurm writes here have mode 0600, all directories 0700.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tf4slurm.cluster import Task
from tf4slurm.control.messages import changed_fields
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.schema import (
    FILE_NAMES,
    JobFile,
    LastState,
    ResultFile,
    Sample,
    StatusFile,
    WorkerArray,
    read_file,
    to_versioned_json,
)
from tf4slurm.slurm.parsing import SlurmResources
from tf4slurm.system.directories import make_directories
from tf4slurm.system.files import replacing
from tf4slurm.system.trusted_files import TRUST, is_owned_by, read_trusted
from tf4slurm.system.typed_json import read_lines, to_json

TIMES_SUFFIX = ".times"
_RESERVED = ".result.json.reserved"
_RESERVED_BYTES = 4096
_SHORT_REASON = 500  # characters; JSON may encode each in six bytes
_T = TypeVar("_T")


@dataclass(frozen=True)
class RunDirectory:
    """The run directory of one job, which only its user can access (0700).

    Raises:
        RunDirectoryError: A method cannot create a directory or write a file.
        SchemaVersionError: A method reads a JSON file that a newer version of tf4slurm wrote.
    """

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str) -> RunDirectory:
        """Create `parent`/`name`, or `name`-2, `name`-3 and so on if the name is taken."""
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                make_parent(parent)
                path.mkdir(mode=0o700)
                _check_owner(path)
                (path / "logs").mkdir(mode=0o700)
                _reserve_result(path)
            except FileExistsError:
                if parent.is_dir():
                    continue
                raise _cannot_create(path, "its parent is not a directory") from None
            except OSError as error:
                raise _cannot_create(path, error.strerror) from error
            return cls(path.absolute())
        raise _cannot_create(parent / name, "9,999 runs of that name exist")

    @classmethod
    def open(cls, path: Path, *, reserve_result: bool = True) -> RunDirectory:
        """Create the run directory at exactly this path, or open the existing one if this user owns it.

        Disk space for result.json is reserved, except with `reserve_result=False`.

        Raises:
            RunDirectoryError: The directory cannot be created, belongs to another user, or is a link.
        """
        try:
            make_directories(path, 0o700)
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                raise _cannot_create(path, "a link, or another user's directory, is in its place")
            if facts.st_mode & 0o077:
                path.chmod(0o700)
            (path / "logs").mkdir(mode=0o700, exist_ok=True)
            if reserve_result:
                _reserve_result(path)
        except OSError as error:
            raise _cannot_create(path, error.strerror) from error
        return cls(path.absolute())

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def control(self) -> Path:
        return self.path / "control.json"

    def has_worker_arrays(self) -> bool:
        """Return whether worker_arrays.jsonl exists, because `tf4slurm grow` or `join` was called for this job."""
        with contextlib.suppress(OSError):
            return FILE_NAMES[WorkerArray] in os.listdir(self.path)  # on NFS exists() may be wrong for a minute
        return False

    def log(self, task: Task, attempt: int) -> Path:
        return self.path / "logs" / f"{_name(task, attempt)}.log"

    def metrics(self, task: Task, attempt: int) -> Path:
        return self.path / "metrics" / f"{_name(task, attempt)}.jsonl"

    def work(self, task: Task, attempt: int) -> Path:
        return self.path / "work" / _name(task, attempt)

    def read(self, kind: type[_T]) -> _T | None:
        """Read the file of class `kind`, such as `StatusFile`. Return None if it is missing or not a JSON object."""
        return read_file(self.path / FILE_NAMES[kind], kind)

    def read_trusted_job(self) -> JobFile:
        """Read job.json for a caller that runs its command or signals its process. If it is missing, return defaults.

        Raises:
            UntrustedFileError: Another user could have written the file.
        """
        read = functools.partial(read_trusted, instead="Only the user who started a job can change it.")
        return read_file(self.path / FILE_NAMES[JobFile], JobFile, read) or JobFile()

    def read_lines(self, kind: type[_T]) -> list[_T]:
        """Read events.jsonl (`Event`), samples.jsonl (`Sample`) or worker_arrays.jsonl (`WorkerArray`).

        Damaged lines are skipped. A missing file has no lines.
        """
        return read_lines(self.path / FILE_NAMES[kind], kind)

    def read_metrics(self) -> dict[tuple[str, int], list[StepMetrics]]:
        """Return the metrics that scripts have reported, by task and attempt, such as ("worker/0", 1)."""
        found = {}
        for path in (self.path / "metrics").glob("*-*.*.jsonl"):
            task, _, attempt = path.name.removesuffix(".jsonl").rpartition(".")
            if attempt.isdecimal():
                found["/".join(task.rsplit("-", 1)), int(attempt)] = read_lines(path, StepMetrics)
        return dict(sorted(found.items()))

    def read_last_states(self) -> dict[str, LastState]:
        """Return the last states that agents wrote after the loss of the launcher, by task, such as "worker/0"."""
        states = (read_file(path, LastState) for path in sorted((self.path / "lost").glob("*.json")))
        return {state.task: state for state in states if state is not None}

    def write(self, content: JobFile | StatusFile | SlurmResources | LastState) -> None:
        path = self.path / FILE_NAMES[type(content)]
        if isinstance(content, LastState):
            path = path.with_name(f"{content.task.replace('/', '-')}.json")
            with contextlib.suppress(OSError):  # `_write` raises the error
                path.parent.mkdir(mode=0o700, exist_ok=True)
        indent = None if isinstance(content, StatusFile) else 2
        _write(path, to_versioned_json(content, indent).encode())

    def write_control(self, content: Mapping[str, Any]) -> None:
        _write(self.control, to_json(content, indent=2).encode() + b"\n")

    def write_result(self, content: ResultFile) -> None:
        """Write result.json.

        If that fails, as on a full disk, write a short version into the space of the reserved or existing file. It has
        at most 500 characters of the reason. `log` is null, and `tail`, `meaning`, `collateral`, `warnings` and `tasks`
        are empty.

        Raises:
            RunDirectoryError: The file is not written, or is the short version.
        """
        path, reserved = self.path / FILE_NAMES[ResultFile], self.path / _RESERVED
        try:
            _write(path, to_versioned_json(content, indent=2).encode())
        except RunDirectoryError as error:
            rest: dict[str, Any] = dict.fromkeys(("tail", "meaning", "collateral", "warnings", "tasks"), ())
            short = dataclasses.replace(content, reason=content.reason[:_SHORT_REASON], log=None, **rest)
            try:
                space = reserved if reserved.exists() else path
                # Overwriting takes no space on most file systems.
                with open(os.open(space, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
                    file.write(to_versioned_json(short).encode().ljust(_RESERVED_BYTES))
                    file.truncate()
                space.replace(path)
            except OSError:
                raise error from None
            raise RunDirectoryError(
                f"{error} It has the state, the exit code and the reason alone.", path=str(path)
            ) from error
        with contextlib.suppress(OSError):
            reserved.unlink()

    def append_sample(self, sample: Sample) -> None:
        _append(self.path / FILE_NAMES[Sample], sample)

    def add_worker_arrays(self, *arrays: WorkerArray) -> None:
        """Append arrays to worker_arrays.jsonl, which is created if missing, also without arrays.

        If the file exists, the launcher writes control.json, with which workers can join the job.
        """
        _append(self.path / FILE_NAMES[WorkerArray], *arrays)

    def write_metrics(self, task: Task, attempt: int, entries: Sequence[StepMetrics], *, is_appended: bool) -> None:
        """Write metrics of a task in an attempt: append them to the file if `is_appended`, else replace the file."""
        path = self.metrics(task, attempt)
        lines = b"".join(to_json(changed_fields(entry)).encode() + b"\n" for entry in entries)
        with _writing(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if is_appended:
                with open_to_append(path) as file:
                    file.write(lines)
        if not is_appended:
            _write(path, lines)

    def write_report(self, content: bytes, path: Path | None = None) -> Path:
        """Write the report, by default as report.html. Return its path."""
        return write_report(content, path or self.path / "report.html")


def write_report(content: bytes, path: Path) -> Path:
    """Write a report to `path`. Return the path.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    _write(path, content)
    return path


def _name(task: Task, attempt: int) -> str:
    return f"{task.task_type}-{task.task_index}.{attempt}"


def _reserve_result(path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path / _RESERVED, flags, 0o600), "wb", buffering=0) as file:
        file.write(b" " * _RESERVED_BYTES)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file for unbuffered appending, or create it (0600)."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)


def _append(path: Path, *lines: Sample | WorkerArray) -> None:
    """Append lines with one write, so that simultaneous writers on one host lose none."""
    with _writing(path), open_to_append(path) as file:
        file.write(b"".join(to_json(line).encode() + b"\n" for line in lines))


def make_parent(path: Path) -> None:
    """Create `path`, the parent of run directories, with mode 0755. An existing directory is not changed."""
    make_directories(path, 0o755)


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, so that readers on other hosts never see an incomplete file."""
    with _writing(path), replacing(path) as draft:
        draft.write(content)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` in the block into a `RunDirectoryError` which says that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{str(path)!r} cannot be written: {error.strerror}.", path=str(path)) from error


def _check_owner(path: Path) -> None:
    """Check that the file system shows a new run directory as this user's. Otherwise remove it.

    Commands that read run directories skip those of other users.

    Raises:
        RunDirectoryError: The directory looks like another user's.
    """
    if not is_owned_by(os.getuid(), path):
        owner = path.stat().st_uid
        path.rmdir()
        raise RunDirectoryError(
            f"The file system shows the new run directory {str(path)!r} as that of user {owner}, so that it looks like "
            f"another user's. Choose another --runs-directory, or add {str(path.parent)!r} to {TRUST}.",
            path=str(path),
        )


def _cannot_create(path: Path, reason: str | None) -> RunDirectoryError:
    return RunDirectoryError(
        f"The run directory {str(path)!r} cannot be created: {reason}. Choose a directory that you can write, on a "
        "file system that all hosts of the job share, with --runs-directory.",
        path=str(path),
    )
