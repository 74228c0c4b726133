"""The schema of a job's files: one frozen dataclass per JSON file of a run directory, and one version number.

`system/typed_json.py` converts between dataclasses and JSON. The documentation has a page made from this module.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tf4slurm.control.messages import CheckpointState, KilledBy
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.control.shard_leases import ShardProgress
from tf4slurm.errors import FAILED, SchemaVersionError
from tf4slurm.slurm.parsing import SlurmResources
from tf4slurm.system.proc import is_running, read_stat
from tf4slurm.system.typed_json import from_json, read_object, to_json

SCHEMA_VERSION = 1
"""The version of all files of a run directory. Increment it when an older reader would misread a newer file."""
LATE_SECONDS = 20.0
"""Seconds by which status.json may be late because the file system is slow."""

_VERSION_KEY = "schema_version"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Process:
    """A process, such as the launcher.

    Attributes:
        host: Host name.
        id: Process ID.
        start_ticks: Start of the process in clock ticks since the host's boot. It distinguishes the process from a
            later one with the same ID. 0 if there was no such process.
    """

    host: str = ""
    id: int = 0
    start_ticks: int = 0

    @classmethod
    def of(cls, process_id: int) -> Process:
        """Return the process of this host with this ID, which may be a zombie."""
        try:
            start_ticks = read_stat(process_id).start_ticks
        except OSError:
            start_ticks = 0
        return cls(os.uname().nodename, process_id, start_ticks)

    def is_alive(self) -> bool:
        return self.host == os.uname().nodename and is_running(self.id, self.start_ticks)


@dataclass(frozen=True)
class JobFile:
    """The command, options and versions of a job.

    Attributes:
        name: The name of the job. The run directory's name begins with it.
        job_id: Slurm's job id; null for a local job.
        step: Slurm's id of the step in which rank 0 runs the launcher (`srun tf4slurm task`), such as "4711.0"; null if
            the launcher is a process of its own.
        command: The command that each task runs.
        arguments: The command line that started the launcher.
        directory: The launcher's working directory.
        counts: Number of tasks of each role.
        grace_period_seconds: Seconds that the script has to save and stop after a stop request.
        labels: Names and values of the varied arguments, such as {"lr": "0.1"}; empty for a job without them.
        options: The options of `tf4slurm run`, named as the keyword arguments of `tf4slurm.Job`. Not those for sbatch.
        process: The launcher's process.
        started: Start of the job, as YYYY-MM-DDThh:mm:ss±hhmm.
        versions: Versions of tf4slurm, and of the Python, TensorFlow and Keras ("tf_keras" for Keras 2) that the script
            uses. The script's versions are missing if the command does not start with a Python.
        commit: Git commit of the directory, or of the directory that its snapshot was taken from; null if unknown.
        is_dirty: Whether files that git tracks had uncommitted changes; null if unknown.
    """

    name: str = ""
    job_id: str | None = None
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    directory: str | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    grace_period_seconds: float = 0.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    process: Process | None = None
    started: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    is_dirty: bool | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: str | None = None


@dataclass(frozen=True)
class TaskStatus:
    """The state of one task. A field whose value is unknown is null, or 0 if null is not among its types.

    Attributes:
        task: Its role and index, such as "worker/0".
        rank: Its rank in the step; joined workers have the ranks after those of the step.
        has_joined: Whether it is a joined worker, added to the running job by `tf4slurm grow` or `join`.
        node: Name of its node.
        address: Its host:port in the cluster spec.
        state: "missing" until the task registers, then the last state that its agent reported. "importing" replaces
            "running" until its server answers or its script calls a function of tf4slurm, for at most 60 s.
        starts: Number of starts of its child process in this attempt.
        is_forked: Whether its last child process was forked by the preloader (--preload), and not executed.
        not_forked: Why it was executed, as a clause; empty if it was forked, and without a preloader.
        returncode: Exit code of the last child process, or minus the number of the signal that killed it.
        killed_by: What ended the child process or its agent: "liveness_probe", "guard" (the process above the agent was
            killed), "slurmstepd" (Slurm's process above the task was killed) or "stop" (the job or the attempt ended).
            null if the child process ended by itself.
        detail: Details of the state, in words. Of a joined worker, why the chief does not use it yet.
        is_gone: Whether the task's agent has exited or is lost.
        heartbeat_age_seconds: Seconds since the last heartbeat of its agent.
        started_seconds: Last start of its child process, in seconds since the job's start.
        ended_seconds: End of its last child process, in seconds since the job's start.
        step: Last training step that the script reported.
        steps_per_second: New steps divided by the time between the script's reports of them, over the last 20 s, or
            between the last two reports if that is longer. The time before the second report does not count. 0 if no
            new step came for 20 s, and for twice the time between the last two.
        seconds_since_step: Seconds since the last new step.
        metrics: Last value of each metric that the script reported. NaN and infinity are null.
        variable_bytes: Bytes of the variables on a ps; null if the chief's script makes its strategy without tf4slurm.
        checkpoint: The state of the script's checkpoints; null if it has no `Checkpoints` object.
        memory_bytes: Resident memory of the child process and its descendants.
        cpu_seconds: Processor time of the child process and its descendants.
        sent_bytes: Bytes sent from the task's port.
        received_bytes: Bytes received at the task's port.
        gpu_percent: Percentage of the time in which the GPUs of the child process were busy; mean over its GPUs.
        gpu_memory_bytes: GPU memory of the child process and its descendants.
        num_printed: Number of lines that the child process has printed, without those that TensorFlow prints at its
            start or while it waits.
        num_sessions: Number of sessions of TensorFlow 1 that the child process has made.
        vain_waits: Tasks that have ended, for which TensorFlow in this task waits, or waited at its end.
    """

    task: str = "?"
    rank: int = 0
    has_joined: bool = False
    node: str | None = None
    address: str | None = None
    state: str = "?"
    starts: int = 0
    is_forked: bool = False
    not_forked: str = ""
    returncode: int | None = None
    killed_by: KilledBy | None = None
    detail: str | None = None
    is_gone: bool = False
    heartbeat_age_seconds: float | None = None
    started_seconds: float | None = None
    ended_seconds: float | None = None
    step: int | None = None
    steps_per_second: float | None = None
    seconds_since_step: float | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    variable_bytes: int | None = None
    checkpoint: CheckpointState | None = None
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    num_printed: int = 0
    num_sessions: int = 0
    vain_waits: tuple[str, ...] = ()

    @property
    def name_text(self) -> str:
        """The name of the task for tables, such as "worker/2 (joined)"."""
        return f"{self.task} (joined)" if self.has_joined else self.task

    @property
    def state_text(self) -> str:
        """The state of the task for tables, such as "running (start 2)" after a restart."""
        return f"{self.state} (start {self.starts})" if self.starts > 1 else self.state


@dataclass(frozen=True)
class StatusFile:
    """The state of the job and its tasks. The launcher replaces the file every few seconds.

    Attributes:
        time: When the file was written, in seconds since 1970.
        seconds: When the file was written, in seconds since the job's start.
        phase: Phase of the job: "rendezvous" (not all tasks have registered), "checking" (whether addresses are
            reachable), "importing" (a script has probably not yet imported TensorFlow), "running", "training" (a task
            has reported a step), "stopping" (the scripts save), "terminating" or "ended".
        attempt: Number of this attempt, from 1.
        max_attempts: Maximum number of attempts.
        reason: How the job ended, in words; empty until then.
        heartbeat_timeout_seconds: Heartbeat timeout of the job.
        grace_seconds_left: Seconds that the scripts still had to save when the file was written; null if they do not
            save after a stop request.
        warnings: Possible problems of the job, in sentences.
        shards: Progress of the data shards of each name.
        accepts_workers: Whether the chief's script has reported that workers can join. false until it has made its
            strategy.
        workers_error: The reason why no worker can join the job; empty if one can, or if that is not yet known.
        workers_left: Number of joined workers that have left.
        tasks: The tasks by rank, joined workers last. A spare that has replaced a task has the position of that task.
            Of the joined workers that have left, the list has the last 20.
    """

    time: float | None = None
    seconds: float = 0.0
    phase: str | None = None
    attempt: int | None = None
    max_attempts: int | None = None
    reason: str = ""
    heartbeat_timeout_seconds: float = 0.0
    grace_seconds_left: float | None = None
    warnings: tuple[str, ...] = ()
    shards: tuple[ShardProgress, ...] = ()
    accepts_workers: bool = False
    workers_error: str = ""
    workers_left: int = 0
    tasks: tuple[TaskStatus, ...] = ()

    @property
    def stale_seconds(self) -> float:
        """Maximum age of the file in seconds. If it is older, the launcher and all agents may have ended."""
        return self.heartbeat_timeout_seconds + LATE_SECONDS


@dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl. Each list but `joined` has one entry per task, by rank, joined workers last.

    An entry whose value is unknown is null.

    Attributes:
        seconds: When the sample was taken, in seconds since the job's start.
        attempt: Number of the attempt.
        joined: Ranks of the joined workers that have an entry.
        step: Last training step.
        memory_bytes: Resident memory.
        cpu_seconds: Processor time since the start of the child process.
        sent_bytes: Bytes sent from the tasks' ports.
        received_bytes: Bytes received at the tasks' ports.
        gpu_percent: Percentage of the time in which the tasks' GPUs were busy; empty if no task uses GPUs.
        gpu_memory_bytes: GPU memory; empty if no task uses GPUs.
    """

    seconds: float | None = None
    attempt: int = 1
    joined: tuple[int, ...] = ()
    step: tuple[int | None, ...] = ()
    memory_bytes: tuple[int | None, ...] = ()
    cpu_seconds: tuple[float | None, ...] = ()
    sent_bytes: tuple[int | None, ...] = ()
    received_bytes: tuple[int | None, ...] = ()
    gpu_percent: tuple[float | None, ...] = ()
    gpu_memory_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl: a change of the job's or a task's state.

    Attributes:
        time: When it happened, in seconds since 1970.
        seconds: When it happened, in seconds since the job's start.
        kind: The kind of change. The documentation has a table of all kinds (`control.records.EVENT_KINDS`).
        task: The task, such as "worker/0"; null for the job.
        text: The change in words.
        returncode: For an exit: the exit code, or minus the number of the signal that killed the process.
        barrier: For a wait at a barrier: the barrier's name.
        waited_seconds: For a wait at a barrier: seconds from the first arrival to the last.
    """

    time: float | None = None
    seconds: float | None = None
    kind: str = ""
    task: str | None = None
    text: str = ""
    returncode: int | None = None
    barrier: str | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True)
class ResultFile:
    """How the job ended.

    On a full disk `log` is null, and `tail`, `meaning`, `collateral`, `warnings` and `tasks` are empty.

    Attributes:
        state: "COMPLETED", "FAILED", "STOPPED" (a person, a time limit or preemption requested the end) or "REQUEUED"
            (stopped, and back in Slurm's queue).
        exit_code: Exit code of the launcher.
        reason: How the job ended, in words.
        cause: The task that failed first; null if no single task did.
        failure: What ended the script of the task `cause`: an exception, a signal or an exit code; null if the job did
            not end by the failure of a script.
        tail: The last lines that the task `cause` printed.
        meaning: Explanations of known errors in `tail` and `reason`.
        log: Path of the log of the task `cause`.
        collateral: Failures of other tasks, in words. Most are consequences of the cause.
        seconds: Duration of the job.
        attempts: Number of attempts that the job made.
        furthest_step: The furthest training step that a task reported, in all attempts; null for none.
        requeued: Why the job was requeued: "preemption", or "time limit" after any other stop signal, also one that a
            person sent, such as USR1; "Slurm" if Slurm had requeued it already, as after `scontrol requeue`; null if
            the job was not requeued.
        warnings: Possible problems of the job, in sentences.
        shards: Progress of the data shards of each name, in the last attempt.
        workers_left: Number of joined workers that have left.
        tasks: The tasks in the last attempt, in the same order as in `StatusFile`.
    """

    state: str = FAILED
    exit_code: int = 1
    reason: str = ""
    cause: str | None = None
    failure: ScriptFailure | None = None
    tail: tuple[str, ...] = ()
    meaning: tuple[str, ...] = ()
    log: str | None = None
    collateral: tuple[str, ...] = ()
    seconds: float | None = None
    attempts: int | None = None
    furthest_step: int | None = None
    requeued: str | None = None
    warnings: tuple[str, ...] = ()
    shards: tuple[ShardProgress, ...] = ()
    workers_left: int = 0
    tasks: tuple[TaskStatus, ...] = ()

    @property
    def headline(self) -> str:
        """What ended the script of the task that failed first, or else how the job ended."""
        return self.failure.headline() if self.failure is not None else self.reason


@dataclass(frozen=True)
class WorkerArray:
    """One line of worker_arrays.jsonl: a Slurm job array that `tf4slurm grow` has submitted, one element per worker.

    Attributes:
        job_id: Slurm's id of the array.
    """

    job_id: str = ""


@dataclass(frozen=True)
class LastState:
    """The last state of a task, which its agent writes if it loses the launcher.

    Attributes:
        task: The task, such as "worker/0".
        time: When the file was written, in seconds since 1970.
        attempt: Number of the attempt.
        starts: Number of starts of the child process in this attempt.
        state: The task's state; "ended" if the agent terminated the child process.
        returncode: Exit code of the child process, or minus the number of the signal that killed it.
    """

    task: str = "?"
    time: float | None = None
    attempt: int = 1
    starts: int = 0
    state: str = "lost"
    returncode: int | None = None


FILE_NAMES: dict[type[Any], str] = {
    JobFile: "job.json",
    SlurmResources: "slurm.json",
    StatusFile: "status.json",
    Sample: "samples.jsonl",
    StepMetrics: "metrics/<role>-<index>.<attempt>.jsonl",
    Event: "events.jsonl",
    ResultFile: "result.json",
    WorkerArray: "worker_arrays.jsonl",
    LastState: "lost/<role>-<index>.json",
}


def to_versioned_json(value: Any, indent: int | None = None) -> str:
    """Return the text of a JSON file with the fields of `value` and the schema version."""
    return to_json({_VERSION_KEY: SCHEMA_VERSION, **vars(value)}, indent) + "\n"


def read_file(path: Path, kind: type[_T], read: Callable[[Path], bytes] = Path.read_bytes) -> _T | None:
    """Read a JSON file as a value of class `kind`. Return None if it is missing, unreadable or not a JSON object.

    `read` returns the content of a path. Its errors are raised, except OSError and ValueError.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote the file.
    """
    content = read_object(path, read)
    if content is None:
        return None
    version = content.get(_VERSION_KEY)
    if type(version) is int and version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{str(path)!r} has schema version {version}; this tf4slurm reads versions up to {SCHEMA_VERSION}. "
            "Read it with the tf4slurm that wrote it, or a later one.",
            path=str(path),
            version=version,
        )
    return from_json(kind, content)
