"""What the tasks of a job printed, line by line, over all its attempts and runs.

The lines themselves have no times. Beside each log lies an index that the agent writes, at most every second: from
which byte on the log is of which time or later. So a line's time is known to about a second; lines of different tasks
within one may be in another order than they were printed.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import heapq
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.cluster import Task
from tf4slurm.jobs.run_directory import TIMES_SUFFIX, RunDirectory

_NAME = re.compile(r"(?P<role>[a-z]+(?:-[a-z]+)*)-(?P<index>\d+)\.(?P<attempt>\d+)\.log")
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class LogFile:
    """The log of one task in one attempt; `run` counts the runs of a requeued job from 1."""

    task: Task
    run: int
    attempt: int
    path: Path


@dataclass(frozen=True)
class LogLine:
    """One line, without its end; `time` is in seconds since 1970, 0 if nothing tells it."""

    time: float
    task: Task
    text: str


def find_logs(runs: Sequence[RunDirectory], patterns: Sequence[str] = ()) -> list[LogFile]:
    """Return the logs of the tasks that fit one of the patterns, such as "worker/*"; all if there is none.

    They are in the order of run, attempt and task.
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


class LogReader:
    """Reads one log from a place on, as often as it grows."""

    def __init__(self, log: LogFile) -> None:
        self.log = log
        self._offset = 0
        self._rest = b""
        self._index: tuple[list[int], list[float]] = ([], [])

    def skip_until(self, since: float) -> None:
        """Leave out what is surely older than `since`, in seconds since 1970."""
        self._read_index()
        offsets, times = self._index
        place = bisect.bisect_left(times, since)
        self._offset = offsets[place] if place < len(offsets) else self._size()

    def skip_to_tail(self, num_lines: int) -> None:
        """Leave out all but the last lines."""
        size = self._size()
        reach = _TAIL_BYTES
        while True:
            start = max(0, size - reach)
            with contextlib.suppress(OSError), self.log.path.open("rb") as file:
                file.seek(start)
                data = file.read(size - start)
                ends = [match.end() for match in re.finditer(rb"\n", data)]
                whole = ends if data.endswith(b"\n") or not data else [*ends, len(data)]
                if len(whole) > num_lines:
                    self._offset = start + whole[-num_lines - 1] if num_lines else size
                    return
                if start == 0:
                    self._offset = 0
                    return
                reach *= 4
                continue
            return

    def read(self, *, is_final: bool = True) -> Iterator[LogLine]:
        """Return the lines that have come since the last call; a last one without an end only if this `is_final`."""
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
                with contextlib.suppress(ValueError):  # cut in the middle
                    offset, time = line.split()
                    offsets.append(int(offset))
                    times.append(float(time))
        self._index = (offsets, times)

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self.log.path).st_size
        return 0


def merge(readers: Sequence[LogReader], *, is_final: bool = True) -> Iterator[LogLine]:
    """Return what has come in all logs, in the order of time as far as that is known."""
    return heapq.merge(*(reader.read(is_final=is_final) for reader in readers), key=lambda line: line.time)
