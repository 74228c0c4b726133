"""Findings of many nodes as one list."""

from __future__ import annotations

import pytest

from tf4slurm.doctor.finding import Finding, exit_code_of, merge_nodes

SAME = Finding("ok", "python", "Python 3.11")
HERE = Finding("ok", "interfaces", "up: eth0", detail="eth0 10.0.0.1")
THERE = Finding("ok", "interfaces", "up: eth0", detail="eth0 10.0.0.2")
BAD = Finding("fail", "interfaces", "ib0 is down", "Bring it up.")


def test_what_is_equal_stands_once() -> None:
    (found,) = merge_nodes({"n1": [SAME], "n2": [SAME]})
    assert found == SAME


def test_what_differs_stands_with_its_nodes_beside_the_rest_of_its_topic() -> None:
    found = merge_nodes({"n1": [HERE, SAME], "n2": [THERE, SAME], "n3": [BAD, SAME]})
    assert [(finding.text, finding.nodes) for finding in found] == [
        ("up: eth0", ("n1", "n2")),
        ("ib0 is down", ("n3",)),
        ("Python 3.11", ()),
    ]


def test_details_are_told_of_each_node_and_make_no_difference() -> None:
    (found,) = merge_nodes({"n1": [HERE], "n2": [THERE]})
    assert (found.nodes, found.detail) == ((), "n1: eth0 10.0.0.1; n2: eth0 10.0.0.2")


def test_a_single_node_is_all_of_them() -> None:
    assert [finding.nodes for finding in merge_nodes({"n1": [SAME, BAD]})] == [(), ()]


def test_no_node_gives_nothing() -> None:
    assert merge_nodes({}) == []


def test_the_exit_code_is_that_of_a_failure() -> None:
    assert exit_code_of([SAME, Finding("warn", "proxy", "one is set")]) == 0
    assert exit_code_of([SAME, BAD]) == 3


def test_json_there_and_back() -> None:
    assert Finding.from_json(BAD.to_json()) == BAD


@pytest.mark.parametrize("change", [{"level": "bad"}, {"level": ["ok"]}])
def test_a_level_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Finding.from_json({**SAME.to_json(), **change})
