"""The schema of a job's files: the JSON files of a run directory as frozen values, with one version number.

Writers construct these values and readers use their attributes. Reading tolerates damage: unknown keys are ignored, and
a missing or mistyped value becomes the field's default. Only a newer version is refused. The JSON is strict: NaN and
infinite numbers are null. docs/job-files.md is generated from this module.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import json
import math
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tf4slurm.errors import SchemaVersionError
from tf4slurm.slurm.job import SlurmGrant
from tf4slurm.system.proc import ProcessIdentity, identity_of, is_alive

SCHEMA_VERSION = 1
"""The version of all files of a run directory. Raise it when an older reader would misread a newer file."""

_VERSION_KEY = "schema_version"
_LARGEST = 1e15  # of any number that a job writes; damaged files have larger ones
_T = TypeVar("_T")


@dataclass(frozen=True)
class Process:
    """The launcher's process.

    Attributes:
        host: Host name.
        id: Process ID.
        started: Start of the process in clock ticks since the host's boot.
    """

    host: str = ""
    id: int = 0
    started: int = 0

    @classmethod
    def own(cls) -> Process:
        return cls(*identity_of(os.getpid()))

    def is_alive(self) -> bool:
        """Return whether the process runs on this host."""
        return is_alive(ProcessIdentity(self.host, self.id, self.started))


@dataclass(frozen=True)
class JobFile:
    """What was started: the command, its options and the versions.

    Attributes:
        name: First part of the run directory's name.
        job_id: Slurm's job id; null for a local job.
        command: The command that each task runs.
        arguments: The command line that started the launcher.
        directory: The launcher's working directory.
        counts: Number of tasks of each role.
        grace_period_seconds: Seconds that the script has to save and stop.
        options: All options of the job, by the names of the keyword arguments of `tf4slurm.Job`.
        host: Host name of the launcher.
        process: The launcher's process.
        started: Start of the job, as YYYY-MM-DDThh:mm:ss±hhmm.
        versions: Versions of tf4slurm and Python.
    """

    name: str = ""
    job_id: str | None = None
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    directory: str | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    grace_period_seconds: float = 0.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    host: str = ""
    process: Process | None = None
    started: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class StatusTask:
    """One task in status.json.

    Attributes:
        task: Its role and index, such as "worker/0".
        rank: Its rank in the step.
        node: Name of its node.
        address: Its host:port in the cluster spec.
        state: "missing" until it registers, then the state that its agent reports.
        starts: Number of starts of its child process in this attempt.
        returncode: Exit code of the last child process, or minus the signal that killed it.
        detail: More about its state, in words.
        is_gone: Its agent has exited or is lost.
        heartbeat_age_seconds: Age of its last message in seconds.
        started_seconds: Last start of its child process, in seconds since the job's start.
        step: Last training step that the script reported.
        steps_per_second: Mean over the last 20 s.
        step_seconds: Age of the last new step in seconds.
        metrics: Metrics that the script reported with its step; null is NaN or infinite.
        memory_bytes: Resident memory of the child process and its descendants.
        cpu_seconds: Their processor time.
        sent_bytes: Bytes sent from the task's port.
        received_bytes: Bytes received at the task's port.
    """

    task: str = "?"
    rank: int = 0
    node: str | None = None
    address: str | None = None
    state: str = "?"
    starts: int = 0
    returncode: int | None = None
    detail: str | None = None
    is_gone: bool = False
    heartbeat_age_seconds: float | None = None
    started_seconds: float | None = None
    step: int | None = None
    steps_per_second: float | None = None
    step_seconds: float | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class StatusFile:
    """The state of the job and its tasks a few seconds ago.

    Attributes:
        time: When it was written, in seconds since 1970.
        seconds: When it was written, in seconds since the job's start.
        phase: Phase of the job: "rendezvous", "checking", "training", "stopping", "terminating" or "ended".
        attempt: Number of this attempt, from 1.
        max_attempts: How many attempts the job may make.
        reason: How the job ended, once it has.
        interval_seconds: How often the launcher writes this file.
        heartbeat_timeout_seconds: Heartbeat timeout of the job.
        tasks: The tasks by rank.
    """

    time: float | None = None
    seconds: float = 0.0
    phase: str | None = None
    attempt: int | None = None
    max_attempts: int | None = None
    reason: str = ""
    interval_seconds: float = 0.0
    heartbeat_timeout_seconds: float = 0.0
    tasks: tuple[StatusTask, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl. Each list has one entry per rank, null where nothing is known.

    Attributes:
        seconds: When the sample was taken, in seconds since the job's start.
        attempt: Number of the attempt.
        step: Training steps.
        memory: Resident memory in bytes.
        cpu: Processor time in seconds.
        sent: Bytes sent from the tasks' ports.
        received: Bytes received at the tasks' ports.
        metrics: Metrics by rank and name; null is NaN or infinite.
    """

    seconds: float | None = None
    attempt: int = 1
    step: tuple[int | None, ...] = ()
    memory: tuple[int | None, ...] = ()
    cpu: tuple[float | None, ...] = ()
    sent: tuple[int | None, ...] = ()
    received: tuple[int | None, ...] = ()
    metrics: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl: a change of the job's or a task's state.

    Attributes:
        time: When it happened, in seconds since 1970.
        seconds: When it happened, in seconds since the job's start.
        kind: The kind of change, such as "registered".
        task: The task, such as "worker/0"; null for the job.
        text: The change in words.
    """

    time: float | None = None
    seconds: float | None = None
    kind: str = ""
    task: str | None = None
    text: str = ""


@dataclass(frozen=True)
class ResultTask:
    """One task in result.json, as of the last attempt.

    Attributes:
        task: Its role and index, such as "worker/0".
        rank: Its rank in the step.
        node: Name of its node.
        address: Its host:port in the cluster spec.
        starts: Number of starts of its child process.
        state: "missing" if it never registered, else the last state that its agent reported.
        returncode: Exit code of the last child process, or minus the signal that killed it.
        started_seconds: Last start of its child process, in seconds since the job's start.
        ended_seconds: End of its last child process, in seconds since the job's start.
    """

    task: str = "?"
    rank: int = 0
    node: str | None = None
    address: str | None = None
    starts: int = 0
    state: str = "?"
    returncode: int | None = None
    started_seconds: float | None = None
    ended_seconds: float | None = None


@dataclass(frozen=True)
class ResultFile:
    """How the job ended. On a full disk the launcher writes the exit code and the reason alone.

    Attributes:
        exit_code: Exit code of the launcher.
        reason: How the job ended, in words.
        cause: The task that failed first; null if no single task did.
        tail: The last lines that this task printed.
        meaning: What these lines mean, where tf4slurm knows it.
        log: Path of this task's log.
        collateral: What failed after it, one sentence each.
        seconds: Duration of the job.
        attempts: How many attempts the job made.
        requeued: Why the job was requeued: "preemption" or "time limit"; null if it was not.
        warnings: What may be wrong with the job, in sentences.
        tasks: The tasks by rank.
    """

    exit_code: int = 1
    reason: str = ""
    cause: str | None = None
    tail: tuple[str, ...] = ()
    meaning: tuple[str, ...] = ()
    log: str | None = None
    collateral: tuple[str, ...] = ()
    seconds: float | None = None
    attempts: int | None = None
    requeued: str | None = None
    warnings: tuple[str, ...] = ()
    tasks: tuple[ResultTask, ...] = ()


@dataclass(frozen=True)
class LastState:
    """What a task's agent knew when it lost the launcher.

    Attributes:
        task: The task, such as "worker/0".
        time: When it was written, in seconds since 1970.
        attempt: Number of the attempt.
        starts: Number of starts of the child process in this attempt.
        state: The task's state; "ended" if the agent terminated the child process.
        returncode: Exit code of the child process, or minus the signal that killed it.
    """

    task: str = "?"
    time: float | None = None
    attempt: int = 1
    starts: int = 0
    state: str = "lost"
    returncode: int | None = None


FILE_NAMES: dict[type[Any], str] = {
    JobFile: "job.json",
    SlurmGrant: "slurm.json",
    StatusFile: "status.json",
    Sample: "samples.jsonl",
    Event: "events.jsonl",
    ResultFile: "result.json",
    LastState: "lost/<role>-<index>.json",
}


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON of dataclasses and plain values; NaN and infinite numbers are null."""
    separators = (",", ":") if indent is None else None
    dump = functools.partial(json.dumps, indent=indent, separators=separators, default=vars, allow_nan=False)
    try:
        return dump(value)
    except ValueError:
        return dump(_without_nan(value))


