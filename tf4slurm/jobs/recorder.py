"""What the launcher writes down while a job lives: where it stands (status.json), and how it went (samples.jsonl).

status.json
    {"time", "seconds", "phase", "attempt", "max_attempts", "reason", "interval_seconds", "heartbeat_timeout_seconds",
     "tasks": [{"task", "rank", "node", "address", "state", "starts", "returncode", "detail", "is_gone",
                "heard_seconds", "started_seconds", "step", "steps_per_second", "step_seconds", "metrics",
                "memory_bytes", "cpu_seconds", "sent_bytes", "received_bytes"}]}
samples.jsonl, one line per sample; lists have one entry per rank, null where nothing is known
    {"seconds", "attempt", "step", "memory", "cpu", "sent", "received", "metrics": {rank: {name: value}}}

"time" is seconds since 1970; "seconds" and "started_seconds" count from the job's start, "heard_seconds" and
"step_seconds" back from the moment of writing (last heard of, last new step). Units: bytes, seconds of processor time.
Metrics that are no finite numbers are the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from typing import Any

from tf4slurm.control.state import JobState
from tf4slurm.control.task_record import TaskRecord
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.system.background import OrderedThread

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 2.0
_TASKS_PER_SECOND = 100  # of the samples: 1,000 tasks are sampled every 10 s
_RATE_SECONDS = 20.0  # what "steps per second" looks back


class Recorder:
    """Writes status.json and samples.jsonl of one job. A disk that is full, or hangs, costs them, not the job."""

    def __init__(self, run_directory: RunDirectory, state: JobState, started_at: float, files: OrderedThread) -> None:
        self._run_directory = run_directory
        self._files = files
        self._state = state
        self._started_at = started_at
        self._progress = [_Progress() for _ in state.records]
        self._sample_seconds = max(_STATUS_SECONDS, len(state.records) / _TASKS_PER_SECOND)
        self._sampled_at = float("-inf")
        self._is_failing = False

    async def run(self) -> None:
        """Write every few seconds, once the last has been written: cancel this, and `write` once more."""
        while True:
            await self._files.run(self._write, self._status(), self._sample())
            await asyncio.sleep(max(_STATUS_SECONDS, self._sample_seconds / 5))

    def write(self) -> None:
        """Write where the job stands now, in the thread after all else."""
        self._sampled_at = float("-inf")
        self._files.submit(self._write, self._status(), self._sample())

    def _write(self, status: dict[str, Any], sample: dict[str, Any] | None) -> None:
        try:
            self._run_directory.write_status(status)
            if sample is not None:
                self._run_directory.append_sample(sample)
            self._is_failing = False
        except RunDirectoryError as error:
            if not self._is_failing:
                logger.warning("what the job does is not written down, until this ends: %s", error)
            self._is_failing = True

    def _status(self) -> dict[str, Any]:
        state, now = self._state, time.monotonic()
        for record, progress in zip(state.records, self._progress, strict=True):
            progress.note(record.status.report.step, now)
        return {
            "time": round(time.time(), 3),
            "seconds": round(now - self._started_at, 3),
            "phase": state.phase.value,
            "attempt": state.attempt,
            "max_attempts": state.limits.max_attempts,
            "reason": state.outcome.reason if state.outcome is not None else "",
            "interval_seconds": max(_STATUS_SECONDS, self._sample_seconds / 5),
            "heartbeat_timeout_seconds": state.limits.heartbeat_timeout_seconds,
            "tasks": [
                self._task(record, progress, now)
                for record, progress in zip(state.records, self._progress, strict=True)
            ],
        }

    def _task(self, record: TaskRecord, progress: _Progress, now: float) -> dict[str, Any]:
        status, usage = record.status, record.status.usage
        return {
            "task": record.name,
            "rank": record.rank,
            "node": record.node or None,
            "address": str(record.address) if record.address else None,
            "state": status.state if record.has_registered else "missing",
            "starts": status.starts,
            "returncode": status.returncode,
            "detail": status.detail,
            "is_gone": record.is_gone,
            "heard_seconds": round(now - record.heard_at, 1) if record.has_registered else None,
            "started_seconds": _round(record.started_at, self._started_at),
            "step": status.report.step,
            "steps_per_second": progress.rate(now),
            "step_seconds": None if progress.changed_at is None else round(now - progress.changed_at, 1),
            "metrics": dict(status.report.metrics),
            "memory_bytes": usage.memory_bytes,
            "cpu_seconds": usage.cpu_seconds,
            "sent_bytes": usage.sent_bytes,
            "received_bytes": usage.received_bytes,
        }

    def _sample(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._sampled_at < self._sample_seconds:
            return None
        self._sampled_at = now
        statuses = [record.status for record in self._state.records]
        return {
            "seconds": round(now - self._started_at, 2),
            "attempt": self._state.attempt,
            "step": [status.report.step for status in statuses],
            "memory": [status.usage.memory_bytes or None for status in statuses],
            "cpu": [status.usage.cpu_seconds or None for status in statuses],
            "sent": [status.usage.sent_bytes or None for status in statuses],
            "received": [status.usage.received_bytes or None for status in statuses],
            "metrics": {
                str(rank): dict(status.report.metrics) for rank, status in enumerate(statuses) if status.report.metrics
            },
        }


class _Progress:
    """The steps of one task over the last seconds."""

    def __init__(self) -> None:
        self.changed_at: float | None = None
        self._steps: collections.deque[tuple[float, int]] = collections.deque()

    def note(self, step: int | None, now: float) -> None:
        if step is None or (self._steps and step < self._steps[-1][1]):  # it was started anew
            self._steps.clear()
        if step is None:
            self.changed_at = None
            return
        if not self._steps or step != self._steps[-1][1]:
            self.changed_at = now
        self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[1][0] > _RATE_SECONDS:
            self._steps.popleft()

    def rate(self, now: float) -> float | None:
        """Return the steps per second, or None where there are none yet."""
        if not self._steps or now <= self._steps[0][0]:
            return None
        return round((self._steps[-1][1] - self._steps[0][1]) / (now - self._steps[0][0]), 2)


def _round(at: float | None, since: float) -> float | None:
    return None if at is None else round(at - since, 3)
