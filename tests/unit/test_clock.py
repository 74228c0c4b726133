"""The job clock, with simulated monotonic time."""

from __future__ import annotations

import pytest

from tf4slurm.control.clock import JobClock


class Time:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("gaps", "passed"),
    [
        ((0.2, 0.2), 0.4),
        ((1.0,), 1.0),  # the longest time that is no pause
        ((25.0,), 1.0),
        ((0.2, 25.0, 0.2, 3600.0, 0.2), 0.6 + 1 + 1),
    ],
)
def test_pause_is_left_out(gaps: tuple[float, ...], passed: float) -> None:
    time = Time()
    clock = JobClock(1.0, time)
    clock.start()
    started = clock.now()
    for gap in gaps:
        time.seconds += gap
        clock.now()
    assert clock.now() - started == pytest.approx(passed)


def test_nothing_is_left_out_before_the_start() -> None:
    time = Time()
    clock = JobClock(1.0, time)
    time.seconds += 30
    assert clock.now() == 1030
    time.seconds += 30
    clock.start()
    assert clock.now() == 1060
