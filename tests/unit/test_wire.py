"""A node's answer comes through srun whole, in whatever order the lines of several nodes come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.doctor.wire import Assembler, to_lines

LONG = {"text": "é" * 500, "number": 7}


def feed(lines: list[str]) -> dict[int, Any]:
    assembler = Assembler()
    return dict(answer for answer in map(assembler.feed, lines) if answer is not None)


def test_lines_are_shorter_than_what_srun_keeps_together() -> None:
    lines = to_lines(3, LONG).splitlines(keepends=True)
    assert len(lines) > 1
    assert all(len(line.encode()) < 1024 for line in lines)


@given(st.data())
def test_lines_of_several_nodes_may_come_mixed(data: st.DataObject) -> None:
    waiting = {rank: to_lines(rank, {**LONG, "rank": rank}).splitlines() for rank in range(3)}
    mixed = []
    while waiting:
        rank = data.draw(st.sampled_from(sorted(waiting)))
        mixed.append(waiting[rank].pop(0))
        waiting = {rank: lines for rank, lines in waiting.items() if lines}
    assert feed(mixed) == {rank: {**LONG, "rank": rank} for rank in range(3)}


@pytest.mark.parametrize(
    "line", ["", "Loading module tensorflow", "tf4slurm-doctor", "tf4slurm-doctor x . e30=", "tf4slurm-doctor 1 . %%%"]
)
def test_what_is_no_such_line_is_passed_over(line: str) -> None:
    assert feed([line]) == {}
    assert feed([line, *to_lines(1, 5).splitlines()]) == {1: 5}
