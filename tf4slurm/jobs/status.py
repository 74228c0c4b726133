"""The state of a job and its tasks (`JobStatus`), from its run directory and from Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.control.shard_leases import ShardProgress
from tf4slurm.errors import COMPLETED, FAILED, REQUEUED, STOPPED, LaunchError
from tf4slurm.jobs.formatting import format_bytes, format_elapsed, format_list
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import LATE_SECONDS, StatusFile, TaskStatus
from tf4slurm.slurm.commands import query_accounting, query_exit_codes
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import ENDED_STATES, QueueEntry

FORGOTTEN = "FORGOTTEN"
SLURM_SECONDS = 5.0
_STALL_SECONDS = 60.0  # a task without a new step for this long is stalled,
_STALL_STEPS = 10.0  # or for this many steps of mean duration, if that is longer
_FRESH_SECONDS = 5.0
_MOST_PS = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class JobStatus:
    """The state of one job, of a whole job array or of one of its elements. An attribute with unknown value is None.

    Attributes:
        job_id: Slurm's job id, such as "4711", or "4711_3" for an element of an array; None for a local job.
        name: Name of its run directory; the later ones of a requeued job are NAME-2, NAME-3 and so on.
        state: Until the job ends, a state of Slurm such as "PENDING" or "RUNNING". Then "COMPLETED", "FAILED",
            "STOPPED", "REQUEUED" or "LOST" (the launcher ended without a result). "FORGOTTEN" if Slurm does not have
            the job any more and it has no result: nobody knows how it ended. "UNKNOWN" if Slurm does not answer and
            the job's files do not show the state. An array that has ended has the worst state of its elements.
        started: When the job was submitted or started, in seconds since 1970.
        phase: Phase of the running job, such as "importing", or "training" when a task has reported a step.
        attempt: Number of this attempt, from 1.
        max_attempts: Maximum number of attempts.
        exit_code: Exit code of the job; None until the job has ended, and for FORGOTTEN. That of an array is that of
            its element with the worst state.
        reason: Why the job is pending, or how it ended, in words.
        failure: What ended the script of the task that failed first: an exception, a signal or an exit code. None if
            the job did not end by the failure of a script.
        meaning: Explanations of known errors in the last lines of the task that failed first.
        elapsed: Duration of the job so far, such as "1:02:03".
        limit: Time limit in Slurm's format.
        start: Expected start of a pending job in Slurm's format.
        nodes: Its nodes, as a nodelist.
        grace_seconds_left: Seconds that its scripts still have to save; None if they do not save after a stop request.
        written_seconds: Age of status.json in seconds.
        run_directory: Path of its latest run directory.
        problems: Possible problems of the job, in sentences.
        shards: Progress of its data shards, one entry for each name.
        workers_left: Number of joined workers that have left.
        warnings: Why this information may be wrong or incomplete, in sentences.
        tasks: Its tasks by rank. The state of a task is "missing" (not registered), "waiting" (for other tasks),
            "importing" (mostly TensorFlow; its server has not answered), "running", "STALLED" (no new step for long),
            "BLOCKED" (TensorFlow waits for a task that has ended),
            "exited N" (exit code N), "killed by signal N", "ended" (terminated by its agent after the loss of the
            launcher), "lost" or "terminated".
        labels: Names and values of the varied arguments, from --grid, --array-args or --label.
        elements: The states of the elements of a job array, in the order of their indices. Empty for any other job.
        has_result: Whether the latest run of the job has written its result.json.
        slurm_output: The last lines of the files that Slurm wrote for the batch script, by path. Only for a job that
            ended without a result and not COMPLETED. Of a job array, those of the first such element.
    """

    job_id: str | None
    name: str
    state: str
    started: float
    phase: str | None = None
    attempt: int | None = None
    max_attempts: int | None = None
    exit_code: int | None = None
    reason: str = ""
    failure: ScriptFailure | None = None
    meaning: tuple[str, ...] = ()
    elapsed: str | None = None
    limit: str | None = None
    start: str | None = None
    nodes: str | None = None
    grace_seconds_left: float | None = None
    written_seconds: float | None = None
    run_directory: str | None = None
    problems: tuple[str, ...] = ()
    shards: tuple[ShardProgress, ...] = ()
    workers_left: int = 0
    warnings: tuple[str, ...] = ()
    tasks: tuple[TaskStatus, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    elements: tuple[JobStatus, ...] = ()
    has_result: bool = False
    slurm_output: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether the job has an exit code. It has none while it may run, and when it is FORGOTTEN."""
        return self.exit_code is not None

    @property
    def parts(self) -> tuple[JobStatus, ...]:
        """The elements of a job array. Any other job is its only part."""
        return self.elements or (self,)

    @property
    def headline(self) -> str:
        """What ended the script of the task that failed first, or else `reason`."""
        return self.failure.headline() if self.failure is not None else self.reason

    @property
    def facts(self) -> list[str]:
        """The job's state and, if known, its duration with its limit, phase, nodes, attempt and exit code, as texts."""
        facts = [self.state]
        if self.elapsed and self.state != "PENDING":
            facts.append(f"{self.elapsed} / {self.limit}" if self.limit else self.elapsed)
        if self.phase and not self.has_ended:
            facts.append(self.phase)
        if self.nodes:
            facts.append(f"on {self.nodes}")
        if self.attempt and (self.max_attempts or 1) > 1:
            facts.append(f"attempt {self.attempt} of {self.max_attempts}")
        if self.has_ended:
            facts.append(f"exit code {self.exit_code}")
        return facts

    @property
    def stop_text(self) -> str:
        """A sentence with the time that the scripts have left to save. "" if they do not save after a stop request."""
        if self.grace_seconds_left is None:
            return ""
        return f"Its scripts save after a stop request: at most {self.grace_seconds_left:.0f} s are left."

    @property
    def is_unclear(self) -> bool:
        """Whether nobody knows if the job still runs or how it ended.

        Its state is FORGOTTEN, or UNKNOWN without an exit code.
        """
        return self.state in (FORGOTTEN, "UNKNOWN") and not self.has_ended

    @property
    def has_failed(self) -> bool:
        """Whether the job has ended with another state than COMPLETED, or is FORGOTTEN."""
        return not self.can_change and self.state != COMPLETED

    @property
    def can_change(self) -> bool:
        """Whether the job may still run or start. The state of a job that has ended, or is forgotten, cannot change."""
        if self.elements:
            return any(each.can_change for each in self.elements)
        return not self.has_ended and self.state != FORGOTTEN

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The last metrics of the chief, or else of the first task that has reported some."""
        with_metrics = [task for task in self.tasks if task.metrics]
        first = next((task for task in with_metrics if task.task == "chief/0"), None)
        return (first or with_metrics[0]).metrics if with_metrics else {}

    @property
    def furthest_step(self) -> int | None:
        """The highest step that a task has reported, or None without one."""
        return max((task.step for task in self.tasks if task.step is not None), default=None)


class SlurmEnds:
    """The ends of jobs that have no result, as Slurm knows them.

    Slurm is asked when an end is first needed, and once for all elements of an array.
    """

    def __init__(self) -> None:
        self._accounting: dict[int, Mapping[JobId, tuple[str, int]]] = {}
        self._exit_codes: dict[int, Mapping[JobId, int]] = {}

    def accounting(self, job_id: JobId) -> tuple[str, int] | None:
        """Return the state and exit code of a job from sacct, or None if sacct does not answer or know the job."""
        if job_id.number not in self._accounting:
            self._accounting[job_id.number] = {}
            with contextlib.suppress(LaunchError):
                found = query_accounting(job_id.whole, timeout_seconds=SLURM_SECONDS)
                self._accounting[job_id.number] = found
        return _first(self._accounting[job_id.number], job_id)

    def exit_code(self, job_id: JobId) -> int:
        """Return the exit code of a job from the controller, or 0 if it is unknown."""
        if job_id.number not in self._exit_codes:
            self._exit_codes[job_id.number] = {}
            with contextlib.suppress(LaunchError):
                found = query_exit_codes(job_id.whole, timeout_seconds=SLURM_SECONDS)
                self._exit_codes[job_id.number] = found
        return _first(self._exit_codes[job_id.number], job_id) or 0


def _first(found: Mapping[JobId, _T], job_id: JobId) -> _T | None:
    """Return the value of a job. For a heterogeneous job it is that of its first component."""
    if job_id in found or job_id.elements:
        return found.get(job_id)
    return found.get(dataclasses.replace(job_id, component=0))


def read_status(
    job: KnownJob,
    entry: QueueEntry | None,
    warnings: Sequence[str] = (),
    *,
    runs: Sequence[RunDirectory] | None = None,
    ends: SlurmEnds | None = None,
) -> JobStatus:
    """Return the state of a job from its files and its entry in Slurm's queue.

    `entry` is None if the job is not in the queue, or if Slurm did not answer. `warnings` must say that Slurm did not
    answer, and be empty if it did. `runs` are the job's run directories, and `ends` has what Slurm answered about ended
    jobs. By default both are looked up.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote the job's files.
    """
    runs = job.run_directories if runs is None else runs
    files = JobFiles(runs[-1] if runs else RunDirectory(Path(job.runs_directory) / job.name), exists=bool(runs))
    file, age = files.status, files.status_age_seconds
    all_warnings = list(warnings)
    state, exit_code, reason = _find_state(job, entry, files, all_warnings, ends or SlurmEnds())
    has_ended = exit_code is not None
    is_earlier = files.result is not None and not has_ended  # the files are from the run before a requeue
    if is_earlier:
        file, age = StatusFile(), None
    elapsed = file.seconds + (0.0 if has_ended else age) if age is not None else None
    if files.result is not None and has_ended:
        elapsed = files.result.seconds
    return JobStatus(
        job_id=job.job_id,
        name=job.name,
        state=state,
        started=job.started,
        phase=file.phase,
        attempt=file.attempt,
        max_attempts=file.max_attempts,
        exit_code=exit_code,
        reason=reason,
        failure=files.result.failure if files.result is not None and has_ended else None,
        meaning=files.result.meaning if files.result is not None else (),
        elapsed=entry.elapsed if entry else format_elapsed(elapsed) if elapsed is not None else None,
        limit=entry.limit if entry else None,
        start=entry.start if entry and entry.is_pending and entry.start != "N/A" else None,
        nodes=(entry.nodes if entry else None) or ",".join(dict.fromkeys(t.node for t in file.tasks if t.node)) or None,
        grace_seconds_left=None if has_ended or state == "PENDING" else find_grace_seconds_left(file, age),
        written_seconds=None if age is None else round(age, 1),
        run_directory=str(runs[-1].path) if runs else None,
        problems=files.result.warnings if files.result is not None and has_ended else file.warnings,
        shards=files.result.shards if files.result is not None and has_ended else file.shards,
        workers_left=file.workers_left,
        warnings=tuple(all_warnings),
        tasks=() if state == "PENDING" or is_earlier else _find_tasks(files, has_ended=has_ended),
        labels=job.labels or files.job.labels,
        has_result=files.result is not None and not is_earlier,
    )


def find_grace_seconds_left(file: StatusFile, age: float | None) -> float | None:
    """Return the seconds of the grace period that are left now. `age` is the age of the file in seconds."""
    if file.grace_seconds_left is None or (age is not None and age > file.stale_seconds):
        return None  # a stale file may be that of an earlier run
    return round(max(0.0, file.grace_seconds_left - (age or 0.0)), 1)


def describe_variables(tasks: Sequence[TaskStatus]) -> str:
    """Return the bytes of the variables on each ps as text, the 8 largest first, or "" if they are unknown."""
    known = [(task.variable_bytes, task.task) for task in tasks if task.variable_bytes is not None]
    known.sort(key=lambda each: -each[0])
    return format_list([f"{name} {format_bytes(num_bytes)}" for num_bytes, name in known], _MOST_PS)


def describe_checkpoints(tasks: Sequence[TaskStatus]) -> str:
    """Return the newest checkpoint of each task that has a `Checkpoints` object as text, or "" if none has one."""
    return "; ".join(f"{task.task} {task.checkpoint}" for task in tasks if task.checkpoint is not None)


def _find_state(
    job: KnownJob, entry: QueueEntry | None, files: JobFiles, warnings: list[str], ends: SlurmEnds
) -> tuple[str, int | None, str]:
    """Return the job's state, exit code (None until it has ended) and reason. Append new warnings to `warnings`.

    If `warnings` is not empty when this function is called, Slurm did not answer.
    """
    result, file, age = files.result, files.status, files.status_age_seconds
    earlier = f"The last attempt was {result.state}: {result.reason}" if result is not None else ""
    if entry is not None and entry.is_pending:
        if result is None and age is not None and age < _FRESH_SECONDS:  # the job started after the query to Slurm
            return "RUNNING", None, file.reason
        return entry.state, None, f"{entry.explained_reason}. {earlier}" if earlier else entry.explained_reason
    if result is not None and result.state == REQUEUED and entry is None and not warnings and _is_cancelled(job):
        return STOPPED, 1, "It was cancelled while it was pending."
    if result is not None and result.state == REQUEUED and warnings:  # Slurm did not answer: the job may run again
        return result.state, None, result.reason
    if result is not None and not (result.state == REQUEUED and entry is not None):
        return result.state, result.exit_code, result.reason
    if entry is not None and not entry.has_ended:
        if earlier:
            return entry.state, None, earlier
        if age is not None and age > file.stale_seconds:
            warnings.append(
                f"The launcher wrote nothing for {age:.0f} s: it is stopped, or the file system is slow. The tasks are "
                "shown as they were then."
            )
        return entry.state, None, file.reason
    if job.job_id is None:
        return _find_end_of_local_job(job, files)
    if warnings:
        return _find_state_without_slurm(job, files, warnings)
    state, exit_code, source = _find_end_in_slurm(job, entry, files, ends)
    return state, exit_code, source if state == "LOST" else f"{source} {files.describe_last_state()}".rstrip()


def _find_state_without_slurm(job: KnownJob, files: JobFiles, warnings: list[str]) -> tuple[str, None, str]:
    """Return the state and the reason of a Slurm job, when Slurm does not answer and the job has no result.

    Both come from the files. The exit code between them is None, because the job may still run. The age of the files
    is appended to `warnings`.
    """
    age = files.status_age_seconds
    if age is None:
        return "UNKNOWN", None, ""
    if files.is_lost:
        return "UNKNOWN", None, files.describe_loss()
    if age > files.status.stale_seconds:
        warnings.append(f"The launcher of {job.name} wrote nothing for {age:.0f} s. The tasks are those of then.")
        return "UNKNOWN", None, files.status.reason
    warnings.append(f"The state of {job.name} is what its launcher wrote {max(age, 0):.0f} s ago.")
    return "RUNNING", None, files.status.reason


def _find_end_in_slurm(
    job: KnownJob, entry: QueueEntry | None, files: JobFiles, ends: SlurmEnds
) -> tuple[str, int | None, str]:
    """Return the final state and exit code of a Slurm job that has no result, and a sentence about their source.

    The source is Slurm's accounting, or else the job's entry in the queue. Without both, the job is "LOST" if its files
    show that its launcher has ended, "STOPPED" if it was cancelled while it was pending, or else "FORGOTTEN".
    """
    assert job.slurm_id is not None
    job_id = job.slurm_id
    reason = ""
    if entry is not None and ENDED_STATES.get(entry.state) == FAILED and entry.reason not in ("", "None"):
        reason = f" ({entry.explained_reason})"  # after other ends, Slurm still shows why the job was pending
    accounted = ends.accounting(job_id)
    if accounted is not None and accounted[0] in ENDED_STATES:  # accounting may lag behind the queue
        return *_end_of(*accounted), f"Slurm's accounting shows {accounted[0]}{reason}; the launcher wrote no result."
    if entry is not None:
        return *_end_of(
            entry.state, ends.exit_code(job_id)
        ), f"Slurm's queue shows {entry.state}{reason}; the launcher wrote no result."
    if _is_cancelled(job) and not files.exists:
        return STOPPED, 1, "It was cancelled while it was pending."
    if files.is_lost and not files.has_orphans:
        return "LOST", 1, f"Slurm no longer has this job. {files.describe_loss()}"
    text = "Slurm no longer has this job, and it has no result: it is unknown whether and how it ended."
    return FORGOTTEN, None, text


def _is_cancelled(job: KnownJob) -> bool:
    """Return whether the job was cancelled while it was pending."""
    return bool(job.cancelled) and job.slurm_id is not None and JobId.parse(job.cancelled).covers(job.slurm_id)


def _end_of(slurm_state: str, exit_code: int) -> tuple[str, int]:
    """Convert Slurm's final state of a job and exit code to those of tf4slurm.

    An exit code of 0 becomes 1 if the state is not COMPLETED.
    """
    state = ENDED_STATES[slurm_state]
    return state, exit_code or int(state != COMPLETED)


def _find_end_of_local_job(job: KnownJob, files: JobFiles) -> tuple[str, int | None, str]:
    if not files.exists and job.process is not None:  # an element of a local sweep
        if job.process.host != os.uname().nodename:
            return "UNKNOWN", None, f"The sweep runs on {job.process.host}. Ask there."
        if job.process.is_alive():
            return "PENDING", None, "earlier elements of the sweep are running"
        return STOPPED, 1, "The sweep has ended: this element was not started, or its launcher failed at once."
    if not files.exists:
        return "UNKNOWN", 1, f"Its run directory under {files.run.path.parent} does not exist."
    process = files.job.process
    if process is None:  # the launcher has just started, or was killed before it wrote job.json
        is_running = time.time() - job.started < LATE_SECONDS
    elif process.host == os.uname().nodename:
        is_running = not files.is_lost
    else:  # on another host, whose processes are not visible here
        is_running = files.status_age_seconds is not None and files.status_age_seconds < LATE_SECONDS
    return ("RUNNING", None, "") if is_running else ("LOST", 1, files.describe_loss())


def _find_tasks(files: JobFiles, *, has_ended: bool) -> tuple[TaskStatus, ...]:
    """Return the tasks in status.json, with the states that `JobStatus` shows.

    The age of the file is added to the times since the last step and heartbeat. `has_ended` says whether the job has
    ended. If it has ended without a result, the last states that agents wrote replace the states in the file.
    """
    tasks, age = files.status.tasks, 0.0 if has_ended else files.status_age_seconds or 0.0
    if has_ended and files.result is None:
        tasks = tuple(_with_last_state(task, files) for task in tasks)
    return tuple(
        dataclasses.replace(
            task,
            state=_describe_state(task, files.status, age),
            seconds_since_step=_add(task.seconds_since_step, age),
            heartbeat_age_seconds=_add(task.heartbeat_age_seconds, age),
        )
        for task in tasks
    )


def _with_last_state(task: TaskStatus, files: JobFiles) -> TaskStatus:
    last = files.last_states.get(task.task)
    if last is None:
        return task if files.has_orphans else dataclasses.replace(task, state="lost")
    return dataclasses.replace(task, state=last.state, starts=last.starts, returncode=last.returncode)


def _add(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else round(seconds + age, 1)


def _describe_state(task: TaskStatus, file: StatusFile, age: float) -> str:
    if task.returncode is not None and task.state in ("exited", "terminated"):
        return f"exited {task.returncode}" if task.returncode >= 0 else f"killed by signal {-task.returncode}"
    if task.is_gone:
        return "terminated" if task.state == "terminated" else "lost"
    if task.state == "running":
        if task.vain_waits:
            return "BLOCKED"
        return "STALLED" if _is_stalled(task, file, age) else "running"
    return "waiting" if task.state in ("registered", "ready", "not_ready") else task.state


def _is_stalled(task: TaskStatus, file: StatusFile, age: float) -> bool:
    if not task.step or task.seconds_since_step is None or file.phase != "training":
        return False
    seconds_per_step = (file.seconds - (task.started_seconds or 0.0)) / task.step
    return task.seconds_since_step + age > max(_STALL_SECONDS, _STALL_STEPS * seconds_per_step)
