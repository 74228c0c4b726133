"""A short run of the soak with a fixed seed; `make soak` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import choose_fault, run_job

SEED = 52
SLOWNESS = 4.0  # the heartbeat timeout is 6 s


@pytest.mark.parametrize(
    "number", [*range(5), *(pytest.param(number, marks=pytest.mark.long) for number in range(5, 10))]
)
def test_job_with_random_fault_ends_with_explained_exit_code(tmp_path: Path, process_mark: str, number: int) -> None:
    assert run_job(SEED, number, tmp_path, SLOWNESS)


def test_short_run_covers_all_kinds_of_targets() -> None:
    kinds = {choose_fault(SEED, number).kind for number in range(10)}
    assert kinds == {"chief", "ps", "worker", "agent", "launcher"}
