"""Files that are found rather than named: the owners whose files are used or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tf4slurm.errors import UnknownJobError, UntrustedFileError
from tf4slurm.jobs.registry import KnownJob, find_job, register_job, registered_jobs
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, ResultFile
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.settings import SettingsPaths, project_directories
from tf4slurm.submission.batch_script import make_script
from tf4slurm.system import trusted_files
from tf4slurm.system.trusted_files import check_trusted

NOBODY = 65534
GROUP = 12345  # of no name
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file and its directory that only this user can write."""
    (tmp_path / "directory").mkdir(mode=0o755)
    path = tmp_path / "directory" / "tf4slurm.toml"
    path.touch(mode=0o644)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UntrustedFileError) as refused:
        check_trusted(path, "Do without.")
    assert refused.value.path == str(path)
    assert str(refused.value).startswith(f"{str(path)!r} is refused")
    assert str(refused.value).endswith("Do without.")
    return str(refused.value)


def test_file_of_this_user_that_others_only_read_is_used(file: Path) -> None:
    check_trusted(file, "")


@pytest.mark.parametrize("part", ["file", "directory"])
def test_file_or_directory_that_all_may_write_is_refused(file: Path, part: str) -> None:
    path = file if part == "file" else file.parent
    path.chmod(path.stat().st_mode | 0o1002)  # sticky or not: other users could have added this file
    assert f"all users may write {str(path)!r}. Take that permission away: chmod o-w." in refusal(file)


@as_root
@pytest.mark.parametrize("part", ["file", "directory"])
def test_file_or_directory_of_another_user_is_refused(file: Path, part: str) -> None:
    path = file if part == "file" else file.parent
    os.chown(path, NOBODY, NOBODY)
    assert f"{str(path)!r} belongs to the user 'nobody'" in refusal(file)


@as_root
def test_group_write_permission_is_refused_unless_the_group_is_the_owners_private_one(file: Path) -> None:
    file.chmod(0o664)
    os.chown(file, 0, 0)
    check_trusted(file, "")  # root's own group
    os.chown(file, 0, GROUP)
    assert f"the group '{GROUP}' may write {str(file)!r}" in refusal(file)
    os.chown(file, 0, 4)  # a group with a name, and not the owner's
    refusal(file)


