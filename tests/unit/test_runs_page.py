"""The page of many runs: what is read from run directories, which values are best, colors, plots, links and escapes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tf4slurm.errors import SchemaVersionError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.metrics import choose_best, is_lower_better
from tf4slurm.reports.plots import Plot, draw_curve, is_logarithmic, make_axis, make_word_axis
from tf4slurm.reports.runs import MAX_POINTS_PER_CURVE, Run, label_runs, parse_number, read_run
from tf4slurm.reports.runs_page import (
    RunSet,
    choose_colors,
    choose_shades,
    count_states,
    make_columns,
    make_row,
    make_runs_page,
    plot_curves,
    plot_label,
)

RUNS = Path(__file__).parents[1] / "data" / "runs"
HOSTILE = "</script></title></style><script>evil()</script><img src=x onerror=evil()>\"'&\x00\u202e\ud800"
COMPLETED = ("COMPLETED", 0, "")


def make_run(number: int = 0, state: str = "COMPLETED", loss: float | None = None, **labels: str) -> Run:
    values = {} if loss is None else {"loss": loss}
    curves = {} if loss is None else {"loss": [(0.0, 2 * loss), (100.0, loss)]}
    return Run(f"sweep-{number}", labels, state, 0, "", 12.0, 100, values, values, curves)


class Page(HTMLParser):
    """The elements, attributes and text of a page; `rows` has the cells of the table of runs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)
        table = re.findall(r"(?s)<tr data-run=.*?</tr>", text)
        self.rows = [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in table]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute]


def write_metrics(
    directory: Path, task: str, entries: Sequence[Mapping[str, object]], attempt: int = 1
) -> RunDirectory:
    (directory / "metrics").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (directory / "metrics" / f"{task}.{attempt}.jsonl").write_text(lines)
    return RunDirectory(directory)


def entry(step: int | None = None, **metrics: float | None) -> dict[str, object]:
    return {"step": step, "time": 1e9, "metrics": metrics}


def read(directory: RunDirectory) -> Run:
    return read_run(directory, "run", {}, *COMPLETED)


# Reading


def test_run_of_a_real_job_has_its_result_and_metrics() -> None:
    run = read_run(RunDirectory(RUNS / "broken"), "broken", {"lr": "0.1"}, "FAILED", 1, "")
    assert (run.name, run.state, run.exit_code, run.labels) == ("broken", "FAILED", 1, {"lr": "0.1"})
    assert run.reason.startswith("ValueError: images of shape (64, 8, 8, 1) expected")
    assert (run.seconds, run.steps) == (27.969, 572)
    assert run.last == run.best == {"loss": pytest.approx(0.00348, abs=1e-5)}
    assert [step for step, _ in run.curves["loss"]] == [66, 286, 462, 572]
    assert run.run_directory == str(RUNS / "broken")


def test_running_job_has_steps_and_duration_of_its_status(tmp_path: Path) -> None:
    tasks = [{"task": "chief/0", "step": 40}, {"task": "ps/0"}, {"task": "worker/0", "step": 42}]
    (tmp_path / "status.json").write_text(json.dumps({"seconds": 5.5, "tasks": tasks}))
    run = read_run(RunDirectory(tmp_path), "run", {}, "RUNNING", None, "")
    assert (run.seconds, run.steps, run.exit_code, run.last) == (5.5, 42, None, {})


def test_job_without_run_directory_or_with_an_empty_one_has_no_values(tmp_path: Path) -> None:
    pending = read_run(None, "run", {"lr": "1"}, "PENDING", None, "Priority")
    assert pending == Run("run", {"lr": "1"}, "PENDING", None, "Priority")
    empty = read_run(RunDirectory(tmp_path), "run", {"lr": "1"}, "PENDING", None, "Priority")
    assert empty == dataclasses.replace(pending, run_directory=str(tmp_path))


@pytest.mark.parametrize(("given", "expected"), [({}, {"lr": "0.1"}), ({"lr": "9"}, {"lr": "9"})])
def test_labels_of_the_job_file_are_used_if_none_are_given(
    tmp_path: Path, given: dict[str, str], expected: dict[str, str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"labels": {"lr": "0.1"}}))
    assert read_run(RunDirectory(tmp_path), "run", given, *COMPLETED).labels == expected


