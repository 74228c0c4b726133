"""The archive of a Python environment: what belongs to it, its fingerprint, and its use in another directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from tf4slurm.errors import LaunchError
from tf4slurm.launch.environment_archive import (
    PythonEnvironment,
    Relocation,
    find_environment,
    fingerprint,
    list_files,
    write_archive,
)


@pytest.fixture
def environment(tmp_path: Path) -> PythonEnvironment:
    path = tmp_path / "home" / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    (package,) = path.glob("lib/python*/site-packages")
    (package / "module.py").write_text("value = 7\n")
    (path / "bin" / "tool").write_text(f"#!{path}/bin/python\nimport module, sys\nprint(sys.prefix, module.value)\n")
    (path / "bin" / "tool").chmod(0o755)
    return PythonEnvironment(f"{path}/bin/python", str(path), (str(path),), ())


def test_programs_of_the_archive_run_in_another_directory(environment: PythonEnvironment, tmp_path: Path) -> None:
    copy = tmp_path / "disk"
    relocate = Relocation({environment.prefix: f"{copy}/0"})
    write_archive(tmp_path / "archives" / "env.tar", list_files(environment), relocate, threading.Event())
    with tarfile.open(tmp_path / "archives" / "env.tar") as archive:
        archive.extractall(copy)
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


def test_stopped_archive_leaves_no_file(environment: PythonEnvironment, tmp_path: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    write_archive(tmp_path / "archives" / "env.tar", list_files(environment), Relocation({}), stopped)
    assert list((tmp_path / "archives").iterdir()) == []


def test_archives_that_nobody_used_for_a_week_are_removed(environment: PythonEnvironment, tmp_path: Path) -> None:
    for name in ("old.tar", "new.tar"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "old.tar", (0, 0))
    write_archive(tmp_path / "env.tar", list_files(environment), Relocation({}), threading.Event())
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["env.tar", "new.tar"]


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
