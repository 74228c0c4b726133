"""Which lines TensorFlow prints while it waits, for which task, and how long an agent reports the wait."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tf4slurm.agent.child_log import ChildLog
from tf4slurm.control.messages import WAIT_SECONDS
from tf4slurm.jobs.waiting_lines import WaitedTasks, is_waiting_line, may_be_waiting_line, waited_task
from tf4slurm.system.output import LineWriter

# Printed by TensorFlow 2.21, and by 2.16 (whose C++ lines have the date).
SESSION = (
    "I0000 00:00:1795737546.680967   16107 master.cc:278] CreateSession still waiting for response from worker: "
    "/job:worker/replica:0/task:0"
)
OLD_SESSION = (
    "2026-11-26 23:59:06.680967: I tensorflow/core/distributed_runtime/master.cc:242] CreateSession still waiting for "
    "response from worker: /job:ps/replica:0/task:12"
)
MODEL = (
    "INFO:tensorflow:Waiting for model to be ready.  Ready_for_local_init_op:  Variables not initialized: w, ready: "
    "Variables not initialized: w"
)
LINES = {SESSION: "worker/0", OLD_SESSION: "ps/12", MODEL: None}
OTHERS = (
    "I1126 23:59:06.680967 139945 session_manager.py:475] Waiting for model to be ready.  Ready_for_local_init_op: x",
    "INFO:tensorflow:Waiting for checkpoint to be available.",
    "INFO:tensorflow:Waiting for new checkpoint at /tmp/model",
    "INFO:tensorflow:Waiting for global step 1000 before starting training.",
    "INFO:tensorflow:Waiting for the cluster, timeout = inf",
    "INFO:tensorflow:Waiting for all global closures to be finished.",
)
OF_SCRIPTS = (
    "CreateSession still waiting for response from worker: /job:worker/replica:0/task:0",
    "worker 3 is still waiting",
    "Waiting for the cluster, timeout = inf",
    "INFO:tensorflow:loss = 3, step = 4",
    "I0000 00:00:1795737546.680967   16107 master.cc:243] Scanning workers for devices: 3 total workers",
)


@pytest.mark.parametrize(("line", "task"), LINES.items())
def test_task_is_that_of_the_line(line: str, task: str | None) -> None:
    found = waited_task(line)
    assert (None if found is None else str(found)) == task


@pytest.mark.parametrize("line", [*LINES, *OTHERS])
def test_waiting_lines_are_recognized(line: str) -> None:
    assert is_waiting_line(line)


@pytest.mark.parametrize("line", OF_SCRIPTS)
def test_other_lines_are_not(line: str) -> None:
    assert not is_waiting_line(line)
    assert waited_task(line) is None


def test_wait_ends_30_s_after_the_last_line_or_at_a_step() -> None:
    waits = WaitedTasks()
    waits.note(SESSION, 100)
    waits.note(OLD_SESSION, 105)
    assert waits.names(106) == ("ps/12", "worker/0")
    waits.note(SESSION, 110)
    assert waits.names(105 + WAIT_SECONDS) == ("worker/0",)
    assert waits.names(110 + WAIT_SECONDS) == ()
    waits.note(SESSION, 200)
    waits.clear()
    assert waits.names(201) == ()


def test_at_most_8_tasks_are_reported() -> None:
    waits = WaitedTasks()
    for index in range(64):
        waits.note(SESSION.replace("task:0", f"task:{index}"), 100)
    assert waits.names(101) == tuple(f"worker/{index}" for index in (0, 1, 10, 11, 12, 13, 14, 15))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["hello\n"], 1),
        (["step 1\nstep 2\n", "step 3\n"], 3),
        ([".", ".", "."], 3),
        (["10 %\r", "20 %\r", "\n"], 2),
        ([f"{SESSION}\n", f"{MODEL}\n"], 0),
        ([SESSION, "\n", SESSION, "\n"], 0),  # as an unbuffered print does
        (["INFO:tensorflow:loss = 3", ", step = 4\n"], 2),
        ([OF_SCRIPTS[-1][:60], f"{OF_SCRIPTS[-1][60:]}\n"], 0),
        (["2026-11-26 23:59:06.680967: epoch 1", ".", ".", "\n"], 4),
        (["1", "0", " %", " 20 %"], 2),
        (["INFO:tensorflow:loss = 3, step = 4\n", f"{SESSION}\n"], 1),
        (["I0000 00:00:1795415142.129385   32088 grpc_server_lib.cc:467] Started server with target: grpc://a:1\n"], 0),
    ],
)
def test_only_output_of_the_script_is_counted(tmp_path: Path, pieces: list[str], expected: int) -> None:
    writer = LineWriter(io.StringIO())
    log = ChildLog(tmp_path / "log", "worker/1", writer)
    for piece in pieces:
        log.write(piece.encode())
    log.write(b"")
    writer.close()
    assert log.num_printed == expected
    assert bool(log.waited_tasks.names(float("-inf"))) == any(SESSION in piece for piece in pieces)


@pytest.mark.parametrize("line", [*LINES, *OTHERS])
def test_waiting_line_in_two_pieces_is_no_output_wherever_it_is_cut(tmp_path: Path, line: str) -> None:
    writer = LineWriter(io.StringIO())
    log = ChildLog(tmp_path / "log", "worker/1", writer)
    for cut in range(1, len(line)):
        log.write(line[:cut].encode())
        log.write(f"{line[cut:]}\n".encode())
    log.write(b"")
    writer.close()
    assert log.num_printed == 0
    assert bool(log.waited_tasks.names(float("-inf"))) == (LINES.get(line) is not None)


def test_beginning_of_a_long_line_is_recognized_at_once() -> None:
    """The pattern must not try many ways to match."""
    for text in ("1" * 10_000, "I0000 00:00:1" + "1" * 10_000, f"I0000 00:00:1.5 7 {'x' * 10_000} y", "W" * 10_000):
        may_be_waiting_line(text)
    assert may_be_waiting_line("2026-11-26 23:59:06.680967: I tensorflow/")
    assert not may_be_waiting_line("2026-11-26 23:59:06,680 epoch 1")
