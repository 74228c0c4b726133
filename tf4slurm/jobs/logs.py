"""Read the logs of a job's tasks: all lines, the last lines, or new lines as they appear.

A task has one log for each attempt, and a requeued job has attempts in each of its runs.

Log lines have no times. The agent writes an index beside each log, with at most one entry per second. An entry has a
byte offset and a time: the output from this offset on was printed at this time or later. So line times are accurate to
about a second. Lines that different tasks print within one second may be out of order.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import heapq
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tf4slurm.cluster import Task
from tf4slurm.errors import NoLogsError, UnknownTaskError
from tf4slurm.jobs.boilerplate import BoilerplateFilter
from tf4slurm.jobs.formatting import as_sentence, format_list
from tf4slurm.jobs.registry import KnownJob, find_run_directories
from tf4slurm.jobs.run_directory import TIMES_SUFFIX, RunDirectory
from tf4slurm.jobs.slurm_output import describe_slurm_output
from tf4slurm.jobs.status import JobStatus
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.spec.options import did_you_mean, nearest

_NAME = re.compile(r"(?P<role>[a-z]+(?:-[a-z]+)*)-(?P<index>\d+)\.(?P<attempt>\d+)\.log")
_TAIL_BYTES = 1 << 16
_MOST_LISTED = 10
_LOOK_SECONDS = 0.3
_STATUS_SECONDS = 3.0


@dataclass(frozen=True, order=True)
class LogFile:
    """The log of one task in one attempt. `run` numbers the runs of a requeued job, from 1.

    `element` is the index of the element of a job array; None for another job.
    """

    run: int
    attempt: int
    task: Task
    path: Path
    element: int | None = None


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        time: When the line was printed, in seconds since 1970, accurate to about a second; 0 if unknown.
        task: The task that printed the line.
        text: The line without its line break.
        element: The index of the element of a job array whose task printed the line, if the lines are those of a whole
            array; otherwise None.
    """

    time: float
    task: Task
    text: str
    element: int | None = None

    @property
    def source(self) -> str:
        """The task as text, such as "worker/0", after the index of an element, such as "3 worker/0"."""
        return str(self.task) if self.element is None else f"{self.element} {self.task}"


