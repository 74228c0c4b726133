"""Write lines and log messages to slow streams in a thread, filter progress bars, and split output into lines.

A write to a paused terminal (Ctrl-S) or a full pipe waits. In an event loop it would stop an agent's heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

_MAX_WAITING_LINES = 10_000
_MAX_WAITING_CHARACTERS = 4_000_000  # at most 16 MB of memory
_CLOSE_SECONDS = 1.0
MAX_LINE_BYTES = 65536
_OVERWRITTEN_SECONDS = 1.0
_PIECES = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+")


class Stream(Protocol):
    """The methods of TextIO that `LineWriter` needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class LineWriter:
    """Writes lines to a stream in a thread of its own, so that `write` never waits.

    The queue holds at most 10,000 lines or about 4,000,000 characters. Beyond this, lines are dropped, and a line with
    their number is written in their place.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # Besides lines, the queue has numbers of dropped lines, events for the thread to set, and None to end it.
        self._lines: queue.Queue[str | int | threading.Event | None] = queue.Queue(_MAX_WAITING_LINES)
        self._dropped = 0
        self._waiting_characters = 0
        self._lock = threading.Lock()  # for the two numbers
        self._thread = threading.Thread(target=self._write_all, name="line-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line, without its newline."""
        with self._lock:
            try:
                if self._waiting_characters > _MAX_WAITING_CHARACTERS:
                    raise queue.Full
                if self._dropped:
                    self._lines.put_nowait(self._dropped)
                    self._dropped = 0
                self._lines.put_nowait(line)
                self._waiting_characters += len(line)
            except queue.Full:
                self._dropped += 1

    def close(self, last_lines: Sequence[str] = ()) -> None:
        """Write the queued lines for at most 2 s, then `last_lines` for at most 1 s, and end the thread.

        Lines that are not written by then are dropped. A second call does nothing.
        """
        if not self._thread.is_alive():
            return  # closed before
        is_written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put(is_written, timeout=_CLOSE_SECONDS)
            is_written.wait(_CLOSE_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                self._dropped += line if isinstance(line, int) else isinstance(line, str)
        for line in (*([self._dropped] if self._dropped else []), *last_lines, None):
            self._lines.put(line)
        self._thread.join(_CLOSE_SECONDS)

    def _write_all(self) -> None:
        is_open = True
        while (line := self._lines.get()) is not None:
            if isinstance(line, str):
                with self._lock:
                    self._waiting_characters -= len(line)
            try:
                if isinstance(line, threading.Event):
                    line.set()
                elif is_open:
                    self._write_line(line)
            except (OSError, ValueError):  # the reader has exited; the log files have the lines
                is_open = False
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _write_line(self, line: str | int) -> None:
        text = f"[{line} lines left out here; the log files have them]\n" if isinstance(line, int) else f"{line}\n"
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:  # a terminal without UTF-8
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        if self._lines.empty():
            self._stream.flush()


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # a type only since Python 3.11
    """Logs to a stream that may be slow, without making an event loop or a thread wait for the stream.

    A message of the main thread outside of an event loop is written directly. Other messages go through a `LineWriter`.
    Therefore call `close` (as logging.shutdown does) before the process ends.
    """

    _writer: LineWriter | None = None

    def emit(self, record: logging.LogRecord) -> None:
        asyncio = sys.modules.get("asyncio")  # not imported here, because it takes 20 ms
        in_event_loop = asyncio is not None and asyncio._get_running_loop() is not None
        if threading.current_thread() is threading.main_thread() and not in_event_loop:
            super().emit(record)
            return
        if self._writer is None:  # not earlier: a fork, such as a local agent's, does not copy the thread
            self._writer = LineWriter(self.stream)
        self._writer.write(self.format(record))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        super().close()


class ProgressFilter:
    """Removes from output the texts that carriage returns overwrite, as in progress bars.

    One overwritten text per second is kept, as a line of its own. The last text of each line is always kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept_at = float("-inf")
        self._begin_line()

    def _begin_line(self) -> None:
        self._text = b""  # after the last carriage return, and not returned yet
        self._overwritten = b""  # the text before it, if not returned yet
        self._has_overwriting = False
        self._is_begun = False  # the beginning of the line has been returned
        self._is_kept = False  # a text of the line has been returned as a line

    def filter(self, data: bytes) -> bytes:
        """Read the next piece of output. Return the next part of the filtered output.

        Text that a carriage return may still overwrite is withheld until a later call or `finish`.
        """
        if not self._has_overwriting and b"\r" not in data:
            self._is_begun = not data.endswith(b"\n") if data else self._is_begun
            return data
        return b"".join(self._filter(piece) for piece in _PIECES.findall(data))

    def _filter(self, piece: bytes) -> bytes:
        """Read a piece of a line with the line break or carriage return at its end, if any. Return the text to keep.

        Text that a later carriage return overwrites, such as a progress bar, is left out. One such text per second is
        kept.
        """
        self._text += piece.rstrip(b"\r\n")
        if piece.endswith(b"\r"):
            return self._overwrite()
        if piece.endswith(b"\n"):
            last = self._text if self._text.strip() else self._overwritten or self._text
            kept = last + b"\n" if last or self._is_begun or not self._is_kept else b""
            self._begin_line()
            return kept
        if self._has_overwriting and len(self._text) <= MAX_LINE_BYTES:
            return b""
        text = self._text
        self._text = self._overwritten = b""
        self._is_begun = True
        return text

    def _overwrite(self) -> bytes:
        text = self._text
        self._text = b""
        self._has_overwriting = True
        if not text.strip() and not self._is_begun:
            return b""
        now = self._clock()
        if not self._is_begun and now - self._kept_at < _OVERWRITTEN_SECONDS:
            self._overwritten = text
            return b""
        self._kept_at = now
        self._overwritten = b""
        self._is_begun = False
        self._is_kept = True
        return text + b"\n"

    @property
    def withheld(self) -> bytes:
        """The text of the incomplete last line that `filter` has not returned yet, because it may be overwritten."""
        return self._text if self._text.strip() else self._overwritten

    def finish(self) -> bytes:
        """Return the text that `filter` has withheld. Call this at the end of the output."""
        rest = self.withheld
        self._begin_line()
        return rest


class LineSplitter:
    """Splits a stream of bytes into lines of text."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> list[str]:
        """Read the next bytes, and return the lines that they complete, without line breaks.

        An incomplete line of more than 65,536 bytes is returned as a line, too.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    @property
    def incomplete(self) -> str:
        """The incomplete last line."""
        return self._rest.decode("utf-8", "replace")

    def finish(self) -> list[str]:
        """Return a list with the incomplete last line, or an empty list if there is none."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []
