"""The states of a worker: the table, and the threads that wait."""

from __future__ import annotations

import threading

import pytest

from tests.processes import wait_until
from tf4slurm.tensorflow.elastic_states import FINISHING, IDLE, OUT, RUNNING, WorkerEvent, WorkerState, WorkerStates

LIVES: dict[str, list[tuple[WorkerEvent, WorkerState]]] = {
    "joins and trains": [("connect", IDLE), ("begin", RUNNING), ("end", IDLE), ("begin", RUNNING)],
    "leaves while idle": [("connect", IDLE), ("release", OUT), ("begin", OUT), ("end", OUT)],
    "finishes its closure and leaves": [("connect", IDLE), ("begin", RUNNING), ("release", FINISHING), ("end", OUT)],
    "fails in its last closure": [("connect", IDLE), ("begin", RUNNING), ("release", FINISHING), ("fail", OUT)],
    "fails and returns": [("connect", IDLE), ("begin", RUNNING), ("fail", OUT), ("connect", IDLE), ("end", IDLE)],
    "is released twice": [("connect", IDLE), ("begin", RUNNING), ("release", FINISHING), ("release", FINISHING)],
    "is used again after it has finished": [("begin", OUT), ("connect", IDLE), ("begin", RUNNING), ("end", IDLE)],
}


@pytest.mark.parametrize("name", LIVES)
def test_worker_has_the_state_of_the_table(name: str) -> None:
    states = WorkerStates([])
    for event, expected in LIVES[name]:
        states.change(event, [2])
        assert states.find(expected) == {2}, event


def test_worker_begins_a_closure_only_while_in_use() -> None:
    states = WorkerStates([0])
    assert [states.begin(0), states.begin(1)] == [True, False]
    states.change("release", [0])
    states.change("end", [0])
    assert not states.begin(0)
    assert states.find(OUT) == {0, 1}


@pytest.mark.parametrize("is_stopped", [False, True])
def test_thread_waits_until_its_worker_is_connected_or_all_is_stopped(is_stopped: bool) -> None:
    states = WorkerStates([0])
    waiting = threading.Thread(target=states.wait_until_used, args=(1,), daemon=True)
    waiting.start()
    states.change("fail", [0])
    assert waiting.is_alive()
    states.stop() if is_stopped else states.change("connect", [1])
    assert wait_until(lambda: not waiting.is_alive(), 30)
