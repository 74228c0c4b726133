"""The metrics of a job for its report: series by name and task, best values, steps per second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.metrics import MetricPoint, ReportedMetrics
from tf4slurm.reports.summary import JobSummary


def entry(seconds: float, step: int | None = None, **metrics: float | None) -> StepMetrics:
    return StepMetrics(step, 1000.0 + seconds, metrics=metrics)


def collect(entries: Mapping[tuple[str, int], list[StepMetrics]], *names: str) -> ReportedMetrics:
    return ReportedMetrics(entries, names or ("chief/0",), 1000.0)


def test_series_have_every_point_of_all_attempts_in_the_order_of_time() -> None:
    entries = {
        ("worker/1", 1): [entry(9, 1, loss=5.0)],
        ("chief/0", 2): [entry(20, 3, loss=1.0, accuracy=0.5)],
        ("chief/0", 1): [entry(5, 4, loss=3.0), entry(6, loss=2.0)],
        ("stranger/0", 1): [entry(5, 4, loss=3.0)],
    }
    found = collect(entries, "chief/0", "worker/1").series
    assert list(found) == ["loss", "accuracy"]
    assert list(found["loss"]) == ["chief/0", "worker/1"]
    assert found["loss"]["chief/0"].points == [
        MetricPoint(5, 4, 3.0, 3.0, 3.0),
        MetricPoint(6, None, 2.0, 2.0, 2.0),
        MetricPoint(20, 3, 1.0, 1.0, 1.0, attempt=2),
    ]


def test_extremes_of_merged_reports_are_found() -> None:
    merged = StepMetrics(8, 1008.0, 8, {"loss": 2.0}, {"loss": 0.5}, {"loss": 7.0})
    series = collect({("chief/0", 1): [entry(1, 1, loss=1.0), merged]}).series["loss"]["chief/0"]
    assert (series.lowest, series.highest, series.last) == (series.points[1],) * 3
    assert series.best == 0.5


@pytest.mark.parametrize(
    ("name", "best"),
    [("val_loss", 1.0), ("train/mse", 1.0), ("top5_accuracy", 3.0), ("F1", 3.0), ("lr", None), ("closses", None)],
)
def test_best_value_is_lowest_for_losses_and_highest_for_scores(name: str, best: float | None) -> None:
    entries = [entry(at, at, **{name: value}) for at, value in enumerate([2.0, 1.0, None, 3.0, 2.0])]
    assert collect({("chief/0", 1): entries}).series[name]["chief/0"].best == best


def test_last_value_is_the_last_finite_number_and_the_first_other_one_is_noted() -> None:
    metrics = collect({("chief/0", 1): [entry(1, 1, loss=0.5), entry(2, 2, loss=None), entry(3, 3, loss=None)]})
    last = metrics.series["loss"]["chief/0"].last
    assert last is not None
    assert (last.step, last.value) == (1, 0.5)
    assert metrics.not_finite == {("loss", "chief/0"): 2.0}
    nothing = collect({("chief/0", 1): [entry(1, 1, loss=None)]}).series["loss"]["chief/0"]
    assert (nothing.last, nothing.lowest, nothing.highest, nothing.best) == (None, None, None, None)


def test_step_rates_are_means_over_a_second_and_begin_again_after_a_restart() -> None:
    steps = [(0.0, 0), (0.4, 2), (1.0, 5), (1.5, 6), (3.0, 9), (4.0, 2), (6.0, 3), (6.5, 3)]
    metrics = collect({("chief/0", 1): [entry(at, step) for at, step in steps]})
    assert [(point.seconds, point.step, point.value) for point in metrics.step_rates["chief/0"]] == [
        (1.5, 6, pytest.approx(4 / 1.1)),  # from 0.4 s on, the second report
        (3.0, 9, 2.0),
        (6.0, 3, 0.5),  # the only two reports after the restart
    ]
    assert metrics.series == {}
    many = collect({("chief/0", 1): [entry(at, 10 * at) for at in range(10_000)]}).step_rates["chief/0"]
    assert len(many) <= 240
    assert {point.value for point in many} == {10.0}
    assert collect({("chief/0", 1): [entry(1, 1)]}).step_rates == {}


def test_step_rates_begin_again_with_a_new_attempt_whose_steps_are_higher() -> None:
    entries = {("chief/0", 1): [entry(0, 0), entry(2, 8)], ("chief/0", 2): [entry(12, 28), entry(16, 30)]}
    rates = collect(entries).step_rates["chief/0"]
    assert [(point.seconds, point.value, point.attempt) for point in rates] == [(2.0, 4.0, 1), (16.0, 0.5, 2)]


def test_metrics_beyond_the_limit_are_counted() -> None:
    metrics = collect({("chief/0", 1): [entry(1, 1, **{f"m{number}": 1.0 for number in range(100)})]})
    assert (len(metrics.series), metrics.num_metrics_left_out) == (24, 76)


@pytest.mark.parametrize(
    "lines",
    ["", "[]\n3\n", '{"time": "noon", "metrics": {"loss": 1}}', '{"time": 1005', '{"metrics": {"loss": 1}}'],
)
def test_damaged_lines_are_left_out(tmp_path: Path, lines: str) -> None:
    (tmp_path / "metrics").mkdir()
    whole = '{"step": 1, "time": 1007.5, "metrics": {"loss": 2}}\n'
    (tmp_path / "metrics" / "data-worker-0.2.jsonl").write_text(whole + lines)
    (tmp_path / "metrics" / "chief-0.x.jsonl").write_text(whole)
    (tmp_path / "metrics" / "chief-0.1.jsonl.draft").write_text(whole)
    (tmp_path / "events.jsonl").write_text(
        '{"time": 1001.5, "seconds": 1.5, "kind": "started", "task": "data-worker/0"}'
    )
    series = JobSummary(RunDirectory(tmp_path)).metrics.series
    assert series["loss"]["data-worker/0"].points == [MetricPoint(6 + 1.5, 1, 2, 2, 2, attempt=2)]


def test_job_without_reports_has_no_metrics(tmp_path: Path) -> None:
    metrics: Any = JobSummary(RunDirectory(tmp_path)).metrics
    assert (metrics.series, metrics.step_rates, metrics.not_finite, metrics.num_metrics_left_out) == ({}, {}, {}, 0)