def test_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"schema_version": 99}')
    with pytest.raises(SchemaVersionError):
        read(RunDirectory(tmp_path))


def test_metric_is_that_of_the_chief_then_worker_0_then_the_evaluator(tmp_path: Path) -> None:
    write_metrics(tmp_path, "evaluator-0", [entry(1, loss=30.0, accuracy=0.3, recall=0.3)])
    write_metrics(tmp_path, "worker-0", [entry(1, loss=20.0, accuracy=0.2)])
    write_metrics(tmp_path, "worker-1", [entry(1, other=9.0)])
    run = read(write_metrics(tmp_path, "chief-0", [entry(1, loss=10.0)]))
    assert run.last == {"loss": 10.0, "accuracy": 0.2, "recall": 0.3}
    shutil.rmtree(tmp_path / "metrics")
    assert read(write_metrics(tmp_path, "worker-3", [entry(1, other=9.0)])).last == {"other": 9.0}


def test_best_is_lowest_for_a_loss_and_highest_for_any_other_metric_also_within_merged_lines(tmp_path: Path) -> None:
    merged = {**entry(9, loss=2.0, lr=2.0), "low": {"loss": 0.5, "lr": 0.5}, "high": {"loss": 7.0, "lr": 7.0}}
    run = read(write_metrics(tmp_path, "chief-0", [entry(1, loss=1.0, lr=1.0), merged]))
    assert run.last == {"loss": 2.0, "lr": 2.0}
    assert run.best == {"loss": 0.5, "lr": 7.0}


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("val_loss", True),
        ("valLoss", True),
        ("train/MSE", True),
        ("mean_absolute_error", True),
        ("perplexity", True),
        ("RMSELoss", True),
        ("top5_accuracy", False),
        ("F1", False),
        ("lr", None),
        ("closses", None),
    ],
)
def test_words_of_a_name_decide_whether_lower_is_better(name: str, lower: bool | None) -> None:
    assert is_lower_better(name) is lower


@pytest.mark.parametrize(("name", "best"), [("loss", 1.0), ("accuracy", 3.0), ("lr", 3.0)])
def test_best_of_values_is_the_highest_unless_lower_is_better(name: str, best: float) -> None:
    assert choose_best(name, [2.0, 1.0, 3.0]) == best
    assert choose_best(name, []) is None


def test_last_value_is_nan_if_the_script_reported_nan_and_best_is_finite(tmp_path: Path) -> None:
    run = read(write_metrics(tmp_path, "chief-0", [entry(1, loss=1.0), entry(2, loss=3.0), entry(3, loss=None)]))
    assert math.isnan(run.last["loss"])
    assert run.best == {"loss": 1.0}
    assert run.curves == {"loss": [(1, 1.0), (2, 3.0)]}
    never = read(write_metrics(tmp_path, "chief-0", [entry(1, loss=None)]))
    assert (math.isnan(never.last["loss"]), never.best, never.curves) == (True, {}, {})


