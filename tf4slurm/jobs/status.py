"""Read the state of jobs and their tasks (`JobStatus`) from their run directories and from Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tf4slurm.control.records import describe_end
from tf4slurm.errors import EXIT_REQUEUED, LaunchError, SchemaVersionError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, LastState, ResultFile, StatusFile, TaskStatus
from tf4slurm.slurm.commands import query_accounting, query_job, query_queue
from tf4slurm.slurm.parsing import ENDED_STATES, QueueEntry

_SLURM_SECONDS = 5.0
_STALL_SECONDS = 60.0
_STALL_STEPS = 10.0  # times the mean seconds per step, if longer
_FRESH_SECONDS = 5.0
_LATE_SECONDS = 20.0  # maximum delay of status.json on a slow file system
_STOP_CODES = (130, 143, 138, 140)
_MOST_ENDS = 5
_LATEST_TIME = 1e11  # in seconds since 1970; time.localtime fails for much later ones


@dataclass(frozen=True)
class JobStatus:
    """The state of one job; None if unknown.

    Attributes:
        job_id: Slurm's job id; None for a local job.
        name: First part of the names of its run directories.
        state: A state of Slurm, or "RUNNING", "COMPLETED", "FAILED", "STOPPED", "LOST" (the launcher ended without a
            result) or "UNKNOWN".
        started: When the job was submitted or started, in seconds since 1970.
        phase: Phase of the running job, such as "training".
        attempt: Number of this attempt, from 1.
        max_attempts: Maximum number of attempts.
        exit_code: Exit code of the job; None until the job has ended.
        reason: Why the job is pending, or how it ended, in words.
        elapsed: Duration of the job so far, such as "1:02:03".
        limit: Time limit in Slurm's format.
        start: Expected start of a pending job in Slurm's format.
        nodes: Its nodes, as a nodelist.
        written_seconds: Age of status.json in seconds.
        run_directory: Path of its latest run directory.
        warnings: Why this information may be wrong or incomplete, in sentences.
        tasks: Its tasks by rank. The state of a task is "missing" (not registered), "waiting" (for other tasks),
            "running", "STALLED" (no new step for long), "exited N" (exit code N), "ended" (terminated by its agent
            after the loss of the launcher), "lost" or "terminated".
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
    elapsed: str | None = None
    limit: str | None = None
    start: str | None = None
    nodes: str | None = None
    written_seconds: float | None = None
    run_directory: str | None = None
    warnings: tuple[str, ...] = ()
    tasks: tuple[TaskStatus, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None


class StatusReader:
    """Reads the state of jobs repeatedly: the files at each call, Slurm's answer less often."""

    def __init__(self, jobs: Sequence[KnownJob], *, ask_seconds: float = 10.0, refuse_newer: bool = True) -> None:
        """Create a reader; read nothing yet.

        Args:
            jobs: The jobs.
            ask_seconds: Minimum seconds between two queries to Slurm.
            refuse_newer: Raise an error for files of a newer version, instead of showing the job as UNKNOWN.
        """
        self._jobs = jobs
        self._refuse_newer = refuse_newer
        self._ask_seconds = ask_seconds
        self._asked_at = -math.inf
        self._entries: dict[str, QueueEntry] = {}
        self._warnings: list[str] = []

    def read(self) -> list[JobStatus]:
        """Return the current state of each job.

        Raises:
            SchemaVersionError: A newer version of tf4slurm wrote a job's files.
        """
        if time.monotonic() - self._asked_at >= self._ask_seconds:
            self._entries, self._warnings = _ask_slurm(self._jobs)
            self._asked_at = time.monotonic()
        return [self._read(job) for job in self._jobs]

    def _read(self, job: KnownJob) -> JobStatus:
        try:
            return read_status(job, self._entries.get(job.job_id or ""), self._warnings if job.job_id else ())
        except SchemaVersionError as error:
            if self._refuse_newer:
                raise
            return JobStatus(job_id=job.job_id, name=job.name, state="UNKNOWN", reason=str(error), started=job.started)


def _ask_slurm(jobs: Sequence[KnownJob]) -> tuple[dict[str, QueueEntry], list[str]]:
    """Query Slurm for the jobs that have an id; return queue entries by job id, and warnings."""
    job_ids = [job.job_id for job in jobs if job.job_id is not None]
    if not job_ids:
        return {}, []
    try:
        entries = query_queue(job_ids, timeout_seconds=_SLURM_SECONDS)
    except LaunchError as error:
        return {}, [f"Slurm's information is missing: {error}"]
    found: dict[str, QueueEntry] = {}
    for entry in entries:
        found.setdefault(entry.job_id, entry)
        array = entry.job_id.partition("_")[0]
        if array not in found or found[array].has_ended:  # for an array, prefer an element that has not ended
            found[array] = entry
    return found, []


@dataclass(frozen=True)
class _Sources:
    """The sources of a job's state: the files of its latest run directory, and its entry in Slurm's queue."""

    job: KnownJob
    entry: QueueEntry | None
    run: RunDirectory | None
    file: StatusFile  # empty if there is none
    result: ResultFile | None
    age: float | None  # of status.json, in seconds


def read_status(job: KnownJob, entry: QueueEntry | None, warnings: Sequence[str] = ()) -> JobStatus:
    """Return the state of a job.

    Args:
        job: The job.
        entry: Its entry in Slurm's queue; None if it has none.
        warnings: Warnings about missing answers from Slurm.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote the job's files.
    """
    runs = job.run_directories
    run = runs[-1] if runs else None
    file = (run.read(StatusFile) if run else None) or StatusFile()
    age = None if file.time is None else time.time() - file.time
    known = _Sources(job, entry, run, file, run.read(ResultFile) if run else None, age)
    all_warnings = list(warnings)
    state, exit_code, reason = _find_state(known, all_warnings)
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
        elapsed=entry.elapsed if entry else _elapsed(known, has_ended=exit_code is not None),
        limit=entry.limit if entry else None,
        start=entry.start if entry and entry.is_pending and entry.start != "N/A" else None,
        nodes=(entry.nodes if entry else None) or ",".join(dict.fromkeys(t.node for t in file.tasks if t.node)) or None,
        written_seconds=None if age is None else round(age, 1),
        run_directory=str(run.path) if run else None,
        warnings=tuple(all_warnings),
        tasks=() if state == "PENDING" else tuple(_find_tasks(known, has_ended=exit_code is not None)),
    )


