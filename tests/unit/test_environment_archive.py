"""The archive of a Python environment: what belongs to it, its fingerprint, and its use in another directory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.errors import LaunchError, UntrustedFileError
from tf4slurm.launch import environment_archive
from tf4slurm.launch.environment_archive import (
    File,
    PythonEnvironment,
    Relocation,
    find_environment,
    fingerprint,
    list_files,
    open_archive,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def environment(tmp_path: Path) -> PythonEnvironment:
    path = tmp_path / "home" / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    (package,) = path.glob("lib/python*/site-packages")
    (package / "module.py").write_text("value = 7\n")
    (path / "bin" / "tool").write_text(f"#!{path}/bin/python\nimport module, sys\nprint(sys.prefix, module.value)\n")
    (path / "bin" / "tool").chmod(0o755)
    return PythonEnvironment(f"{path}/bin/python", str(path), (str(path),), ())


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where the archive belongs: its directory does not exist yet."""
    return tmp_path / "archives" / "env-1.tar"


def read(archive: Path, *files: Path) -> list[str]:
    """Open the archive of these files; return the names in it."""
    listed = [File(str(path), f"0/{path.name}", path.stat()) for path in files]
    with open_archive(archive, listed, Relocation({}), threading.Event()) as file, tarfile.open(fileobj=file) as tar:
        return tar.getnames()