def test_repeated_steps_of_a_later_attempt_replace_earlier_ones(tmp_path: Path) -> None:
    write_metrics(tmp_path, "chief-0", [entry(n, loss=100.0 + n) for n in range(4)])
    run = read(write_metrics(tmp_path, "chief-0", [entry(n, loss=1.0 * n) for n in (2, 3, 4)], attempt=2))
    assert run.curves["loss"] == [(0, 100.0), (1, 101.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert (run.last, run.steps) == ({"loss": 4.0}, 4)


def test_metric_without_steps_has_no_curve(tmp_path: Path) -> None:
    run = read(write_metrics(tmp_path, "chief-0", [entry(loss=3.0), entry(loss=2.0)]))
    assert (run.last, run.best, run.curves, run.steps) == ({"loss": 2.0}, {"loss": 2.0}, {}, None)


def test_damaged_lines_and_values_are_skipped(tmp_path: Path) -> None:
    run = write_metrics(tmp_path, "chief-0", [entry(1, loss=1.0), entry(3, loss=3.0)])
    path = tmp_path / "metrics" / "chief-0.1.jsonl"
    bad = ['{"step":', "[1]", '{"metrics": 3}', '{"metrics": {"loss": "x"}}', '{"metrics": {"loss": 1e300}}', "\xff"]
    bad += ['{"step": 2, "metrics": {"loss": NaN}}', f'{{"step": 2, "metrics": {{"loss": 1{"0" * 400}}}}}', "3", '"x"']
    bad += ['{"step": true, "metrics": {"loss": 2.0}, "low": 4}', "[" * 100_000]
    path.write_text("\n".join([*bad, path.read_text()]))
    assert read(run).curves["loss"] == [(1, 1.0), (3, 3.0)]
    assert read(run).best == {"loss": 1.0}


@pytest.mark.parametrize("count", [1, 199, 200, 201, 400, 2000, 2001])
def test_long_curve_is_thinned_to_200_points_with_its_ends_and_means(tmp_path: Path, count: int) -> None:
    run = read(write_metrics(tmp_path, "chief-0", [entry(n, loss=1.0 * n) for n in range(count)]))
    curve = run.curves["loss"]
    assert min(count, MAX_POINTS_PER_CURVE // 2) <= len(curve) <= MAX_POINTS_PER_CURVE
    assert (curve[0], curve[-1]) == ((0, 0.0), (count - 1, count - 1.0))
    assert all(value == step for step, value in curve)
    assert [step for step, _ in curve] == sorted({step for step, _ in curve})


def test_200_runs_of_2000_points_have_200_points_a_curve_on_a_page_of_moderate_size(tmp_path: Path) -> None:
    runs = []
    lines = [entry(n, loss=2.0 / (n + 1), accuracy=n / 2000) for n in range(2000)]
    directory = write_metrics(tmp_path, "chief-0", lines)
    for number in range(200):
        runs.append(read_run(directory, f"sweep-{number}", {"lr": str(0.1 / (1 + number % 4))}, *COMPLETED))
    assert {len(curve) for run in runs for curve in run.curves.values()} <= {*range(150, 201)}
    text = make_runs_page("sweep", runs)
    paths = re.findall(r'<path data-run="\d+" class="[^"]*" d="([^"]*)"', text)
    curves = [path for path in paths if not path.endswith("h0")]
    assert len(curves) == 400
    assert all(150 <= path.count("L") + 1 <= 200 for path in curves)
    assert len(text) < 2_000_000


# Labels


def test_runs_without_labels_are_labeled_by_what_differs(tmp_path: Path) -> None:
    runs = []
    for number, lr in enumerate(("0.1", "-0.2")):
        directory = tmp_path / str(number)
        directory.mkdir()
        command = ["python", "train.py", "--lr", lr, f"--data=set{number}", "--fast"][: 6 - number]
        options = {"name": f"run-{number}", "limits": {"attempts": number + 1, "restarts": 3}, "ports": [1, 2]}
        (directory / "job.json").write_text(json.dumps({"command": command, "options": options}))
        runs.append(read(RunDirectory(directory)))
    first, second = label_runs(runs)
    assert first.labels == {"lr": "0.1", "data": "set0", "fast": "yes", "limits attempts": "1"}
    assert second.labels == {"lr": "-0.2", "data": "set1", "limits attempts": "2"}
    assert label_runs([first, dataclasses.replace(second, labels={})])[1].labels == {}


def test_at_most_six_differences_become_labels() -> None:
    runs = [Run("a", {}, "", arguments={f"x{n}": value for n in range(9)}) for value in "ab"]
    assert [*label_runs(runs)[0].labels] == [f"x{n}" for n in range(6)]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 0.001), (" 4 ", 4.0), ("-2", -2.0), ("adam", None), ("nan", None), ("inf", None), ("1_0", None)],
)
def test_number_is_a_finite_decimal_number(text: str, number: float | None) -> None:
    assert parse_number(text) == number


# The table


def test_states_are_counted() -> None:
    states = ["COMPLETED"] * 10 + ["FAILED", "RUNNING"]
    runs = [make_run(state=state) for state in states]
    assert count_states(runs) == "12 runs: 10 completed, 1 failed, 1 running"
    assert count_states(runs[:1]) == "1 run: 1 completed"
    assert count_states([]) == "0 runs"


