"""Lines written to streams that are slow, full, closed or of another encoding; bytes split into lines."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import wait_until
from tf4slurm.system import output
from tf4slurm.system.output import LineSplitter, LineWriter, LogHandler, ProgressFilter

MANY = 30_000  # more than fits into the queue and a pipe
NOTICE = re.compile(r"\[(\d+) lines left out here; the log files have them\]")


class HeldPipe:
    """A real pipe without a reader until `start_reading`: writes above its capacity block."""

    def __init__(self) -> None:
        readable, writable = os.pipe()
        self._reader = open(readable, encoding="utf-8")  # noqa: SIM115 - closed by read_to_end
        self.writer = open(writable, "w", encoding="utf-8")  # noqa: SIM115
        self.lines: list[str] = []
        self._reading = threading.Thread(target=lambda: self.lines.extend(self._reader))

    def read_one(self) -> None:
        """Read a line, and up to some thousand further bytes from the pipe."""
        self.lines.append(next(self._reader))

    def start_reading(self) -> None:
        self._reading.start()

    def read_to_end(self) -> list[str]:
        self.writer.close()
        self._reading.join()
        self._reader.close()
        return [line.removesuffix("\n") for line in self.lines]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `close` wait for longer than a busy machine may delay a thread."""
    monkeypatch.setattr(output, "_CLOSE_SECONDS", 30)


def count(read: list[str]) -> int:
    """Return the number of lines that were read or reported as left out."""
    return sum(int(notice[1]) if (notice := NOTICE.fullmatch(line)) else 1 for line in read)


def test_lines_arrive_in_order_and_close_waits_for_them(patient: None) -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    for number in range(1000):
        writer.write(f"line {number}")
    writer.close()
    assert stream.getvalue() == "".join(f"line {number}\n" for number in range(1000))


def test_buffered_lines_are_flushed_at_the_end(patient: None) -> None:
    for count in range(20):  # whether or not the writing thread has noticed the end
        raw = io.BytesIO()
        writer = LineWriter(io.TextIOWrapper(raw, encoding="utf-8"))
        for number in range(count):
            writer.write(f"line {number}")
        writer.close()
        assert raw.getvalue().count(b"\n") == count


def test_blocked_stream_delays_no_writer_and_dropped_lines_are_counted(patient: None) -> None:
    pipe = HeldPipe()
    writer = LineWriter(pipe.writer)
    before = time.monotonic()
    for number in range(MANY):
        writer.write(f"line {number:0100d}")
    assert time.monotonic() - before < 30
    pipe.start_reading()
    again = 0
    while not any("left out" in line for line in pipe.lines) and time.monotonic() - before < 100:
        again += 1
        writer.write("again")
        time.sleep(0.01)
    writer.close()
    read = pipe.read_to_end()
    assert any(map(NOTICE.fullmatch, read))
    assert count(read) == MANY + again


def test_waiting_lines_are_bounded_in_bytes(patient: None) -> None:
    pipe = HeldPipe()
    writer = LineWriter(pipe.writer)
    for _ in range(2_000):
        writer.write("x" * 60_000)
    pipe.start_reading()
    writer.close()
    read = pipe.read_to_end()
    assert sum(map(len, read)) < 5_000_000
    assert count(read) == 2_000


def test_lines_are_written_again_when_the_waiting_ones_have_been_read(patient: None) -> None:
    pipe = HeldPipe()
    writer = LineWriter(pipe.writer)
    pipe.start_reading()
    for _ in range(200):
        writer.write("x" * 60_000)
        assert wait_until(lambda: writer._waiting_characters == 0, 60, 0.001)
    writer.close()
    assert len(pipe.read_to_end()) == 200


def test_number_of_dropped_lines_is_right_if_its_line_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_CLOSE_SECONDS", 0.1)
    pipe = HeldPipe()
    writer = LineWriter(pipe.writer)
    for number in range(MANY):
        writer.write(f"line {number:0100d}")
    while writer._lines.full():
        pipe.read_one()
    writer.write("again")
    writer.close(["how it went"])  # without a reader
    pipe.start_reading()
    assert wait_until(lambda: pipe.lines[-1] == "how it went\n", 60)
    assert count(pipe.read_to_end()) == MANY + 2


def test_lines_dropped_at_the_end_are_counted(patient: None) -> None:
    pipe = HeldPipe()
    writer = LineWriter(pipe.writer)
    for number in range(MANY):
        writer.write(f"line {number:0100d}")
    pipe.start_reading()
    writer.close()
    assert "lines left out here" in pipe.read_to_end()[-1]


def test_close_waits_for_a_blocked_stream_for_a_limited_time() -> None:
    pipe = HeldPipe()
    writer = LineWriter(pipe.writer)
    for number in range(2000):
        writer.write(f"line {number:0100d}")
    before = time.monotonic()
    writer.close(["how it went"])
    seconds = time.monotonic() - before
    pipe.start_reading()
    assert 0.9 < seconds < 30  # one second for the queue, one more for the last lines
    assert wait_until(lambda: pipe.lines[-1:] == ["how it went\n"], 60)
    *lines, note, last = pipe.read_to_end()
    assert last == "how it went"
    assert int(note.partition(" lines left out here")[0].removeprefix("[")) + len(lines) == 2000


def test_reader_that_has_exited_stops_only_the_writing(patient: None) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with open(writable, "wb", buffering=0) as raw:
        writer = LineWriter(io.TextIOWrapper(raw, write_through=True))
        for number in range(100):
            writer.write(f"line {number}")
        before = time.monotonic()
        writer.close()
        assert time.monotonic() - before < output._CLOSE_SECONDS - 1  # it did not wait for a reader


