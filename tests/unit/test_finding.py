"""Findings: merged over nodes, on the terminal, and in a report."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tf4slurm.doctor.finding import (
    Finding,
    exit_code_of_findings,
    format_findings,
    format_report,
    hide_user,
    merge_nodes,
    summarize,
)

SAME = Finding("ok", "python", "Python 3.11")
HERE = Finding("ok", "interfaces", "up: eth0", detail="eth0 10.0.0.1")
THERE = Finding("ok", "interfaces", "up: eth0", detail="eth0 10.0.0.2")
BAD = Finding("fail", "interfaces", "ib0 is down", "Bring it up.")


def test_equal_findings_are_merged() -> None:
    (found,) = merge_nodes({"n1": [SAME], "n2": [SAME]})
    assert found == SAME


def test_different_findings_name_their_nodes_and_are_grouped_by_topic() -> None:
    found = merge_nodes({"n1": [HERE, SAME], "n2": [THERE, SAME], "n3": [BAD, SAME]})
    assert [(finding.text, finding.nodes) for finding in found] == [
        ("up: eth0", ("n1", "n2")),
        ("ib0 is down", ("n3",)),
        ("Python 3.11", ()),
    ]


def test_findings_that_differ_only_in_details_are_merged() -> None:
    (found,) = merge_nodes({"n1": [HERE], "n2": [THERE]})
    assert (found.nodes, found.detail) == ((), "n1: eth0 10.0.0.1; n2: eth0 10.0.0.2")


def test_findings_of_a_single_node_name_no_node() -> None:
    assert [finding.nodes for finding in merge_nodes({"n1": [SAME, BAD]})] == [(), ()]


def test_no_nodes_have_no_findings() -> None:
    assert merge_nodes({}) == []


def test_exit_code_is_3_with_a_failure() -> None:
    assert exit_code_of_findings([SAME, Finding("warn", "proxy", "one is set")]) == 0
    assert exit_code_of_findings([SAME, BAD]) == 3


def test_findings_are_merged_after_a_round_trip_through_json() -> None:
    read = Finding(**json.loads(json.dumps(asdict(BAD))))
    assert merge_nodes({"n1": [read], "n2": [BAD]}) == [BAD]


@pytest.fixture
def user_ana(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    monkeypatch.setenv("LOGNAME", "ana")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ana/venv/bin/python", "~/venv/bin/python"),
        ("in /home/ana.", "in ~."),
        ("/home/ana.old /home/ana-2", "/home/ana.old /home/ana-2"),
        ("/home/anabel/x", "/home/anabel/x"),
        ("/scratch/ana/runs and /ana", "/scratch/USER/runs and /USER"),
        ("banana", "banana"),
    ],
)
def test_user_name_is_hidden(user_ana: None, text: str, shown: str) -> None:
    assert hide_user(text) == shown


def test_report_has_versions_and_no_user_name(user_ana: None) -> None:
    text = format_report(
        [Finding("warn", "python", "Python 3.11, /home/ana/bin/python", "Do this.", nodes=("n1", "n2"))]
    )
    assert text.startswith("tf4slurm 0.")
    assert "warn  python: Python 3.11, ~/bin/python [on n[1-2]]" in text
    assert "-> Do this." in text
    assert "ana" not in text


def test_long_lines_are_wrapped_and_indented() -> None:
    lines = format_findings([Finding("fail", "slurm", "word " * 60, "do " * 60)], lambda _, text: text)
    assert all(len(line) <= 110 for line in lines)
    assert all(line.startswith(" " * 6) for line in lines[1:])


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        (["ok"], "no failure, no warnings. Next: x"),
        (["ok", "warn"], "no failure, 1 warning. Next: x"),
        (["fail", "fail"], "2 failures, no warnings. To ask for help: tf4slurm doctor --report"),
    ],
)
def test_summary(levels: list[str], text: str) -> None:
    assert summarize([Finding(level, "a", "b") for level in levels], "Next: x") == text  # type: ignore[arg-type]
