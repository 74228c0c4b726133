"""Every row and step is accounted for if calls meet random faults and are repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

ROOT = Path(__file__).parents[2]
FUNCTIONS = ("steps", "training", "shards", "batches", "evaluation", "prediction")


def run(function: str, first_seed: int, last_seed: int, limit_seconds: int) -> None:
    command = [sys.executable, "-m", "tests.tensorflow.random_calls", function, str(first_seed), str(last_seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_seconds)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"


@pytest.mark.keras
@pytest.mark.parametrize("function", FUNCTIONS)
def test_repeated_calls_account_for_every_row(function: str) -> None:
    run(function, 101, 101, 100)


@pytest.mark.keras
@pytest.mark.long
@pytest.mark.parametrize("first_seed", range(1, 51, 10))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_many_repeated_calls_account_for_every_row(function: str, first_seed: int) -> None:
    run(function, first_seed, first_seed + 9, 1500)