@as_root
def test_link_is_checked_with_its_target_file_and_directory(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to(file)
    check_trusted(tmp_path / "link.toml", "")
    file.parent.chmod(0o777)
    refusal(tmp_path / "link.toml")
    file.parent.chmod(0o755)
    os.chown(file, NOBODY, NOBODY)
    refusal(tmp_path / "link.toml")


@pytest.mark.parametrize(
    ("trusted", "is_used"),
    [
        ("{0}/directory", True),
        ("/elsewhere:{0}", True),  # subdirectories are trusted too
        ("{0}/link/", True),
        ("{0}/direct", False),
        ("directory:.:", False),  # relative to any current directory
        ("{0}/directory/tf4slurm.toml", False),
    ],
)
def test_directory_in_the_variable_trust_is_used_whatever_its_permissions(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: str, is_used: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("directory")
    file.chmod(0o666)
    file.parent.chmod(0o2777)
    assert f"add {str(file.parent)!r} to the environment variable TF4SLURM_TRUST." in refusal(file)
    monkeypatch.setenv("TF4SLURM_TRUST", trusted.format(tmp_path))
    if is_used:
        check_trusted(file, "")
    else:
        refusal(file)


def test_link_out_of_a_trusted_directory_is_refused_if_others_may_write_its_target(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted/tf4slurm.toml").symlink_to(file)
    monkeypatch.setenv("TF4SLURM_TRUST", str(tmp_path / "trusted"))
    check_trusted(tmp_path / "trusted/tf4slurm.toml", "")
    file.parent.chmod(0o777)
    refusal(tmp_path / "trusted/tf4slurm.toml")


@as_root
def test_user_uses_files_of_root_and_root_none_of_a_user() -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own directory is closed to other users
    directory.chmod(0o755)
    file = directory / "tf4slurm.toml"
    file.touch(mode=0o644)
    for owner, user, is_used in ((0, NOBODY, True), (NOBODY, NOBODY, True), (NOBODY, 0, False), (4711, NOBODY, False)):
        os.chown(file, owner, owner)
        code = (
            "import os, pathlib, sys; from tf4slurm.system.trusted_files import check_trusted\n"
            f"os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})\n"
            "check_trusted(pathlib.Path(sys.argv[1]), '')"
        )
        done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0, "UntrustedFileError" in done.stderr) == (is_used, not is_used), done.stderr
    shutil.rmtree(directory)


@as_root
def test_file_that_is_exchanged_meanwhile_is_checked_as_it_was_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a user who may write to a directory above: at each check of the path, this user's file is in its place."""
    original = tmp_path / "mine"
    file.rename(original)
    file.write_text("planted")
    os.chown(file, NOBODY, NOBODY)

    def exchange(path: Path, instead: str) -> None:
        original.replace(path)
        check_trusted(path, instead)

    monkeypatch.setattr(trusted_files, "check_trusted", exchange)
    with pytest.raises(UntrustedFileError, match="belongs to the user 'nobody'"):
        trusted_files.read_trusted(file, "")


@as_root
def test_named_pipe_of_another_user_is_refused_at_once(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(UntrustedFileError):
        trusted_files.read_trusted(file, "")


def test_content_of_a_trusted_file_is_read(file: Path) -> None:
    file.write_text("mine")
    assert trusted_files.read_trusted(file, "") == b"mine"
    file.chmod(0o666)
    with pytest.raises(UntrustedFileError):
        trusted_files.read_trusted(file, "")


@pytest.mark.parametrize(
    ("repository", "home", "expected"),
    [
        ("a/b", "a", ("a/b/c", "a/b")),
        ("a", "a/b", ("a/b/c", "a/b")),
        ("a/b/c", "", ("a/b/c",)),
        ("", "a", ("a/b/c", "a/b", "a")),
        ("", "elsewhere", ("a/b/c",)),  # directories above may not belong to this project
    ],
)
def test_project_is_searched_no_higher_than_repository_or_home(
    tmp_path: Path, repository: str, home: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    if repository:
        (tmp_path / repository / ".git").touch()  # a file in a worktree
    home_path = tmp_path / home if home else Path("/nobody")
    assert project_directories(tmp_path / "a/b/c", home_path) == tuple(tmp_path / path for path in expected)


def test_home_that_is_a_link_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "real/project").mkdir(parents=True)
    (tmp_path / "home").symlink_to("real")
    (tmp_path / "real/tf4slurm.toml").touch()
    paths = SettingsPaths.from_environ({"HOME": str(tmp_path / "home")}, tmp_path / "real/project")
    assert paths.project == tmp_path / "real/tf4slurm.toml"


PLANTED = "load-env = 'touch PLANTED'\npython = 'PLANTED'"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of this user with a file of settings, and a directory in it."""
    (tmp_path / "repository/.git").mkdir(parents=True)
    (tmp_path / "repository/below").mkdir()
    (tmp_path / "repository/tf4slurm.toml").write_text(PLANTED)
    return tmp_path / "repository"


def script(directory: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TF4SLURM, "script", *options, "--workers", "1", "--", "python", "train.py"],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_files_whose_settings_are_used_are_named(project: Path) -> None:
    done = script(project / "below")
    assert f"tf4slurm: settings from {project / 'tf4slurm.toml'}\n" in done.stderr
    assert "PLANTED" in done.stdout
    assert "settings from" not in script(project, "--site", "none").stderr


@as_root
def test_project_file_of_another_user_ends_the_command(project: Path) -> None:
    for part in (project, project / "tf4slurm.toml"):
        os.chown(part, NOBODY, NOBODY)
        done = script(project / "below")
        assert done.returncode == 3
        assert "PLANTED" not in done.stdout
        assert f"{str(part)!r} belongs to the user 'nobody'" in done.stderr
        assert "--site none" in done.stderr
        assert script(project / "below", "--site", "none").returncode == 0
        os.chown(part, 0, 0)


@as_root
def test_group_writable_project_is_used_with_the_users_own_settings_once_it_is_trusted(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "tf4slurm").mkdir()
    (tmp_path / "tf4slurm/config.toml").write_text("partition = 'mine'")
    for path, mode in ((project, 0o2775), (project / "tf4slurm.toml", 0o664)):
        os.chown(path, 0, GROUP)
        path.chmod(mode)
    refused = script(project / "below", XDG_CONFIG_HOME=str(tmp_path))
    assert refused.returncode == 3
    assert f"add {str(project)!r} to the environment variable TF4SLURM_TRUST" in refused.stderr
    used = script(project / "below", XDG_CONFIG_HOME=str(tmp_path), TF4SLURM_TRUST=str(project))
    assert used.returncode == 0, used.stderr
    assert "PLANTED" in used.stdout
    assert "--partition=mine" in used.stdout


@as_root
def test_user_config_and_site_profile_of_another_user_end_the_command(tmp_path: Path) -> None:
    (tmp_path / "tf4slurm/sites").mkdir(parents=True)
    for name in ("tf4slurm/config.toml", "tf4slurm/sites/mine.toml"):
        (tmp_path / name).write_text(PLANTED)
        assert "PLANTED" in script(tmp_path, "--site", "mine", XDG_CONFIG_HOME=str(tmp_path)).stdout or "config" in name
        os.chown(tmp_path / name, NOBODY, NOBODY)
        done = script(tmp_path, "--site", "mine", XDG_CONFIG_HOME=str(tmp_path))
        assert (done.returncode, done.stdout) == (3, "")
        assert "belongs to the user 'nobody'" in done.stderr
        (tmp_path / name).unlink()


def test_config_init_makes_a_file_that_is_used_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        command = [TF4SLURM, "config", "init"]
        environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
        made = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
        RunDirectory.create(tmp_path / "runs", "train").write(JobFile())
    finally:
        os.umask(before)
    check_trusted(Path(made.strip()), "")
    check_trusted(tmp_path / "runs/train", "")


@pytest.fixture
def other_users_run(tmp_path: Path) -> Path:
    """The run directory of another user's job, whose command would create a file."""
    run = RunDirectory.create(tmp_path, "train")
    command = ["run", "--ps", "0", "--workers", "0", "--", "touch", str(tmp_path / "PLANTED")]
    run.write(JobFile(arguments=("tf4slurm", *command), directory=str(tmp_path), process=Process(id=1)))
    run.write_result(ResultFile(exit_code=1))
    os.chown(run.path / "job.json", NOBODY, NOBODY)
    return run.path


@as_root
def test_job_of_another_user_is_not_resumed_and_can_be_read(other_users_run: Path) -> None:
    def call(verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([TF4SLURM, verb, other_users_run], capture_output=True, text=True, timeout=60)

    refused = call("resume")
    assert (refused.returncode, "belongs to the user 'nobody'" in refused.stderr) == (3, True)
    assert not (other_users_run.parent / "PLANTED").exists()
    assert call("status").returncode == 0


@as_root
def test_job_of_another_user_is_not_cancelled(other_users_run: Path) -> None:
    """Its job.json names the process to signal: here a process of this user."""
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        (other_users_run / "result.json").unlink()
        process = Process.of(sleeper.pid)
        assert process.is_alive()
        RunDirectory(other_users_run).write(JobFile(process=process))
        os.chown(other_users_run / "job.json", NOBODY, NOBODY)
        done = subprocess.run(
            [TF4SLURM, "cancel", "--grace-period", "0", other_users_run], capture_output=True, text=True, timeout=60
        )
        assert "belongs to the user 'nobody'" in done.stderr
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


@as_root
def test_batch_script_ends_if_its_snapshot_belongs_to_another_user(tmp_path: Path) -> None:
    (tmp_path / "train.code").mkdir()
    spec = BatchSpec(
        ("touch", "TRACE"), runs_directory=tmp_path, snapshot="copy", directory=tmp_path / "train.code", single=True
    )
    text = make_script(spec)
    for owner, code in ((NOBODY, 3), (0, 0)):
        os.chown(tmp_path / "train.code", owner, owner)
        assert subprocess.run(["bash", "-c", text], timeout=120).returncode == code
        assert (tmp_path / "train.code/TRACE").exists() == (code == 0)


@as_root
@pytest.mark.parametrize("change", [lambda path: os.chown(path, NOBODY, 0), lambda path: path.chmod(0o777)])
def test_registry_that_others_can_write_is_ignored_with_one_warning(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"HOME": str(tmp_path)}
    run = RunDirectory.create(tmp_path / "runs", "train")
    register_job("train", tmp_path / "runs", environ)
    register_job("other", tmp_path / "runs", environ)
    assert [job.name for job in registered_jobs(environ)] == ["other", "train"]
    registry = tmp_path / ".local/state/tf4slurm/jobs"
    change(registry)
    assert registered_jobs(environ) == []
    (warning,) = caplog.messages
    assert "2 registered jobs are left out" in warning
    assert f"add {str(registry)!r} to the environment variable TF4SLURM_TRUST" in warning
    for text in (None, "train"):
        with pytest.raises(UnknownJobError):
            find_job(text, environ)
    register_job("third", tmp_path / "runs", environ)
    assert {path.name.rpartition("-")[0] for path in registry.iterdir()} == {"train", "other"}
    monkeypatch.setenv("TF4SLURM_TRUST", str(tmp_path))
    assert [job.name for job in registered_jobs(environ)] == ["other", "train"]
    assert isinstance(find_job(str(run.path), environ), KnownJob)