def test_line_that_the_stream_cannot_encode_does_not_stop_the_others(patient: None) -> None:
    raw = io.BytesIO()
    writer = LineWriter(io.TextIOWrapper(raw, encoding="ascii"))
    writer.write("Verlust: 0,3 ✓")
    writer.write("after it")
    writer.close()
    assert b"after it\n" in raw.getvalue()


def test_log_of_an_event_loop_does_not_wait_for_a_blocked_stream(patient: None) -> None:
    pipe = HeldPipe()
    logger = logging.Logger("test")
    handler = LogHandler(pipe.writer)
    logger.addHandler(handler)

    async def log_much() -> None:
        for number in range(2_000):
            logger.warning("line %0100d", number)

    before = time.monotonic()
    asyncio.run(log_much())
    seconds = time.monotonic() - before
    pipe.start_reading()
    handler.close()
    assert seconds < 30
    assert pipe.read_to_end() == [f"line {number:0100d}" for number in range(2_000)]


def test_log_outside_of_an_event_loop_is_written_at_once() -> None:
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(LogHandler(stream))
    logger.warning("one")
    assert stream.getvalue() == "one\n"


@pytest.mark.parametrize(
    ("data", "lines", "rest"),
    [
        (b"", [], []),
        (b"one\ntwo\n", ["one", "two"], []),
        (b"one\n\ntwo", ["one", ""], ["two"]),
        ("Größe\n".encode(), ["Größe"], []),
        (b"\xff\xfe\n", ["\ufffd\ufffd"], []),
    ],
)
def test_bytes_are_split_into_lines(data: bytes, lines: list[str], rest: list[str]) -> None:
    splitter = LineSplitter()
    assert splitter.split(data) == lines
    assert splitter.finish() == rest
    assert splitter.finish() == []


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", "ä".encode(), b"\xff"])), st.data())
def test_lines_do_not_depend_on_the_chunks(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=5)))
    at_once, piecewise = LineSplitter(), LineSplitter()
    expected = at_once.split(whole) + at_once.finish()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += piecewise.split(whole[start:end])
    assert found + piecewise.finish() == expected


def test_line_above_the_limit_is_cut() -> None:
    splitter = LineSplitter()
    pieces = [line for _ in range(5) for line in splitter.split(b"x" * 60_000)] + splitter.finish()
    assert "".join(pieces) == "x" * 300_000
    assert max(map(len, pieces)) <= 2 * output.MAX_LINE_BYTES


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def filtered(*chunks: bytes, seconds_between: float = 0.0) -> bytes:
    clock = Clock()
    progress = ProgressFilter(clock)
    kept = b""
    for chunk in chunks:
        kept += progress.filter(chunk)
        clock.seconds += seconds_between
    return kept + progress.finish()


TQDM = [b"\r%3d%%|" % percent for percent in range(101)]


@pytest.mark.parametrize(
    ("chunks", "seconds_between", "kept"),
    [
        ([b"one\ntwo\n"], 0.0, b"one\ntwo\n"),
        ([b"no end"], 0.0, b"no end"),
        ([b"one\r\n\r\ntwo\r\n"], 0.0, b"one\n\ntwo\n"),
        ([b"one\r", b"\n", b"\r", b"\n", b"two"], 0.0, b"one\n\ntwo"),
        ([b"10%\r20%\r30%\r"], 0.0, b"10%\n30%"),
        ([b"10%\r20%\r30%\n"], 0.0, b"10%\n30%\n"),
        ([b"10%\r", b"20%\r", b"30%\r", b"40%\n"], 0.4, b"10%\n40%\n"),
        ([b"10%\r", b"20%\r", b"30%\r", b"40%\r", b"50%\r"], 0.5, b"10%\n30%\n50%\n"),
        ([b"10", b"%\r20%\n"], 0.0, b"10%\n20%\n"),
        ([*TQDM, b"\n", b"next\n"], 0.0, b"  0%|\n100%|\nnext\n"),
        ([*TQDM, b"\r     \r", b"next\n"], 0.0, b"  0%|\nnext\n"),
        ([*TQDM[:51]], 0.01, b"  0%|\n 50%|"),
    ],
)
def test_overwritten_texts_of_a_line_are_kept_once_a_second(
    chunks: list[bytes], seconds_between: float, kept: bytes
) -> None:
    assert filtered(*chunks, seconds_between=seconds_between) == kept


@given(st.lists(st.sampled_from([b"a", b"bc", b" ", b"\n", b"\r", b"\r\n"])), st.data())
def test_last_text_of_each_line_is_kept_whatever_the_chunks(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=5)))
    kept = filtered(*(whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)))
    assert b"\r" not in kept
    texts = [[text for text in line.split(b"\r") if text.strip()] for line in whole.split(b"\n")]
    last = [line[-1] for line in texts if line]
    found = iter(kept.split(b"\n"))
    assert all(text in found for text in last)
    assert len([text for text in kept.split(b"\n") if text.strip()]) <= sum(map(len, texts))


def test_text_without_an_end_after_a_carriage_return_is_not_held_for_ever() -> None:
    progress = ProgressFilter(Clock())
    kept = progress.filter(b"10%\r")
    for _ in range(5):
        kept += progress.filter(b"x" * 60_000)
    assert len(kept) > 200_000
    assert kept + progress.filter(b"\n") + progress.finish() == b"10%\n" + b"x" * 300_000 + b"\n"
