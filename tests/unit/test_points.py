"""Grids, points, labels and elements of job arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.submissions import job_of
from tf4slurm.errors import CommandError, OptionError
from tf4slurm.launch.checks import check_command
from tf4slurm.slurm.job_id import MAX_INDEX
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.points import (
    ArrayElement,
    LogUniform,
    Uniform,
    fill_point,
    format_labels,
    make_points,
    parse_array,
    parse_grid,
    parse_labels,
    random_points,
)
from tf4slurm.submission.batch_script import make_sbatch_options, make_script

TRAIN = ("--", "python", "train.py")
WORKER = ("--workers", "1")


@pytest.mark.parametrize(
    ("texts", "grid"),
    [
        ((), {}),
        (("lr=0.1,0.01",), {"lr": ("0.1", "0.01")}),
        (("units=64", "lr=1"), {"units": ("64",), "lr": ("1",)}),
        (('layers="1,2",3',), {"layers": ("1,2", "3")}),
        (('text="","a ""b"""," c "',), {"text": ("", 'a "b"', " c ")}),
        (("learning-rate=a=b",), {"learning-rate": ("a=b",)}),
        (('json={"a":1},it\'s "two"',), {"json": ('{"a":1}', 'it\'s "two"')}),
        (("text=two\nlines,\udcff",), {"text": ("two\nlines", "\udcff")}),
        (("_x9=-1",), {"_x9": ("-1",)}),
    ],
)
def test_grid_is_parsed(texts: tuple[str, ...], grid: dict[str, tuple[str, ...]]) -> None:
    assert parse_grid(texts) == grid
    assert list(parse_grid(texts)) == list(grid)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("lr",), "expected NAME=VALUE,VALUE"),
        (("lr=",), "has no values"),
        (("lr=1,",), "expected a value after the last comma"),
        (("lr=1,,2",), "expected a value at ',2'"),
        (("lr=1, 2",), "expected a value at ' 2'"),
        (('lr="1,2',), "expected a value at '\"1,2'"),
        (('lr="1"2',), "expected a value at '\"1\"2'"),
        (("lr=1", "lr=2"), "has 'lr' twice"),
        (("lr=1,2,1",), "has the value '1' twice"),
        (('lr=1,"1"',), "has the value '1' twice"),
        (("=1",), "'' is not the name of an argument"),
        (("--lr=1",), "'--lr' is not the name"),
        (("l r=1",), "'l r' is not the name"),
        (("é=1",), "'é' is not the name"),
        (("1lr=1",), "'1lr' is not the name"),
        (("ps_hosts=1",), "{ps_hosts} is filled in for each task"),
        (("task_index=1",), "{task_index} is filled in for each task"),
    ],
)
def test_invalid_grid_is_refused(texts: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_grid(texts)
    assert words in str(refused.value)
    assert refused.value.option == "grid"


def test_last_name_of_grid_varies_fastest() -> None:
    points = make_points({"lr": (0.1, 1e-5), "units": [32, "64"], "bias": [True]})
    assert points == (
        {"lr": "0.1", "units": "32", "bias": "True"},
        {"lr": "0.1", "units": "64", "bias": "True"},
        {"lr": "1e-05", "units": "32", "bias": "True"},
        {"lr": "1e-05", "units": "64", "bias": "True"},
    )
    assert [list(point) for point in points] == [["lr", "units", "bias"]] * 4


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({}, "at least one"),
        ({"lr": ()}, "one or more values"),
        ({"lr": "0.1"}, "one or more values"),
        ({"l r": (1,)}, "'l r' is not the name"),
        ({"worker_hosts": (1,)}, "{worker_hosts} is filled in"),
        ({3: (1,)}, "3 is not the name"),
        (dict.fromkeys("abcdefg", range(10)), "has 10000000 combinations"),
    ],
)
def test_invalid_values_of_make_points_are_refused(grid: dict[Any, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_points(grid)


def test_random_points_are_in_their_space_and_repeatable() -> None:
    space: Mapping[str, Sequence[object] | Uniform | LogUniform]
    space = {"lr": LogUniform(1e-5, 1e-1), "momentum": Uniform(0.5, 0.9), "units": range(32, 34), "kind": ["a", "b"]}
    points = random_points(space, 200, seed=3)
    assert points == random_points(space, 200, seed=3)
    assert points != random_points(space, 200, seed=4)
    assert points[:10] == random_points(space, 10, seed=3)
    assert {point["units"] for point in points} == {"32", "33"}
    assert {point["kind"] for point in points} == {"a", "b"}
    assert all(0.5 <= float(point["momentum"]) <= 0.9 for point in points)
    logarithms = [math.log10(float(point["lr"])) for point in points]
    assert all(-5 <= each <= -1 for each in logarithms)
    assert 60 < sum(each < -3 for each in logarithms) < 140


def test_quantiles_of_uniform_and_log_uniform() -> None:
    assert [Uniform(2, 4).at(fraction) for fraction in (0, 0.5, 1)] == [2, 3, 4]
    assert [LogUniform(1, 100).at(fraction) for fraction in (0, 0.5, 1)] == pytest.approx([1, 10, 100])


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (Uniform, 1, 1),
        (Uniform, 2, 1),
        (Uniform, math.nan, 1),
        (Uniform, -math.inf, 1),
        (Uniform, 0, math.inf),
        (LogUniform, 0, 1),
        (LogUniform, -1, 1),
        (LogUniform, 1, math.inf),
    ],
)
def test_invalid_bounds_are_refused(kind: type[Uniform | LogUniform], low: float, high: float) -> None:
    with pytest.raises(OptionError, match="the lower one first"):
        kind(low, high)


