"""Checks of the run directory, and of clocks. Hosts of the lab share one clock, so differences are faked here."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tf4slurm.doctor import host
from tf4slurm.doctor.host import check_clocks, check_directory, probe_file, probe_path


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
    found = check_clocks(skews)
    assert found.level == level
    assert words in found.text


def skew_of(directory: Path) -> float:
    with probe_file(probe_path(directory, "probe")) as skew:
        return skew


def test_check_leaves_no_file(tmp_path: Path) -> None:
    found, skew = check_directory(tmp_path / "a" / "runs", "probe")
    assert found.level in ("ok", "warn")
    assert skew is not None
    assert abs(skew) < 2.0
    assert list(tmp_path.iterdir()) == []


def test_slow_file_system_is_not_skew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(host, "time", SimpleNamespace(time=lambda: time.time() + sum(waited)))
    monkeypatch.setattr("os.fsync", lambda _: waited.append(60.0))
    assert abs(skew_of(tmp_path)) < 2.0


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_skew_is_the_difference_to_the_time_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    monkeypatch.setattr(host, "time", SimpleNamespace(time=lambda: time.time() - ahead))
    assert skew_of(tmp_path) == pytest.approx(ahead, abs=5)


def test_file_instead_of_the_directory_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found, skew = check_directory(tmp_path / "runs", "probe")
    assert (found.level, skew) == ("fail", None)
    assert "Not a directory" in found.text


def test_probe_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / ".tf4slurm-doctor-probe").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        skew_of(tmp_path)
    assert (tmp_path / ".tf4slurm-doctor-probe").is_symlink(), "the file of another user stays"
    assert not (tmp_path / "victim").exists()


def test_probe_is_in_the_nearest_existing_parent(tmp_path: Path) -> None:
    assert probe_path(tmp_path / "a" / "b", "probe").parent == tmp_path
