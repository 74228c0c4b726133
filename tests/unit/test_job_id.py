"""Ids of Slurm jobs in each notation."""

from __future__ import annotations

import pytest

from tf4slurm.slurm.job_id import JobId, parse_indices


@pytest.mark.parametrize(
    ("text", "job_id", "printed"),
    [
        ("4711", JobId(4711), "4711"),
        (" 4711\n", JobId(4711), "4711"),
        ("4711;north", JobId(4711, cluster="north"), "4711"),
        ("4711_0", JobId(4711, (0,)), "4711_0"),
        ("4711_[3-5,9%2]", JobId(4711, (3, 4, 5, 9)), "4711_[3-5,9]"),
        ("4711_[0-8:4]", JobId(4711, (0, 4, 8)), "4711_[0,4,8]"),
        ("4711_[7]", JobId(4711, (7,)), "4711_7"),
        ("4712+1", JobId(4712, component=1), "4712+1"),
    ],
)
def test_each_notation_is_parsed_and_printed(text: str, job_id: JobId, printed: str) -> None:
    parsed = JobId.parse(text)
    assert (parsed, parsed.cluster) == (job_id, job_id.cluster)
    assert str(parsed) == printed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "train-4711",
        "4711_",
        "4711_x",
        "4711_[]",
        "4711_[1,3,...]",
        "4711_[5-3]",
        "4711+",
        "4711.0",
        "-1",
        "4711 4712",
    ],
)
def test_other_text_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        JobId.parse(text)


@pytest.mark.parametrize(
    ("first", "second", "covers"),
    [
        ("19", "19", True),
        ("19", "19_3", True),
        ("19", "19+1", True),
        ("19", "20", False),
        ("19_3", "19_3", True),
        ("19_3", "19", False),
        ("19_[3-5]", "19_4", True),
        ("19_[3-5]", "19_6", False),
        ("19_[3-5]", "19_[4-5]", True),
        ("19+1", "19+1", True),
        ("19+1", "19", False),
        ("19+1", "19+0", False),
    ],
)
def test_id_covers_its_parts(first: str, second: str, covers: bool) -> None:
    assert JobId.parse(first).covers(JobId.parse(second)) is covers


def test_element_is_known_for_one_element_only() -> None:
    assert [JobId.parse(text).element for text in ("19", "19_3", "19_[3]", "19_[3-4]", "19+1")] == [
        None,
        3,
        3,
        None,
        None,
    ]
    assert {JobId.parse(text).whole for text in ("19", "19_3", "19+1", "19;x")} == {JobId(19)}


def test_indices_are_sorted_without_repetitions() -> None:
    assert parse_indices("7,0-4:2,2%9") == (0, 2, 4, 7)
