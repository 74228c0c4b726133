"""The registry: jobs are found by id, name or path, from any directory."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.errors import RunDirectoryError, UnknownJobError
from tf4slurm.jobs import registry
from tf4slurm.jobs.registry import (
    KnownEnd,
    KnownJob,
    find_job,
    find_run_directories,
    latest_run,
    register_cancelled,
    register_job,
    registered_jobs,
)
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.points import ArrayElement


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


@pytest.mark.parametrize("other", ["end", "cancelled"])
def test_notes_of_two_processes_at_the_same_moment_are_both_kept(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    array = tuple(ArrayElement(index) for index in range(3))
    job = register_job("a-7", tmp_path, environ, "7", array)
    both_have_read = threading.Barrier(2)
    read = registry._read_registered

    def read_and_wait(job: KnownJob, environ: dict[str, str]) -> KnownJob | None:
        entry = read(job, environ)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_read.wait(0.5)  # a process that waits for the lock does not come here
        return entry

    def note_end(index: int) -> None:
        ends = {JobId(7, (index,)): KnownEnd(state="FAILED", reason=f"{index}")}
        registry.register_known_ends(job, ends, environ)

    monkeypatch.setattr(registry, "_read_registered", read_and_wait)
    note_other = (lambda: note_end(1)) if other == "end" else lambda: register_cancelled(job, JobId(7, (1,)), environ)
    threads = [threading.Thread(target=lambda: note_end(0)), threading.Thread(target=note_other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    entry = find_job("7", environ)
    noted = {each.job_id for each in entry.ends} | {entry.cancelled}
    assert {"7_0", "7_1"} <= noted


def test_lock_that_another_process_holds_for_too_long_is_ignored(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_job("a-7", tmp_path, environ, "7")
    monkeypatch.setattr(registry, "_LOCK_SECONDS", 0.1)
    with registry._locked(environ):
        register_job("b-8", tmp_path, environ, "8")
    assert find_job("8", environ).name == "b-8"


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
    (jobs / "gone.json").symlink_to(jobs / "removed by another job")
    for number in range(4):
        register_job(f"c-{number}", tmp_path, environ, str(number))
    assert sorted(path.name[:3] for path in jobs.glob("*.json")) == ["c-2", "c-3"]
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


ELEMENTS = tuple(ArrayElement(index, {"lr": f"0.{index}"}) for index in (1, 2, 5))


@pytest.mark.parametrize(
    ("text", "job_id", "indices"),
    [
        ("19", "19", [1, 2, 5]),
        ("train-19", "19", [1, 2, 5]),
        ("19;north", "19", [1, 2, 5]),
        ("19_5", "19_5", []),
        ("train-19_5", "19_5", []),
        ("19_[5]", "19_5", []),
        ("19_[1-2]", "19_[1-2]", [1, 2]),
        ("19_[5,1%2]", "19_[1,5]", [1, 5]),
        ("17", "17", []),
        ("17+1", "17", []),
    ],
)
def test_array_and_its_elements_are_found(
    environ: dict[str, str], tmp_path: Path, text: str, job_id: str, indices: list[int]
) -> None:
    register_job("train-19", tmp_path, environ, "19", ELEMENTS)
    register_job("train-17", tmp_path, environ, "17")
    job = find_job(text, environ)
    assert (job.job_id, [each.index for each in job.array]) == (job_id, indices)
    if job_id == "19_5":
        assert (job.name, job.whole_name, job.labels) == ("train-19_5", "train-19", {"lr": "0.5"})
    assert [each.name for each in job.elements] == [f"train-19_{index}" for index in indices]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("19_3", "The array train-19 has the elements 1-2,5, and no element 3."),
        ("19_[1-5]", "has the elements 1-2,5, and no element 3."),
        ("train-19_99", "has the elements 1-2,5, and no element 99."),
        ("17_1", "train-17 is no job array, so it has no element 1."),
        ("train-17_1", "train-17 is no job array, so it has no element 1."),
        ("train-17_" + "9" * 5000, "There is no job"),
        ("train-17_", "There is no job"),
        ("19_", "There is no job"),
        ("19_[1-2", "There is no job"),
        ("19_[" + "0-4000000," * 9 + "1]", "There is no job"),
        ("-1", "There is no job"),
    ],
)
def test_element_that_does_not_exist_is_an_error(
    environ: dict[str, str], tmp_path: Path, text: str, words: str
) -> None:
    register_job("train-19", tmp_path, environ, "19", ELEMENTS)
    register_job("train-17", tmp_path, environ, "17")
    with pytest.raises(UnknownJobError) as caught:
        find_job(text, environ)
    assert words in str(caught.value)


def test_job_with_the_name_of_an_element_is_found_by_its_name(environ: dict[str, str], tmp_path: Path) -> None:
    """The name is also that of an element of a job that was started later."""
    for name, job_id in (("train-17_1", None), ("exp_3-4711", "4711"), ("local_3", None)):
        register_job(name, tmp_path, environ, job_id)
    register_job("train-17", tmp_path, environ, "17")
    register_job("local", tmp_path, environ)
    assert find_job("train-17_1", environ).job_id is None
    assert find_job("exp_3-4711", environ).job_id == "4711"
    assert find_job("local_3", environ).name == "local_3"
    with pytest.raises(UnknownJobError, match="There is no job 'local_4'"):
        find_job("local_4", environ)


def test_array_without_own_entry_consists_of_the_elements_that_registered_themselves(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """Its batch script was written by hand. So each run registers itself, with a name and directory of its own."""
    register_job("lr1-19_1", tmp_path / "one", environ, "19_1")
    register_job("lr2-19_2", tmp_path / "two", environ, "19_2")
    register_job("lr2-18_2", tmp_path / "two", environ, "18_2")
    run = RunDirectory.create(tmp_path / "one", "lr1-19_1")
    again = RunDirectory.create(tmp_path / "one", "lr1-19_1")
    for text in ("19", "lr1-19", "lr2-19"):
        job = find_job(text, environ)
        assert (job.job_id, [each.job_id for each in job.elements]) == ("19", ["19_1", "19_2"])
        assert [each.run_directories for each in job.elements] == [[run, again], []]
        assert [each.name for each in job.elements] == ["lr1-19_1", "lr2-19_2"]
    assert find_job("19_1", environ).name == "lr1-19_1"
    assert find_job("19_[1-2]", environ).job_id == "19_[1-2]", "not the whole array"
    pending = find_job("19_[2-3]", environ)  # element 3 is pending, so it is not registered
    assert [each.job_id for each in pending.elements] == ["19_2", "19_3"]
    assert find_job("lr2-19_7", environ).job_id == "19_7"


def test_elements_of_a_registered_array_have_no_entries_of_their_own(environ: dict[str, str], tmp_path: Path) -> None:
    early = register_job("train-19_1", tmp_path, environ, "19_1")  # it started before `submit` registered the array
    assert registered_jobs(environ) == [early]
    array = register_job("train-19", tmp_path, environ, "19", ELEMENTS)
    register_job("train-19_2", tmp_path, environ, "19_2")
    other = register_job("train-19_2", tmp_path / "other", environ, "19_2")  # not in the array's directory
    assert registered_jobs(environ) == [other, array]
    assert len(list((tmp_path / "home/.local/state/tf4slurm/jobs").glob("*.json"))) == 3
    assert find_job("19_1", environ).labels == {"lr": "0.1"}


def test_two_arrays_of_one_name_in_two_directories_keep_their_elements(environ: dict[str, str], tmp_path: Path) -> None:
    for number, job_id in enumerate(("19", "20")):
        register_job(f"train-{job_id}", tmp_path / f"runs-{number}", environ, job_id, ELEMENTS)
        RunDirectory.create(tmp_path / f"runs-{number}", f"train-{job_id}_1")
    for number, job_id in enumerate(("19", "20")):
        (run,) = find_job(f"train-{job_id}_1", environ).run_directories
        assert run.path.parent == tmp_path / f"runs-{number}"


def test_array_that_an_older_version_registered_without_elements(environ: dict[str, str], tmp_path: Path) -> None:
    """That version registered each element beside it."""
    for name, job_id in (("train-19", "19"), ("train-19_1", "19_1"), ("train-19_2", "19_2")):
        register_job(name, tmp_path, {"HOME": str(tmp_path / name)}, job_id)  # apart, as that version did not look
        for path in (tmp_path / name / ".local/state/tf4slurm/jobs").iterdir():
            target = tmp_path / "home/.local/state/tf4slurm/jobs"
            target.mkdir(parents=True, exist_ok=True, mode=0o700)
            content = json.loads(path.read_text())
            for key in ("array", "cancelled", "labels"):
                del content[key]
            (target / path.name).write_text(json.dumps(content))
    for text in ("19", "train-19"):
        assert [each.job_id for each in find_job(text, environ).elements] == ["19_1", "19_2"]
    assert find_job("19_2", environ).name == "train-19_2"


def test_entries_with_invalid_ids_are_left_out(environ: dict[str, str], tmp_path: Path) -> None:
    register_job("train-19", tmp_path, environ, "19", ELEMENTS)
    jobs = tmp_path / "home/.local/state/tf4slurm/jobs"
    (path,) = jobs.iterdir()
    damages: tuple[dict[str, Any], ...] = ({"job_id": "x"}, {"cancelled": "y"}, {"job_id": "19_"}, {"job_id": None})
    for number, changes in enumerate(damages):
        (jobs / f"{number}.json").write_text(json.dumps({**json.loads(path.read_text()), "name": "bad", **changes}))
    (jobs / "9.json").write_text(
        json.dumps({**json.loads(path.read_text()), "name": "odd", "job_id": "23", "array": [3, {"index": "x"}]})
    )
    assert sorted(job.name for job in registered_jobs(environ)) == ["odd", "train-19"]
    assert find_job("19_2", environ).name == "train-19_2"
    with pytest.raises(UnknownJobError):
        find_job("x", environ)


def test_note_of_cancelled_elements_is_added_to_the_entry_of_the_array(environ: dict[str, str], tmp_path: Path) -> None:
    register_job("train-19", tmp_path / "other", environ, "18")
    register_job("train-19", tmp_path, environ, "19", ELEMENTS)
    register_cancelled(find_job("19_5", environ), JobId(19, (5,)), environ)
    job = register_cancelled(find_job("19", environ), JobId(19, (1, 2)), environ)
    assert job.cancelled == find_job("19", environ).cancelled == "19_[1-2,5]"
    assert find_job("19_1", environ).cancelled == "19_[1-2,5]"
    assert find_job("18", environ).cancelled == ""


def test_registry_is_private_with_any_umask(environ: dict[str, str], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        register_job("train-19", tmp_path, environ, "19", ELEMENTS)
    finally:
        os.umask(before)
    assert find_job("19", environ).name == "train-19"  # refused if others may write to it


def test_ten_thousand_elements_are_found_and_their_runs_listed_once(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_job("train-19", tmp_path / "runs", environ, "19", [ArrayElement(index) for index in range(10_000)])
    run = RunDirectory.create(tmp_path / "runs", "train-19_7")
    listed: list[str] = []
    names = os.listdir(tmp_path / "runs")

    def list_names(path: str) -> list[str]:
        listed.append(path)
        return names

    monkeypatch.setattr(os, "listdir", list_names)
    started = time.process_time()
    job = find_job("19_[0-9999]", environ)
    found = find_run_directories(job.elements)
    assert time.process_time() - started < 5
    assert listed == [str(tmp_path / "runs")]
    assert [number for number, runs in enumerate(found) if runs] == [7]
    assert found[7] == [run]


def test_run_directory_found_by_path_keeps_its_labels(environ: dict[str, str], tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "train-19_1")
    run.write(JobFile(job_id="19_1", labels={"lr": "0.1"}))
    job = find_job(str(run.path), environ)
    assert (job.whole_name, job.labels) == ("train-19", {"lr": "0.1"})


def test_name_without_id_is_the_latest_job_of_that_name(environ: dict[str, str], tmp_path: Path) -> None:
    elements = [ArrayElement(index) for index in range(3)]
    register_job("train-17", tmp_path / "runs", environ, "17")
    register_job("train-18", tmp_path / "runs", environ, "18")
    register_job("train-19-20", tmp_path / "runs", environ, "20")  # its name is train-19
    register_job("local-20261123-092334", tmp_path / "runs", environ)
    register_job("local-20261123-092334-2", tmp_path / "runs", environ)
    register_job("grid-21", tmp_path / "runs", environ, "21", elements)
    register_job("mine-22_3", tmp_path / "runs", environ, "22_3")  # an element of a hand-written array
    found = {name: find_job(name, environ) for name in ("train", "train-17", "train-19", "local", "grid", "grid_2")}
    assert {name: job.name for name, job in found.items()} == {
        "train": "train-18",
        "train-17": "train-17",
        "train-19": "train-19-20",
        "local": "local-20261123-092334-2",
        "grid": "grid-21",
        "grid_2": "grid-21_2",
    }
    assert [each.name for each in find_job("mine", environ).elements] == ["mine-22_3"]
    register_job("17-23", tmp_path / "runs", environ, "23")  # its name is the id of another job
    assert find_job("17", environ).name == "train-17"
    for name in ("trai", "grid_3", "local-2026"):
        with pytest.raises(UnknownJobError):
            find_job(name, environ)
