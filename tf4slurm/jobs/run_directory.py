"""The run directory: everything that is kept of one job. Its JSON has NaN and infinite numbers as texts: see `to_json`.

runs/<name>-<id>/
    job.json          the plan, the versions, the command
    control.json      0600: only where tasks come by themselves (plain srun): where the control service listens, and the
                      job's secret, sealed with MUNGE where that works
    events.jsonl      every change of state
    slurm.json        when Slurm has taken and started the job, and what it was given
    status.json       where the job stands, as of the last seconds
    samples.jsonl     steps, metrics, memory, processor time and bytes over time
    logs/<role>-<index>.<attempt>.log   what the task's child printed
    logs/<role>-<index>.<attempt>.times when: lines "byte seconds", the log from that byte on is of that time or later
    work/<role>-<index>.<attempt>/      what a server of the data service keeps over a restart
    lost/<role>-<index>.json            what the task's agent knew when it lost the launcher
    result.json       the outcome, and the life of each task; .result.json.reserved is its space on a full disk
    report.html       the job's life to look at
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tf4slurm.cluster import Task
from tf4slurm.errors import RunDirectoryError
from tf4slurm.system.trusted_files import check_trusted

TIMES_SUFFIX = ".times"
_RESERVED = ".result.json.reserved"
_RESERVED_BYTES = 4096
_SHORT_REASON = 500  # characters; JSON may write each as six


@dataclass(frozen=True)
class RunDirectory:
    """Where the files of one job are. Everything in it belongs to its user alone (0700)."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str) -> RunDirectory:
        """Make `parent`/`name`; where that exists already, `name`-2, `name`-3 and so on.

        Raises:
            RunDirectoryError: It cannot be made.
        """
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                make_parent(parent)
                path.mkdir(mode=0o700)
                (path / "logs").mkdir(mode=0o700)
                _reserve_result(path)
            except FileExistsError:
                if parent.is_dir():
                    continue
                raise _cannot_write(path, "its parent is not a directory") from None
            except OSError as error:
                raise _cannot_write(path, error.strerror) from error
            return cls(path.absolute())
        raise _cannot_write(parent / name, "9,999 runs of that name exist")

    @classmethod
    def open(cls, path: Path, *, reserve_result: bool = True) -> RunDirectory:
        """Make the run directory at exactly this path, or take the one that is there if it is this user's own.

        Args:
            reserve_result: Reserve the space for result.json: whether the caller will write it.

        Raises:
            RunDirectoryError: It cannot be made, or someone else has made it, or a link in its place.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                raise _cannot_write(path, "a link, or another user's directory, is in its place")
            if facts.st_mode & 0o077:
                path.chmod(0o700)
            (path / "logs").mkdir(mode=0o700, exist_ok=True)
            if reserve_result:
                _reserve_result(path)
        except OSError as error:
            raise _cannot_write(path, error.strerror) from error
        return cls(path.absolute())

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def control(self) -> Path:
        return self.path / "control.json"

    def log(self, task: Task, attempt: int) -> Path:
        return self.path / "logs" / f"{task.task_type}-{task.task_index}.{attempt}.log"

    def work(self, task: Task, attempt: int) -> Path:
        return self.path / "work" / f"{task.task_type}-{task.task_index}.{attempt}"

    def write_job(self, content: Mapping[str, Any]) -> None:
        _write_json(self.path / "job.json", content)

    def write_control(self, content: Mapping[str, Any]) -> None:
        _write_json(self.control, content)

    def write_result(self, content: Mapping[str, Any]) -> None:
        """Write result.json; on a full disk the exit code and the reason alone, into the space reserved for it.

        On a full disk a second call writes into the space of the result.json that is there.

        Raises:
            RunDirectoryError: It cannot be written, or not whole.
        """
        path, reserved = self.path / "result.json", self.path / _RESERVED
        try:
            _write_json(path, content)
        except RunDirectoryError as error:
            kept = {name: content.get(name) for name in ("exit_code", "cause", "seconds", "attempts", "requeued")}
            text = json.dumps({**kept, "reason": str(content.get("reason", ""))[:_SHORT_REASON]})
            try:
                space = reserved if reserved.exists() else path
                # In place: that takes no space on most file systems.
                with open(os.open(space, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
                    file.write(text.encode().ljust(_RESERVED_BYTES))
                    file.truncate()
                space.replace(path)
            except OSError:
                raise error from None
            raise RunDirectoryError(f"{error} It has the exit code and the reason alone.", path=str(path)) from error
        with contextlib.suppress(OSError):
            reserved.unlink()

    def write_slurm(self, content: Mapping[str, Any]) -> None:
        _write_json(self.path / "slurm.json", content)

    def write_status(self, content: Mapping[str, Any]) -> None:
        _write_json(self.path / "status.json", content, indent=None)

    def write_last_state(self, task: Task, content: Mapping[str, Any]) -> None:
        path = self.path / "lost" / f"{task.task_type}-{task.task_index}.json"
        with contextlib.suppress(OSError):  # `_write` says what is wrong
            path.parent.mkdir(mode=0o700, exist_ok=True)
        _write_json(path, {"task": str(task), **content})

    def append_sample(self, content: Mapping[str, Any]) -> None:
        path = self.path / "samples.jsonl"
        try:
            with open_to_append(path) as file:
                file.write(to_json(content).encode() + b"\n")
        except OSError as error:
            raise RunDirectoryError(f"{str(path)!r} cannot be written: {error.strerror}.", path=str(path)) from error

    def write_report(self, content: bytes, path: Path | None = None) -> Path:
        """Write the report, by default as report.html, whole or not at all; return where it is.

        Raises:
            RunDirectoryError: It cannot be written.
        """
        path = path or self.path / "report.html"
        _write(path, content)
        return path

    def size_of_record(self) -> int:
        """Return the bytes of what grows while a job lives: events and samples."""
        total = 0
        for path in (self.events, self.path / "samples.jsonl"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def read_job(self) -> dict[str, Any] | None:
        """Return what job.json holds; None if it is not there, or cannot be read. So for the others."""
        return _read_json(self.path / "job.json")

    def read_job_to_act_on(self) -> dict[str, Any] | None:
        """Return what job.json holds, for a caller that runs its command or signals its process.

        Raises:
            UntrustedFileError: Another user could have written it.
        """
        path = self.path / "job.json"
        if path.exists():
            check_trusted(path, "Only the user who started a job may act on it.")
        return self.read_job()

    def read_slurm(self) -> dict[str, Any] | None:
        return _read_json(self.path / "slurm.json")

    def read_result(self) -> dict[str, Any] | None:
        return _read_json(self.path / "result.json")

    def read_status(self) -> dict[str, Any] | None:
        return _read_json(self.path / "status.json")

    def read_last_states(self) -> dict[str, dict[str, Any]]:
        """Return what agents that lost their launcher knew, by task; empty if none did."""
        states = map(_read_json, sorted((self.path / "lost").glob("*.json")))
        return {str(state.get("task")): state for state in states if state}

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events so far; a line that is cut or broken is left out."""
        return _read_lines(self.events)

    def read_samples(self) -> list[dict[str, Any]]:
        return _read_lines(self.path / "samples.jsonl")


