"""Write the output of a child process to its log file and to the terminal, and keep its last lines."""

from __future__ import annotations

import collections
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.jobs.boilerplate import BoilerplateFilter
from tf4slurm.jobs.failures import find_failure
from tf4slurm.jobs.formatting import shorten_in_the_middle, without_colors
from tf4slurm.jobs.run_directory import TIMES_SUFFIX, open_to_append
from tf4slurm.jobs.waiting_lines import WaitedTasks, is_new_session, is_waiting_line, may_be_waiting_line
from tf4slurm.system.directories import make_directories
from tf4slurm.system.output import LineSplitter, LineWriter, ProgressFilter

_TIMES_SECONDS = 1.0
_LINES = 20
_CHARACTERS = 500  # per line, to stay below the limit of the control service
_MOST_LINES, _MOST_CHARACTERS = 4_000, 2_000  # kept of the output, to find what ended the script
_NUMBER_LINES = 2  # lines kept of a tensor
_NUMBERS = 8  # numbers kept per line

# These patterns match each text in one way only. Otherwise backtracking could take minutes, without a heartbeat.
_NUMBER = r"(?:[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf|\.\.\.)"
_OF_A_TENSOR = re.compile(r"array\(|dtype=\w+|(?:shape|numpy)=|<tf\.Tensor:|[\[\](){}<>,:\s]+")
_ONLY_NUMBERS = re.compile(r"(?=.*(?:\d|nan|inf|True|False|\.\.\.))(?:[-+.\d]|e[-+]?\d|nan|inf|True|False)+")
_MANY_NUMBERS = re.compile(
    rf"(?<![\d.])((?:{_NUMBER}[\s,\[\]()]+){{{_NUMBERS}}})(?:{_NUMBER}[\s,\[\]()]+){{{_NUMBERS},}}"
)


class LastLines:
    """Keeps the last 20 lines of an output, which the agent reports when the child fails.

    A line of more than 500 characters is shortened in the middle. Only two lines of a printed tensor are kept, and of
    16 or more numbers in a row only the first 8.
    """

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._num_number_lines = 0

    def append(self, line: str) -> None:
        is_numbers = _ONLY_NUMBERS.fullmatch(_OF_A_TENSOR.sub("", line)) is not None
        self._num_number_lines = self._num_number_lines + 1 if is_numbers else 0
        left_out = self._num_number_lines - _NUMBER_LINES
        if left_out > 1:
            self._lines.pop()
        short = shorten_in_the_middle(_MANY_NUMBERS.sub(r"\1[…] ", without_colors(line)), _CHARACTERS)
        self._lines.append(f"[… {left_out} lines of numbers]" if left_out > 0 else short)

    def to_tuple(self) -> tuple[str, ...]:
        return tuple(self._lines)


class ChildLog:
    """Writes the output of one child process to its log file, and line by line to the terminal.

    TensorFlow's start-up messages are printed on the terminal only with `all_output`. They never belong to the last
    lines that `close` returns. A progress bar is written at most once per second, and at its end. If the file cannot be
    written (a full disk), later output appears only on the terminal.

    Attributes:
        waited_tasks: The tasks for which the child waits, according to TensorFlow's lines.
        num_printed: Number of lines that the child has printed, and of pieces of incomplete lines. The lines that
            TensorFlow prints at its start, or because it waits, do not count.
        num_sessions: Number of sessions that TensorFlow has made in the child, according to its lines.
    """

    def __init__(self, path: Path, name: str, writer: LineWriter, *, all_output: bool = False) -> None:
        self._name = name
        self._all_output = all_output
        self._writer = writer
        self._filter = ProgressFilter()
        self._splitter = LineSplitter()
        self._boilerplate = BoilerplateFilter()
        self._tail = LastLines()
        self._end: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
        self.waited_tasks = WaitedTasks()
        self.num_printed = self.num_sessions = 0
        self._file: BinaryIO | None = None
        self._times: BinaryIO | None = None
        self._timed_at = float("-inf")
        self._is_closed = False
        try:
            make_directories(path.parent, 0o700)
            self._file = open_to_append(path)
            self._times = open_to_append(path.with_suffix(TIMES_SUFFIX))
        except OSError as error:
            self._show([f"[tf4slurm: no log file: {error}]"])

    def write(self, data: bytes) -> None:
        """Write a piece of the child's output. Empty `data` marks the end of the output.

        A stalled file system blocks the thread that calls this method, not the agent.
        """
        kept = self._filter.filter(data) if data else self._filter.finish()
        if data or not self._is_closed:
            lines = self._splitter.split(kept)
            self._show(lines)
            if kept and not lines and not may_be_waiting_line(self._splitter.incomplete):
                self.num_printed += 1  # such as the dots of a progress indicator
        if kept and self._file is not None:
            try:
                self._note_time(self._file)
                self._file.write(kept)
            except OSError as error:
                self._show([f"[tf4slurm: the log file ends here: {error}]"])
                self._close_files()
        if not data:
            self._close_files()

    def _close_files(self) -> None:
        for file in (self._file, self._times):
            try:
                if file is not None:
                    file.close()
            except OSError as error:  # NFS may report a full disk only here
                self._show([f"[tf4slurm: the log file may be incomplete: {error}]"])
        self._file = self._times = None

    def _note_time(self, file: BinaryIO) -> None:
        """Append the log's size and the time (seconds since 1970) to the file of times beside the log.

        This is done at most once a second. `jobs/logs.py` reads the file to find when a line was printed.
        """
        now = time.time()
        if self._times is not None and not 0 <= now - self._timed_at < _TIMES_SECONDS:
            self._timed_at = now
            self._times.write(b"%d %.1f\n" % (file.seek(0, os.SEEK_END), now))

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last complete lines so far (see `LastLines`)."""
        return self._tail.to_tuple()

    def close(self) -> tuple[str, ...]:
        """Print the incomplete last line on the terminal. Return the last lines of the output (see `LastLines`).

        The thread that reads the output may still write to the log file, until it calls `write` with empty data.
        """
        self._is_closed = True
        self._show([*self._splitter.split(self._filter.withheld), *self._splitter.finish()])
        return self._tail.to_tuple()

    def find_failure(self, returncode: int) -> ScriptFailure:
        """Return what ended the process, from the end of its output. This may take 0.1 s."""
        return find_failure(self._end.copy(), returncode)  # the thread that reads the output may still append

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._end.append(shorten_in_the_middle(line, _MOST_CHARACTERS))
            is_shown = not self._boilerplate.is_boilerplate(line)
            is_waiting = is_waiting_line(line)
            if is_waiting:
                self.waited_tasks.note(line, time.monotonic())
            self.num_sessions += is_new_session(line)
            if is_shown:
                self._tail.append(line)
                self.num_printed += not is_waiting
            if is_shown or self._all_output:
                self._writer.write(f"{self._name} | {line}")
