"""Write a running job's files: status.json and samples.jsonl (`Recorder`), events.jsonl (`EventLog`).

A thread writes the files, because the file system may stall and the event loop must not wait for it. A full disk does
not stop the job: events.jsonl ends at the first error, and the other two continue when there is space again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from tf4slurm.cluster import Task
from tf4slurm.control.clock import JobClock
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.state import JobState
from tf4slurm.control.step_rate import RATE_SECONDS
from tf4slurm.control.task_table import TaskTable
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory, open_to_append
from tf4slurm.jobs.schema import Event, Sample, StatusFile, TaskStatus
from tf4slurm.system.typed_json import to_json

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 2.0
_TASKS_PER_SECOND = 100  # limit of the sampling rate: 1,000 tasks are sampled every 10 s
_COUNTERS = ("memory_bytes", "cpu_seconds", "sent_bytes", "received_bytes")  # null in a sample if they are 0


class EventLog:
    """Appends events to events.jsonl. After the first error it logs a warning and writes no more events."""

    def __init__(self, path: Path, clock: JobClock, files: ThreadPoolExecutor) -> None:
        self._clock = clock
        self._started_at = clock.now()
        self._file: BinaryIO | None = None
        self._files = files
        files.submit(self._open, path)

    def add(self, kind: str, task: str | None, text: str, **facts: Any) -> Event:
        seconds = round(self._clock.now() - self._started_at, 4)
        event = Event(round(time.time(), 3), seconds, kind, task, text, **facts)
        self._files.submit(self._write, to_json(event).encode() + b"\n")
        return event

    def close(self) -> None:
        self._files.submit(self._close)

    def _open(self, path: Path) -> None:
        try:
            self._file = open_to_append(path)
        except OSError as error:
            logger.warning("events.jsonl cannot be created: %s", error)

    def _write(self, line: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(line)
            except OSError as error:
                logger.warning("events.jsonl cannot be written and ends here: %s", error)
                self._close()

    def _close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:  # NFS may report a full disk only on close
            logger.warning("events.jsonl may be incomplete: %s", error)
        self._file = None


class Recorder:
    """Writes status.json and samples.jsonl of a running job.

    status.json is replaced every max(2 s, num_tasks x 2 ms). A line is added to samples.jsonl every max(2 s, num_tasks
    x 10 ms). The event loop collects the values. A thread of the pool `files` writes them, so that a stalled file
    system does not block the event loop.
    """

    def __init__(
        self, run_directory: RunDirectory, state: JobState, clock: JobClock, files: ThreadPoolExecutor
    ) -> None:
        self._run_directory = run_directory
        self._files = files
        self._state = state
        self._clock = clock
        self._started_at = clock.now()
        self._progress: dict[Task, Progress] = {}
        self._sample_seconds = max(_STATUS_SECONDS, len(state.tasks) / _TASKS_PER_SECOND)
        self._interval_seconds = max(_STATUS_SECONDS, self._sample_seconds / 5)
        self._sampled_at = float("-inf")
        self._is_failing = False

    async def run(self) -> None:
        """Write status.json and samples.jsonl at intervals, until this coroutine is cancelled.

        An interval begins when a write has ended, so a slow file system delays the next write.
        """
        while True:
            await asyncio.wrap_future(self._queue_write())
            await asyncio.sleep(self._interval_seconds)

    def write(self) -> None:
        """Queue a write of status.json and of a sample at once, without regard to the intervals. Do not wait for it."""
        self._sampled_at = float("-inf")
        self._queue_write()

    def _queue_write(self) -> Future[None]:
        return self._files.submit(self._write, self._status(), self._sample())

    def _write(self, status: StatusFile, sample: Sample | None) -> None:
        try:
            self._run_directory.write(status)
            if sample is not None:
                self._run_directory.append_sample(sample)
            self._is_failing = False
        except RunDirectoryError as error:
            if not self._is_failing:
                logger.warning("the state of the job is not recorded for now: %s", error)
            self._is_failing = True

    def _status(self) -> StatusFile:
        state = self._state
        now = self._clock.now()
        records = state.tasks.in_order()
        obstacle = state.tasks.find_workers_obstacle(now)
        before, self._progress = self._progress, {}
        for record in records:
            # Progress is kept by task, not by rank: a spare and the task that it replaces exchange their roles.
            progress = self._progress[record.task] = before.get(record.task) or Progress()
            progress.note(record.observed.script.step, now)
        return StatusFile(
            time=round(time.time(), 3),
            seconds=round(now - self._started_at, 3),
            phase=state.tasks.describe_phase(state.phase, now),
            attempt=state.attempt,
            max_attempts=state.spec.max_attempts,
            reason=state.outcome.reason if state.outcome is not None else "",
            heartbeat_timeout_seconds=state.spec.heartbeat_timeout_seconds,
            grace_seconds_left=_round(state.grace_seconds_left(now)),
            warnings=state.watches.warnings,
            shards=state.scripts.shards,
            accepts_workers=state.tasks.accepts_workers,
            workers_error=obstacle,
            workers_left=state.tasks.num_left,
            tasks=tuple(self._describe(record, now, obstacle) for record in records),
        )

    def _describe(self, record: TaskRecord, now: float, obstacle: str) -> TaskStatus:
        tasks = self._state.tasks
        status = describe_task(tasks, record, self._started_at, now, self._progress[record.task])
        wait = self._state.scripts.joined_workers.describe_wait(record.rank, tasks.chief, obstacle)
        return dataclasses.replace(status, detail=wait) if wait and status.detail is None else status

    def _sample(self) -> Sample | None:
        now = self._clock.now()
        if now - self._sampled_at < self._sample_seconds:
            return None
        self._sampled_at = now
        records = self._state.tasks.in_order(with_left=False)
        states = [record.observed for record in records]
        usages = [vars(state.usage) for state in states]
        gpus = {name: tuple(usage[name] for usage in usages) for name in ("gpu_percent", "gpu_memory_bytes")}
        has_gpus = any(value is not None for column in gpus.values() for value in column)
        return Sample(
            seconds=round(now - self._started_at, 2),
            attempt=self._state.attempt,
            joined=tuple(record.rank for record in records if record.role.has_joined),
            step=tuple(state.script.step for state in states),
            **{name: tuple(usage[name] or None for usage in usages) for name in _COUNTERS},
            **(gpus if has_gpus else {}),
        )


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


class Progress:
    """The times at which the launcher has seen a task's step change."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._changed_at: float | None = None
        self._interval = 0.0  # between the last two changes

    def note(self, step: int | None, now: float) -> None:
        if step is None:
            self._changed_at = None
        elif step != self._step or self._changed_at is None:
            self._interval = 0.0 if self._changed_at is None else now - self._changed_at
            self._changed_at = now
        self._step = step

    def is_overdue(self, now: float) -> bool:
        """Return whether the task has made no new step for 20 s, and for twice the time that the last one took."""
        return self._changed_at is not None and now - self._changed_at > max(RATE_SECONDS, 2 * self._interval)

    def seconds_since_step(self, now: float) -> float | None:
        return None if self._changed_at is None else round(now - self._changed_at, 1)