def _reserve_result(path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path / _RESERVED, flags, 0o600), "wb", buffering=0) as file:
        file.write(b" " * _RESERVED_BYTES)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file that grows, for this user alone; what is written is with the kernel at once."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)


def make_parent(path: Path) -> None:
    """Make the directory of run directories, if it is not there; others may not write it, whatever the umask."""
    path.mkdir(mode=0o755, parents=True, exist_ok=True)


def to_json(content: Any, indent: int | None = None) -> str:
    """Return JSON; numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity", as protobuf has it.

    Python's float() reads them.
    """
    dump = functools.partial(
        json.dumps, indent=indent, separators=(",", ":") if indent is None else None, allow_nan=False
    )
    try:
        return dump(content)
    except ValueError:
        return dump(_spell_out(content))


def _spell_out(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spell_out(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_out(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _write_json(path: Path, content: Mapping[str, Any], indent: int | None = 2) -> None:
    _write(path, (to_json(content, indent) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    """Write a whole file or none: readers on other hosts never see half of it."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"{str(path)!r} cannot be written: {error.strerror}.", path=str(path)) from error


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    result = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict):
                    result.append(content)
    return result


def _cannot_write(path: Path, why: str | None) -> RunDirectoryError:
    return RunDirectoryError(
        f"The run directory {str(path)!r} cannot be made: {why}. Choose a place that you may write, on a file system "
        "that all hosts of the job share, with --runs-directory.",
        path=str(path),
    )
