"""The user's directories, with and without HOME, and new directories under every umask."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tf4slurm.errors import SettingsError
from tf4slurm.jobs.registry import register_job, registered_jobs
from tf4slurm.spec.settings import SettingsPaths, create_file, read_settings
from tf4slurm.system.directories import home_directory, make_directories, user_directory


def forget_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(user_id: int) -> pwd.struct_passwd:
        raise KeyError(user_id)

    monkeypatch.setattr(pwd, "getpwuid", look_up)


def set_passwd_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    entry = pwd.struct_passwd(("ana", "x", os.getuid(), os.getgid(), "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda user_id: entry)


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}])
def test_without_home_settings_and_registry_use_the_password_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    set_passwd_home(monkeypatch, tmp_path)
    assert SettingsPaths.from_environ(environ, tmp_path).user == tmp_path / ".config/tf4slurm"
    register_job("train-1", tmp_path / "runs", environ, "1")
    assert len([*(tmp_path / ".local/state/tf4slurm/jobs").glob("train-1-*.json")]) == 1
    assert [job.name for job in registered_jobs(environ)] == ["train-1"]


def test_user_without_any_home_has_no_registry_and_no_settings_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_user(monkeypatch)
    assert home_directory({}) is None
    paths = SettingsPaths.from_environ({}, tmp_path)
    assert read_settings({}, None, paths).keys() == {"site"}
    assert register_job("train-1", tmp_path / "runs", {}, "1").name == "train-1"
    assert registered_jobs({}) == []
    with pytest.raises(SettingsError, match="Set HOME or XDG_CONFIG_HOME"):
        create_file(paths, project=False)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("/state", "/state/tf4slurm"),
        ("", "/home/ana/.local/state/tf4slurm"),
        ("state", "/home/ana/.local/state/tf4slurm"),
    ],
)
def test_relative_path_in_an_xdg_variable_is_ignored(variable: str, expected: str) -> None:
    environ = {"HOME": "/home/ana", "XDG_STATE_HOME": variable}
    assert user_directory(environ, "XDG_STATE_HOME", ".local/state") == Path(expected)


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_others_cannot_write_to_new_directories(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_directories(tmp_path / "a/b/c", 0o700)
        make_directories(tmp_path / "a/b/d", 0o755)
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c", "a/b/d")}
    assert modes == {name: mode & ~umask for name, mode in zip(modes, (0o755, 0o755, 0o700, 0o755), strict=True)}


def test_relative_path_below_a_removed_working_directory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        make_directories(Path("a/b"), 0o700)


def test_existing_directory_is_left_and_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in (".", "link"):
        before = tmp_path.stat().st_mode
        make_directories(tmp_path / name, 0o700)
        assert tmp_path.stat().st_mode == before
    for name, error in (("file", FileExistsError), ("file/below", NotADirectoryError)):
        with pytest.raises(error):
            make_directories(tmp_path / name, 0o700)
