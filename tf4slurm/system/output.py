"""Output to slow streams: a line writer and a log handler; also a line splitter.

A paused terminal (Ctrl-S) or a full pipe must not stop an agent's heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

_MAX_WAITING_LINES = 10_000
_CLOSE_SECONDS = 1.0


class Stream(Protocol):
    """The methods of TextIO that `LineWriter` needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class LineWriter:
    """Writes lines in a thread. When its queue is full it drops lines, and writes their number."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # An int in the queue is a number of dropped lines; the thread sets an event; None ends the thread.
        self._lines: queue.Queue[str | int | threading.Event | None] = queue.Queue(_MAX_WAITING_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="line-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line, without its newline."""
        try:
            if self._dropped:
                self._lines.put_nowait(self._dropped)
                self._dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, last_lines: Sequence[str] = ()) -> None:
        """Write the queued lines for at most 1 s, then `last_lines` for at most 1 s; drop the rest."""
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
    """Logs to a slow stream. Event loops and threads other than the main thread do not wait for it.

    Call `close` (as logging.shutdown does) before the process ends.
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


class LineSplitter:
    """Splits a stream of bytes into lines of text. A carriage return also ends a line, because of progress bars."""

    MAX_LINE_BYTES = 65536

    def __init__(self) -> None:
        self._rest = b""
        self._ended_in_return = False

    def split(self, data: bytes) -> list[str]:
        """Add `data`; return the lines that are now complete."""
        if not data:
            return []
        if self._ended_in_return:
            data = data.removeprefix(b"\n")
        self._ended_in_return = data.endswith(b"\r")
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > self.MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def finish(self) -> list[str]:
        """Return the incomplete last line, if any."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []
