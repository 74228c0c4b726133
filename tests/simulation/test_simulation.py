"""Simulated jobs: 2,000 seeds, and those that have found a fault."""

from __future__ import annotations

import pytest

from tests.simulation.run import run_seed, run_seeds

_SEEDS, _BLOCK = 2_000, 200

FOUND = [
    (868, "a ps that ended after training was the cause of a later failure"),
    (6176, "a task that reconnected after a pause of the launcher was lost"),
]
"""Seeds, and what each has found. A change of `plan.py` changes the meaning of a seed, so a found fault also gets a
test of its own in tests/unit."""


@pytest.mark.parametrize("first", range(0, _SEEDS, _BLOCK))
def test_invariants_hold(first: int) -> None:
    assert run_seeds(range(first, first + _BLOCK)) == [], "repeat it: python -m tests.simulation --seed SEED -v"


@pytest.mark.parametrize(("seed", "what"), FOUND)
def test_found_seed(seed: int, what: str) -> None:
    assert run_seed(seed)[0] == [], what
