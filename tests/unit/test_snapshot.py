"""Snapshots of the code: their content, and when none is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tf4slurm.batch_spec import BatchSpec
from tf4slurm.errors import OptionError, RunDirectoryError
from tf4slurm.submission.snapshot import place_snapshot, take_snapshot


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory under git: two files tracked, one of them changed since, one not tracked; and an earlier run."""
    source = tmp_path / "source"
    (source / "model").mkdir(parents=True)
    (source / "train.py").write_text("old")
    (source / "model" / "layers one.py").write_text("layers")
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    for command in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", "-C", source, *command], check=True, env=environ)
    (source / "train.py").write_text("new")
    (source / "notes.py").write_text("notes")
    (source / "runs" / "train-1").mkdir(parents=True)
    return source


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_git_snapshot_has_tracked_files_as_they_are_now(source: Path) -> None:
    target = source / "runs" / "train.code"
    take_snapshot("git", source, target, ("python", "train.py"))
    assert files(target) == {"train.py": "new", "model/layers one.py": "layers"}
    assert target.stat().st_mode & 0o777 == 0o700


def test_copy_has_all_but_git_and_runs(source: Path) -> None:
    target = source / "runs" / "train.code"
    take_snapshot("copy", source, target, ("python", "notes.py"))
    assert files(target) == {"train.py": "new", "model/layers one.py": "layers", "notes.py": "notes"}


def test_copy_omits_what_git_ignores(source: Path) -> None:
    for name in (".env", "id_rsa", "data/images.bin", "model/cache.pyc"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("secret")
    (source / ".gitignore").write_text(".env\nid_rsa\ndata/\n*.pyc\n")
    target = source / "runs" / "train.code"
    for directory, expected in (
        (source, {".gitignore", "train.py", "model/layers one.py", "notes.py"}),
        (source / "model", {"layers one.py"}),
    ):
        take_snapshot("copy", directory, target, ())
        assert set(files(target)) == expected
        shutil.rmtree(target)


def test_copy_outside_of_checkout_has_everything(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/.env").write_text("TOKEN=1")
    take_snapshot("copy", tmp_path / "source", tmp_path / "runs/train.code")
    assert files(tmp_path / "runs/train.code") == {".env": "TOKEN=1"}


def test_copy_of_checkout_that_git_cannot_read_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for kind in ("copy", "git"):
        with pytest.raises(OptionError, match=r"git does not list the files .* git is not installed.* --snapshot none"):
            take_snapshot(kind, source, source / "runs" / "train.code")
    assert not (source / "runs" / "train.code").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("kind", ["git", "copy"])
def test_checkout_of_another_user_is_refused_with_message_of_git(
    source: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")):
        monkeypatch.setenv(name, value)
    os.chown(source, 65534, 65534)
    with pytest.raises(OptionError, match="dubious ownership") as refused:
        take_snapshot(kind, source / "model", source / "runs" / "train.code")
    todo = f"git config --global --add safe.directory {source}. Or --snapshot none."
    assert str(refused.value).endswith(todo)


@pytest.mark.parametrize("ignored", ["*", "/home"])
@pytest.mark.parametrize("name", ["project", "project/model"])
def test_copy_of_source_ignored_by_outer_repository_has_everything(tmp_path: Path, ignored: str, name: str) -> None:
    source = tmp_path / "home" / name
    source.mkdir(parents=True)
    (source / "train.py").write_text("train")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text(ignored)
    take_snapshot("copy", source, tmp_path / "runs/train.code", ("python", "train.py"))
    assert files(tmp_path / "runs/train.code") == {"train.py": "train"}


@pytest.mark.parametrize("kind", ["git", "copy"])
def test_snapshot_that_is_too_large_is_refused_with_its_size(source: Path, kind: str) -> None:
    with (source / "train.py").open("ab") as file:
        file.truncate(1_500_000_000)  # a sparse file
    with pytest.raises(OptionError, match=r"would have 1\.5 GB; the limit is 1 GB\. Keep data"):
        take_snapshot(kind, source, source / "runs" / "train.code")
    assert not (source / "runs" / "train.code").exists()
    if kind == "copy":
        (source / "train.py").rename(source / "runs" / "data")  # this file is left out
        take_snapshot(kind, source, source / "runs" / "train.code")


def test_untracked_script_is_refused_and_nothing_remains(source: Path) -> None:
    target = source / "runs" / "train.code"
    with pytest.raises(OptionError, match=r"'notes\.py' would not be in the snapshot"):
        take_snapshot("git", source, target, ("python", "notes.py"))
    assert not target.exists()


def test_git_snapshot_without_tracked_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Use --snapshot copy"):
        take_snapshot("git", tmp_path, tmp_path / "runs" / "x.code")
    assert not (tmp_path / "runs" / "x.code").exists()


def test_unwritable_target_is_refused_with_its_path(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        take_snapshot("copy", source, tmp_path / "file" / "x.code")


def test_snapshot_is_placed_beside_runs_in_free_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without = BatchSpec(("python", "train.py"), workers=1)
    assert place_snapshot(without) == without
    spec = BatchSpec(("python", "train.py"), workers=1, snapshot="git")
    placed = place_snapshot(spec)
    assert placed.runs_directory == tmp_path / "runs"
    assert placed.directory is not None
    assert placed.directory.parent == tmp_path / "runs"
    placed.directory.mkdir(parents=True)
    assert place_snapshot(spec).directory != placed.directory
    assert place_snapshot(placed) == placed