def to_versioned_json(value: Any, indent: int | None = None) -> str:
    """Return the content of a JSON file of this version; `value` is one of the dataclasses above."""
    return to_json({_VERSION_KEY: SCHEMA_VERSION, **vars(value)}, indent) + "\n"


def read_file(path: Path, kind: type[_T]) -> _T | None:
    """Read a JSON file; return None if it is missing, unreadable or not a JSON object.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    version = content.get(_VERSION_KEY, SCHEMA_VERSION)
    if type(version) is int and version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{str(path)!r} has schema version {version}; this tf4slurm reads versions up to {SCHEMA_VERSION}. "
            "Read it with the tf4slurm that wrote it, or a later one.",
            path=str(path),
            version=version,
        )
    return from_json(kind, content)


def read_lines(path: Path, kind: type[_T]) -> list[_T]:
    """Read a file with one JSON object per line; lines that are cut or damaged are left out."""
    result = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(line)
                if isinstance(content, dict):
                    result.append(from_json(kind, content))
    return result


def from_json(kind: type[_T], content: Mapping[str, Any]) -> _T:
    """Return a dataclass from a JSON object; unknown keys are ignored, mistyped values become defaults."""
    values = {}
    readers: dict[str, _Reader] = _field_readers(kind)  # type: ignore[arg-type]
    for name, read in readers.items():
        if name in content:
            with contextlib.suppress(_MistypedError):
                values[name] = read(content[name])
    return kind(**values)


class _MistypedError(Exception):
    """A JSON value is not of the type that the field declares."""


_Reader = Callable[[Any], Any]
_MISSING = object()


@functools.cache
def _field_readers(kind: type[Any]) -> dict[str, _Reader]:
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return the function that reads a JSON value of this type, or raises _MistypedError."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return functools.partial(_read_tuple, arguments[0])
    if get_origin(hint) is collections.abc.Mapping:
        return functools.partial(_read_mapping, arguments[1])
    if isinstance(hint, types.UnionType):  # X | None
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    return functools.partial(_read_dataclass if dataclasses.is_dataclass(hint) else _read_scalar, hint)


def _read_dataclass(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _MistypedError
    return from_json(kind, value)


def _read_tuple(hint: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _MistypedError
    items = (_read_item(hint, item) for item in value)
    return tuple(item for item in items if item is not _MISSING)


def _read_mapping(hint: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _MistypedError
    items = {name: _read_item(hint, item) for name, item in value.items()}
    return {name: item for name, item in items.items() if item is not _MISSING}


def _read_item(hint: Any, value: Any) -> Any:
    """Read an item; a mistyped one becomes None or an empty dataclass, so that the others keep their places."""
    try:
        return _reader(hint)(value)
    except _MistypedError:
        if isinstance(hint, types.UnionType):
            return None
        return _read_dataclass(hint, {}) if dataclasses.is_dataclass(hint) else _MISSING


def _read_scalar(kind: type[Any], value: Any) -> Any:
    if kind is Any:
        return value
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise _MistypedError
    if kind in (int, float) and not -_LARGEST < value < _LARGEST:
        raise _MistypedError
    return value


def _without_nan(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