def _find_state(known: _Sources, warnings: list[str]) -> tuple[str, int | None, str]:
    """Return the job's state, exit code (None until it has ended) and reason; append to `warnings`."""
    entry, result, age = known.entry, known.result, known.age
    if entry is not None and entry.is_pending:
        if result is None and age is not None and age < _FRESH_SECONDS:  # the job started after the query to Slurm
            return "RUNNING", None, known.file.reason
        return entry.state, None, entry.explained_reason
    is_requeued = result is not None and result.exit_code == EXIT_REQUEUED and entry is not None
    if result is not None and not is_requeued:
        code = result.exit_code
        return "COMPLETED" if code == 0 else "STOPPED" if code in _STOP_CODES else "FAILED", code, result.reason
    if entry is not None and not entry.has_ended:
        if age is not None and age > known.file.heartbeat_timeout_seconds + _LATE_SECONDS:
            warnings.append(
                f"The launcher wrote nothing for {age:.0f} s: it is stopped, or the file system is slow. The tasks are "
                "shown as they were then."
            )
        return entry.state, None, known.file.reason
    if known.job.job_id is not None:
        return _find_end_in_slurm(known, known.job.job_id, has_answer=not warnings)
    return _find_end_of_local_job(known)


def _find_end_in_slurm(known: _Sources, job_id: str, *, has_answer: bool) -> tuple[str, int | None, str]:
    """Return the state of a Slurm job without a result, from accounting or the last queue entry."""
    if not has_answer:  # the job may still run
        return "UNKNOWN", None, ""
    try:
        accounted = query_accounting(job_id, timeout_seconds=_SLURM_SECONDS)
    except LaunchError:
        accounted = None
    if accounted is not None and accounted[0] in ENDED_STATES:  # accounting may lag behind the queue
        code = accounted[1] or int(accounted[0] != "COMPLETED")
        return accounted[0], code, _describe_loss("From Slurm's accounting; the launcher wrote no result.", known.run)
    if known.entry is not None:
        code = 0
        with contextlib.suppress(LaunchError):
            code = query_job(job_id, timeout_seconds=_SLURM_SECONDS).exit_code
        code = code or int(known.entry.state != "COMPLETED")
        return known.entry.state, code, _describe_loss("From Slurm's queue; the launcher wrote no result.", known.run)
    reason = "Slurm no longer has this job, and the launcher wrote no result."
    return "LOST" if known.run is not None else "UNKNOWN", 1, _describe_loss(reason, known.run)