@pytest.mark.parametrize(
    ("space", "number"), [({}, 1), ({"lr": []}, 1), ({"lr": "ab"}, 1), ({"lr": [1]}, 0), ({"ps_hosts": [1]}, 1)]
)
def test_invalid_random_points_are_refused(space: dict[str, Any], number: int) -> None:
    with pytest.raises(OptionError):
        random_points(space, number, seed=1)


def test_space_of_random_points_may_have_more_points_than_an_array() -> None:
    points = random_points({f"p{number}": range(10) for number in range(10)}, 3, seed=1)
    assert len(points) == 3


@pytest.mark.parametrize(
    ("command", "point", "filled"),
    [
        (("a", "{lr}"), {}, ("a", "{lr}")),
        (("a", "b"), {"lr": "1", "units": "2"}, ("a", "b", "--lr=1", "--units=2")),
        (("a", "--rate={lr}", "b"), {"units": "2", "lr": "1"}, ("a", "--rate=1", "b", "--units=2")),
        (("a-{lr}", "{lr}{lr}"), {"lr": "1"}, ("a-1", "11")),
        (("a", "{ps_hosts}", "{x}", "{}", "{lr"), {"lr": "1"}, ("a", "{ps_hosts}", "{x}", "{}", "{lr", "--lr=1")),
        (("a", "{lr}", "{units}"), {"lr": "{units}", "units": "{lr}"}, ("a", "{units}", "{lr}")),
        (("a", "{b-c}"), {"b-c": r"\1", "b": ""}, ("a", r"\1", "--b=")),
        (("a", "{LR}"), {"lr": "1"}, ("a", "{LR}", "--lr=1")),
        (("a", "{{lr}}"), {"lr": "1"}, ("a", "{1}")),
    ],
)
def test_point_is_filled_in(command: tuple[str, ...], point: dict[str, str], filled: tuple[str, ...]) -> None:
    assert fill_point(command, point) == filled


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("7", [7]),
        ("0-3", [0, 1, 2, 3]),
        ("0-9:3%2,20", [0, 3, 6, 9, 20]),
        ("5,1-3,2%1", [1, 2, 3, 5]),
        ("3-3", [3]),
        ("0-5:4", [0, 4]),
        (f"{MAX_INDEX}", [MAX_INDEX]),
    ],
)
def test_array_is_parsed(text: str, indices: list[int]) -> None:
    assert list(parse_array(text)) == indices


