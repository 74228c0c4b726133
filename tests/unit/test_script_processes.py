"""The rules by which the states of a script's processes become one, with each order of messages and ends."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tf4slurm.agent.script_processes import RULES, ScriptProcesses
from tf4slurm.control.messages import BarrierArrival, CheckpointState, ScriptState, ShardRequest
from tf4slurm.control.shard_position import ShardPosition

Event = tuple[str, "dict[str, Any] | None"]
"""A message of a process, as (process, fields), or its end, as (process, None)."""
START = ShardPosition("hash", 7)


def barrier(token: str) -> BarrierArrival:
    return BarrierArrival("loaded", token, 60.0)


def shards(token: str, **changes: Any) -> ShardRequest:
    return dataclasses.replace(ShardRequest("data", token, 3, 2, "hash"), **changes)


def merge(*events: Event) -> ScriptState:
    """Return the merged state after these messages and ends."""
    processes, merged = ScriptProcesses(), ScriptState()
    for process, fields in events:
        merged = processes.end(process) if fields is None else processes.update(process, ScriptState(**fields))
    return merged


def test_each_field_has_a_rule() -> None:
    assert list(RULES) == [field.name for field in dataclasses.fields(ScriptState)]


def test_state_of_a_single_process_is_unchanged() -> None:
    state = ScriptState(
        step=3,
        metrics=(("loss", 0.5), ("accuracy", 0.25)),
        handles_stop=True,
        has_saved=True,
        completion="failed",
        barrier=barrier("a"),
        stop_signal="SIGTERM",
        shards=(shards("a", start=START), shards("b", name="other")),
        workers=(0, 2),
        workers_error="none can join",
        unusable_workers=((3, "no data"),),
        ps_bytes=(16, 4),
        checkpoint=CheckpointState("saved/ckpt-3", 3),
        is_helper=True,
    )
    assert ScriptProcesses().update("a", state) == state


SAVED = CheckpointState("saved/ckpt-3", 3)
SAVES = {"handles_stop": True, "has_saved": True}
HELPER = {"is_helper": True}
OTHER = {"step": 1}  # a process that only reports

ORDER_FREE: list[tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]] = [
    # the states of the processes, the merged state while all live, and after all but "main" have ended
    ({"main": {"step": 5}, "b": {"step": 9}, "c": {"step": 7}}, {"step": 9}, {"step": 5}),
    ({"main": {}, "b": {"step": 9}}, {"step": 9}, {"step": 9}),
    ({"main": {"handles_stop": True}, "b": OTHER, "c": {}}, {"handles_stop": True}, {"handles_stop": True}),
    ({"main": {}, "b": {"handles_stop": True}}, {"handles_stop": True}, {"handles_stop": False}),
    ({"main": SAVES, "b": OTHER, "c": {}}, {"has_saved": True}, {"has_saved": True}),
    ({"main": {"handles_stop": True}, "b": SAVES}, {"has_saved": False}, {"has_saved": False}),
    ({"main": SAVES, "b": {"handles_stop": True}}, {"has_saved": False}, {"has_saved": True}),
    ({"main": SAVES, "b": SAVES, "c": SAVES}, {"has_saved": True}, {"has_saved": True}),
    ({"main": {}, "b": SAVES}, {"has_saved": True}, {"has_saved": True}),
    ({"main": {"completion": "done"}, "b": OTHER, "c": {}}, {"completion": "done"}, {"completion": "done"}),
    ({"main": {"completion": "done"}, "b": {"completion": "failed"}}, {"completion": "failed"}, {}),
    ({"main": {}, "b": {"completion": "done"}, "c": OTHER}, {"completion": "done"}, {"completion": "done"}),
    ({"main": {}, "b": HELPER | {"completion": "done"}}, {"completion": None}, {"completion": None}),
    ({"main": {}, "b": HELPER | {"completion": "failed"}}, {"completion": None}, {"completion": None}),
    (
        {"main": {"completion": "done"}, "b": HELPER | {"completion": "failed"}, "c": HELPER},
        {"completion": "done"},
        {"completion": "done"},
    ),
    ({"main": HELPER, "b": HELPER | {"completion": "done"}}, {"completion": "done"}, {"completion": "done"}),
    ({"main": {}, "b": {"barrier": barrier("b")}, "c": OTHER}, {"barrier": barrier("b")}, {"barrier": None}),
    ({"main": {"barrier": barrier("a")}, "b": OTHER, "c": {}}, {}, {"barrier": barrier("a")}),
    ({"main": {}, "b": {"stop_signal": "SIGTERM"}}, {"stop_signal": "SIGTERM"}, {"stop_signal": None}),
    ({"main": {"stop_signal": "SIGTERM"}, "b": OTHER, "c": {}}, {}, {"stop_signal": "SIGTERM"}),
    ({"main": {"workers": (0, 1)}, "b": OTHER, "c": {}}, {"workers": (0, 1)}, {"workers": (0, 1)}),
    ({"main": {}, "b": {"workers": (0, 1)}}, {"workers": (0, 1)}, {"workers": (0, 1)}),
    ({"main": {"workers_error": "no"}, "b": OTHER}, {"workers_error": "no"}, {"workers_error": "no"}),
    (
        {"main": {"workers": (0,), "unusable_workers": ((1, "no data"),)}, "b": OTHER},
        {"unusable_workers": ((1, "no data"),)},
        {"unusable_workers": ((1, "no data"),)},
    ),
    ({"main": {"ps_bytes": (16, 4)}, "b": OTHER, "c": {}}, {"ps_bytes": (16, 4)}, {"ps_bytes": (16, 4)}),
    ({"main": {}, "b": {"ps_bytes": (16, 4)}}, {"ps_bytes": (16, 4)}, {"ps_bytes": (16, 4)}),
    ({"main": {}, "b": {"checkpoint": SAVED}, "c": OTHER}, {"checkpoint": SAVED}, {"checkpoint": SAVED}),
    (
        {"main": {"metrics": (("loss", 1.0),)}, "b": {"metrics": (("accuracy", 2.0),)}},
        {},
        {"metrics": (("loss", 1.0), ("accuracy", 2.0))},
    ),
]


@pytest.mark.parametrize(("states", "together", "at_end"), ORDER_FREE)
def test_merged_state_does_not_depend_on_the_order(
    states: dict[str, dict[str, Any]], together: dict[str, Any], at_end: dict[str, Any]
) -> None:
    others = [name for name in states if name != "main"]
    for messages, ends in itertools.product(itertools.permutations(states), itertools.permutations(others)):
        sent: list[Event] = [(name, states[name]) for name in messages]
        check(merge(*sent), together)
        check(merge(*sent, *sent), together)  # a repeated message has no effect
        check(merge(*sent, *((name, None) for name in ends)), at_end)
    for early in itertools.permutations(others):  # each of the others ends before the next one begins
        sent = [event for name in early for event in ((name, states[name]), (name, None))]
        check(merge(*sent, ("main", states["main"])), at_end)
        check(merge(("main", {}), *sent, ("main", states["main"])), at_end)


def check(merged: ScriptState, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        found = getattr(merged, name)
        assert (dict(found) if name == "metrics" else found) == (dict(value) if name == "metrics" else value), name


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # a process that restores an older checkpoint
        ([("main", {"step": 9}), ("main", {"step": 4})], {"step": 4}),
        # one process after another, as in a search
        ([("a", {"step": 9}), ("a", None), ("main", {}), ("b", {"step": 4})], {"step": 4}),
        ([("main", {}), ("a", {"step": 9}), ("a", None), ("b", {"step": 4}), ("b", None)], {"step": 4}),
        # the latest report of each name, not the latest message
        (
            [("a", {"metrics": (("loss", 1.0), ("accuracy", 0.1))}), ("b", {"metrics": (("loss", 2.0),)}), ("a", {})],
            {"metrics": (("loss", 2.0),)},
        ),
        (
            [
                ("a", {"metrics": (("loss", 1.0), ("accuracy", 0.1))}),
                ("b", {"metrics": (("accuracy", 0.2),)}),
                ("a", {"metrics": (("loss", 0.5), ("accuracy", 0.1))}),
            ],
            {"metrics": (("loss", 0.5), ("accuracy", 0.2))},
        ),
        # two barriers: the one that was reached first, then the other
        ([("a", {"barrier": barrier("a")}), ("b", {"barrier": barrier("b")})], {"barrier": barrier("a")}),
        (
            [("a", {"barrier": barrier("a")}), ("b", {"barrier": barrier("b")}), ("a", {})],
            {"barrier": barrier("b")},
        ),
        (
            [("a", {"barrier": barrier("a")}), ("b", {"barrier": barrier("b")}), ("a", None)],
            {"barrier": barrier("b")},
        ),
        (
            [
                ("a", {"barrier": barrier("a")}),
                ("b", {"barrier": barrier("b")}),
                ("a", {}),
                ("a", {"barrier": barrier("a2")}),
                ("b", {"barrier": barrier("b"), "step": 1}),
            ],
            {"barrier": barrier("b")},
        ),
        # the latest stop signal
        (
            [("a", {"stop_signal": "SIGUSR1"}), ("b", {"stop_signal": "SIGTERM"}), ("a", {"stop_signal": "SIGUSR1"})],
            {"stop_signal": "SIGTERM"},
        ),
        # the signal of a helper counts after the end of the process that started it
        (
            [("main", {}), ("a", HELPER | {"completion": "done"}), ("a", None), ("main", None)],
            {"completion": "done"},
        ),
        ([("main", {}), ("a", HELPER | {"completion": "failed"}), ("main", None)], {"completion": "failed"}),
        (
            [("main", {}), ("a", HELPER | {"completion": "done"}), ("b", HELPER), ("a", None)],
            {"completion": None},
        ),
        # the strategy that was made last
        ([("a", {"workers": (0, 1)}), ("b", {"workers": (0,)}), ("b", None)], {"workers": (0, 1)}),
        ([("a", {"workers": (0, 1)}), ("b", {"workers": (0,)}), ("a", {"workers": (0, 1)})], {"workers": (0,)}),
    ],
)
def test_merged_state_after_these_messages(events: list[Event], expected: dict[str, Any]) -> None:
    check(merge(*events), expected)


def test_ended_process_gives_its_shards_back_and_keeps_those_done() -> None:
    merged = merge(
        ("a", {"shards": (shards("a", capacity=4, done=(1,), start=START), shards("b", name="other"))}),
        ("main", {"shards": (shards("c"),)}),
        ("a", None),
    )
    assert merged.shards == (shards("a", capacity=0, done=(1,)), shards("c"))


def test_start_of_equal_requests_is_sent_once() -> None:
    other = shards("c", name="other", start=START)
    merged = merge(
        ("a", {"shards": (shards("a", start=START),)}),
        ("b", {"shards": (shards("b", start=START), other)}),
    )
    assert merged.shards == (shards("a", start=START), shards("b"), other)


def test_memory_of_many_ended_processes_is_bounded() -> None:
    processes = ScriptProcesses()
    for number in range(500):
        request = shards(f"{number}", done=tuple(range(1_000)))
        processes.update(number, ScriptState(metrics=((f"{number}", 0.0),), shards=(request,)))
        merged = processes.end(number)
    assert [request.token for request in merged.shards] == [str(number) for number in range(492, 500)]
    assert [name for name, _ in merged.metrics] == [str(number) for number in range(400, 500)]


def test_cleared_processes_are_forgotten() -> None:
    processes = ScriptProcesses()
    processes.update("a", ScriptState(step=3, completion="done"))
    processes.clear()
    assert "a" not in processes
    assert processes.end("a") == ScriptState()


def test_completion_of_a_helper_does_not_replace_that_of_the_ended_main_process() -> None:
    processes = ScriptProcesses()
    processes.update("main", ScriptState())
    processes.update("helper", ScriptState(is_helper=True, completion="failed"))
    processes.end("helper")
    processes.update("main", ScriptState(completion="done"))
    assert processes.end("main").completion == "done"
