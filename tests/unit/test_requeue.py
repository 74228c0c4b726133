"""Decisions to requeue a stopped job, with recorded answers of a real controller."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tf4slurm.errors import LaunchError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.launch import patience, requeue
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.requeue import Requeue
from tf4slurm.launch.spawners import ExternalSpawner
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.slurm import commands
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import SlurmJob, parse_job
from tf4slurm.spec.job_spec import JobSpec

ANSWER = """JobId=7 JobName=wrap
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   PreemptEligibleTime=2026-11-21T07:27:59 PreemptTime=None
   Partition=low AllocNode:Sid=ctl:3617
   NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
"""
ANSWER_EXCLUDING = f"{ANSWER}   ReqNodeList=(null) ExcNodeList=n[1-2]\n"
RUNNING = SlurmJob("RUNNING", is_batch=True, can_requeue=True, is_preempted=False, partition="low")
STOPPED = ResultFile("STOPPED", 143, "The job was stopped: the launcher received SIGTERM.")


def test_job_is_parsed_from_scontrol() -> None:
    assert parse_job(ANSWER) == RUNNING
    text = ANSWER.replace("PreemptTime=None", "PreemptTime=2026-11-21T07:30:00").replace("BatchFlag=1", "BatchFlag=0")
    assert parse_job(text) == SlurmJob("RUNNING", False, True, True, "low")
    with pytest.raises(ValueError, match="is not the output of scontrol show job"):
        parse_job("slurm_load_jobs error: Invalid job id specified")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "train-7")


def answer_with(monkeypatch: pytest.MonkeyPatch, job: SlurmJob) -> None:
    monkeypatch.setattr(requeue, "query_job", lambda job_id: job)


@pytest.mark.parametrize(
    ("exit_code", "job", "reason"),
    [
        (143, RUNNING, "time limit"),
        (138, RUNNING, "time limit"),
        (130, RUNNING, None),
        (129, RUNNING, None),
        (143, SlurmJob("COMPLETING", True, True, False, "low"), None),
        (143, SlurmJob("RUNNING", True, True, True, "low"), "preemption"),
        (143, SlurmJob("COMPLETING", True, True, False, "low", restart_count=1), "Slurm"),
        (143, SlurmJob("PENDING", True, True, False, "low", restart_count=1), "Slurm"),
    ],
)
def test_reason_to_requeue(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory, exit_code: int, job: SlurmJob, reason: str | None
) -> None:
    answer_with(monkeypatch, job)
    assert Requeue(JobId(7), 1).find_reason(exit_code, directory) == reason


def test_limit_counts_time_limits_of_this_job_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer_with(monkeypatch, RUNNING)
    for name, reason in (("train-7", "time limit"), ("train-7-2", "preemption"), ("train-77", "time limit")):
        RunDirectory.create(tmp_path, name).write_result(ResultFile(requeued=reason))
    for name, content in (("train-7-3", "{"), ("train-7-4", '{"schema_version": 999}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(content)
    directory = RunDirectory.create(tmp_path, "train-7")
    assert directory.path.name == "train-7-5"
    assert Requeue(JobId(7), 2).find_reason(STOPPED.exit_code, directory) == "time limit"
    assert Requeue(JobId(7), 1).find_reason(STOPPED.exit_code, directory) is None
    answer_with(monkeypatch, parse_job(ANSWER.replace("PreemptTime=None", "PreemptTime=2026-11-21T07:30:00")))
    assert Requeue(JobId(7), 0).find_reason(STOPPED.exit_code, directory) == "preemption"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_runs_that_other_users_have_put_beside_the_job_do_not_count(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory
) -> None:
    answer_with(monkeypatch, RUNNING)
    for _ in range(3):
        planted = RunDirectory.create(directory.path.parent, "train-7")
        planted.write_result(ResultFile(requeued="time limit", furthest_step=10**9))
        os.chown(planted.path, 65534, 65534)
    assert Requeue(JobId(7), 1).find_reason(STOPPED.exit_code, directory) == "time limit"
    assert Requeue(JobId(7), 1).progress_of_runs(directory, 40).furthest_step == 40


def test_two_requeued_runs_without_a_new_step_end_the_requeues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer_with(monkeypatch, RUNNING)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def requeue_job(directory: RunDirectory, file: ResultFile) -> ResultFile:
        request = Requeue(JobId(7), 9)
        spec = JobSpec(("true",), workers=1).for_tasks(None)
        started = Launcher(spec, ExternalSpawner(), directory, TerminalOutput(), request)
        return await started._requeue_job(file, request)

    try:
        monkeypatch.setattr(requeue, "requeue_job", lambda job_id: None)
        for number, step in enumerate((40, 40, 39)):
            directory = RunDirectory.create(tmp_path, "train-7")
            file = asyncio.run(requeue_job(directory, dataclasses.replace(STOPPED, furthest_step=step)))
            directory.write_result(file)
            assert (file.state, file.exit_code) == (("REQUEUED", 75) if number < 2 else ("FAILED", 8))
        assert "not requeued. No progress: 2 times in a row no step after step 40" in file.reason
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_requeued_job_excludes_nodes_in_addition_to_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def read(command: tuple[str, ...], *_: object) -> str:
        calls.append(command)
        return ANSWER_EXCLUDING

    monkeypatch.setattr(commands, "_read", read)
    assert Requeue(JobId(7), 1).requeue(("n3", "n9"))
    assert calls[0] == ("scontrol", "requeue", "7")
    assert calls[-1] == ("scontrol", "update", "JobId=7", "ExcNodeList=n[1-2],n3,n9")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (RUNNING, ""),
        (SlurmJob("RUNNING", False, True, False, "low"), "it is not a batch job"),
        (SlurmJob("RUNNING", True, False, False, "low"), "Requeue=0"),
        (SlurmJob("RUNNING", True, True, False, "lowc", "CANCEL"), "PreemptMode=CANCEL in partition lowc"),
    ],
)
def test_obstacles_to_requeue_are_reported(monkeypatch: pytest.MonkeyPatch, job: SlurmJob, words: str) -> None:
    answer_with(monkeypatch, job)
    obstacle = Requeue(JobId(7), 1).find_obstacle()
    assert (obstacle is None) == (not words)
    assert words in (obstacle or "")


class SlowRequeue(Requeue):
    """A request that is answered after Slurm has signalled the launcher, which has waited longer than its patience."""

    launcher: Launcher
    loop: asyncio.AbstractEventLoop

    def find_reason(self, exit_code: int, run_directory: RunDirectory) -> str | None:
        return "preemption"

    def requeue(self, excluded_nodes: Sequence[str] = ()) -> bool:
        async def signal_launcher() -> None:
            self.launcher._writer.is_impatient.set()
            await asyncio.sleep(0.1)

        asyncio.run_coroutine_threadsafe(signal_launcher(), self.loop).result(10)
        return True


def test_slow_controller_is_waited_for_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "_PATIENCE_SECONDS", 0.05)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def requeue_job() -> ResultFile:
        slow = SlowRequeue(JobId(7), 1)
        spec = JobSpec(("true",), workers=1).for_tasks(None)
        started = Launcher(spec, ExternalSpawner(), directory, TerminalOutput(), slow)
        for name, value in (("launcher", started), ("loop", asyncio.get_running_loop())):
            object.__setattr__(slow, name, value)
        return await started._requeue_job(STOPPED, slow)

    try:
        file = asyncio.run(requeue_job())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (file.exit_code, file.requeued) == (75, "preemption")
    assert directory.read(ResultFile) == file
    assert not caplog.text


def test_unreachable_controller_means_no_requeue(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(job_id: str) -> SlurmJob:
        raise LaunchError("scontrol exited with 1: busy", command=("scontrol",), returncode=1, stderr="busy")

    monkeypatch.setattr(requeue, "query_job", refuse)
    monkeypatch.setattr(requeue, "requeue_job", refuse)
    with caplog.at_level(logging.ERROR):
        assert Requeue(JobId(7), 1).find_reason(STOPPED.exit_code, directory) is None
        assert not Requeue(JobId(7), 1).requeue()
    assert caplog.text.count("busy") == 2
    assert "busy" in (Requeue(JobId(7), 1).find_obstacle() or "")


@pytest.mark.parametrize("num_queries", [0, 1, 2], ids=["requeued", "requeued-meanwhile", "not-requeued"])
def test_job_that_ends_is_not_requeued_again_unless_slurm_has_done_so(
    monkeypatch: pytest.MonkeyPatch, num_queries: int
) -> None:
    """Slurm requeues it after `num_queries` queries, at the end of the grace time of a preemption."""
    calls: list[object] = []
    requeued = SlurmJob("PENDING", True, True, False, "low", restart_count=1)

    def query_job(job_id: JobId) -> SlurmJob:
        calls.append("query")
        return requeued if calls.count("query") > num_queries else RUNNING

    monkeypatch.setattr(requeue, "query_job", query_job)
    monkeypatch.setattr(requeue, "allow_requeue", lambda job_id, allowed: calls.append(allowed))
    assert Requeue(JobId(7), 1).end() == (num_queries < 2)
    assert calls == [["query"], ["query", False, "query", True], ["query", False, "query"]][num_queries]


def test_job_that_slurm_requeues_before_the_launcher_can_has_the_result_requeued(
    monkeypatch: pytest.MonkeyPatch, directory: RunDirectory
) -> None:
    """Slurm refuses the launcher's request, because the job is pending: the grace time of the preemption has ended."""
    jobs = [
        SlurmJob("RUNNING", True, True, True, "low"),
        SlurmJob("PENDING", True, True, False, "low", restart_count=1),
    ]

    def refuse(job_id: JobId) -> None:
        raise LaunchError("the job is pending", command=(), returncode=1)

    monkeypatch.setattr(requeue, "query_job", lambda job_id: jobs.pop(0))
    monkeypatch.setattr(requeue, "requeue_job", refuse)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def conclude() -> ResultFile:
        request = Requeue(JobId(7), 1)
        launcher = Launcher(
            JobSpec(("true",), workers=1).for_tasks(None), ExternalSpawner(), directory, TerminalOutput(), request
        )
        return await launcher._requeue_job(STOPPED, request)

    try:
        file = asyncio.run(conclude())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (file.state, file.exit_code, file.requeued) == ("REQUEUED", 75, "Slurm")


def test_job_ends_even_if_slurm_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(job_id: str) -> None:
        raise LaunchError("the controller is down", command=(), returncode=1)

    monkeypatch.setattr(requeue, "query_job", fail)
    Requeue(JobId(7), 1, restart_count=1).end()
    assert "Slurm may run the job again: the controller is down" in caplog.text