def test_table_has_labels_outcome_and_metrics_as_sortable_values() -> None:
    failed = Run("b", {"lr": "0.01", "opt": "sgd"}, "FAILED", 3, "lost", None, None, {"loss": math.nan}, {"loss": 9.0})
    found = RunSet([make_run(1, loss=0.123456, lr="1e-1", opt="adam"), failed, make_run(2)])
    columns = [(column.title, column.is_number) for column in make_columns(found)]
    assert columns == [
        ("run", False),
        ("lr", True),
        ("opt", False),
        ("outcome (exit code)", False),
        ("steps", True),
        ("loss, last", True),
        ("loss, best", True),
        ("duration", True),
    ]
    rows = [[(cell.text, cell.value) for cell in make_row(found, number)] for number in range(3)]
    assert rows[0][1:] == [
        ("1e-1", 0.1),
        ("adam", "adam"),
        ("COMPLETED (0)", "COMPLETED (0)"),
        ("100", 100),
        ("0.123", 0.123456),
        ("0.123", 0.123456),
        ("12 s", 12.0),
    ]
    assert rows[1][3:] == [("FAILED (3)", "FAILED (3)"), ("–", None), ("NaN", None), ("9", 9.0), ("–", None)]
    assert rows[2][1:3] == [("–", None), ("–", None)]
    bold = [[cell.text for cell in make_row(found, n) if cell.style == "top"] for n in range(3)]
    assert bold == [["0.123"], [], []]


def test_missing_values_have_no_value_to_sort_by_on_the_page() -> None:
    page = make_runs_page("sweep", [make_run(1, loss=0.5), make_run(2)])
    assert '<td data-value="0.5" title="0.5"><bdi>0.5</bdi></td>' in page
    assert page.count("<td><bdi>–</bdi></td>") == 2


def test_four_metrics_of_the_most_runs_are_chosen() -> None:
    runs = [Run("", {}, "", last=dict.fromkeys(names, 1.0)) for names in ("abcdef", "bcdef", "cdef", "f")]
    assert RunSet(runs).metrics == ["f", "c", "d", "e"]


def test_run_is_linked_to_its_report_if_that_exists(tmp_path: Path) -> None:
    for name in ("with report", "without"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "with report" / "report.html").touch()
    directories = [str(tmp_path / "runs" / name) for name in ("with report", "without", "lost")]
    runs = [dataclasses.replace(make_run(n), run_directory=path) for n, path in enumerate(directories)]
    links = Page(make_runs_page("sweep", runs, tmp_path / "pages")).values("href")
    assert links == ["data:,", "../runs/with%20report/report.html"]
    assert Page(make_runs_page("sweep", runs)).values("href") == ["data:,"]


def test_reasons_of_runs_that_have_not_completed_are_shown() -> None:
    runs = [Run(f"r{n}", {}, "FAILED", 1, f"reason {n}.") for n in range(22)]
    words = Page(make_runs_page("sweep", [*runs, Run("good", {}, "COMPLETED", 0, "All is well.")])).words
    assert "reason 19." in words
    assert "reason 20." not in words
    assert "and 2 more" in words
    assert "All is well." not in words


# Colors and plots


def test_each_of_twelve_runs_has_a_legend_entry_and_a_style_of_its_own() -> None:
    colors = choose_colors(RunSet([make_run(n, lr=str(n)) for n in range(12)]))
    assert len({*colors.styles}) == 12
    assert colors.legend[7] == ("c1 dashed", "sweep-7: lr 7")


def test_color_of_many_runs_shows_the_first_label_that_varies() -> None:
    runs = [make_run(n, same="1", lr=str(10.0 ** -(n % 3))) for n in range(30)]
    colors = choose_colors(RunSet([*runs, make_run(30, same="1")]))
    assert colors.title == "lr"
    assert colors.legend == [("g0", "0.01"), ("g4", "0.1"), ("g7", "1"), ("other", "other or none")]
    assert [*colors.styles[:3], colors.styles[30]] == ["g7", "g4", "g0", "other"]


