"""A site's profile, compared with what Slurm has."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.test_scheduler import GOOD, SITE
from tf4slurm.doctor.scheduler import check_profile
from tf4slurm.spec.settings import Setting, read_settings

HERE = dataclasses.replace(
    SITE, partitions=(GOOD,), gpu_types=frozenset({"a100"}), features=frozenset({"icelake", "ib"})
)  # partition "work", at most two days


def found(**values: str) -> list[tuple[str, str]]:
    settings = {name: Setting(value, "site.toml") for name, value in values.items()}
    return [(finding.level, finding.text) for finding in check_profile(settings, HERE)]


def test_profile_that_fits() -> None:
    values = {"partition": "work", "time": "24:00:00", "gpu_type": "a100", "constraint": "icelake&ib"}
    assert [level for level, _ in found(**values)] == ["ok"] * 4


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("partition", "gpu", "--partition gpu of site.toml does not exist here; there is work"),
        ("gpu_type", "h100", "--gpu-type h100 of site.toml does not exist here; there is a100"),
        (
            "constraint",
            "icelake&hbm",
            "--constraint icelake&hbm of site.toml does not exist here; there is ib, icelake",
        ),
        ("time", "3-00:00:00", "--time 3-00:00:00 of site.toml exceeds the limit of partition work, 2-00:00:00"),
    ],
)
def test_profile_that_does_not_fit(name: str, value: str, words: str) -> None:
    assert found(**{name: value}) == [("warn", words)]


def test_what_slurm_does_not_tell_is_said() -> None:
    ((level, text),) = found(qos="regular")
    assert level == "ok"
    assert "was not checked" in text


@pytest.mark.parametrize("name", ["cesga-ft3", "generic", "leonardo", "lumi", "marenostrum5", "nersc-perlmutter"])
def test_each_profile_that_is_shipped_is_read(name: str) -> None:
    settings = read_settings({"HOME": "/nowhere"}, name)
    assert settings["site"].value == name
    assert [each for each in check_profile(settings, HERE) if each.level == "fail"] == []
