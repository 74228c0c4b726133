"""Write the metrics of a task's script to a file of the run directory."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor

from tf4slurm.cluster import Task
from tf4slurm.control.script_metrics import BoundedMetrics, StepMetrics
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory

logger = logging.getLogger(__name__)

_MAX_VALUES, _MIN_VALUES = 20_000, 100  # numbers of all tasks, and at least of each; the job's report reads them all
_WRITE_SECONDS = 2.0
_TASKS_PER_SECOND = 100  # limit of the writing rate: each of 1,000 tasks writes every 10 s
_SEAL_SECONDS = 10.0
_CLOSE_SECONDS = 2.0


class MetricLog:
    """The metrics of one task in one attempt. Until `close`, a thread appends new metrics to a file.

    The thread writes every max(2 s, num_tasks x 10 ms). When there are too many metrics, `BoundedMetrics` merges all
    lines in pairs, and the thread then replaces the whole file. While the file system stalls, entries are kept in
    memory.
    """

    def __init__(self, run_directory: RunDirectory, task: Task, attempt: int, num_tasks: int) -> None:
        self._run_directory = run_directory
        self._file = (task, attempt)
        self._series = BoundedMetrics(max(_MIN_VALUES, _MAX_VALUES // num_tasks))
        self._pause_seconds = max(_WRITE_SECONDS, num_tasks / _TASKS_PER_SECOND)
        self._thread = ThreadPoolExecutor(1, "metric-log")
        self._writing: Future[None] | None = None
        self._written = (0, 0)  # number of lines in the file, and of mergings before it was written
        self._is_failing = False
        self._running = asyncio.create_task(self._run())

    def add(self, entry: StepMetrics) -> None:
        self._series.add(entry)

    async def close(self) -> None:
        self._running.cancel()
        self._series.seal()
        await self._wait()
        self._start_writing()
        await self._wait()
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        """Start a write of the metrics periodically, until cancelled.

        About every 10 s the last line is written, too. Therefore the next entry then begins a new line.
        """
        seconds = 0.0
        while True:
            await asyncio.sleep(self._pause_seconds)
            seconds += self._pause_seconds
            if seconds >= _SEAL_SECONDS:
                self._series.seal()
                seconds = 0.0
            self._start_writing()

    async def _wait(self) -> None:
        if self._writing is not None:
            await asyncio.wait({asyncio.wrap_future(self._writing)}, timeout=_CLOSE_SECONDS / 2)

    def _start_writing(self) -> None:
        """Let the thread write the lines that the file lacks. Do nothing while the thread is still writing.

        The last line is left out while it may still change, because later entries are merged into it.
        """
        lines, num_mergings = self._series.lines[: self._series.num_final], self._series.num_mergings
        if (self._writing is not None and not self._writing.done()) or self._written == (len(lines), num_mergings):
            return
        try:
            self._writing = self._thread.submit(self._write, lines, num_mergings)
        except RuntimeError as error:  # no thread can be started
            logger.warning("reported metrics are not recorded for now: %s", error)

    def _write(self, lines: list[StepMetrics], num_mergings: int) -> None:
        num_written, mergings_written = self._written
        is_appended = num_mergings == mergings_written and not self._is_failing
        new_lines = lines[num_written:] if is_appended else lines
        try:
            self._run_directory.write_metrics(*self._file, new_lines, is_appended=is_appended)
            self._written = (len(lines), num_mergings)
            self._is_failing = False
        except RunDirectoryError as error:
            if not self._is_failing:
                logger.warning("reported metrics are not recorded for now: %s", error)
            self._is_failing = True
