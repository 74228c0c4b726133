"""The node of each rank, by distribution, and layouts that are refused."""

from __future__ import annotations

import pytest

from tf4slurm.errors import LayoutError, PlacementError
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.slurm.layout import (
    deal_ranks,
    join_components,
    rename_nodes,
    split_components,
)

A, B, C = "r1-n9", "r1-n10", "gpu-09"


@pytest.mark.parametrize(
    ("counts", "distribution", "plane_size", "expected"),
    [
        ((3, 1, 2), None, None, "AAABCC"),
        ((3, 1, 2), "block", None, "AAABCC"),
        ((3, 1, 2), "block,nopack", None, "AAABCC"),
        ((3, 1, 2), "block:cyclic", 2, "AAABCC"),
        ((3, 1, 2), "cyclic", None, "ABCACA"),
        ((3, 1, 2), "cyclic:fcyclic:block,pack", None, "ABCACA"),
        ((2, 2, 2), "cyclic", None, "ABCABC"),
        ((3, 1, 2), "plane", 2, "AABCCA"),
        ((5, 2, 1), "plane", 2, "AABBCAAA"),
        ((3, 1, 2), "plane", 1, "ABCACA"),
        ((3, 1, 2), "plane", 9, "AAABCC"),
    ],
)
def test_distributions(
    counts: tuple[int, ...], distribution: str | None, plane_size: int | None, expected: str
) -> None:
    assert "".join(deal_ranks(dict(zip("ABC", counts, strict=True)), distribution, plane_size)) == expected


@pytest.mark.parametrize("distribution", ["arbitrary", "arbitrary,nopack", "plane", "unknown"])
def test_undetermined_distribution_is_refused(distribution: str) -> None:
    with pytest.raises(LayoutError, match=f"does not determine the node of each rank.*{distribution}"):
        deal_ranks({A: 2}, distribution, None)


def test_components_are_split_in_the_order_of_the_groups() -> None:
    split = split_components({C: 1, A: 2, B: 3}, [(B, "not in the step"), ("neither",), (A, C)])
    assert [list(component.items()) for component in split] == [[(B, 3)], [(C, 1), (A, 2)]]


@pytest.mark.parametrize("groups", [[(A,), (B,)], [(A, B), (B, C)]])
def test_node_in_no_group_or_in_two_is_refused(groups: list[tuple[str, ...]]) -> None:
    with pytest.raises(LayoutError, match="not each in one group"):
        split_components({A: 1, B: 1, C: 1}, groups)


def test_components_of_one_node_and_own_component_of_two_nodes_are_joined() -> None:
    components = [{A: 2}, {B: 3, C: 1}]
    assert join_components(components, B, {2, 4, 5}) == (A, A, B, C, B, B)
    assert join_components(components, C, {3}) == (A, A, B, C, B, B)
    assert join_components(components[:1] * 2, A, {0}) == (A, A, A, A)


@pytest.mark.parametrize("own_node", ["A", "B"])
def test_other_component_of_two_nodes_and_component_of_three_nodes_are_refused(own_node: str) -> None:
    components = [{"A": 2}, {"B": 1, "C": 1, "D": 1}, {"E": 1, "F": 1}]
    with pytest.raises(LayoutError, match="has 3 nodes"):
        join_components(components, own_node, {0})
    with pytest.raises(LayoutError, match="has 2 nodes"):
        join_components([components[0], components[2]], own_node, {0})


def check(nodes_by_rank: str = "AABA", **changes: str) -> None:
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "2",
        "SLURMD_NODENAME": "A",
        "SLURM_GTIDS": "0,1,3",
        "SLURM_DISTRIBUTION": "block",
    }
    SlurmStep.from_environ({**environ, **changes}).check_own_place(nodes_by_rank)


def test_correct_layout_is_accepted() -> None:
    check()


@pytest.mark.parametrize(
    ("nodes_by_rank", "changes", "difference"),
    [
        ("AAB", {}, "the step has 4 tasks, but the layout 3"),
        ("AABA", {"SLURM_PROCID": "4"}, "has 4 tasks"),
        ("AAAB", {}, "its node is 'A', but 'B' in the layout"),
        ("ABAA", {}, "'A' has the ranks 0, 1, 3, but 0, 2, 3 in the layout"),
        ("AABA", {"SLURM_LOCALID": "1"}, "it is task 1 of 'A', but task 2 in the layout"),
        ("AABA", {"SLURM_GTIDS": ",".join(map(str, range(20)))}, "ranks 0, 1, 2, 3, 4, 5, 6, 7, …, but"),
    ],
)
def test_layout_that_contradicts_the_task_is_refused(
    nodes_by_rank: str, changes: dict[str, str], difference: str
) -> None:
    with pytest.raises(
        LayoutError, match=f"rank {changes.get('SLURM_PROCID', '3')}: .*{difference}.*distribution 'block'"
    ):
        check(nodes_by_rank, **changes)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ({A: 2, B: 1}, (A, B, A)),
        ({B: 1, A: 2}, (A, B, A)),
        ({"r1-n10-ib": 1, "r1-n9-ib": 2}, ("r1-n9-ib", "r1-n10-ib", "r1-n9-ib")),
        ({"10.0.0.1": 2, "10.0.0.2": 1}, ("10.0.0.1", "10.0.0.2", "10.0.0.1")),
    ],
)
def test_nodes_may_have_other_names(hosts: dict[str, int], expected: tuple[str, ...]) -> None:
    assert rename_nodes((A, B, A), (A, B), hosts) == expected


@pytest.mark.parametrize(
    "hosts", [{}, {A: 3}, {"10.0.0.9": 2, "10.0.0.10": 1}, {A: 2, "x": 1}, {"r1-n9-a": 2, "r1-n9-b": 1}]
)
def test_ambiguous_names_are_refused(hosts: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=r"are not the nodes r1-n9, r1-n10\."):
        rename_nodes((A, B, A), (A, B), hosts)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"Slurm placed \{'r1-n9': 2, 'r1-n10': 1\} tasks"):
        rename_nodes((A, B, A), (A, B), {A: 1, B: 2})
