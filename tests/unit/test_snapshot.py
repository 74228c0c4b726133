"""Snapshots of the code: their content, and when none is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.errors import OptionError, RunDirectoryError
from tf4slurm.spec.batch_spec import BatchSpec
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


def run_git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always")
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", "-C", directory, *identity, *arguments], check=True, env=environ, capture_output=True)


@pytest.fixture
def with_submodules(source: Path, tmp_path: Path) -> Path:
    """A source with a submodule in a submodule."""
    for name, inner in (("inner", None), ("outer", "inner")):
        (tmp_path / name).mkdir()
        run_git(tmp_path / name, "init", "-q")
        (tmp_path / name / f"{name}.py").write_text(name)
        run_git(tmp_path / name, "add", ".")
        if inner is not None:
            run_git(tmp_path / name, "submodule", "add", str(tmp_path / inner), "lib/inner")
        run_git(tmp_path / name, "commit", "-qm", "x")
    run_git(source, "submodule", "add", str(tmp_path / "outer"), "libs/outer")
    run_git(source, "submodule", "update", "--init", "--recursive")
    return source


def test_git_snapshot_has_files_of_submodules(with_submodules: Path) -> None:
    (with_submodules / "libs/outer/untracked.py").touch()
    target = with_submodules / "runs" / "train.code"
    for directory, prefix in ((with_submodules, "libs/"), (with_submodules / "libs", "")):
        take_snapshot("git", directory, target)
        found = files(target)
        assert {name for name in found if "train.py" not in name and "layers" not in name} - {".gitmodules"} == {
            f"{prefix}outer/.gitmodules",
            f"{prefix}outer/outer.py",
            f"{prefix}outer/lib/inner/inner.py",
        }
        assert found[f"{prefix}outer/lib/inner/inner.py"] == "inner"
        shutil.rmtree(target)


def test_submodule_that_is_no_checkout_is_refused_unless_it_is_empty(with_submodules: Path) -> None:
    target = with_submodules / "runs" / "train.code"
    run_git(with_submodules, "submodule", "deinit", "-f", "libs/outer")
    take_snapshot("git", with_submodules, target, ("python", "train.py"))
    assert not (target / "libs/outer/outer.py").exists()
    shutil.rmtree(target)
    (with_submodules / "libs/outer/outer.py").write_text("by hand")
    with pytest.raises(OptionError, match=r"/libs/outer': git .* is no checkout: run git submodule update"):
        take_snapshot("git", with_submodules, target, ("python", "train.py"))
    assert not target.exists()


def test_directory_in_the_place_of_a_tracked_link_is_refused_without_advice_to_empty_it(source: Path) -> None:
    (source / "data").symlink_to("model")
    run_git(source, "add", ".")
    (source / "data").unlink()
    (source / "data").mkdir()
    (source / "data" / "images").touch()
    with pytest.raises(OptionError, match=r"/data': git tracks a file or link, where .*: run git add or git rm\."):
        take_snapshot("git", source, source / "runs" / "train.code")


@pytest.mark.parametrize("kind", ["git", "copy"])
def test_links_lead_to_the_same_place(source: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").write_text("images")
    links = {"data": "../data", "model/data": "../../data", "layers": "model", "model/self": "../model", "old": "gone"}
    for name, text in links.items():
        (source / name).symlink_to(text)
    (source / "absolute").symlink_to(tmp_path / "data")
    run_git(source, "add", ".")
    target = source / "runs" / "train.code"
    take_snapshot(kind, source, target)
    for name in (*links, "absolute"):
        assert (target / name).is_symlink(), name
    assert [os.readlink(target / name) for name in ("layers", "model/self", "old")] == ["model", "../model", "gone"]
    for name in ("data", "model/data", "absolute"):
        assert (target / name / "images").read_text() == "images"
    assert (target / "layers" / "layers one.py").read_text() == "layers"
    assert os.path.samefile(target / "layers", target / "model")


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


@pytest.mark.parametrize("kind", ["git", "copy"])
def test_snapshot_is_private_at_every_moment(source: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source.chmod(0o755)
    target = source / "runs" / "train.code"
    modes = []
    change = os.chmod

    def record(path: str | Path, mode: int, **options: Any) -> None:
        change(path, mode, **options)
        modes.append(target.stat().st_mode & 0o777)

    monkeypatch.setattr(os, "chmod", record)
    take_snapshot(kind, source, target)
    assert {*modes, target.stat().st_mode & 0o777} == {0o700}


def test_second_snapshot_of_a_name_has_a_directory_of_its_own(source: Path) -> None:
    target = source / "runs" / "train.code"
    target.symlink_to("gone")
    places = [take_snapshot("copy", source, target) for _ in range(2)]
    assert [path.name for path in places] == ["train-2.code", "train-3.code"]
    assert {len(files(path)) for path in places} == {3}
    with pytest.raises(OptionError):
        take_snapshot("git", source, target, ("python", "notes.py"))
    assert sorted(os.listdir(target.parent)) == ["train-1", "train-2.code", "train-3.code", "train.code"]


def test_copy_beside_the_code_does_not_contain_itself(source: Path) -> None:
    take_snapshot("copy", source, source / "train.code")
    assert "train.code" not in os.listdir(source / "train.code")


def test_unwritable_target_is_refused_with_its_path(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        take_snapshot("copy", source, tmp_path / "file" / "x.code")


def test_snapshot_is_placed_beside_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without = BatchSpec(("python", "train.py"), workers=1)
    assert place_snapshot(without) == without
    spec = BatchSpec(("python", "train.py"), workers=1, snapshot="git")
    placed = place_snapshot(spec)
    assert placed.runs_directory == tmp_path / "runs"
    assert placed.directory is not None
    assert placed.directory.parent == tmp_path / "runs"
    assert list(tmp_path.iterdir()) == []
    assert place_snapshot(placed) == placed
