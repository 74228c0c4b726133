"""Curves from samples: rates of counters, thinning, missing values; and the lines of charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Sample
from tf4slurm.reports.charts import Chart, Line, describe_values, make_lines, make_point_lines
from tf4slurm.reports.metrics import MetricPoint, MetricSeries
from tf4slurm.reports.summary import MAX_POINTS, Curves, summarize_usage
from tf4slurm.reports.timeline import Timeline, TimelineEvent
from tf4slurm.slurm.parsing import SlurmResources
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


def test_means_count_each_sample_for_its_time() -> None:
    measured = ((0, 0.0, 0), (10, 10.0, 40), (15, 15.0, 50), (16, 21.0, 56))  # seconds, processor seconds, step
    samples = [sample(at, cpu_seconds=[used], step=[step]) for at, used, step in measured]
    usage = summarize_usage(["chief/0"], Curves(samples, 1), Timeline(0, 21, (), (), (), None), SlurmResources())
    assert (usage.tasks[0].cores, usage.tasks[0].steps_per_second) == (1.3125, 3.5)  # 21 and 56 in 16 s


def test_mean_steps_per_second_are_those_from_the_first_step_to_the_outcome() -> None:
    steps = ((0, 0), (10, 100), (20, 140), (40, 240), (50, 340))
    samples = [sample(at, step=[step, None]) for at, step in steps]
    timeline = Timeline(0, 50, (), (TimelineEvent(45, "outcome", ""),), (), 15)
    usage = summarize_usage(["chief/0", "ps/0"], Curves(samples, 2), timeline, SlurmResources())
    assert [task.steps_per_second for task in usage.tasks] == [pytest.approx(14 / 3), None]  # 140 from 10 s to 40 s


def test_counter_that_falls_was_restarted() -> None:
    moved = [10, 20, None, 4, 8]
    curves = Curves([sample(10 * number, sent_bytes=[value]) for number, value in enumerate(moved)], 1)
    assert curves.sent == [[None, 1, None, None, 0.4]]
    assert (curves.total_sent, curves.total_received) == ([28], [None])


def test_many_samples_are_thinned_out_and_counted() -> None:
    peak = [sample(number, memory_bytes=[9 if number == 501 else 1], step=[number]) for number in range(1000)]
    curves = Curves(peak, 1)
    assert len(curves.seconds) == 200 <= MAX_POINTS
    assert curves.seconds[-1] == 999
    assert curves.num_samples_left_out == 800
    assert set(curves.steps[0]) == {None, 1.0}
    assert (curves.peak_memory, curves.peak_job_memory) == ([9], 9)  # also of samples that are not drawn


@pytest.mark.parametrize(
    "line",
    [
        from_json(Sample, {"memory_bytes": [1]}),
        sample(float("inf")),
        sample(3, memory_bytes="x", step=3),
        sample(3, memory_bytes=[None, "1", True]),
        sample(3, memory_bytes=[10**400]),
    ],
)
def test_damaged_sample_makes_no_curve(line: Sample) -> None:
    curves = Curves([sample(1, memory_bytes=[5, 6]), line, sample(1, memory_bytes=[7, 7])], 2)
    assert [column[0] for column in curves.memory] == [5, 6]
    assert curves.seconds[:1] == [1]


def test_curves_of_a_real_job() -> None:
    curves = Curves(RunDirectory(RUNS / "broken").read_lines(Sample), 4)
    steps = [110, 88, 68.75]  # 66 at 22.37 s, 286 at 24.37 s, 462 at 26.37 s, 572 at 27.97 s
    assert curves.steps[0] == [*[None] * 11, *map(pytest.approx, steps)]
    assert curves.steps[1:] == [[None] * 14] * 3
    # 0.3 at 4.3 s, 1.57 at 10.33 s, 2.89 at 14.34 s, 4.28 at 20.36 s, 5.5 at 24.37 s
    cores = [*[0.21061] * 3, *[0.32918] * 2, *[0.2309] * 3, *[0.30424] * 2]
    assert curves.cores[0] == [None, None, *(pytest.approx(each, abs=1e-5) for each in cores), None, None]
    assert curves.memory[0][-3:] == [651_501_568] * 3
    assert (curves.peak_memory[0], curves.total_sent[1], curves.total_received[1]) == (
        651_501_568,
        22_194_977,
        1_608_488,
    )


def test_many_tasks_of_a_role_are_one_line_with_a_band() -> None:
    names = [*(f"worker/{index}" for index in range(9)), "ps/0"]
    lines = make_lines([1.0, 2.0], {name: [float(rank), 1.0] for rank, name in enumerate(names)})
    assert [line.name for line in lines] == ["9 workers (mean)", "ps/0"]
    assert (lines[0].values, lines[0].low, lines[0].high) == ([4, 1], [0, 1], [8, 1])


def test_points_of_many_tasks_are_averaged_in_bins() -> None:
    points = {f"worker/{index}": [(step + 0.0, index + 0.0) * 2 for step in range(0, 5000, 10)] for index in range(9)}
    points = {task: [(x, y, y, y) for x, y, *_ in each] for task, each in points.items()}
    (line,) = make_point_lines(points)
    assert (line.name, len(line.xs)) == ("9 workers (mean)", MAX_POINTS)
    assert set(line.values) == {4}
    assert (set(line.low or ()), set(line.high or ())) == ({0}, {8})
    (first, *_) = lines = make_point_lines({"ps/0": [(1.0, 2.0, 2.0, 2.0)], **points}, max_lines=9)
    assert len(lines) == 10
    assert (first.xs, first.values, first.low) == ([1], [2], None)


def test_long_line_is_averaged_with_a_band_and_ends_with_the_last_value() -> None:
    (line,) = make_point_lines({"chief/0": [(step, step % 2, step % 2, step % 2) for step in range(24_000)]})
    assert len(line.xs) == MAX_POINTS + 1
    assert line.values[5] == pytest.approx(0.5, abs=0.01)
    assert (line.low, line.high) == ([*[0] * MAX_POINTS, 1], [1] * (MAX_POINTS + 1))
    assert (line.xs[-1], line.values[-1]) == (23_999, 1)


def metric(name: str, task: str, *values: tuple[int | None, float | None]) -> MetricSeries:
    return MetricSeries(name, task, [MetricPoint(at, step, y, y, y) for at, (step, y) in enumerate(values)])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("val_loss", "last 3, best 0.5 at step 2,000"),
        ("accuracy", "last 3, best 4 at step 1,000"),
        ("queue", "last 3, lowest 0.5 at step 2,000, highest 4 at step 1,000"),
    ],
)
def test_last_and_best_value_are_named(name: str, words: str) -> None:
    series = [
        metric(name, "worker/0", (1000, 4.0), (2000, 0.5), (3000, None)),
        metric(name, "worker/1", *[(5, 3.0)] * 9),
    ]
    assert describe_values(series) == words
    assert describe_values([metric(name, "worker/0", (1, None))]) == ""
    assert describe_values([metric("loss", "worker/0", (None, 1.0))]) == "last 1, best 1"


def test_json_of_a_chart_has_a_table_for_each_x_axis() -> None:
    seconds = [1.0, 2.0]
    lines = [*make_lines(seconds, {"ps/0": [None, 4.123456789], "worker/0": [float("inf"), 1e-300]})]
    lines += make_point_lines({"chief/0": [(7.0, 1.0, 0.5, 2.0)]})
    content = json.loads(Chart("t", "B", lines, 2.0).to_json())
    assert [table["xs"] for table in content["tables"]] == [[1, 2], [7]]
    assert [line["ys"] for line in content["tables"][0]["lines"]] == [[None, 4.12346], [None, 1e-300]]
    assert (content["tables"][1]["lines"][0]["low"], content["end"]) == ([0.5], 2)
    assert make_lines(seconds, {"ps/0": [None, None]}) == make_point_lines({"ps/0": []}) == []


@pytest.mark.parametrize(
    ("values", "has_curve"),
    [([], False), ([1.0], False), ([1.0, None], False), ([1.0, float("inf")], False), ([1.0, None, 2.0], True)],
)
def test_chart_has_a_curve_if_a_line_has_two_values(values: list[float | None], has_curve: bool) -> None:
    alone = Line("ps/0", "ps", 0, [0.0], [1.0])
    lines = [alone, Line("chief/0", "chief", 0, [*range(len(values))], values)]
    assert Chart("t", "", lines).has_curve is has_curve
    assert not Chart("t", "", [alone, alone]).has_curve