def describe_task(
    tasks: TaskTable, record: TaskRecord, started_at: float, now: float, progress: Progress | None = None
) -> TaskStatus:
    """Return the state of a task for status.json and result.json. `started_at` and `now` are job times in seconds.

    `progress` adds the steps per second, which are 0 when a step is overdue, and the seconds since the last new step.
    Without it, both are null.
    """
    rate = None if progress is None else record.observed.script.steps_per_second
    progress = progress or Progress()
    observed = record.observed
    script = observed.script

    def since_start(at: float | None) -> float | None:
        return None if at is None else round(at - started_at, 3)

    return TaskStatus(
        task=record.name,
        rank=record.rank,
        has_joined=record.role.has_joined,
        node=record.node or None,
        address=str(record.address) if record.address else None,
        state="importing" if record.is_importing(now) else observed.state if record.has_registered else "missing",
        starts=observed.start_count,
        is_forked=observed.is_forked,
        not_forked=observed.not_forked,
        returncode=observed.returncode,
        killed_by=observed.killed_by,
        detail=observed.detail,
        is_gone=record.is_gone,
        heartbeat_age_seconds=round(now - record.last_message_at, 1) if record.has_registered else None,
        started_seconds=since_start(record.started_at),
        ended_seconds=since_start(record.ended_at),
        step=script.step,
        steps_per_second=0.0 if rate is not None and progress.is_overdue(now) else rate,
        seconds_since_step=progress.seconds_since_step(now),
        metrics=dict(script.metrics),
        variable_bytes=tasks.variable_bytes(record),
        checkpoint=script.checkpoint,
        vain_waits=record.vain_waits,
        **vars(observed.usage),
    )
