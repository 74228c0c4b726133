"""The last lines of a child's log: which lines are kept and which are shortened."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tf4slurm.agent.child_log import ChildLog, LastLines
from tf4slurm.jobs.failures import find_failure
from tf4slurm.jobs.formatting import shorten_in_the_middle
from tf4slurm.system.output import LineWriter

KERAS = '  File "/venv/lib/python3.11/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler'
PER_REPLICA = f"""Traceback (most recent call last):
{KERAS}
    raise e.with_traceback(filtered_tb) from None
ValueError: Attempt to convert a value (PerReplica:{{
  0: <tf.Tensor: shape=(16, 784), dtype=float32, numpy=
array([[0., 0., 0., ..., 0., 0., 0.],
       [0., 0., 0., ..., 0., 0., 0.],
       [0., 0., 0., ..., 0., 0., 0.],
       ...,
       [1., 0., 0., ..., 0., 0., 0.],
       [0., 0., 0., ..., 0., 0., 0.]], shape=(16, 784), dtype=float32)>
}}) with an unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor."""


def kept(text: str) -> list[str]:
    last = LastLines()
    for line in text.splitlines():
        last.append(line)
    return list(last.to_tuple())


def test_first_numbers_of_a_tensor_are_kept() -> None:
    lines = PER_REPLICA.splitlines()
    assert kept(PER_REPLICA) == [*lines[:7], "[… 4 lines of numbers]", lines[-1]]


def test_error_is_kept_after_a_tensor_of_a_thousand_lines() -> None:
    numbers = "\n".join(f" [{row} {row + 0.5} -1e-05 nan]" for row in range(1000))
    lines = kept(f"Traceback\n[[0 0.5]\n{numbers}]\nValueError: no")
    assert lines == ["Traceback", "[[0 0.5]", " [0 0.5 -1e-05 nan]", "[… 999 lines of numbers]", "ValueError: no"]


def test_tensor_on_one_line_is_shortened_and_the_following_text_kept() -> None:
    (line,) = kept(f"ValueError: [[{'0. ' * 5000}1.]] is not finite, step 7")
    assert line == "ValueError: [[" + "0. " * 8 + "[…] is not finite, step 7"


@pytest.mark.parametrize(
    "text",
    [
        "1\n2",
        "epoch 1 2 3\nepoch 2 3 4\nepoch 4 5 6",
        "2026-11-22 20:31:25.485568: I 0 1 2",
        "a, b, c, 1, 2, 3, 4, 5, 6, 7",
    ],
)
def test_other_lines_are_unchanged(text: str) -> None:
    assert kept(text) == text.splitlines()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "line",
    [
        "2026-11-23 14:51:43.45619384738291037462: E tensorflow/core/common_runtime/eager/context.cc:849]",
        "1" * 60_000 + "x",
        " ".join(["1234567890" * 5] * 7) + " x",
        "." * 60_001 + "x",
        "1e5" * 20_000 + "e",
    ],
)
def test_no_line_takes_long(line: str) -> None:
    """The agent sends no heartbeat meanwhile; some patterns would take years."""
    assert kept(line) == [shorten_in_the_middle(line, 500)]
    assert find_failure([line] * 4_000, 1).message


def test_progress_bar_is_folded_on_the_terminal_and_in_the_file(tmp_path: Path) -> None:
    terminal = io.StringIO()
    writer = LineWriter(terminal)
    log = ChildLog(tmp_path / "logs/worker-0.1.log", "worker/0", writer)
    log.write(b"start\n")
    for step in range(2_001):
        log.write(b"\r%4d/2000" % step)
    log.write(b"\nend\n")
    for step in range(2_001):
        log.write(b"%4d/2000\r" % step)
    log.write(b"")
    tail = log.close()
    writer.close()
    lines = (tmp_path / "logs/worker-0.1.log").read_text().splitlines()
    assert len(lines) < 40  # one a second
    assert {"start", "2000/2000", "end"} <= set(lines)
    assert lines[-1] == "2000/2000"
    assert terminal.getvalue() == "".join(f"worker/0 | {line}\n" for line in lines)
    assert tail == tuple(lines[-20:])


def test_last_text_of_a_line_is_in_the_file_if_its_end_is_read_after_the_close(tmp_path: Path) -> None:
    """A process that the child has left behind keeps the pipe open: the agent closes the log before its end."""
    terminal = io.StringIO()
    writer = LineWriter(terminal)
    log = ChildLog(tmp_path / "logs/chief-0.1.log", "chief/0", writer)
    log.write(b"10%\r57% fatal: out of memory")
    assert log.close() == ("10%", "57% fatal: out of memory")
    log.write(b"")
    writer.close()
    assert (tmp_path / "logs/chief-0.1.log").read_text() == "10%\n57% fatal: out of memory"
    assert terminal.getvalue() == "chief/0 | 10%\nchief/0 | 57% fatal: out of memory\n"
