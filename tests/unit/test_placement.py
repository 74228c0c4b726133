"""Counts become ranks, or an error that names the mismatch."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.cluster import Task
from tf4slurm.errors import PlacementError
from tf4slurm.placement import PACK, SPREAD, fill_counts, place_tasks
from tf4slurm.roles import TASK_TYPES


def counts_of(chiefs: int, ps: int, workers: int | None, evaluators: int) -> dict[str, int | None]:
    return {"chief": chiefs, "ps": ps, "worker": workers, "evaluator": evaluators}


COUNTS = st.dictionaries(st.sampled_from(["chief", "ps", "worker", "evaluator"]), st.integers(0, 5))


def test_ranks_go_role_by_role() -> None:
    assert place_tasks({"worker": 2, "evaluator": 1, "chief": 1, "ps": 2}, PACK, ["n"] * 6) == (
        Task("chief", 0),
        Task("ps", 0),
        Task("ps", 1),
        Task("worker", 0),
        Task("worker", 1),
        Task("evaluator", 0),
    )


@given(COUNTS)
def test_every_task_has_one_rank(counts: dict[str, int]) -> None:
    tasks = place_tasks(counts, PACK, ["n"] * sum(counts.values()))
    expected = {Task(task_type, index) for task_type, count in counts.items() for index in range(count)}
    assert set(tasks) == expected
    assert len(tasks) == len(expected)


@pytest.mark.parametrize(
    ("chiefs", "ps", "workers", "evaluators", "available", "expected_workers"),
    [
        (1, 1, 2, 0, None, 2),
        (1, 1, 2, 0, 4, 2),
        (1, 1, 0, 0, 2, 0),
        (1, 2, None, 1, 10, 6),
        (0, 1, None, 0, 2, 1),
        (0, 0, None, 0, 3, 3),
    ],
)
def test_counts_that_match_the_tasks_of_slurm(
    chiefs: int, ps: int, workers: int | None, evaluators: int, available: int | None, expected_workers: int
) -> None:
    assert fill_counts(counts_of(chiefs, ps, workers, evaluators), available) == {
        "chief": chiefs,
        "ps": ps,
        "worker": expected_workers,
        "evaluator": evaluators,
    }


def test_data_service_has_one_dispatcher_and_the_last_ranks() -> None:
    counts = fill_counts({**counts_of(1, 1, None, 1), "data-dispatcher": 1, "data-worker": 2}, 9)
    assert counts == {
        "chief": 1,
        "ps": 1,
        "worker": 3,
        "evaluator": 1,
        "data-dispatcher": 1,
        "data-worker": 2,
    }
    assert list(counts) == [role for role in TASK_TYPES if role != "spare"]
    for placement in (PACK, SPREAD):
        assert [str(task) for task in place_tasks(counts, placement, ["a"] * 5 + ["b"] * 4)][-3:] == [
            "data-dispatcher/0",
            "data-worker/0",
            "data-worker/1",
        ]


@pytest.mark.parametrize(
    ("chiefs", "ps", "workers", "evaluators", "available", "words"),
    [
        (
            *(1, 2, 4, 0, 6),
            "1 chief + 2 ps + 4 worker need 7 tasks, but Slurm gives 6. Ask Slurm for --ntasks=7 or lower a count, "
            "or give --no-chief if worker 0 leads in the script.",
        ),
        (
            *(1, 1, 1, 1, 6),
            "1 chief + 1 ps + 1 worker + 1 evaluator need 4 tasks, but Slurm gives 6. "
            "Ask Slurm for --ntasks=4 or raise a count.",
        ),
        (
            *(1, 1, None, 0, None),
            "The number of workers is not known: 1 chief + 1 ps, and there is no Slurm allocation. Give --workers N.",
        ),
        (
            *(1, 1, None, 0, 2),
            "The number of workers is not known: 1 chief + 1 ps, and Slurm gives 2 tasks. Give --workers N.",
        ),
    ],
)
def test_counts_that_do_not_match_are_refused(
    chiefs: int, ps: int, workers: int | None, evaluators: int, available: int | None, words: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        fill_counts(counts_of(chiefs, ps, workers, evaluators), available)
    assert str(caught.value) == words


def test_error_without_any_counts_is_a_complete_sentence() -> None:
    with pytest.raises(PlacementError) as caught:
        fill_counts(counts_of(0, 0, None, 0), None)
    assert "  " not in str(caught.value)
    assert ": and" not in str(caught.value)


LAYOUTS = st.lists(st.integers(1, 4), min_size=1, max_size=6).flatmap(
    lambda sizes: st.permutations([f"n{node}" for node, size in enumerate(sizes) for _ in range(size)])
)


@given(nodes=LAYOUTS, data=st.data())
def test_spread_puts_ps_on_nodes_as_evenly_as_possible(nodes: list[str], data: st.DataObject) -> None:
    ps = data.draw(st.integers(0, len(nodes) - 1))
    tasks = place_tasks({"chief": 1, "ps": ps, "worker": len(nodes) - 1 - ps}, SPREAD, nodes)
    assert sorted(task.task_type for task in tasks) == ["chief"] + ["ps"] * ps + ["worker"] * (len(nodes) - 1 - ps)
    assert tasks[0] == Task("chief", 0)
    for role in ("ps", "worker"):
        indices = [task.task_index for task in tasks if task.task_type == role]
        assert indices == list(range(len(indices)))
    held = {node: sum(t.task_type == "ps" for t, n in zip(tasks, nodes, strict=True) if n == node) for node in nodes}
    room = {node: nodes.count(node) - (node == nodes[0]) for node in nodes}
    for node, count in held.items():  # a node with fewer ps has no free task
        assert all(count >= other - 1 or count == room[node] for other in held.values())


def test_spread_puts_ps_on_the_node_with_most_free_tasks() -> None:
    nodes = ["a", "a", "b", "b"]
    roles = [task.task_type for task in place_tasks({"chief": 1, "ps": 1, "worker": 2}, SPREAD, nodes)]
    assert roles == ["chief", "worker", "ps", "worker"]


def test_list_of_roles_has_the_role_of_each_rank() -> None:
    tasks = place_tasks({"ps": 2, "worker": 2}, "ps,worker,ps,worker", ["a", "a", "b", "b"])
    assert tasks == (Task("ps", 0), Task("worker", 0), Task("ps", 1), Task("worker", 1))


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("ps,worker", "lists 1 ps + 1 worker, but the job has 1 ps + 2 worker"),
        ("ps,worker,evaluator", "lists 1 ps + 1 worker + 1 evaluator, but"),
        ("ps,wroker,worker", "'wroker' is neither a role nor a placement"),
        ("sprad", "'sprad' is neither a role nor a placement"),
    ],
)
def test_placement_that_contradicts_the_counts_is_refused(placement: str, words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        place_tasks({"ps": 1, "worker": 2}, placement, ["n"] * 3)


@pytest.mark.parametrize("num_tasks", range(1, 7))
def test_every_small_layout_is_spread_evenly(num_tasks: int) -> None:
    """Every placement of up to 6 ranks on up to 3 nodes, with every number of ps."""
    for nodes in itertools.product("abc", repeat=num_tasks):
        for ps in range(num_tasks + 1):
            tasks = place_tasks({"ps": ps, "worker": num_tasks - ps}, SPREAD, nodes)
            held = Counter(node for node, task in zip(nodes, tasks, strict=True) if task.task_type == "ps")
            assert sum(held.values()) == ps
            assert all(held[a] <= held[b] + 1 or held[b] == nodes.count(b) for a in set(nodes) for b in set(nodes))
