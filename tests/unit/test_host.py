"""Checks of the run directory, and of clocks. Hosts of the lab share one clock, so differences are faked here."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tf4slurm.doctor import directory
from tf4slurm.doctor.directory import Probe, check_directory, existing_parent, judge_skew


@pytest.mark.parametrize(
    ("skews", "level", "words"),
    [
        ({"n1": 0.0, "n2": -0.02}, "ok", "within 0.1 s"),
        ({"n1": 100.0, "n2": 101.5}, "ok", "within 1.5 s"),
        ({"n1": 0.0, "n2": 7.25, "n3": 1.0}, "warn", "the clock of n1 is 7.2 s ahead of that of n2"),
        ({"n1": 0.0, "n2": -90.0}, "warn", "the clock of n2 is 90.0 s ahead of that of n1"),
    ],
)
def test_clocks(skews: dict[str, float], level: str, words: str) -> None:
    found = judge_skew(skews)
    assert found.level == level
    assert words in found.text


def test_check_leaves_no_file(tmp_path: Path) -> None:
    found, skew = check_directory(tmp_path / "a" / "runs", "probe")
    assert found.level in ("ok", "warn")
    assert skew is not None
    assert abs(skew) < 2.0
    assert list(tmp_path.iterdir()) == []


def test_slow_file_system_is_not_skew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(directory, "time", SimpleNamespace(time=lambda: time.time() + sum(waited)))
    monkeypatch.setattr("os.fsync", lambda _: waited.append(60.0))
    assert abs(Probe(tmp_path, "probe").write()) < 2.0


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_skew_is_the_difference_to_the_time_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    monkeypatch.setattr(directory, "time", SimpleNamespace(time=lambda: time.time() - ahead))
    assert Probe(tmp_path, "probe").write() == pytest.approx(ahead, abs=5)


def test_file_instead_of_the_directory_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found, skew = check_directory(tmp_path / "runs", "probe")
    assert (found.level, skew) == ("fail", None)
    assert "Not a directory" in found.text


def test_probe_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / ".tf4slurm-doctor-probe").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        Probe(tmp_path, "probe").write()
    assert not (tmp_path / "victim").exists()


def test_existing_parent(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