def test_programs_of_the_archive_run_in_another_directory(
    environment: PythonEnvironment, archive: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "disk"
    relocate = Relocation({environment.prefix: f"{copy}/0"})
    with (
        open_archive(archive, list_files(environment), relocate, threading.Event()) as file,
        tarfile.open(fileobj=file) as tar,
    ):
        tar.extractall(copy)
    Path(environment.prefix).rename(tmp_path / "gone")
    shown = subprocess.run([f"{copy}/0/bin/tool"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{copy}/0 7\n"
    activate = f". {copy}/0/bin/activate && echo $VIRTUAL_ENV"
    assert subprocess.run(["sh", "-c", activate], capture_output=True, text=True).stdout.strip() == f"{copy}/0"


def test_fingerprint_changes_with_a_file_but_not_with_bytecode(environment: PythonEnvironment) -> None:
    before = fingerprint(list_files(environment), "/tmp")
    subprocess.run([f"{environment.prefix}/bin/python", "-c", "import module"], check=True)  # writes __pycache__
    assert fingerprint(list_files(environment), "/tmp") == before
    assert fingerprint(list_files(environment), "/scratch") != before
    (module,) = Path(environment.prefix).glob("lib/python*/site-packages/module.py")
    module.write_text("value = 8\n")
    assert fingerprint(list_files(environment), "/tmp") != before


def test_stopped_archive_leaves_no_file(environment: PythonEnvironment, archive: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(LaunchError):
        open_archive(archive, list_files(environment), Relocation({}), stopped)
    assert list(archive.parent.iterdir()) == []


def test_archive_is_written_once(archive: Path) -> None:
    assert read(archive, Path(__file__)) == [f"0/{Path(__file__).name}"]
    first = archive.stat().st_ino
    os.utime(archive, (0, 0))
    read(archive, Path(__file__))
    assert archive.stat().st_ino == first
    assert time.time() - archive.stat().st_mtime < 60  # it was used
    assert archive.parent.stat().st_mode & 0o777 == 0o700


def test_only_archives_are_removed(archive: Path) -> None:
    """Another user may have renamed a run directory of this user to the name of the archives' directory."""
    read(archive, Path(__file__))
    for name in ("result.json", "env-old.tar"):
        (archive.parent / name).touch()
        os.utime(archive.parent / name, (0, 0))
    archive.unlink()
    read(archive, Path(__file__))
    assert {path.name for path in archive.parent.iterdir()} == {"result.json", archive.name}


def test_lines_that_the_sites_python_prints_are_left_out(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "[Welcome]"\n{sys.executable} "$@"\necho Bye\n')
    python.chmod(0o755)
    assert find_environment(str(python), os.environ).prefix == sys.prefix


def test_archive_that_another_job_has_just_written_is_not_removed(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow job finds no archive. Then a fast job writes it, and opens it after the slow job has gone on."""
    has_looked, is_written, has_gone_on, is_read = (threading.Event() for _ in range(4))
    look, write = environment_archive._is_own, environment_archive._write_archive

    def slow_look(path: Path) -> bool:
        found = look(path)
        if threading.current_thread().name == "slow":
            has_looked.set()
            assert is_written.wait(60)
        return found

    def fast_write(*arguments: Any) -> None:
        is_slow = threading.current_thread().name == "slow"
        if is_slow:
            has_gone_on.set()
            assert is_read.wait(60)
        write(*arguments)
        if not is_slow:
            is_written.set()
            assert has_gone_on.wait(60)

    monkeypatch.setattr(environment_archive, "_is_own", slow_look)
    monkeypatch.setattr(environment_archive, "_write_archive", fast_write)
    slow = threading.Thread(target=read, args=(archive, Path(__file__)), name="slow")
    slow.start()
    assert has_looked.wait(60)
    try:
        assert read(archive, Path(__file__)) == [f"0/{Path(__file__).name}"]
    finally:
        is_read.set()
        slow.join(60)


def other_users_archive(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("planted"), io.BytesIO())
    path.chmod(0o666)


@as_root
@pytest.mark.parametrize("kind", ["another user's", "that others may write", "a link"])
def test_archive_that_another_user_may_have_written_is_written_again(archive: Path, tmp_path: Path, kind: str) -> None:
    archive.parent.mkdir(mode=0o700)
    if kind == "a link":
        other_users_archive(tmp_path / "theirs.tar")
        archive.symlink_to(tmp_path / "theirs.tar")
    else:
        other_users_archive(archive)
    if kind == "another user's":
        archive.chmod(0o600)
        os.chown(archive, NOBODY, NOBODY)
    assert read(archive, Path(__file__)) == [f"0/{Path(__file__).name}"]
    assert archive.lstat().st_uid == os.getuid()
    assert archive.lstat().st_mode & 0o777 == 0o600


@as_root
@pytest.mark.parametrize("kind", ["another user's", "a link"])
def test_directory_of_archives_that_is_not_this_users_is_refused_unchanged(
    archive: Path, tmp_path: Path, kind: str
) -> None:
    """In a directory that all users may write to, the name of the archives' directory is known."""
    theirs = archive.parent if kind == "another user's" else tmp_path / "data"
    theirs.mkdir()
    (theirs / "old.tar").touch()
    os.utime(theirs / "old.tar", (0, 0))
    other_users_archive(theirs / archive.name)
    if kind == "a link":
        archive.parent.symlink_to(theirs)
    else:
        os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(UntrustedFileError, match=r"Choose another --runs-directory\.$"):
        read(archive, Path(__file__))
    assert {path.name for path in theirs.iterdir()} == {"old.tar", archive.name}


def test_directory_of_archives_that_is_renamed_meanwhile_is_not_exchanged(archive: Path, tmp_path: Path) -> None:
    class Exchange(Relocation):
        """Acts as a user who may write to the directory above, while the archive is written."""

        def __call__(self, text: str) -> str:
            archive.parent.rename(tmp_path / "moved")
            archive.parent.mkdir()
            other_users_archive(archive)
            return text

    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "script"
    script.write_text("#!/bin/sh")
    files = [File(str(script), "0/bin/script", script.stat())]
    with open_archive(archive, files, Exchange({}), threading.Event()) as file, tarfile.open(fileobj=file) as tar:
        assert tar.getnames() == ["0/bin/script"]


def test_unused_archives_and_drafts_of_dead_jobs_are_removed(archive: Path) -> None:
    archive.parent.mkdir(mode=0o700)
    hours_ago = {
        "env-week.tar": 8 * 24,
        "env-day.tar": 24,
        "env-now.tar": 0,
        ".env-dead.draft": 1,
        ".env-growing.draft": 0.1,
    }
    for name, hours in hours_ago.items():
        (archive.parent / name).touch()
        os.utime(archive.parent / name, (time.time() - hours * 3600,) * 2)
    read(archive)
    assert {path.name for path in archive.parent.iterdir()} == {
        "env-day.tar",
        "env-now.tar",
        ".env-growing.draft",
        archive.name,
    }


def test_least_recently_used_archives_beyond_the_limit_are_removed(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_archive, "CACHE_BYTES", 1000)
    archive.parent.mkdir(mode=0o700)
    for name, hours in {"env-first.tar": 9, "env-second.tar": 8, "env-third.tar": 7, "env-in-use.tar": 0.1}.items():
        (archive.parent / name).write_bytes(bytes(450))
        os.utime(archive.parent / name, (time.time() - hours * 3600,) * 2)
    read(archive)
    assert {path.name for path in archive.parent.iterdir()} == {"env-third.tar", "env-in-use.tar", archive.name}


def test_environment_is_that_of_the_python_and_of_tf4slurm_without_the_system(environment: PythonEnvironment) -> None:
    found = find_environment(f"{environment.prefix}/bin/python", os.environ)
    assert environment.prefix in found.directories
    for path in (sys.prefix, sys.base_prefix):
        is_part = any(Path(path).is_relative_to(directory) for directory in found.directories)
        assert is_part != path.startswith("/usr")
    assert not any(path.startswith("/usr") for path in found.directories)


def test_modules_on_pythonpath_belong_to_the_environment(environment: PythonEnvironment, tmp_path: Path) -> None:
    module = tmp_path / "tensorflow-2.16" / "site-packages"
    module.mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": f"{module}:{tmp_path}"}
    found = find_environment(f"{environment.prefix}/bin/python", environ)
    assert str(module) in found.directories
    assert str(tmp_path) not in found.directories  # a directory of scripts


def test_missing_python_is_named() -> None:
    with pytest.raises(LaunchError, match="python9 is not on PATH"):
        find_environment("python9", os.environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/env/bin/python", "/tmp/x/bin/python"),
        ("/usr/bin:/home/ada/env/bin:/home/ada/env", "/usr/bin:/tmp/x/bin:/tmp/x"),
        (json.dumps({"python": "/home/ada/env/bin/python"}), '{"python": "/tmp/x/bin/python"}'),
        ("-Dprefix=/home/ada/env", "-Dprefix=/tmp/x"),
        (
            "/home/ada/env2/bin /home/ada/env.old /data/home/ada/env",
            "/home/ada/env2/bin /home/ada/env.old /data/home/ada/env",
        ),
        ("/home/ada/env/inner/bin", "/tmp/inner/bin"),
    ],
)
def test_whole_paths_are_replaced(text: str, expected: str) -> None:
    relocate = Relocation({"/home/ada/env": "/tmp/x", "/home/ada/env/inner": "/tmp/inner"})
    assert relocate(text) == expected