def _find_end_of_local_job(known: _Sources) -> tuple[str, int | None, str]:
    """Return the state of a local job without a result, from its launcher's process."""
    if known.run is None:
        return "UNKNOWN", 1, f"Its run directory under {known.job.runs_directory} does not exist."
    process = (known.run.read(JobFile) or JobFile()).process
    if process is not None:
        is_elsewhere = process.host != os.uname().nodename  # on a host that shares this directory
        if process.is_alive() or (is_elsewhere and known.age is not None and known.age < _LATE_SECONDS):
            return "RUNNING", None, ""
    return "LOST", 1, _describe_loss("The launcher was killed, or its host failed: it wrote no result.", known.run)


def _elapsed(known: _Sources, *, has_ended: bool) -> str | None:
    if known.result is not None:
        return _format_seconds(known.result.seconds)
    return None if known.age is None else _format_seconds(known.file.seconds + (0.0 if has_ended else known.age))


def _find_tasks(known: _Sources, *, has_ended: bool) -> list[TaskStatus]:
    tasks = known.file.tasks
    if known.run is not None and has_ended and known.result is None:
        states = known.run.read_last_states()
        tasks = tuple(_with_last_state(task, states.get(task.task, LastState())) for task in tasks)
    return [_age_task(task, known.file, known.age or 0.0, has_ended=has_ended) for task in tasks]


def _with_last_state(task: TaskStatus, last: LastState) -> TaskStatus:
    starts = last.starts if last.time is not None else task.starts
    returncode = last.returncode if last.time is not None else task.returncode
    return dataclasses.replace(task, state=last.state, starts=starts, returncode=returncode)


def _age_task(task: TaskStatus, file: StatusFile, age: float, *, has_ended: bool) -> TaskStatus:
    """Return the current state of a task, `age` seconds after status.json was written."""
    heartbeat_age, seconds_since_step = task.heartbeat_age_seconds, task.seconds_since_step
    return dataclasses.replace(
        task,
        state=_task_state(task, file, 0.0 if has_ended else age),
        seconds_since_step=None if seconds_since_step is None else round(seconds_since_step + age, 1),
        heartbeat_age_seconds=None if heartbeat_age is None else round(heartbeat_age + age, 1),
    )


def _task_state(task: TaskStatus, file: StatusFile, age: float) -> str:
    if task.state == "exited":
        return f"exited {task.returncode}"
    if task.is_gone:
        return "terminated" if task.state == "terminated" else "lost"
    if task.state == "running":
        return "STALLED" if _is_stalled(task, file, age) else "running"
    return "waiting" if task.state in ("registered", "ready", "not_ready") else task.state


def _is_stalled(task: TaskStatus, file: StatusFile, age: float) -> bool:
    if not task.step or task.seconds_since_step is None or file.phase != "training":
        return False
    seconds_per_step = (file.seconds - (task.started_seconds or 0.0)) / task.step
    return task.seconds_since_step + age > max(_STALL_SECONDS, _STALL_STEPS * seconds_per_step)


def _format_seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_lost(run: RunDirectory) -> bool:
    """Return whether the launcher of this job certainly ended without a result.

    This is certain if the launcher ran on this host and its process no longer exists, or if agents recorded its loss.
    A launcher on another host that writes nothing may only be suspended.
    """
    if run.read(ResultFile) is not None:
        return False
    process = (run.read(JobFile) or JobFile()).process
    if process is not None and process.host == os.uname().nodename:
        return not process.is_alive()
    return bool(run.read_last_states())


def last_known(run: RunDirectory) -> str:
    """Return the last recorded state of a job without a result, in sentences: phase, step, and how tasks ended."""
    file, states = run.read(StatusFile), list(run.read_last_states().values())
    sentences = []
    if file is not None and file.time is not None:
        reached = max((task.step for task in file.tasks if task.step is not None), default=None)
        step = "" if reached is None else f", step {reached:,}"
        sentences.append(f"Last recorded state, at {_format_time(file.time)}: {file.phase}{step}.")
    ends = [f"{state.task} {describe_end(state.returncode)}" for state in states if state.returncode is not None]
    if ends:
        more = f" and {len(ends) - _MOST_ENDS:,} more" if len(ends) > _MOST_ENDS else ""
        sentences.append(f"These tasks ended by themselves: {', '.join(ends[:_MOST_ENDS])}{more}.")
    ended = [state.time for state in states if state.state == "ended"]
    if ended:
        sentences.append(f"Agents terminated the scripts of {len(ended):,} tasks, at {_format_time(ended[0])}.")
    return " ".join(sentences)


def _describe_loss(reason: str, run: RunDirectory | None) -> str:
    return f"{reason} {last_known(run)}".rstrip() if run is not None else reason


def _format_time(seconds: float | None) -> str:
    if seconds is None or not 0 < seconds < _LATEST_TIME:
        return "an unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
