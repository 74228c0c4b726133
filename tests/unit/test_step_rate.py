"""Steps per second, computed from reports at known times."""

from __future__ import annotations

import pytest

from tf4slurm.control.step_rate import StepRate


def rate_of(*reports: tuple[float, int]) -> float | None:
    rate = StepRate()
    for seconds, step in reports:
        rate.add(step, seconds)
    return rate.steps_per_second


def fast(start: float, end: float, first: int = 1, per_second: int = 260) -> list[tuple[float, int]]:
    """The reports of a script that makes `per_second` steps from `start` to `end`."""
    return [(start + n / per_second, first + n) for n in range(round((end - start) * per_second) + 1)]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], None),
        ([(0, 10)], None),
        ([(0, 0), (10, 1)], 0.1),  # nothing else is known yet
        ([(0, 0), (10, 1), (10.5, 3)], 4.0),  # the time until the second report is that of tracing
        ([(0, 0), *fast(30, 31)], 260.0),  # right after the start, 30 s after step 0 was reported
        ([(0, 0), *fast(30, 45)], 260.0),
        ([(0, 0), *fast(30, 90)], 260.0),
        ([*fast(0, 30), *fast(30.1, 50.1, 8000, 26)], 26.0),  # only the last 20 s count
        ([(0, 1), (1, 2), (61, 3), (121, 4)], 0.0167),  # the last two reports are further apart than 20 s
        ([(0, 100), (10, 200), (20, 300), (30, 400), (40, 500)], 10.0),
        ([(0, 1), (1, 2), (2, 3), (2, 3), (8, 3)], 1.0),  # a step that is reported again
        ([(0, 50), (10, 100), (12, 20), (14, 30), (15, 40)], 10.0),  # back to a checkpoint: it begins again
        ([(0, 50), (10, 100), (12, 20)], None),
        ([(5, 1), (6, 2), (2, 3), (3, 4), (4, 6)], 2.0),  # the clock was set back
        ([(1, 1), (1, 2)], None),
    ],
)
def test_steps_per_second(reports: list[tuple[float, int]], expected: float | None) -> None:
    rate = rate_of(*reports)
    assert rate == (None if expected is None else pytest.approx(expected, rel=0.005))


def test_a_minute_of_fast_reports_is_kept_as_few() -> None:
    rate = StepRate()
    for seconds, step in fast(0, 60, per_second=1000):
        rate.add(step, seconds)
    assert len(rate._reports) < 250
    assert rate.steps_per_second == 1000.0
