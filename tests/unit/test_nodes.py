"""Answers of nodes: parsed from srun's output, and evaluated."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.doctor.nodes import Peer, check_reach, join_parts

LAUNCHER = Peer(3, "login", 1, {"10.0.0.9": "", "192.0.2.9": ""}, None)
LONG = {"text": "é" * 500, "number": 7}


def peer(rank: int) -> Peer:
    return Peer(rank, f"n{rank}", 1, {f"10.0.0.{rank}": "eth0", f"172.16.0.{rank}": "ib0"}, f"10.0.0.{rank}")


PEERS = [peer(0), peer(1), peer(2)]


def judge(faults: dict[int, list[tuple[int, str, str]]], peers: list[Peer] = PEERS) -> list[tuple[str, str]]:
    found = check_reach(peers, LAUNCHER, {0: [], 1: [], 2: [], **faults})
    return [(finding.level, finding.text) for finding in found]


def test_all_nodes_reach_each_other() -> None:
    assert judge({}) == [("ok", "3 nodes reach each other and this host, at every address")]


def test_unreachable_address_is_a_failure_only_if_a_job_would_use_it() -> None:
    faults = [(0, "10.0.0.0", "no route"), (0, "172.16.0.0", "no answer")]
    assert judge({1: faults, 2: faults[1:]}) == [
        ("fail", "n0 is unreachable at 10.0.0.0 (eth0) from n1, and a job would use that address"),
        ("warn", "n0 is unreachable at 172.16.0.0 (ib0) from n[1-2]; a job would use another address"),
    ]


def test_one_reachable_address_of_the_launchers_host_suffices() -> None:
    assert [level for level, _ in judge({1: [(3, "192.0.2.9", "no answer")]})] == ["ok"]
    lost = [(3, address, "no answer") for address in ("10.0.0.9", "192.0.2.9")]
    assert judge({1: lost, 2: lost[:1]}) == [
        ("fail", "login, where the launcher would run, is unreachable at all its addresses from n1")
    ]


def test_checks_of_a_node_without_an_address_are_ignored() -> None:
    peers = [peer(0), dataclasses.replace(peer(1), own_address=None), peer(2)]
    assert judge({1: [(0, "10.0.0.0", "no answer")]}, peers) == [
        ("ok", "2 nodes reach each other and this host, at every address")
    ]


def srun_lines(rank: int, value: Any) -> list[str]:
    """The lines that `srun --label` prints for an answer: parts of 1,024 bytes, each with the rank."""
    text = json.dumps({"tf4slurm-doctor": value})
    return [f"{rank:3}: {text[start : start + 1024]}\n" for start in range(0, len(text), 1024)]


def parse(lines: list[str]) -> dict[int, Any]:
    parts: dict[int, str] = {}
    return dict(answer for line in lines if (answer := join_parts(parts, line)) is not None)


@given(st.data())
def test_parts_of_several_answers_may_alternate(data: st.DataObject) -> None:
    waiting = {rank: srun_lines(rank, {**LONG, "rank": rank}) for rank in range(3)}
    lines = []
    while waiting:
        rank = data.draw(st.sampled_from(sorted(waiting)))
        lines.append(waiting[rank].pop(0))
        waiting = {rank: left for rank, left in waiting.items() if left}
    assert parse(lines) == {rank: {**LONG, "rank": rank} for rank in range(3)}


@pytest.mark.parametrize("line", ["", "1: Loading module tensorflow", "Loading", "1: ", '1: {"x": 1}', "1: }"])
def test_other_output_of_a_task_is_ignored(line: str) -> None:
    assert parse([line]) == {}
    assert parse([line, *srun_lines(1, LONG)]) == {1: LONG}
    assert parse([*srun_lines(1, 5), *srun_lines(1, 6)]) == {1: 6}
