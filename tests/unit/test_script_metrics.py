"""Reports of scripts: merging them, and the thinned series that the run directory keeps."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.control.script_metrics import BoundedMetrics, StepMetrics, merge_metrics, merge_to_limit


def entry(step: int, loss: float) -> StepMetrics:
    return StepMetrics(step, float(step), metrics={"loss": loss})


def test_merged_report_has_the_last_the_lowest_and_the_highest_value() -> None:
    merged = merge_metrics([entry(1, 3.0), entry(2, 9.0), entry(3, 1.0), entry(4, 2.0)])
    assert merged == StepMetrics(4, 4.0, 4, {"loss": 2.0}, {"loss": 1.0}, {"loss": 9.0})
    again = merge_metrics([merged, StepMetrics(None, 5.0, metrics={"accuracy": 0.5})])
    assert again == StepMetrics(
        4, 5.0, 5, {"loss": 2.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.5}, {"loss": 9.0, "accuracy": 0.5}
    )


def test_range_with_a_value_that_is_not_finite_is_unknown() -> None:
    for value in (math.nan, math.inf, None):
        merged = merge_metrics([entry(1, 3.0), entry(2, value), entry(3, 1.0)])  # type: ignore[arg-type]
        assert merged == StepMetrics(3, 3.0, 3, {"loss": 1.0}, {"loss": None}, {"loss": None})
        assert merge_metrics([merged, entry(4, 0.0)]).low == {"loss": None}


@given(st.integers(0, 500), st.integers(1, 50))
def test_merging_to_a_limit_keeps_the_number_of_reports_and_the_last(count: int, limit: int) -> None:
    merged = merge_to_limit([entry(step, -step) for step in range(count)], limit)
    assert len(merged) <= max(1, limit // 2)
    assert sum(each.calls for each in merged) == count
    assert [each.step for each in merged][-1:] == [count - 1][:count]


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(allow_nan=False, allow_infinity=False)), min_size=1))
def test_series_is_bounded_and_keeps_extremes_and_order(groups: list[tuple[int, float]]) -> None:
    series = BoundedMetrics(20)
    for step, (count, value) in enumerate(groups):
        series.add(StepMetrics(step, float(step), count, {"loss": value}, {"loss": value}, {"loss": value}))
        assert len(series.lines) <= 10
        assert series.lines[-1].step == step
    steps = [line.step or 0 for line in series.lines]
    assert steps == sorted(steps)
    assert sum(line.calls for line in series.lines) == sum(count for count, _ in groups)
    assert min(line.low["loss"] or 0.0 for line in series.lines) == min(value or 0.0 for _, value in groups)
    assert max(line.high["loss"] or 0.0 for line in series.lines) == max(value or 0.0 for _, value in groups)


def test_new_reports_are_merged_in_groups_as_large_as_the_others() -> None:
    series = BoundedMetrics(8)
    for step in range(100):
        series.add(entry(step, 0.0))
    sizes = [line.calls for line in series.lines]
    assert series.num_mergings == 5
    assert sizes == [32, 32, 32, 4]
    assert series.num_final == 3


def test_sealed_line_is_not_changed() -> None:
    series = BoundedMetrics(8)
    for step in range(5):  # the fifth line exceeds the limit
        series.add(entry(step, 0.0))
    assert ([line.calls for line in series.lines], series.num_final) == ([2, 2, 1], 2)
    series.seal()
    assert series.num_final == 3
    series.add(entry(5, 0.0))
    assert [line.calls for line in series.lines] == [2, 2, 1, 1]


def test_single_report_with_more_values_than_the_limit_is_kept() -> None:
    series = BoundedMetrics(2)
    for step in range(3):
        series.add(StepMetrics(step, 0.0, metrics={"a": 1.0, "b": 2.0}))
    assert [line.calls for line in series.lines] == [3]
