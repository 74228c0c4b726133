"""Which nodes reach each other, in words."""

from __future__ import annotations

from typing import Any

from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.reach import judge_reach

LAUNCHER = {"rank": 3, "node": "login", "addresses": ["10.0.0.9", "192.0.2.9"]}


def peer(rank: int, address: str | None = "") -> dict[str, Any]:
    addresses = {f"10.0.0.{rank}": "eth0", f"172.16.0.{rank}": "ib0"}
    return {"rank": rank, "node": f"n{rank}", "addresses": addresses, "address": address or f"10.0.0.{rank}"}


PEERS = [peer(0), peer(1), peer(2), LAUNCHER]


def judge(faults: dict[int, list[list[Any]]], peers: list[dict[str, Any]] = PEERS) -> list[tuple[str, str]]:
    found: list[Finding] = judge_reach(peers, {0: [], 1: [], 2: [], **faults})
    return [(finding.level, finding.text) for finding in found]


def test_all_reach_each_other() -> None:
    assert judge({}) == [("ok", "3 nodes reach each other and this host, at every address")]


def test_the_address_that_a_job_would_use_is_a_failure_and_another_one_is_not() -> None:
    faults = [[0, "10.0.0.0", "no route"], [0, "172.16.0.0", "no answer"]]
    assert judge({1: faults, 2: faults[1:]}) == [
        ("fail", "n0 is not reached at 10.0.0.0 (eth0) from n1, and a job would use that address"),
        ("warn", "n0 is not reached at 172.16.0.0 (ib0) from n[1-2]; a job would use another address"),
    ]


def test_one_address_of_the_launchers_host_is_enough() -> None:
    assert [level for level, _ in judge({1: [[3, "192.0.2.9", "no answer"]]})] == ["ok"]
    lost = [[3, address, "no answer"] for address in ("10.0.0.9", "192.0.2.9")]
    assert judge({1: lost, 2: lost[:1]}) == [
        ("fail", "login, where the launcher would run, is reached at none of its addresses from n1")
    ]


def test_a_node_without_the_network_is_not_told_again() -> None:
    peers = [peer(0), {**peer(1), "address": None}, peer(2), LAUNCHER]
    assert judge({1: [[0, "10.0.0.0", "no answer"]]}, peers) == [
        ("ok", "2 nodes reach each other and this host, at every address")
    ]
