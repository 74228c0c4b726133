"""The run directory: its name, its permissions and its files."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.disk import fill, small_disk
from tf4slurm.cluster import Task
from tf4slurm.control.clock import JobClock
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.recorder import EventLog
from tf4slurm.jobs.run_directory import RunDirectory, open_to_append
from tf4slurm.jobs.schema import JobFile, LastState, ResultFile, Sample, WorkerArray

MAKERS = {"create": lambda path: RunDirectory.create(path.parent, path.name), "open": RunDirectory.open}
UNUSABLE = {"parent is a file": "file/runs/digits", "itself a file's child": "file/digits", "kernel's": "/proc/runs/x"}


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_created_directory_is_private_and_its_parents_exist(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "a" / "runs", "digits-42")
    assert directory.path == tmp_path / "a" / "runs" / "digits-42"
    assert mode_of(directory.path) == 0o700
    assert (directory.path / "logs").is_dir()


def test_existing_name_gets_a_number(tmp_path: Path) -> None:
    names = [RunDirectory.create(tmp_path, "digits").path.name for _ in range(3)]
    assert names == ["digits", "digits-2", "digits-3"]


def test_file_of_the_same_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("mine")
    assert RunDirectory.create(tmp_path, "digits").path.name == "digits-2"
    assert (tmp_path / "digits").read_text() == "mine"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("place", UNUSABLE.values(), ids=UNUSABLE)
def test_unwritable_parent_is_an_error(tmp_path: Path, make: Callable[[Path], RunDirectory], place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError) as caught:
        make(tmp_path / place)
    assert str(caught.value).startswith(f"The run directory '{tmp_path / place}' cannot be created: ")
    assert "--runs-directory" in str(caught.value)
    assert caught.value.path == str(tmp_path / place)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(Path("runs/digits")) == RunDirectory(tmp_path / "runs" / "digits")


def test_open_creates_the_directory_or_uses_the_existing_one(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "digits-1.0"
    made = RunDirectory.open(path)
    made.write(JobFile(name="digits"))
    assert RunDirectory.open(path) == made
    assert mode_of(path) == 0o700
    assert made.read(JobFile) == JobFile(name="digits")


def test_4_kb_are_reserved_once_for_the_process_that_writes_the_result(tmp_path: Path) -> None:
    reserved = tmp_path / "digits-1.0" / ".result.json.reserved"
    for _ in range(3):
        RunDirectory.open(reserved.parent, reserve_result=False)
    assert not reserved.exists()
    for _ in range(3):
        RunDirectory.open(reserved.parent)
    assert reserved.stat().st_size == 4096


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("first", ["on the full disk", "before it is full", "before it is full, and long"])
def test_second_result_on_a_full_disk_replaces_the_first(tmp_path: Path, first: str) -> None:
    """As when Slurm refuses the requeue that the first result announces."""
    with small_disk(tmp_path / "runs"):
        run = RunDirectory.create(tmp_path / "runs", "digits")
        requeued = ResultFile(exit_code=75, requeued="time limit", tail=("x" * (20_000 if "long" in first else 1),))
        if first == "on the full disk":
            fill(tmp_path / "runs")
            with pytest.raises(RunDirectoryError, match="the state, the exit code and the reason alone"):
                run.write_result(requeued)
        else:
            run.write_result(requeued)
            fill(tmp_path / "runs")
        result = run.read(ResultFile)
        assert result is not None
        assert result.exit_code == 75
        with pytest.raises(RunDirectoryError, match="the state, the exit code and the reason alone"):
            run.write_result(ResultFile(exit_code=143, reason="The job was stopped."))
        assert run.read(ResultFile) == ResultFile(exit_code=143, reason="The job was stopped.")


def test_open_removes_permissions_of_others(tmp_path: Path) -> None:
    path = tmp_path / "digits-1.0"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    RunDirectory.open(path)
    assert mode_of(path) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
    """In a world-writable directory, such as /tmp."""
    tmp_path.chmod(0o1777)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    for name in ("theirs", "link"):
        with pytest.raises(RunDirectoryError, match="a link, or another user's directory, is in its place"):
            RunDirectory.open(tmp_path / name)
        assert RunDirectory.create(tmp_path, name).path.name == f"{name}-2"
    assert list((tmp_path / "mine").iterdir()) == list((tmp_path / "theirs").iterdir()) == []


def test_growing_files_and_their_directories_are_private_under_any_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = RunDirectory.create(tmp_path, "digits")
        thread, written = ThreadPoolExecutor(1), threading.Event()
        EventLog(run.events, JobClock(1.0), thread).add("registered", "worker/0", "It has joined.")
        thread.submit(written.set)
        assert written.wait(60)
        run.append_sample(Sample(seconds=1.0))
        run.write(LastState("worker/0", state="ended"))
        open_to_append(run.log(Task("worker", 0), 1)).close()
    finally:
        os.umask(old)
    modes = {str(path.relative_to(run.path)): mode_of(path) for path in run.path.rglob("*")}
    directories = {"logs": 0o700, "lost": 0o700}
    names = (".result.json.reserved", "events.jsonl", "samples.jsonl", "logs/worker-0.1.log", "lost/worker-0.json")
    assert modes == {**directories, **dict.fromkeys(names, 0o600)}


def test_file_is_replaced_atomically_and_private(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path)
    path = tmp_path / "job.json"
    old = os.umask(0)
    try:
        directory.write(JobFile(name="first"))
        first = path.stat().st_ino
        with path.open() as reader:
            directory.write(JobFile(name="second"))
            assert json.load(reader)["name"] == "first"  # an open file keeps the old content
    finally:
        os.umask(old)
    assert directory.read(JobFile) == JobFile(name="second")
    assert path.stat().st_ino != first
    assert mode_of(path) == 0o600
    assert {child.name for child in tmp_path.iterdir()} == {".result.json.reserved", "job.json", "logs"}


def test_simultaneous_writers_of_a_report_publish_whole_files(tmp_path: Path) -> None:
    run, contents = RunDirectory.open(tmp_path), [letter * 300_000 for letter in (b"a", b"b")]

    def write_often(content: bytes) -> set[bytes]:
        return {run.write_report(content).read_bytes() for _ in range(50)}

    with ThreadPoolExecutor() as threads:
        found = set().union(*threads.map(write_often, contents))
    assert found <= set(contents)
    assert {path.name for path in tmp_path.iterdir()} == {".result.json.reserved", "logs", "report.html"}


def test_content_that_is_not_json_keeps_the_old_file(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path)
    directory.write(JobFile(name="first"))
    with pytest.raises(TypeError):
        directory.write(JobFile(name=object()))  # type: ignore[arg-type]
    assert directory.read(JobFile) == JobFile(name="first")


def test_deleted_directory_is_a_run_directory_error(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "digits")
    shutil.rmtree(directory.path)
    with pytest.raises(RunDirectoryError):
        directory.write(JobFile())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_file_system_that_shows_other_owners_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS with all_squash does, or sshfs: a later process could not tell the run from another user's."""
    mkdir = Path.mkdir

    def make_for_others(path: Path, mode: int = 0o777, **options: bool) -> None:
        mkdir(path, mode, **options)
        os.chown(path, 65534, 65534)

    monkeypatch.setattr(Path, "mkdir", make_for_others)
    with pytest.raises(RunDirectoryError, match="as that of user 65534"):
        RunDirectory.create(tmp_path, "digits")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TF4SLURM_TRUST", str(tmp_path))
    assert RunDirectory.create(tmp_path, "digits").path == tmp_path / "digits"


def test_simultaneous_grows_and_joins_lose_no_array(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "train-4711")
    job_ids = [*map(str, range(100))]
    with ThreadPoolExecutor(8) as threads:
        for job_id in job_ids:
            threads.submit(directory.add_worker_arrays, WorkerArray(job_id))
            threads.submit(directory.add_worker_arrays)  # as `join` does
    assert sorted((array.job_id for array in directory.read_lines(WorkerArray)), key=int) == job_ids
    assert mode_of(directory.path / "worker_arrays.jsonl") == 0o600