@pytest.mark.parametrize("text", ["", "x", "1-", "3-1", "1,", "1-4:0", "-1", "1%", "%2", "1 ,2", f"0-{MAX_INDEX + 1}"])
def test_invalid_array_is_refused(text: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_array(text)
    assert refused.value.option == "array"


def test_labels_are_parsed() -> None:
    labels = {"lr": "0.1", "text": "a=b\nc", "learning-rate": ""}
    assert parse_labels(format_labels(labels)) == labels
    assert JobSpec(("true",), label=("lr=0.1", "units=2")).labels == {"lr": "0.1", "units": "2"}


@pytest.mark.parametrize("texts", [("lr",), ("=1",), ("l r=1",), ("lr=1", "lr=1")])
def test_invalid_label_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as refused:
        JobSpec(("true",), label=texts)
    assert refused.value.option == "label"


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ((), {}),
        (("--label", "a=1"), {}),
        (("--array", "0-9:3%2,20"), {index: {} for index in (0, 3, 6, 9, 20)}),
        (("--array", "4", "--label", "a=1"), {4: {"a": "1"}}),
        (("--sbatch", "array=1-2"), {1: {}, 2: {}}),
        (("--grid", "lr=1,2"), {0: {"lr": "1"}, 1: {"lr": "2"}}),
        (("--grid", "lr=1,2,3", "--array", "2,0%1"), {0: {"lr": "1"}, 2: {"lr": "3"}}),
        (("--grid", "lr=1,2,3,4", "--array", "0-3:2"), {0: {"lr": "1"}, 2: {"lr": "3"}}),
        (
            ("--grid", "lr=1,2", "--grid", "b=3", "--label", "a=1"),
            {0: {"a": "1", "lr": "1", "b": "3"}, 1: {"a": "1", "lr": "2", "b": "3"}},
        ),
        (("--array-args", "lines"), {0: {"arguments": "--rate 0.1"}, 1: {"arguments": "--words 'two words'"}}),
        (("--array-args", "lines", "--array", "1"), {1: {"arguments": "--words 'two words'"}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_elements_of_array_have_labels(
    options: tuple[str, ...],
    elements: dict[int, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lines").write_text("--rate 0.1\n--words 'two words'\n")
    monkeypatch.chdir(tmp_path)
    expected = tuple(ArrayElement(index, labels) for index, labels in elements.items())
    assert job_of(*WORKER, *options, *TRAIN).elements == expected


def test_elements_of_single_jobs_have_labels() -> None:
    spec = job_of("--single", "--grid", "lr=1,2", *TRAIN)
    assert spec.elements == (ArrayElement(0, {"lr": "1"}), ArrayElement(1, {"lr": "2"}))


@pytest.mark.parametrize(
    ("options", "array"),
    [
        (("--grid", "lr=1,2,3"), "0-2"),
        (("--grid", "lr=1"), "0-0"),
        (("--grid", "lr=1,2,3", "--at-most", "2"), "0-2%2"),
        (("--grid", "lr=1,2,3", "--array", "1-2", "--at-most", "1"), "1-2%1"),
        (("--array", "0-9", "--at-most", "4"), "0-9%4"),
        (("--sbatch", "array=0-9", "--at-most", "4"), "0-9%4"),
        (("--array", "0-9%3"), "0-9%3"),
    ],
)
def test_sbatch_gets_the_array(options: tuple[str, ...], array: str) -> None:
    (found,) = make_sbatch_options(job_of(*WORKER, *options, *TRAIN))
    assert found["array"] == array


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        (("--grid", "lr"), "grid", "expected NAME=VALUE,VALUE"),
        (("--grid", "lr=1", "--array-args", "x"), "grid", "exclude each other"),
        (("--grid", "lr=1", "--het"), "grid", "exclude each other"),
        (
            ("--grid", "lr=1,2", "--array", "0-2"),
            "array",
            "an element 2, but --grid has arguments for the elements 0 to 1",
        ),
        (("--grid", "lr=1", "--label", "lr=2"), "label", "'lr' twice"),
        (("--array", "x"), "array", "not numbers and ranges"),
        (("--at-most", "2"), "at-most", "is for a job array"),
        (("--at-most", "0", "--array", "1"), "at-most", "0 is less than 1"),
        (("--at-most", "2", "--array", "0-9%3"), "at-most", "are the same option"),
        (("--at-most", "2", "--grid", "lr=1,2", "--array", "0-1%3"), "at-most", "are the same option"),
        (("--label", "lr"), "label", "expected NAME=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_contradicting_options_are_refused(options: tuple[str, ...], option: str, words: str) -> None:
    with pytest.raises(OptionError) as refused:
        job_of(*WORKER, *options, *TRAIN)
    assert words in str(refused.value)
    assert refused.value.option == option


def test_label_of_single_job_is_refused_because_it_is_written_nowhere() -> None:
    with pytest.raises(OptionError, match="exclude each other"):
        job_of("--single", "--label", "lr=1", *TRAIN)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (({},), "at least one"),
        (({"lr": "1"}, {"units": "1"}), "the same names"),
        (({"lr": "1"}, {"lr": "1", "units": "1"}), "the same names"),
        (({"l r": "1"},), "'l r' is not the name"),
        (({"ps_hosts": "1"},), "{ps_hosts} is filled in"),
    ],
)
def test_invalid_points_are_refused(points: tuple[dict[str, str], ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        BatchSpec(("true",), workers=1, points=points)


def test_points_of_a_program_exclude_lines_and_het() -> None:
    points = ({"lr": "1"},)
    with pytest.raises(OptionError, match="exclude each other"):
        BatchSpec(("true",), workers=1, points=points, array_lines=(("1",),))
    with pytest.raises(OptionError, match="no arrays of heterogeneous jobs"):
        make_script(BatchSpec(("true",), workers=1, points=points, het=True))


def test_points_are_kept_by_replace() -> None:
    spec = job_of(*WORKER, "--grid", "lr=1,2", *TRAIN)
    assert spec.points == ({"lr": "1"}, {"lr": "2"})
    assert replace(spec, name="other").points == spec.points
    assert spec.commands == (("python", "train.py", "--lr=1"), ("python", "train.py", "--lr=2"))


def test_values_of_points_may_be_numbers() -> None:
    spec = BatchSpec(("true",), workers=1, points=[{"lr": 0.1}])  # type: ignore[arg-type]
    assert spec.points == ({"lr": "0.1"},)


def test_placeholders_of_the_cluster_in_values_are_checked() -> None:
    with pytest.raises(OptionError, match=r"no cluster to fill in \{ps_hosts\}"):
        job_of("--single", "--grid", "hosts={ps_hosts},localhost", *TRAIN)
    with pytest.raises(OptionError, match="no list would contain the chief"):
        job_of(*WORKER, "--grid", "hosts={worker_hosts},{chief_hosts}", *TRAIN)


def test_varied_name_that_resembles_a_placeholder_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    job_of(*WORKER, "--grid", "task_id=1,2", *TRAIN, "{task_id}").warn_of_mistakes()
    assert caplog.messages == []
    job_of(*WORKER, "--grid", "lr=1,2", *TRAIN, "{task_id}").warn_of_mistakes()
    assert len(caplog.messages) == 1


def test_script_of_each_element_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    spec = BatchSpec(("python3", "{script}"), workers=1, grid=("script=a.py,b.py",))
    with pytest.raises(CommandError, match=r"'b\.py' does not exist"):
        check_command(spec)
    (tmp_path / "b.py").touch()
    check_command(spec)