def test_color_of_many_runs_shows_the_six_most_frequent_words() -> None:
    words = ["adam"] * 9 + ["sgd"] * 5 + [*"abcdef"]
    colors = choose_colors(RunSet([make_run(n, opt=word) for n, word in enumerate(words)]))
    assert [text for _, text in colors.legend] == ["adam", "sgd", "a", "b", "c", "d", "other or none"]
    assert [colors.styles[n] for n in (0, 9, 14, 18)] == ["c0", "c1", "c2", "other"]


def test_many_runs_without_labels_have_one_color() -> None:
    colors = choose_colors(RunSet([make_run(n) for n in range(13)]))
    assert ({*colors.styles}, colors.legend) == ({"c0"}, [])


def test_shades_follow_the_size_of_the_values() -> None:
    assert choose_shades([5.0]) == {5.0: 0}
    assert choose_shades([3.0, 1.0]) == {1.0: 0, 3.0: 7}
    many = choose_shades([1.0 * n for n in range(1, 17)])
    assert ({*many.values()}, many[1.0], many[16.0]) == ({*range(8)}, 0, 7)
    decades = choose_shades([10.0**n for n in range(16)])
    assert [decades[10.0**n] for n in range(16)] == sorted([*range(8)] * 2)


def test_curves_are_drawn_over_steps_and_named() -> None:
    found = RunSet([make_run(0, loss=1.0, lr="3"), make_run(1, loss=2.0), make_run(2)])
    plot = plot_curves(found, "loss", choose_colors(found))
    assert plot is not None
    assert [mark.path for mark in plot.marks] == ["M0 654L1000 963", "M0 37L1000 654"]
    assert plot.marks[0].text == "sweep-0: lr 3; last 1, best 1"
    assert plot.note == "1 run without steps of this metric is not drawn."
    assert plot.scales == "steps"
    assert plot.x.ticks == [(0, "0"), (20, "20"), (40, "40"), (60, "60"), (80, "80"), (100, "100")]
    assert plot_curves(found, "accuracy", choose_colors(found)) is None


def scatter(label: str, runs: Sequence[Run]) -> Plot | None:
    found = RunSet(runs)
    return plot_label(found, label, "loss", choose_colors(found))


def test_label_of_numbers_over_two_decades_has_a_log_axis() -> None:
    plot = scatter("lr", [make_run(n, loss=1.0 + n, lr=lr) for n, lr in enumerate(("0.001", "0.01", "0.1"))])
    assert plot is not None
    assert plot.scales == "log scale of x"
    assert [label for _, label in plot.x.ticks] == ["0.001", "0.01", "0.1"]
    assert [mark.path for mark in plot.marks] == ["M37 963h0", "M500 500h0", "M963 37h0"]
    assert plot.marks[0].text == "sweep-0: lr 0.001; best loss 1"


def test_label_of_words_has_a_position_for_each_word() -> None:
    plot = scatter("opt", [make_run(n, loss=1.0 + n, opt=word) for n, word in enumerate(("sgd", "adam", "sgd"))])
    assert plot is not None
    assert plot.x.ticks == [(25, "adam"), (75, "sgd")]
    assert [mark.path.split()[0] for mark in plot.marks] == ["M750", "M250", "M750"]


@pytest.mark.parametrize(
    "labels", [["1", "1", "1"], ["1", "2"], [f"word {n}" for n in range(13)]], ids=["constant", "two runs", "13 words"]
)
def test_label_without_a_readable_plot_has_none(labels: Sequence[str]) -> None:
    assert scatter("x", [make_run(n, loss=1.0, x=value) for n, value in enumerate(labels)]) is None


def test_runs_that_lack_the_label_or_the_metric_are_counted_below_the_plot() -> None:
    runs = [make_run(n, loss=1.0 + n, x=str(n)) for n in range(3)]
    plot = scatter("x", [*runs, make_run(3, loss=1.0), make_run(4, x="9")])
    assert plot is not None
    assert plot.note == "2 runs without a value of loss or x are not drawn."
    assert len(plot.marks) == 3


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([0.001, 0.1], True), ([1.0, 99.0], False), ([0.0, 1000.0], False), ([-1.0, 1000.0], False), ([5.0], False)],
)
def test_axis_is_logarithmic_for_positive_values_over_two_decades(values: list[float], is_log: bool) -> None:
    assert is_logarithmic(values) is is_log
    assert make_axis(values).is_log is is_log


