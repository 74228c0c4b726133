"""Where a job stands: what its run directory tells, and what Slurm says.

As JSON (`tf4slurm status --json`) a list of

    {"job_id", "name", "state", "phase", "attempt", "max_attempts", "exit_code", "reason", "elapsed", "limit", "start",
     "nodes", "written_seconds", "run_directory", "doubts": [sentence],
     "tasks": [{"task", "rank", "node", "address", "state", "step", "steps_per_second", "step_seconds", "memory_bytes",
                "heard_seconds", "starts", "metrics"}]}

"state" is Slurm's while Slurm has the job, else RUNNING, COMPLETED, FAILED, STOPPED, LOST (its launcher has ended
without a result) or UNKNOWN. A task is missing, waiting, running, STALLED, exited, ended (by its agent, which had lost
the launcher), lost or left. What is not known is null. A metric may be "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf4slurm.errors import EXIT_REQUEUED, LaunchError
from tf4slurm.jobs.lost_job import last_known
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.slurm.commands import ask_accounting, ask_job, ask_queue
from tf4slurm.slurm.job import ENDED_STATES, QueueEntry
from tf4slurm.system.proc import is_alive

_SLURM_SECONDS = 5.0
_STALL_SECONDS = 60.0
_STALL_STEPS = 10.0  # and as long as this many steps took before
_FRESH_SECONDS = 5.0
_LATE_SECONDS = 20.0  # that status.json may be old on a slow file system
_STOP_CODES = (130, 143, 138, 140)
_UNKNOWN_END = {"state": "lost"}


@dataclass(frozen=True)
class TaskStatus:
    """One task; see the head of this file."""

    task: str
    rank: int
    node: str | None
    address: str | None
    state: str
    step: int | None
    steps_per_second: float | None
    step_seconds: float | None
    memory_bytes: int
    heard_seconds: float | None
    starts: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class JobStatus:
    """One job; see the head of this file. Times are text as Slurm writes it, or seconds."""

    job_id: str | None
    name: str
    state: str
    phase: str | None
    attempt: int | None
    max_attempts: int | None
    exit_code: int | None
    reason: str
    elapsed: str | None
    limit: str | None
    start: str | None
    nodes: str | None
    written_seconds: float | None
    run_directory: str | None
    doubts: tuple[str, ...]
    tasks: tuple[TaskStatus, ...]

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class StatusReader:
    """Reads where some jobs stand, again and again; their files each time, Slurm's word not too often."""

    def __init__(self, jobs: Sequence[KnownJob], *, ask_seconds: float = 10.0) -> None:
        """`ask_seconds` is how old Slurm's last answer may be."""
        self._jobs = jobs
        self._ask_seconds = ask_seconds
        self._asked_at = -math.inf
        self._entries: dict[str, QueueEntry] = {}
        self._doubts: list[str] = []

    def read(self) -> list[JobStatus]:
        """Return where each job stands now."""
        if time.monotonic() - self._asked_at >= self._ask_seconds:
            self._entries, self._doubts = _ask_slurm(self._jobs)
            self._asked_at = time.monotonic()
        return [
            read_status(job, self._entries.get(job.job_id or ""), self._doubts if job.job_id else ())
            for job in self._jobs
        ]


def _ask_slurm(jobs: Sequence[KnownJob]) -> tuple[dict[str, QueueEntry], list[str]]:
    """Ask Slurm for the jobs that are its own; return what it says by job id, and the doubts that remain."""
    job_ids = [job.job_id for job in jobs if job.job_id is not None]
    if not job_ids:
        return {}, []
    try:
        entries = ask_queue(job_ids, timeout_seconds=_SLURM_SECONDS)
    except LaunchError as error:
        return {}, [f"What Slurm knows of it is not in this: {error}"]
    found: dict[str, QueueEntry] = {}
    for entry in entries:
        found.setdefault(entry.job_id, entry)
        array = entry.job_id.partition("_")[0]
        if array not in found or found[array].has_ended:  # of an array, one that is still to end
            found[array] = entry
    return found, []


def read_status(job: KnownJob, entry: QueueEntry | None, doubts: Sequence[str] = ()) -> JobStatus:
    """Return where a job stands. `entry` is what the queue says, None if it does not have it."""
    runs = job.run_directories
    run = runs[-1] if runs else None
    status = (run.read_status() if run else None) or {}
    result = run.read_result() if run else None
    age = time.time() - status["time"] if "time" in status else None
    doubts = list(doubts)
    state, exit_code, reason = _judge(job, run, entry, result, status, age, doubts)
    is_over = exit_code is not None
    tasks = [] if state == "PENDING" else _tasks(status)
    if run is not None and is_over and result is None:
        last = run.read_last_states()
        tasks = [{**task, **last.get(str(task.get("task")), _UNKNOWN_END)} for task in tasks]
    return JobStatus(
        job_id=job.job_id,
        name=job.name,
        state=state,
        phase=status.get("phase"),
        attempt=status.get("attempt"),
        max_attempts=status.get("max_attempts"),
        exit_code=exit_code,
        reason=reason,
        elapsed=entry.elapsed if entry else _clock(result.get("seconds") if result else _elapsed(status, age, is_over)),
        limit=entry.limit if entry else None,
        start=entry.start if entry and entry.is_pending and entry.start != "N/A" else None,
        nodes=(entry.nodes if entry else None) or _nodes(status),
        written_seconds=None if age is None else round(age, 1),
        run_directory=str(run.path) if run else None,
        doubts=tuple(doubts),
        tasks=tuple(_task(task, status, age or 0.0, is_over) for task in tasks),
    )


