"""The versions of a script's software, and the git commit of a directory."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tf4slurm.submission.snapshot import take_snapshot
from tf4slurm.system.versions import Commit, explain_difference, read_commit, read_versions


@pytest.mark.parametrize(
    ("own", "other", "clause"),
    [
        ({"tensorflow": "2.21.0", "python": "3.11.7"}, {"tensorflow": "2.21.1", "python": "3.11.2"}, ""),
        ({"tensorflow": "2.21.0"}, {"python": "3.12.0"}, ""),
        ({"tensorflow": "2.21.0"}, {"tensorflow": "2.16.2"}, "TensorFlow 2.21.0 here and 2.16.2 in the tasks"),
        (
            {"tensorflow": "2.21.0", "python": "3.11.7", "keras": "3.9"},
            {"tensorflow": "2.2.0", "python": "3.1.0", "keras": "2"},
            "TensorFlow 2.21.0 here and 2.2.0 in the tasks and Python 3.11.7 here and 3.1.0 in the tasks",
        ),
    ],
)
def test_versions_differ_in_their_first_two_numbers(own: dict[str, str], other: dict[str, str], clause: str) -> None:
    assert explain_difference(own, other) == clause


@pytest.mark.keras
def test_versions_of_this_python_are_those_that_its_packages_have_when_imported() -> None:
    pytest.importorskip("tensorflow")
    code = "import tensorflow, keras; print(tensorflow.__version__, keras.__version__)"
    imported = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    expected = dict(zip(("python", "tensorflow", "keras"), (platform.python_version(), *imported), strict=True))
    assert read_versions(sys.executable).items() >= expected.items()


def test_greeting_of_a_python_is_left_out(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho Welcome; echo "{{}} users"; {sys.executable} "$@"; echo Bye\n')
    program.chmod(0o755)
    assert read_versions(str(program)) == read_versions(sys.executable) != {}


@pytest.mark.parametrize("program", ["", "false", "true", "echo", "no-such-python"])
def test_program_that_is_no_python_has_no_versions(program: str) -> None:
    assert read_versions(program) == {}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "ada")
    path = tmp_path / "code"
    path.mkdir()
    (path / "train.py").write_text("1")
    git(path, "init", "-q")
    git(path, "add", "train.py")
    git(path, "commit", "-qm", "Train")
    return path


def git(path: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", path, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_commit_is_dirty_after_a_change_of_a_tracked_file(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "untracked").touch()
    assert read_commit(repository) == Commit(head, is_dirty=False)
    (repository / "train.py").write_text("2")
    assert read_commit(repository) == Commit(head, is_dirty=True)


def test_directory_without_tracked_files_has_no_commit(repository: Path, tmp_path: Path) -> None:
    (repository / "runs").mkdir()
    assert read_commit(repository / "runs") is None
    assert read_commit(tmp_path) is None
    assert read_commit(tmp_path / "missing") is None


def test_snapshot_has_the_commit_of_its_source(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "train.py").write_text("2")
    take_snapshot("git", repository, repository / "runs" / "digits.code")
    git(repository, "commit", "-qam", "Train again")
    assert read_commit(repository / "runs" / "digits.code") == Commit(head, is_dirty=True)