def omit_boilerplate(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield the lines without the messages that TensorFlow prints at every start."""
    filters: defaultdict[tuple[int | None, Task], BoilerplateFilter] = defaultdict(BoilerplateFilter)
    return (line for line in lines if not filters[line.element, line.task].is_boilerplate(line.text))


def find_logs_of_job(job: KnownJob, patterns: Sequence[str] = ()) -> list[LogFile]:
    """Return the logs of a job, or of all elements of a job array, one element after the other. See `find_logs`."""
    if not job.array:
        return find_logs(job.run_directories, patterns)
    return [
        replace(log, element=part.index)
        for part, runs in zip(job.array, find_run_directories(job.elements), strict=True)
        for log in find_logs(runs, patterns)
    ]


def find_logs(runs: Sequence[RunDirectory], patterns: Sequence[str] = ()) -> list[LogFile]:
    """Return the logs in `runs` of the tasks that match a pattern such as "worker/*". Without patterns, return all.

    A role, such as "worker", matches all its tasks.
    """
    found = []
    for number, run in enumerate(runs, start=1):
        with contextlib.suppress(OSError):
            for path in (run.path / "logs").iterdir():
                match = _NAME.fullmatch(path.name)
                if match is None:
                    continue
                task = Task(match["role"], int(match["index"]))
                if not patterns or any(_matches(task, pattern) for pattern in patterns):
                    found.append(LogFile(number, int(match["attempt"]), task, path))
    return sorted(found)


def _matches(task: Task, pattern: str) -> bool:
    return pattern == task.task_type or fnmatch.fnmatchcase(str(task), pattern)


def read_logs(
    job: KnownJob, patterns: Sequence[str] = (), *, tail: int | None = None, since: float | None = None, merged: bool
) -> Iterator[LogLine]:
    """Return the lines that tasks have printed, log by log, or if `merged`, sorted by time.

    The arguments are those of `api.logs`. `patterns` are its `tasks`.
    """
    logs = find_logs_of_job(job, patterns)
    if not logs:
        raise _no_logs(job, patterns)
    readers = [LogReader(log, tail=tail, since=since) for log in logs]
    return merge(readers) if merged else (line for reader in readers for line in reader.read())


def follow_logs(
    job: KnownJob,
    patterns: Sequence[str] = (),
    *,
    tail: int | None = None,
    since: float | None = None,
    on_pending: Callable[[JobStatus], None] = lambda status: None,
) -> Iterator[LogLine]:
    """Yield the lines that tasks have printed, and new lines as tasks print them, until the job has ended.

    The arguments are those of `api.logs`. `patterns` are its `tasks`.
    """
    readers: dict[LogFile, LogReader] = {}
    checked_at = float("-inf")
    has_ended = False
    reason = ""
    while True:
        if not has_ended and time.monotonic() - checked_at > _STATUS_SECONDS:
            (status,) = StatusReader([job]).read()
            checked_at, has_ended = time.monotonic(), not status.can_change
            if status.state == "PENDING" and status.reason != reason:
                reason = status.reason
                on_pending(status)
        for log in find_logs_of_job(job, patterns):
            if log not in readers:
                readers[log] = LogReader(log, tail=tail, since=since)
        yield from merge(list(readers.values()), is_final=has_ended)
        if has_ended:
            return
        time.sleep(_LOOK_SECONDS)


class LogReader:
    """Reads a log while the task writes it. Each call of `read` yields the lines that are new."""

    def __init__(self, log: LogFile, *, tail: int | None = None, since: float | None = None) -> None:
        """Start at a line of the log, so that `read` omits the lines before it.

        Args:
            log: The log to read.
            tail: Number of last lines from which to start. None for the whole log.
            since: Time from which to start, in seconds since 1970, accurate to about a second. It overrides `tail`.
        """
        self.log = log
        self._offset = 0
        self._index: tuple[list[int], list[float]] = ([], [])  # offsets and times of the lines that are not yet read
        self._index_bytes = 0  # bytes of the index file that were read
        with contextlib.suppress(OSError):
            if since is not None:
                self._skip_until(since)
            elif tail is not None:
                self._skip_to_tail(tail)

    def _skip_until(self, since: float) -> None:
        self._read_index()
        offsets, times = self._index
        place = bisect.bisect_left(times, since)
        self._offset = offsets[place] if place < len(offsets) else self.log.path.stat().st_size

    def _skip_to_tail(self, num_lines: int) -> None:
        tail_bytes = _TAIL_BYTES
        lines: list[bytes] = []
        with self.log.path.open("rb") as file:
            start = size = file.seek(0, os.SEEK_END)
            while start > 0 and len(lines) <= num_lines:
                start = file.seek(max(0, size - tail_bytes))
                lines = file.readlines()
                tail_bytes *= 4
            self._offset = file.tell() - sum(map(len, lines[max(0, len(lines) - num_lines) :]))

    def read(self, *, is_final: bool = True) -> Iterator[LogLine]:
        """Yield the lines since the last call.

        If the last line has no line break, the task may still be writing it. With `is_final` such a line is yielded,
        too. Without `is_final` it is left for the next call.
        """
        with contextlib.suppress(OSError), self.log.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size <= self._offset:
                return
            self._read_index()
            file.seek(self._offset)
            for line in file:
                start = self._offset
                if not line.endswith(b"\n") and not is_final:
                    return
                self._offset += len(line)
                text = line.decode(errors="replace").rstrip("\r\n")
                yield LogLine(self._time(start), self.log.task, text, self.log.element)

    def _time(self, offset: int) -> float:
        offsets, times = self._index
        place = bisect.bisect_right(offsets, offset) - 1
        return times[place] if place >= 0 else 0.0

    def _read_index(self) -> None:
        """Read the new entries of the log's index file. Drop the entries that no unread line needs.

        An entry has a position in the log, and the time at which the line at this position was printed.
        """
        offsets, times = self._index
        num_read = max(0, bisect.bisect_right(offsets, self._offset) - 1)
        del offsets[:num_read], times[:num_read]
        with contextlib.suppress(OSError), self.log.path.with_suffix(TIMES_SUFFIX).open("rb") as file:
            file.seek(self._index_bytes)
            for line in file:
                if not line.endswith(b"\n"):  # unfinished
                    return
                self._index_bytes += len(line)
                with contextlib.suppress(ValueError):  # damaged
                    offset, time = line.split()
                    entry = int(offset), float(time)
                    offsets.append(entry[0])
                    times.append(entry[1])


def merge(readers: Sequence[LogReader], *, is_final: bool = True) -> Iterator[LogLine]:
    """Yield the new lines of all logs, sorted by time. `is_final` is passed to `LogReader.read`."""
    return heapq.merge(*(reader.read(is_final=is_final) for reader in readers), key=lambda line: line.time)


def _no_logs(job: KnownJob, patterns: Sequence[str]) -> UnknownTaskError:
    found = dict.fromkeys(log.task for log in find_logs_of_job(job))
    if found:
        tasks = tuple(map(str, found))
        roles = dict.fromkeys(f"{task.task_type}/*" for task in found)
        similar = did_you_mean(nearest(patterns[0], (*roles, *tasks)))
        listed = format_list(tasks, _MOST_LISTED)
        text = f"No task of {job.name} matches {' '.join(patterns)}.{similar} It has: {listed}."
        return UnknownTaskError(text, tasks=tasks)
    (status,) = StatusReader([job], reads_output=True).read()
    text = f"{job.name} has no logs: it is {status.state}. {as_sentence(status.reason)}".rstrip()
    if status.state in ("PENDING", "RUNNING"):
        text += f" To wait for them: tf4slurm logs -f {job.job_id or job.name}"
    return NoLogsError("\n".join([text, *describe_slurm_output(status.slurm_output)]))
