"""Read the JSON files of a run directory, each once (`JobFiles`), and find out whether the launcher is lost."""

from __future__ import annotations

import functools
import os
import time
from typing import TypeVar

from tf4slurm.errors import describe_end
from tf4slurm.jobs.formatting import format_list, format_time
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, LastState, ResultFile, StatusFile, TaskStatus

_MOST_ENDS = 5
_T = TypeVar("_T")


class JobFiles:
    """The JSON files of a run directory. Each is read once, when first needed. If missing, it has default values.

    With `exists=False` no file is read: the job has not started, or another user made a directory of this name.

    Raises:
        SchemaVersionError: An attribute needs a file that a newer version of tf4slurm wrote.
    """

    def __init__(self, run: RunDirectory, *, exists: bool = True) -> None:
        self.run = run
        self.exists = exists

    def _read(self, kind: type[_T]) -> _T | None:
        return self.run.read(kind) if self.exists else None

    @functools.cached_property
    def job(self) -> JobFile:
        return self._read(JobFile) or JobFile()

    @functools.cached_property
    def status(self) -> StatusFile:
        return self._read(StatusFile) or StatusFile()

    @functools.cached_property
    def status_age_seconds(self) -> float | None:
        return None if self.status.time is None else time.time() - self.status.time

    @functools.cached_property
    def result(self) -> ResultFile | None:
        found = self._read(ResultFile)
        if found is None and self._has_lost_launcher:  # which may have written its result in the meantime
            found = self._read(ResultFile)
        return found

    @property
    def tasks(self) -> tuple[TaskStatus, ...]:
        """The tasks by rank, from result.json if it lists tasks, otherwise from status.json."""
        return (self.result.tasks if self.result is not None else ()) or self.status.tasks

    @functools.cached_property
    def last_states(self) -> dict[str, LastState]:
        return self.run.read_last_states() if self.exists else {}

    @property
    def is_lost(self) -> bool:
        """Whether the launcher certainly ended without a result.

        A launcher on another host that writes nothing may be suspended. It is lost only if agents recorded its loss.
        """
        return self._has_lost_launcher and self.result is None

    @functools.cached_property
    def _has_lost_launcher(self) -> bool:
        process = self.job.process
        if process is not None and process.host == os.uname().nodename:
            return not process.is_alive()
        return bool(self.last_states)

    @property
    def has_orphans(self) -> bool:
        """Whether the launcher is lost, but agents may still have to terminate their tasks."""
        age = self.status_age_seconds
        is_recent = age is not None and age < self.status.stale_seconds
        return self.is_lost and is_recent and len(self.last_states) < len(self.status.tasks)

    @property
    def has_ended(self) -> bool:
        return self.result is not None or (self.is_lost and not self.has_orphans)

    def describe_loss(self) -> str:
        sentences = ["The launcher was killed, or its host failed: it wrote no result.", self.describe_last_state()]
        if self.has_orphans:
            seconds = self.status.heartbeat_timeout_seconds
            sentences.append(f"Tasks may still run: their agents terminate them {seconds:g} s after the loss.")
        return " ".join(filter(None, sentences))

    def describe_last_state(self) -> str:
        """Return the last recorded phase and step, and how tasks ended, in sentences."""
        status, states = self.status, list(self.last_states.values())
        sentences = []
        if status.time is not None:
            reached = max((task.step for task in status.tasks if task.step is not None), default=None)
            step = "" if reached is None else f", step {reached:,}"
            sentences.append(f"Last recorded state, at {format_time(status.time)}: {status.phase}{step}.")
        ends = [f"{state.task} {describe_end(state.returncode)}" for state in states if state.returncode is not None]
        if ends:
            sentences.append(f"These tasks ended by themselves: {format_list(ends, _MOST_ENDS)}.")
        ended = [state.time for state in states if state.state == "ended"]
        if ended:
            sentences.append(f"Agents terminated the scripts of {len(ended):,} tasks, at {format_time(ended[0])}.")
        return " ".join(sentences)
