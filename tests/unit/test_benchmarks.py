"""Pure functions of the benchmarks: outcomes, tables, curves, growth, and agreement of two runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.earlier import agreement, read_earlier
from benchmarks.growth import growth_of
from benchmarks.measure import Figure, ratio
from benchmarks.page import curves_of, page_of
from benchmarks.table import markdown_table, number, summary, text_table


@pytest.mark.parametrize(
    ("values", "bound", "outcome"),
    [
        ((0.4, 0.49, 9.0), "< 0.5", "met"),
        ((0.5,), "< 0.5", "not met"),
        ((0.5,), "<= 0.5", "met"),
        ((1.0, 3.0), ">= 2", "met"),
        ((1.9, 1.9, 3.0), ">= 2", "not met"),
        ((5.0,), "> 5", "not met"),
        ((5.0,), "", "no bound"),
    ],
)
def test_bound_applies_to_the_median(values: tuple[float, ...], bound: str, outcome: str) -> None:
    assert Figure("what", "s", values, bound).outcome == outcome


def test_ratio_is_computed_pair_by_pair() -> None:
    figure = ratio("theirs / ours", [4.0, 9.0], [2.0, 3.0], ">= 2", beside="JAX", at=1_000)
    assert figure.values == (2.0, 3.0)
    assert figure.to_json() == {
        "what": "theirs / ours",
        "at": 1_000,
        "beside": "JAX",
        "unit": "x",
        "median": 2.5,
        "low": 2.0,
        "high": 3.0,
        "values": [2.0, 3.0],
        "bound": ">= 2",
        "outcome": "met",
    }


FIGURES = [
    Figure("barrier", "s", (0.25, 0.2, 0.5), "< 0.2", at=1_000),
    Figure("rendezvous / JAX", "x", (3.0,), ">= 2", beside="JAX"),
    Figure("the map's message", "kB", (1234.5,)),
    Figure("barrier", "s", (0.1,), at=10),  # for the curves
]


def test_the_table_as_text() -> None:
    assert text_table(FIGURES).splitlines() == [
        "what                  beside  asked  median    spread          runs  outcome",
        "--------------------  ------  -----  --------  --------------  ----  --------",
        "1,000 tasks: barrier          < 0.2  0.250 s   0.200 to 0.500  3     not met",
        "rendezvous / JAX      JAX     >= 2   3.00 x                    1     met",
        "the map's message                    1,234 kB                  1     no bound",
    ]
    assert summary(FIGURES) == "1 of 2 bounds are met."


def test_the_table_on_a_page() -> None:
    lines = markdown_table(FIGURES).splitlines()
    assert lines[2] == "| 1,000 tasks: barrier |  | < 0.2 | 0.250 s | 0.200 to 0.500 | 3 | **not met** |"
    page = page_of(FIGURES, {"load": (1.5, 0.25), "processors": 2}, ["steps"], ["time"])
    assert "* load: 1.50, 0.250\n* processors: 2\n" in page
    assert "Not measured, for it failed or was given up: steps." in page
    assert "(growth-time.svg)" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00123, "0.0012"), (0.5, "0.500"), (1.234, "1.23"), (12.34, "12.3"), (12345.6, "12,346")],
)
def test_number_has_about_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_curve_has_at_least_three_sizes() -> None:
    figures = [Figure("barrier", "s", (size / 100,), at=size) for size in (1_000, 10, 100, 100)]
    figures += [Figure("rare", "s", (1.0,), at=10), Figure("other", "s", (1.0,)), Figure("barrier", "s", (1.0,))]
    curves = curves_of(figures, ["barrier", "rare", "never"])
    assert {what: [at for at, _ in points] for what, points in curves.items()} == {"barrier": [10, 100, 1_000]}


def test_growth_is_per_additional_task() -> None:
    figures = [
        Figure("barrier", "s", (0.1,), at=1_000),
        Figure("barrier", "s", (2.0,), at=10_000),
        Figure("bytes of messages, in all", "kB", (1.0,), at=1_000),
        Figure("bytes of messages, in all", "kB", (100.0,), at=10_000),
        Figure("only here", "s", (1.0,), at=1_000),
    ]
    slow, all_maps = growth_of(figures, 1_000, 10_000)
    assert slow.median == pytest.approx(2.0)
    assert slow.outcome == "not met"
    assert all_maps.median == pytest.approx(10.0)
    assert all_maps.outcome == "no bound"


FACTS = {"processors": 2, "model": "a processor", "memory_gigabytes": 24.7, "date": "2026-11-21 21:21 UTC"}


def _keep(file: Path, *figures: Figure) -> None:
    file.write_text(json.dumps({"machine": FACTS, "figures": [figure.to_json() for figure in figures]}))


def test_two_runs_agree_if_their_spreads_overlap(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    once, gone, barrier = (
        Figure("once", "s", (1.0,)),
        Figure("gone", "s", (1.0, 2.0)),
        Figure("barrier", "s", (0.3, 0.4)),
    )
    _keep(file, once, gone, barrier, Figure("barrier", "s", (2.0, 2.5), at=1_000), Figure("start", "s", (1.0, 2.0)))
    earlier = read_earlier(file, FACTS)
    assert earlier is not None
    again = [
        Figure("once", "s", (9.0,)),  # no spread was recorded
        Figure("new", "s", (9.0, 9.5)),
        Figure("barrier", "s", (0.2, 0.35, 0.5)),
        Figure("barrier", "s", (3.0, 3.5), at=1_000),
        Figure("start", "s", (1.9, 2.1, 2.3)),
    ]
    assert agreement(again, earlier) == (
        "Beside the run of 2026-11-21 21:21 UTC on such a machine, of 3 quantities with a spread: the spreads "
        "of 2 overlap, 1 medians lie within the earlier spread. Apart: 1,000 tasks: barrier (3.25, was 2.00 to 2.50)."
    )


def test_run_on_another_machine_is_not_compared(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert read_earlier(file, FACTS) is None
    _keep(file)
    assert read_earlier(file, FACTS) is not None
    assert read_earlier(file, {**FACTS, "model": "another"}) is None