def _judge(
    job: KnownJob,
    run: RunDirectory | None,
    entry: QueueEntry | None,
    result: dict[str, Any] | None,
    status: dict[str, Any],
    age: float | None,
    doubts: list[str],
) -> tuple[str, int | None, str]:
    """Return state, exit code once it is over, and the reason in words."""
    if entry is not None and entry.is_pending:
        if result is None and age is not None and age < _FRESH_SECONDS:  # it has begun since Slurm was asked
            return "RUNNING", None, str(status.get("reason", ""))
        return entry.state, None, entry.explained_reason
    is_requeued = result is not None and result.get("exit_code") == EXIT_REQUEUED and entry is not None
    if result is not None and not is_requeued:
        code = int(result.get("exit_code", 1))
        word = "COMPLETED" if code == 0 else "STOPPED" if code in _STOP_CODES else "FAILED"
        return word, code, str(result.get("reason", ""))
    if entry is not None and not entry.has_ended:
        if age is not None and age > status.get("heartbeat_timeout_seconds", 0) + _LATE_SECONDS:
            doubts.append(
                f"Nothing was written for {age:.0f} s: the launcher is stopped, or the file system is slow. The "
                "tasks below are as they were then."
            )
        return entry.state, None, status.get("reason", "")
    if job.job_id is not None:
        return _judge_gone(job, run, entry, doubts)
    process = ((run.read_job() if run else None) or {}).get("process")
    if process is not None and is_alive(process):
        return "RUNNING", None, ""
    if process is not None and process.get("host") != os.uname().nodename and age is not None and age < _LATE_SECONDS:
        return "RUNNING", None, ""  # on another host, which shares this directory
    if run is None:
        return "UNKNOWN", 1, f"Its run directory under {job.runs_directory} is gone."
    return "LOST", 1, _describe_loss("Its launcher was killed, or its host went down: there is no result.", run)


def _judge_gone(
    job: KnownJob, run: RunDirectory | None, entry: QueueEntry | None, doubts: list[str]
) -> tuple[str, int | None, str]:
    """Judge a job of Slurm that has ended without a result: by the queue's last word, or the accounting's."""
    assert job.job_id is not None
    if doubts:  # Slurm does not answer: it may as well be running
        return "UNKNOWN", None, ""
    try:
        accounted = ask_accounting(job.job_id, timeout_seconds=_SLURM_SECONDS)
    except LaunchError:
        accounted = None
    if accounted is not None and accounted[0] in ENDED_STATES:  # it may lag behind the queue, and call it PENDING yet
        code = accounted[1] or int(accounted[0] != "COMPLETED")
        return accounted[0], code, _describe_loss("From Slurm's accounting; there is no result of a launcher.", run)
    if entry is not None:
        code = 0
        with contextlib.suppress(LaunchError):
            code = ask_job(job.job_id, timeout_seconds=_SLURM_SECONDS).exit_code
        code = code or int(entry.state != "COMPLETED")
        return entry.state, code, _describe_loss("From Slurm's queue; there is no result of a launcher.", run)
    why = "Slurm no longer knows it, and there is no result of a launcher."
    return "LOST" if run is not None else "UNKNOWN", 1, _describe_loss(why, run)


def _describe_loss(why: str, run: RunDirectory | None) -> str:
    return f"{why} {last_known(run)}".rstrip() if run is not None else why


def _tasks(status: dict[str, Any]) -> list[dict[str, Any]]:
    tasks = status.get("tasks")
    return [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []


def _task(task: dict[str, Any], status: dict[str, Any], age: float, is_over: bool) -> TaskStatus:
    heard, step_seconds = task.get("heard_seconds"), task.get("step_seconds")
    return TaskStatus(
        task=str(task.get("task")),
        rank=int(task.get("rank") or 0),
        node=task.get("node"),
        address=task.get("address"),
        state=_task_state(task, status, 0.0 if is_over else age),
        step=task.get("step"),
        steps_per_second=task.get("steps_per_second"),
        step_seconds=None if step_seconds is None else round(step_seconds + age, 1),
        memory_bytes=int(task.get("memory_bytes") or 0),
        heard_seconds=None if heard is None else round(heard + age, 1),
        starts=int(task.get("starts") or 0),
        metrics={name: float(value) for name, value in (task.get("metrics") or {}).items()},
    )


def _task_state(task: dict[str, Any], status: dict[str, Any], age: float) -> str:
    state = task.get("state")
    if state == "exited":
        return f"exited {task.get('returncode')}"
    if task.get("is_gone"):
        return "terminated" if state == "terminated" else "lost"
    if state == "running":
        return "STALLED" if _is_stalled(task, status, age) else "running"
    return {"registered": "waiting", "ready": "waiting", "not_ready": "waiting"}.get(str(state), str(state))


def _is_stalled(task: dict[str, Any], status: dict[str, Any], age: float) -> bool:
    step, still = task.get("step"), task.get("step_seconds")
    if not step or still is None or status.get("phase") != "training":
        return False
    lived = status.get("seconds", 0.0) - (task.get("started_seconds") or 0.0)
    return bool(still + age > max(_STALL_SECONDS, _STALL_STEPS * lived / step))


def _elapsed(status: dict[str, Any], age: float | None, is_over: bool) -> float | None:
    return None if age is None else status.get("seconds", 0.0) + (0.0 if is_over else age)


def _nodes(status: dict[str, Any]) -> str | None:
    nodes = dict.fromkeys(task["node"] for task in _tasks(status) if task.get("node"))
    return ",".join(nodes) or None


def _clock(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
