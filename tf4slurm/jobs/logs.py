"""Read the logs of a job's tasks over all attempts and runs: all lines, the last lines, or new lines as they appear.

Log lines have no times. The agent writes an index beside each log, at most once a second. Each entry has a byte offset
and a time: the output from this offset on was printed at this time or later. So line times are accurate to about a
second, and lines that different tasks print within one second may be out of order.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import heapq
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.cluster import Task
from tf4slurm.errors import NoLogsError, UnknownTaskError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import TIMES_SUFFIX, RunDirectory
from tf4slurm.jobs.status import JobStatus, StatusReader

_NAME = re.compile(r"(?P<role>[a-z]+(?:-[a-z]+)*)-(?P<index>\d+)\.(?P<attempt>\d+)\.log")
_TAIL_BYTES = 1 << 16
_LOOK_SECONDS = 0.3
_STATUS_SECONDS = 3.0


@dataclass(frozen=True)
class LogFile:
    """The log of one task in one attempt; `run` counts the runs of a requeued job from 1."""

    task: Task
    run: int
    attempt: int
    path: Path


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        time: When the line was printed, in seconds since 1970, accurate to about a second; 0 if unknown.
        task: The task that printed the line.
        text: The line without its line break.
    """

    time: float
    task: Task
    text: str


def find_logs(runs: Sequence[RunDirectory], patterns: Sequence[str] = ()) -> list[LogFile]:
    """Return the logs of the tasks that match a pattern such as "worker/*", sorted by run, attempt and task.

    Without patterns, return the logs of all tasks.
    """
    found = []
    for number, run in enumerate(runs, start=1):
        with contextlib.suppress(OSError):
            for path in (run.path / "logs").iterdir():
                match = _NAME.fullmatch(path.name)
                if match is None:
                    continue
                task = Task(match["role"], int(match["index"]))
                if not patterns or any(fnmatch.fnmatchcase(str(task), pattern) for pattern in patterns):
                    found.append(LogFile(task, number, int(match["attempt"]), path))
    return sorted(found, key=lambda log: (log.run, log.attempt, log.task))


def read_logs(
    job: KnownJob, patterns: Sequence[str] = (), *, tail: int | None = None, since: float | None = None, merged: bool
) -> Iterator[LogLine]:
    """Return the lines that tasks have printed.

    Args:
        job: The job.
        patterns: The tasks, such as "chief/0" or "worker/*"; all if empty.
        tail: Number of last lines of each log; None for all lines.
        since: Omit lines that are certainly older than this time, in seconds since 1970; overrides `tail`.
        merged: Sort the lines of all tasks by time; otherwise return one log after the other.

    Raises:
        UnknownTaskError: No task matches, or the job has no logs yet.
    """
    logs = find_logs(job.run_directories, patterns)
    if not logs:
        raise _no_logs(job, patterns)
    readers = [_open(log, tail, since) for log in logs]
    return merge(readers) if merged else (line for reader in readers for line in reader.read())


def follow_logs(
    job: KnownJob,
    patterns: Sequence[str] = (),
    *,
    tail: int | None = None,
    since: float | None = None,
    on_pending: Callable[[JobStatus], None] = lambda status: None,
) -> Iterator[LogLine]:
    """Return lines as tasks print them, until the job has ended; see `read_logs`.

    `on_pending` is called while the job is pending, whenever Slurm's reason changes.
    """
    readers: dict[LogFile, LogReader] = {}
    checked_at, has_ended, reason = float("-inf"), False, ""
    while True:
        if not has_ended and time.monotonic() - checked_at > _STATUS_SECONDS:
            (status,) = StatusReader([job]).read()
            checked_at, has_ended = time.monotonic(), status.has_ended
            if status.state == "PENDING" and status.reason != reason:
                reason = status.reason
                on_pending(status)
        for log in find_logs(job.run_directories, patterns):
            if log not in readers:
                readers[log] = _open(log, tail, since)
        yield from merge(list(readers.values()), is_final=has_ended)
        if has_ended:
            return
        time.sleep(_LOOK_SECONDS)


class LogReader:
    """Reads the new lines of one growing log at each call."""

    def __init__(self, log: LogFile) -> None:
        self.log = log
        self._offset = 0
        self._index: tuple[list[int], list[float]] = ([], [])

    def skip_until(self, since: float) -> None:
        """Skip the lines that are certainly older than `since`, in seconds since 1970."""
        self._read_index()
        offsets, times = self._index
        place = bisect.bisect_left(times, since)
        self._offset = offsets[place] if place < len(offsets) else self._size()

    def skip_to_tail(self, num_lines: int) -> None:
        """Skip all but the last `num_lines` lines."""
        size = self._size()
        reach = _TAIL_BYTES
        with contextlib.suppress(OSError), self.log.path.open("rb") as file:
            while True:
                start = max(0, size - reach)
                file.seek(start)
                data = file.read(size - start)
                ends = [match.end() for match in re.finditer(rb"\n", data)]
                if data and not data.endswith(b"\n"):
                    ends.append(len(data))
                if len(ends) > num_lines:
                    self._offset = start + ends[-num_lines - 1] if num_lines else size
                    return
                if start == 0:
                    self._offset = 0
                    return
                reach *= 4

    def read(self, *, is_final: bool = True) -> Iterator[LogLine]:
        """Return the lines since the last call. An unfinished last line is left out unless `is_final`."""
        self._read_index()
        with contextlib.suppress(OSError), self.log.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                start = self._offset
                if not line.endswith(b"\n") and not is_final:
                    return
                self._offset += len(line)
                yield LogLine(self._time(start), self.log.task, line.decode(errors="replace").rstrip("\r\n"))

    def _time(self, offset: int) -> float:
        offsets, times = self._index
        place = bisect.bisect_right(offsets, offset) - 1
        return times[place] if place >= 0 else 0.0

    def _read_index(self) -> None:
        offsets, times = [], []
        with contextlib.suppress(OSError):
            for line in self.log.path.with_suffix(TIMES_SUFFIX).read_text().splitlines():
                with contextlib.suppress(ValueError):  # an unfinished line
                    offset, time = line.split()
                    offsets.append(int(offset))
                    times.append(float(time))
        self._index = (offsets, times)

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self.log.path).st_size
        return 0


def merge(readers: Sequence[LogReader], *, is_final: bool = True) -> Iterator[LogLine]:
    """Return the new lines of all logs, sorted by time."""
    return heapq.merge(*(reader.read(is_final=is_final) for reader in readers), key=lambda line: line.time)


def _open(log: LogFile, tail: int | None, since: float | None) -> LogReader:
    reader = LogReader(log)
    if since is not None:
        reader.skip_until(since)
    elif tail is not None:
        reader.skip_to_tail(tail)
    return reader


def _no_logs(job: KnownJob, patterns: Sequence[str]) -> UnknownTaskError:
    tasks = tuple(dict.fromkeys(str(log.task) for log in find_logs(job.run_directories)))
    if tasks:
        text = f"No task of {job.name} matches {' '.join(patterns)}. It has: {', '.join(tasks)}."
        return UnknownTaskError(text, tasks=tasks)
    (status,) = StatusReader([job]).read()
    command = f"tf4slurm logs -f {job.job_id or job.name}"
    text = f"{job.name} has no logs: it is {status.state}. {status.reason} To wait for them: {command}"
    return NoLogsError(text)
