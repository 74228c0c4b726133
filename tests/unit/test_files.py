"""Files that are replaced at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf4slurm.system.files import replacing


def test_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_each_of_two_simultaneous_writers_publishes_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with replacing(path) as first:
        first.write(b"first ")
        first.flush()
        with replacing(path) as second:
            second.write(b"second, whole")
        assert path.read_bytes() == b"second, whole"
        first.write(b"whole")
    assert path.read_bytes() == b"first whole"
    assert list(tmp_path.iterdir()) == [path]


def test_error_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError), replacing(tmp_path / "report.html") as file:
        file.write(b"whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


def test_draft_cannot_be_a_link_that_another_user_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", bytes)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / f".{'00' * 8}.draft").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError), replacing(tmp_path / "report.html") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "mine"