@pytest.mark.parametrize(
    "values",
    [[0.0], [3.0, 3.0], [-7.0], [1e-9, 2e-9], [1e14, -1e14], [1e-12, 1e14], [0.1234567, 0.1234568], [5e-320, 1.0]],
)
def test_axis_shows_all_values_and_few_ticks(values: list[float]) -> None:
    axis = make_axis(values)
    assert all(0 <= axis.percent(value) <= 100 for value in values)
    assert all(-0.01 <= at <= 100.01 for at, _ in axis.ticks)
    assert 1 <= len(axis.ticks) <= 6
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


def test_curve_of_one_point_is_a_dot() -> None:
    axis = make_word_axis(["a"])
    assert draw_curve([(0.5, 0.5)], axis, axis) == "M500 500h0"


# The page


def test_page_escapes_hostile_texts() -> None:
    labels = {HOSTILE: HOSTILE, "w" * 500: "z" * 3000, "שלום": "مرحبا"}
    runs = [
        Run(HOSTILE, {**labels, "x": str(n)}, HOSTILE, 1, HOSTILE, 1.0, n, {HOSTILE: 1.0}, {HOSTILE: 1.0 + n})
        for n in range(3)
    ]
    usual = [make_run(n, loss=1.0, a="a", b="b", c="c", x=str(n)) for n in range(3)]
    runs = [dataclasses.replace(run, curves={HOSTILE: [(0.0, 1.0)]}) for run in runs]
    usual[0] = dataclasses.replace(usual[0], state="FAILED", reason="lost")
    text = make_runs_page(HOSTILE, runs)
    page = Page(text)
    assert page.elements == Page(make_runs_page("usual", usual)).elements
    assert page.words.count("<script>evil()</script>") > 10
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "\u202e" not in text
    assert "z" * 200 not in page.words
    assert "<bdi>مرحبا</bdi>" in text


def test_page_loads_nothing_and_works_without_values() -> None:
    for runs in ([], [Run("a", {}, "PENDING")], [make_run(n, loss=1.0 * n, lr=str(n)) for n in range(3)]):
        text = make_runs_page("sweep", runs).replace("https://github.com/leeoniya/uPlot", "", 1)
        assert not re.search(r"url\(|@import|https?://", text)
        assert not Page(text).elements & {"img", "iframe", "object"}
        assert len(Page(text).rows) == len(runs)


def test_page_states_the_rule_for_the_best_value_and_describes_each_plot() -> None:
    page = Page(make_runs_page("sweep", [make_run(n, loss=1.0 + n, lr=str(n)) for n in range(3)]))
    assert "Best is the lowest value of a metric whose name has one of the words loss, error," in page.words
    descriptions = page.values("aria-label")
    assert len(descriptions) == 2
    assert descriptions[0].startswith("loss over steps, 3 runs, from ")
    assert descriptions[1].startswith("Best loss against lr, 3 runs, from ")


def test_page_of_two_jobs_has_their_comparison(tmp_path: Path) -> None:
    runs = []
    for name in ("digits", "broken"):
        directory = RunDirectory(Path(shutil.copytree(RUNS / name, tmp_path / name)))
        runs.append(read_run(directory, name, {}, *COMPLETED))
    text = make_runs_page("digits and broken", runs, tmp_path)
    facts = {name: (a, b) for name, a, b in re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>", text)}
    assert facts["duration"] == ("55 s", "28 s")
    assert facts["command"] == ("python train.py --epochs 150 --seed 1", "python train_broken.py --epochs 60")
    charts = [json.loads(value) for value in Page(text).values("data-chart")]
    assert [line["name"] for table in charts[0]["tables"] for line in table["lines"]] == [
        "digits: chief/0",
        "broken: chief/0",
    ]
    assert "Metrics of all runs" not in text
    assert [row[0] for row in Page(text).rows] == ["digits", "broken"]
