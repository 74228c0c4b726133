"""Times that people type: with units, for each option in seconds."""

from __future__ import annotations

import dataclasses

import pytest

from tf4slurm.errors import OptionError
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.durations import parse_seconds, parse_time_limit
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.options import options_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("1.5", 1.5), ("0", 0), ("1e3", 1000), (" 5 ", 5)),
        *(("90s", 90), ("5m", 300), ("1.5m", 90), ("2h", 7200), ("1d12h", 129_600), ("1h0m30s", 3630), (" 5m ", 300)),
    ],
)
def test_time_is_in_seconds_or_has_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "5x", "5 m", "30s5m", "1m1m", "1:30", "five", "5min", "-5m", "nan", "inf", "1e999"]
)
def test_other_times_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 90s, 5m, 2h or 1d12h"):
        parse_seconds(text)


def test_each_option_in_seconds_takes_units() -> None:
    names = [name for name, each in options_of(BatchSpec).items() if each.metavar == "SECONDS"]
    assert {"grace_period_seconds", "start_timeout_seconds", "stall_timeout_seconds"} <= set(names)
    for name in names:
        assert options_of(BatchSpec)[name].convert("2m") == 120.0, name
    spec = JobSpec(("python", "train.py"), grace_period_seconds="1m")  # type: ignore[arg-type]
    assert spec.to_arguments()[-2:] == ["--grace-period", "60"]
    assert dataclasses.replace(spec, grace_period_seconds=5).grace_period_seconds == 5.0


def test_number_outside_of_the_range_is_refused_in_seconds() -> None:
    with pytest.raises(OptionError, match=r"--grace-period: -5\.0 is less than 0\."):
        JobSpec(("python", "train.py"), grace_period_seconds="-5")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--grace-period: 'inf' is not a time"):
        JobSpec(("python", "train.py"), grace_period_seconds="inf")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"), [("1.5h", "1:30:00"), ("25h", "1-01:00:00"), ("90", "90"), ("1-0", "1-0"), ("", "")]
)
def test_time_limit(text: str, expected: str) -> None:
    assert parse_time_limit(text) == expected
