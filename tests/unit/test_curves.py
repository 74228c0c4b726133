"""Curves from samples: rates of counters, thinning, missing values; and their charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Sample
from tf4slurm.reports.charts import Chart, draw_chart, make_lines
from tf4slurm.reports.summary import MAX_POINTS, Curves
from tf4slurm.system.typed_json import from_json

RUNS = Path(__file__).parents[1] / "data" / "runs"


def sample(seconds: float, **columns: Any) -> Sample:
    return from_json(Sample, {"seconds": seconds, **columns})


def test_rate_is_constant_between_changes() -> None:
    seconds = [0.0, 0.0, 5.0, 5.0, 5.0, 10.0]  # every 4 s or 6 s, sampled every 2 s
    curves = Curves([sample(2 * number, cpu_seconds=[value]) for number, value in enumerate(seconds)], 1)
    assert curves.cores == [[None, 1.25, 1.25, *[pytest.approx(5 / 6)] * 3]]


def test_counter_without_change_has_rate_zero_after_a_timeout() -> None:
    curves = Curves([sample(10 * number, step=[min(number, 2)], cpu_seconds=[1.0]) for number in range(6)], 1)
    assert curves.steps == [[None, 0.1, 0.1, 0.0, 0.0, None]]
    assert curves.cores == [[None, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_counter_that_falls_was_restarted() -> None:
    moved = [10, 20, None, 4, 8]
    curves = Curves([sample(10 * number, sent_bytes=[value]) for number, value in enumerate(moved)], 1)
    assert curves.sent == [[None, 1, None, None, 0.4]]
    assert (curves.total_sent, curves.total_received) == ([28], [0])


def test_many_samples_are_thinned_out_and_counted() -> None:
    peak = [sample(number, memory_bytes=[9 if number == 501 else 1], step=[number]) for number in range(1000)]
    curves = Curves(peak, 1)
    assert len(curves.seconds) == 200 <= MAX_POINTS
    assert curves.seconds[-1] == 999
    assert (curves.num_samples_left_out, curves.num_metrics_left_out) == (800, 0)
    assert set(curves.steps[0]) == {None, 1.0}
    assert curves.peak_memory == [9]  # also of samples that are not drawn


def test_metrics_are_kept_by_name_and_rank() -> None:
    curves = Curves([sample(1, metrics={"1": {"loss": 2.0}}), sample(2, metrics={"1": {"loss": 1.0, "n": 3}})], 2)
    assert curves.metrics == {"loss": {1: [2.0, 1.0]}, "n": {1: [None, 3]}}
    many = Curves([sample(1, metrics={"0": {f"m{number}": 1.0 for number in range(100)}})], 1)
    assert (len(many.metrics), many.num_metrics_left_out) == (24, 76)


@pytest.mark.parametrize(
    "line",
    [
        from_json(Sample, {"memory_bytes": [1]}),
        sample(float("inf")),
        sample(3, memory_bytes="x", step=3, metrics=[1]),
        sample(3, memory_bytes=[None, "1", True], metrics={"x": {}, "7": {"a": 1}, "0": 3}),
        sample(3, memory_bytes=[10**400], metrics={"0": {"a": float("nan")}}),
    ],
)
def test_damaged_sample_makes_no_curve(line: Sample) -> None:
    curves = Curves([sample(1, memory_bytes=[5, 6]), line, sample(1, memory_bytes=[7, 7])], 2)
    assert [column[0] for column in curves.memory] == [5, 6]
    assert curves.seconds[:1] == [1]
    assert not any(value for by_rank in curves.metrics.values() for column in by_rank.values() for value in column)


def test_real_job() -> None:
    curves = Curves(RunDirectory(RUNS / "digits").read_lines(Sample), 4)
    chief = [rate for rate in curves.steps[0] if rate]
    assert 20 < min(chief) < max(chief) < 200
    assert all(0 <= (cores or 0) < 4 for column in curves.cores for cores in column)
    assert max(column[-1] or 0 for column in curves.memory) > 500e6
    assert set(curves.metrics) == {"loss"}


def test_many_tasks_of_a_role_are_one_line_with_a_range() -> None:
    names = [f"worker/{index}" for index in range(9)] + ["ps/0"]
    lines = make_lines(names, {rank: [float(rank), 1.0] for rank in range(10)})
    assert [line.name for line in lines] == ["9 workers (mean)", "ps/0"]
    assert (lines[0].values, lines[0].low, lines[0].high) == ([4, 1], [0, 1], [8, 1])


def test_single_value_is_drawn_as_a_dot() -> None:
    assert make_lines(["ps/0"], {0: [None]}) == []
    for unit, values in (("B", [None, 4.0]), ("", [-1e300, None])):
        chart = Chart("t", unit, [1.0, 2.0], make_lines(["ps/0"], {0: values}), 2)
        assert "h0.01" in draw_chart(chart).to_svg()
