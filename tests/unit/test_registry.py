"""The registry: jobs are found by id, name or path, from any directory."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tf4slurm.errors import RunDirectoryError, UnknownJobError
from tf4slurm.jobs import registry
from tf4slurm.jobs.registry import find_job, latest_run, register_job, registered_jobs
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def test_job_is_found_by_id_and_by_name(environ: dict[str, str], tmp_path: Path) -> None:
    register_job("train-17", tmp_path / "runs", environ, "17")
    register_job("train-1712", tmp_path / "runs", environ, "1712")
    first = RunDirectory.create(tmp_path / "runs", "train-17")
    second = RunDirectory.create(tmp_path / "runs", "train-17")  # it was requeued
    RunDirectory.create(tmp_path / "runs", "train-1712")
    assert find_job("17", environ) == find_job("train-17", environ)
    assert find_job("17", environ).run_directories == [first, second]
    assert find_job(None, environ).job_id == "1712"


def test_jobs_started_within_a_second_keep_their_order(environ: dict[str, str], tmp_path: Path) -> None:
    for number in range(20):
        register_job(f"sweep-{number}", tmp_path, environ, str(number))
    assert [job.job_id for job in registered_jobs(environ)] == [str(number) for number in reversed(range(20))]


def test_local_jobs_that_started_in_the_same_second_have_their_own_run_directories(
    environ: dict[str, str], tmp_path: Path
) -> None:
    runs = [RunDirectory.create(tmp_path / "runs", "train-20261123-092334") for _ in range(2)]
    jobs = [register_job(run.path.name, run.path.parent, environ) for run in runs]
    assert [job.run_directories for job in jobs] == [[runs[0]], [runs[1]]]
    runs[1].write(JobFile(started="2026-11-23T09:23:34+0100"))
    assert (
        find_job(str(runs[1].path), environ).started
        == datetime(2026, 11, 23, 8, 23, 34, tzinfo=timezone.utc).timestamp()
    )
    assert [latest_run(find_job(str(run.path), environ)) for run in runs] == runs


def test_jobs_of_the_same_name_in_two_directories_are_both_registered(environ: dict[str, str], tmp_path: Path) -> None:
    names = ("train-20261123-092334", "train-20261123-092334", "train 1", "train_1")
    jobs = [register_job(name, tmp_path / f"runs-{number}", environ) for number, name in enumerate(names)]
    assert registered_jobs(environ) == jobs[::-1]
    again = register_job(jobs[0].name, tmp_path / "runs-0", environ)  # as a requeued job does
    assert registered_jobs(environ) == [again, *jobs[:0:-1]]


def test_unregistered_job_is_found_by_the_path_of_its_run_directory(environ: dict[str, str], tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "train-9")
    run.write(JobFile(job_id="9"))
    job = find_job(str(run.path), environ)
    assert (job.job_id, job.run_directories) == ("9", [run])


def test_incomplete_run_directory_is_found_and_a_missing_one_is_an_error(
    environ: dict[str, str], tmp_path: Path
) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "events.jsonl").touch()
    assert latest_run(find_job(str(half), environ)).path == half
    register_job("gone-5", tmp_path / "runs", environ, "5")
    with pytest.raises(RunDirectoryError, match=r"'gone-5' has no run directory: '.*/runs/gone-5' does not exist"):
        latest_run(find_job("5", environ))


def test_error_for_an_unknown_job_names_similar_ones(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UnknownJobError, match="has not started any job"):
        find_job("17", environ)
    with pytest.raises(UnknownJobError, match="This user has not started any job"):
        find_job(None, environ)
    register_job("digits-4711", tmp_path, environ, "4711")
    with pytest.raises(UnknownJobError, match=r"no job '4771'.*4711") as caught:
        find_job("4771", environ)
    assert caught.value.exit_code == 5


def test_damaged_entries_are_left_out_and_an_unwritable_registry_is_no_error(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_job("a-1", tmp_path, environ, "1")
    jobs = tmp_path / "home/.local/state/tf4slurm/jobs"
    (jobs / "cut.json").write_text('{"job_id": "2", "na')
    (jobs / "other.json").write_text('{"job_id": "3", "colour": "red"}')
    assert [job.job_id for job in registered_jobs(environ)] == ["1"]
    (tmp_path / "file").touch()
    register_job("b-2", tmp_path, {"HOME": str(tmp_path / "file")}, "2")  # no error
    monkeypatch.setattr(registry, "_MAX_JOBS", 2)
    for number in range(4):
        register_job(f"c-{number}", tmp_path, environ, str(number))
    assert len(list(jobs.glob("*.json"))) == 2
    assert jobs.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_run_directories_of_other_users_beside_the_jobs_own_are_left_out(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users who may write to the parent know the name of a job's next run directory."""
    runs = tmp_path / "runs"
    job = register_job("train-17", runs, environ, "17")
    first = RunDirectory.create(runs, "train-17")
    planted = RunDirectory.create(runs, "train-17")
    os.chown(planted.path, 65534, 65534)
    (runs / "train-17-3").symlink_to(first.path)
    os.chown(runs / "train-17-3", 65534, 65534, follow_symlinks=False)
    own = RunDirectory.create(runs, "train-17")
    assert job.run_directories == [first, own]
    assert latest_run(find_job("17", environ)) == own
    local = register_job("train-17-2", runs, environ)
    assert local.run_directories == []
    with pytest.raises(RunDirectoryError, match="belongs to another user"):
        latest_run(local)

    assert find_job(str(planted.path), environ).run_directories == [planted]  # named explicitly
    monkeypatch.setenv("TF4SLURM_TRUST", str(runs))
    assert len(job.run_directories) == 4


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_with_the_name_of_a_registered_job_is_not_that_job(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a working directory that other users may write to, the id of a job names the job."""
    monkeypatch.chdir(tmp_path)
    register_job("train-17", tmp_path / "runs", environ, "17")
    for name in ("17", "18"):
        RunDirectory.create(tmp_path, name).write(JobFile(job_id="666"))
        os.chown(name, 65534, 65534)
    assert find_job("17", environ).name == "train-17"
    assert find_job("./17", environ).job_id == "666"  # named as a path
    assert find_job("18", environ).job_id == "666"  # nothing else has this name
    RunDirectory.create(tmp_path, "train-17").write(JobFile(job_id="3"))
    assert find_job("train-17", environ).runs_directory == str(tmp_path)  # this user's
