"""Numbers, durations, bytes and axis ticks as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tf4slurm.jobs.formatting import (
    as_sentence,
    format_bytes,
    format_count,
    format_elapsed,
    format_number,
    format_seconds,
    format_time,
)
from tf4slurm.reports.timeline_chart import find_ticks

CASES: dict[Callable[[float], str], dict[float, str]] = {
    format_seconds: {
        0.04: "0.0 s",
        9.94: "9.9 s",
        9.96: "10 s",
        119.4: "119 s",
        200: "3 min 20 s",
        3599.6: "1 h 00 min",
        7500: "2 h 05 min",
        200_000: "2 d 7 h",
        -3: "-3.0 s",
    },
    format_elapsed: {11.9: "0:11", 3723: "1:02:03"},
    format_time: {0: "an unknown time", 1e12: "an unknown time"},
    format_bytes: {0: "0 B", 999: "999 B", 999.7: "1 kB", 1.234e9: "1.23 GB", 5e15: "5,000 TB"},
    format_number: {
        0: "0",
        0.01234: "0.0123",
        4.561: "4.56",
        100: "100",
        12345: "12,345",
        -2.5: "-2.5",
        1e-9: "1.00e-09",
    },
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_number_as_text(function: Callable[[float], str]) -> None:
    assert {value: function(value) for value in CASES[function]} == CASES[function]


def test_sentence_ends_with_a_full_stop() -> None:
    texts = ("more than the QOS allows", "It has ended.", "Why?", "")
    assert [*map(as_sentence, texts)] == ["more than the QOS allows.", "It has ended.", "Why?", ""]


def test_counts() -> None:
    assert [format_count(1, "worker"), format_count(2000, "worker"), format_count(2, "ps")] == [
        "1 worker",
        "2,000 workers",
        "2 ps",
    ]


def test_ticks_are_round_and_few() -> None:
    assert find_ticks(0, 21) == [(0, "0 s"), (5, "5 s"), (10, "10 s"), (15, "15 s"), (20, "20 s")]
    assert find_ticks(-900, 900)[::3] == [(-900, "-15 min"), (0, "0 min"), (900, "15 min")]
    assert find_ticks(-600, 3600)[-1] == (3600, "60 min")
    assert find_ticks(7200, 30000)[:2] == [(7200, "2:00 h"), (10800, "3:00 h")]
    assert find_ticks(0, 900_000)[-1] == (864000, "10 d")
    for high in (1e-9, 1.0, 1e6, 1e14, 1e300):
        assert 1 <= len(find_ticks(0, high)) <= 9
