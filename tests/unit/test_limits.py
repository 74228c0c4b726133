"""How often tasks are asked whether they live: as asked for in small jobs, at a bounded cost in large ones."""

from __future__ import annotations

import pytest

from tf4slurm.control.limits import Limits


@pytest.mark.parametrize(
    ("num_tasks", "limits", "seconds"),
    [
        (1, Limits(), 1),
        (100, Limits(), 1),
        (250, Limits(), 2.5),
        (1_000, Limits(), 4),
        (100_000, Limits(), 4),
        (100_000, Limits(heartbeat_timeout_seconds=60), 24),
        (1_000, Limits(heartbeat_timeout_seconds=60), 10),
        (1_000, Limits(heartbeat_timeout_seconds=2), 1),
        (1_000, Limits(heartbeat_interval_seconds=7), 7),
        (4, Limits(heartbeat_interval_seconds=0.05), 0.05),
    ],
)
def test_many_tasks_are_asked_less_often_but_twice_in_the_dead_time(
    num_tasks: int, limits: Limits, seconds: float
) -> None:
    assert limits.heartbeat_interval_of(num_tasks) == seconds
