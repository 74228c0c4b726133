"""The state of a job, from its run directory and Slurm's queue."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.jobs import status_reader
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, ResultFile, StatusFile
from tf4slurm.jobs.status import read_status
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import QueueEntry, parse_queue
from tf4slurm.system.typed_json import from_json

TASK = {
    "task": "worker/0",
    "rank": 2,
    "node": "n1",
    "address": "10.0.0.1:4000",
    "state": "running",
    "starts": 1,
    "returncode": None,
    "is_gone": False,
    "heartbeat_age_seconds": 0.5,
    "started_seconds": 1.0,
    "step": 100,
    "steps_per_second": 10.0,
    "seconds_since_step": 0.1,
    "metrics": {"loss": 0.5},
    "memory_bytes": 10**8,
}
STATUS = {
    "seconds": 11.0,
    "phase": "training",
    "attempt": 1,
    "max_attempts": 1,
    "reason": "",
    "heartbeat_timeout_seconds": 10.0,
    "tasks": [TASK],
}


def entry(state: str, **changes: str) -> QueueEntry:
    fields = {"reason": "None", "elapsed": "0:11", "limit": "1:00:00", "start": "N/A", "nodes": "n1"}
    return QueueEntry(job_id=JobId(17), state=state, **{**fields, **changes})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "train-17")
    run.write(JobFile(process=Process.of(os.getpid())))
    return run


def write_status(run: RunDirectory, age: float = 0.0, **changes: Any) -> None:
    run.write(from_json(StatusFile, {**STATUS, "time": time.time() - age, **changes}))


def job(tmp_path: Path, job_id: str | None = "17") -> KnownJob:
    return KnownJob(job_id, "train-17", str(tmp_path), 0.0)


def test_result_of_a_job_that_was_pending_is_seen_before_the_next_usual_query(
    tmp_path: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [[], [entry("PENDING")]]
    monkeypatch.setattr(status_reader, "query_queue", lambda *_, **__: answers.pop())
    monkeypatch.setattr(status_reader, "_MIN_ASK_SECONDS", 0.0)
    reader = StatusReader([job(tmp_path)], ask_seconds=3600)
    assert [reader.read()[0].state for _ in range(2)] == ["PENDING", "PENDING"]
    run.write_result(ResultFile("COMPLETED", 0, "done", seconds=1.0))
    assert reader.read()[0].state == "COMPLETED"
    assert reader.read()[0].state == "COMPLETED"
    assert answers == []


def test_pending_job_has_slurms_reason(tmp_path: Path) -> None:
    status = read_status(job(tmp_path), entry("PENDING", reason="QOSMaxGRESPerUser", start="2026-11-21T10:00:00"))
    assert (status.state, status.has_ended, status.run_directory) == ("PENDING", False, None)
    assert status.reason == "QOSMaxGRESPerUser: you use as many GPUs as this QOS allows"
    assert status.start == "2026-11-21T10:00:00"


def test_pending_job_with_a_fresh_status_file_is_running(run: RunDirectory, tmp_path: Path) -> None:
    write_status(run)
    status = read_status(job(tmp_path), entry("PENDING"))
    assert (status.state, len(status.tasks)) == ("RUNNING", 1)
    write_status(run, age=60)  # from the run before the requeue
    status = read_status(job(tmp_path), entry("PENDING"))
    assert (status.state, status.tasks, status.reason) == ("PENDING", (), "Slurm has not considered the job yet")


def test_running_job_has_tasks(run: RunDirectory, tmp_path: Path) -> None:
    write_status(run)
    status = read_status(job(tmp_path), entry("RUNNING"))
    (task,) = status.tasks
    assert (status.state, status.phase, status.elapsed, status.limit) == ("RUNNING", "training", "0:11", "1:00:00")
    assert (task.task, task.state, task.step, task.metrics) == ("worker/0", "running", 100, {"loss": 0.5})
    assert task.memory_bytes == 10**8
    assert not status.warnings


@pytest.mark.parametrize(
    ("still", "step", "lived", "expected"),
    [
        (59.0, 100, 11.0, "running"),
        (61.0, 100, 11.0, "STALLED"),
        (299.0, 10, 301.0, "running"),  # 30 s a step: 300 s are ten steps
        (301.0, 10, 301.0, "STALLED"),
        (500.0, None, 500.0, "running"),  # no step reported
    ],
)
def test_task_without_new_steps_is_stalled(
    run: RunDirectory, tmp_path: Path, still: float, step: int | None, lived: float, expected: str
) -> None:
    write_status(run, seconds=lived, tasks=[{**TASK, "step": step, "seconds_since_step": still}])
    assert read_status(job(tmp_path), entry("RUNNING")).tasks[0].state == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": "missing"}, "missing"),
        ({"state": "registered"}, "waiting"),
        ({"state": "exited", "returncode": -9}, "killed by signal 9"),
        ({"is_gone": True}, "lost"),
        ({"state": "terminated", "is_gone": True}, "terminated"),
        ({"state": "terminated", "is_gone": True, "returncode": 0}, "exited 0"),
    ],
)
def test_states_of_a_task(run: RunDirectory, tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    write_status(run, tasks=[{**TASK, **changes}])
    assert read_status(job(tmp_path), entry("RUNNING")).tasks[0].state == expected


def test_old_status_file_of_a_running_job_is_a_warning(run: RunDirectory, tmp_path: Path) -> None:
    write_status(run, age=100)
    status = read_status(job(tmp_path), entry("RUNNING"))
    assert "The launcher wrote nothing for 100 s" in status.warnings[0]
    assert status.tasks[0].heartbeat_age_seconds == pytest.approx(100.5, abs=1)


@pytest.mark.parametrize(("code", "word"), [(0, "COMPLETED"), (143, "FAILED"), (143, "STOPPED"), (75, "REQUEUED")])
def test_state_of_an_ended_job_is_that_of_its_result(run: RunDirectory, tmp_path: Path, code: int, word: str) -> None:
    write_status(run, phase="ended")
    run.write_result(ResultFile(word, code, "so it was", seconds=3661.0))
    status = read_status(job(tmp_path), None)
    assert (status.state, status.exit_code, status.reason, status.elapsed) == (word, code, "so it was", "1:01:01")


@pytest.mark.parametrize(
    ("slurm", "warnings", "state", "exit_code", "reason"),
    [
        (
            "PENDING",
            [],
            "PENDING",
            None,
            "next and waits for free nodes. The last attempt was REQUEUED: It is requeued",
        ),
        ("RUNNING", [], "RUNNING", None, "The last attempt was REQUEUED: It is requeued (time limit)."),
        ("CANCELLED", [], "STOPPED", 1, "Slurm's queue shows CANCELLED; the launcher wrote no result."),
        (None, [], "REQUEUED", 75, "It is requeued (time limit)."),
        (None, ["Slurm does not answer."], "REQUEUED", None, "It is requeued (time limit)."),
    ],
)
def test_state_of_a_requeued_job(
    run: RunDirectory,
    tmp_path: Path,
    slurm: str | None,
    warnings: list[str],
    state: str,
    exit_code: int | None,
    reason: str,
) -> None:
    write_status(run, phase="ended")
    run.write_result(ResultFile("REQUEUED", 75, "It is requeued (time limit)."))
    status = read_status(job(tmp_path), entry(slurm, reason="Resources") if slurm else None, warnings)
    assert (status.state, status.exit_code) == (state, exit_code)
    assert reason in status.reason
    if slurm in ("PENDING", "RUNNING"):  # the files are those of the attempt that was requeued
        assert (status.phase, status.tasks) == (None, ())


def test_local_job_without_a_result_is_lost_once_its_launcher_is_gone(run: RunDirectory, tmp_path: Path) -> None:
    write_status(run)
    assert read_status(job(tmp_path, None), None).state == "RUNNING"
    run.write(JobFile(process=replace(Process.of(os.getpid()), start_ticks=1)))  # another process has its id now
    write_status(run, age=100)
    status = read_status(job(tmp_path, None), None)
    assert (status.state, status.exit_code) == ("LOST", 1)


def test_job_without_files_and_without_slurms_answer_is_unknown(tmp_path: Path) -> None:
    assert read_status(job(tmp_path, None), None).state == "UNKNOWN"
    status = read_status(job(tmp_path), None, ["Slurm does not answer."])
    assert (status.state, status.has_ended, status.warnings) == ("UNKNOWN", False, ("Slurm does not answer.",))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobLaunchFailure", "shows FAILED (JobLaunchFailure: a node could not start the batch script"),
        ("RaisedSignal:53(Real-time_signal_19)", "shows FAILED (RaisedSignal:53(Real-time_signal_19)); the launcher"),
        ("None", "shows FAILED; the launcher wrote no result."),
    ],
)
@pytest.mark.parametrize("accounted", [False, True])
def test_ended_job_has_slurms_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounted: bool, reason: str, words: str
) -> None:
    sacct = tmp_path / "sacct"
    sacct.write_text(f"#!/bin/sh\n[ {accounted} = True ] && echo '17|FAILED|1:0'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words in read_status(job(tmp_path), entry("FAILED", reason=reason)).reason


NO_SLURM = "Slurm's information is missing."


@pytest.mark.parametrize(
    ("age", "changes", "state", "warning"),
    [
        (3, {}, "RUNNING", "The state of train-17 is what its launcher wrote 3 s ago."),
        (3, {"phase": "stopping", "reason": "It is asked to stop."}, "RUNNING", "wrote 3 s ago"),
        (100, {}, "UNKNOWN", "The launcher of train-17 wrote nothing for 100 s."),
    ],
)
def test_launchers_files_are_used_while_slurm_does_not_answer(
    run: RunDirectory, tmp_path: Path, age: float, changes: dict[str, str], state: str, warning: str
) -> None:
    write_status(run, age, **changes)
    status = read_status(job(tmp_path), None, [NO_SLURM])
    assert (status.state, status.has_ended, status.warnings[0]) == (state, False, NO_SLURM)
    assert warning in status.warnings[1]
    assert status.reason == changes.get("reason", "")
    assert status.written_seconds == pytest.approx(age, abs=1)
    assert [task.task for task in status.tasks] == ["worker/0"]


def test_lost_launcher_is_no_end_of_a_job_while_slurm_does_not_answer(run: RunDirectory, tmp_path: Path) -> None:
    write_status(run)
    run.write(JobFile(process=replace(Process.of(os.getpid()), start_ticks=1)))  # another process has its id now
    status = read_status(job(tmp_path), None, [NO_SLURM])
    assert (status.state, status.has_ended) == ("UNKNOWN", False)
    assert "The launcher was killed" in status.reason


@pytest.mark.parametrize(
    ("accounted", "state", "source"),
    [
        ("PENDING|0:0", "STOPPED", "Slurm's queue shows TIMEOUT"),
        ("RUNNING|0:0", "STOPPED", "Slurm's queue shows TIMEOUT"),
        ("CANCELLED by 0|0:0", "STOPPED", "Slurm's accounting shows CANCELLED"),
        ("TIMEOUT|0:0", "STOPPED", "Slurm's accounting shows TIMEOUT"),
        ("OUT_OF_MEMORY|0:125", "FAILED", "Slurm's accounting shows OUT_OF_MEMORY"),
    ],
)
def test_accounting_is_used_once_it_has_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounted: str, state: str, source: str
) -> None:
    sacct = tmp_path / "sacct"
    sacct.write_text(f"#!/bin/sh\necho '17|{accounted}'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    status = read_status(job(tmp_path), entry("TIMEOUT"))
    assert (status.state, bool(status.exit_code)) == (state, True)
    assert status.reason.startswith(source)


def test_damaged_files_are_no_error(run: RunDirectory, tmp_path: Path) -> None:
    (run.path / "status.json").write_text('{"time": 3, "tasks": [{"ta')
    (run.path / "job.json").write_text("")
    assert read_status(job(tmp_path), entry("RUNNING")).tasks == ()
    (run.path / "status.json").write_text('{"tasks": [3, {}]}')
    assert [task.state for task in read_status(job(tmp_path), entry("RUNNING")).tasks] == ["?", "?"]


def test_damaged_lines_of_the_queue_are_left_out() -> None:
    lines = (
        "17|RUNNING|None|1:00|2:00|2026-11-21T10:00:00|n[1-2]",
        "slurm_load_jobs: hiccup",
        "18_[1-3]|PENDING|Priority|0:00|2:00|N/A|",
    )
    running, pending = parse_queue("\n".join(lines))
    assert (running.job_id, running.nodes, running.has_ended) == (JobId(17), "n[1-2]", False)
    assert (pending.job_id, pending.is_pending) == (JobId(18, (1, 2, 3)), True)
    assert pending.explained_reason == "Priority: jobs with a higher priority are first"


def test_process_is_distinguished_from_a_later_one_of_the_same_id() -> None:
    own = Process.of(os.getpid())
    assert own.is_alive()
    assert not replace(own, start_ticks=5).is_alive()
    assert not replace(own, host="another").is_alive()
    assert not Process().is_alive()
