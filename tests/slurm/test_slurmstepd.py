"""slurmstepd, which starts a step's tasks and the batch script, is killed: the job ends, and nothing is left."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import CHILD, NAMES, ROLES, TF4SLURM, Job
from tests.processes import child_of, marked_processes, wait_until, wait_until_gone
from tests.slurm.lab import SlurmLab


@pytest.fixture
def job(tmp_path: Path, lab: SlurmLab) -> Iterator[Job]:
    yield Job(
        tmp_path, lambda command, **options: lab.popen(*command, stdout=options["stdout"], stderr=options["stderr"])
    )
    lab.cancel_all()  # Slurm may show such a job as running


def submit(job: Job, lab: SlurmLab, start: str, *options: str) -> str:
    """Submit `start` ("exec" or nothing) and `tf4slurm run`; return the job's id once all children run."""
    run = (TF4SLURM, "run", "--runs-directory", str(job.directory / "runs"), *ROLES, *options)
    script = job.directory / "job.sh"
    script.write_text(
        f"#!/bin/bash\n{start} {shlex.join([*run, '--', sys.executable, str(CHILD), str(job.children)])}\n"
    )
    output = ("-o", job.directory / "stderr", "-N4", "-n4")
    job_id = lab.run("sbatch", "--parsable", *output, script).stdout.strip()
    wait_for_children(job)
    return job_id


def wait_for_children(job: Job) -> None:
    for name in NAMES:
        job.wait_for_child(name)


def slurmstepd_of(process_id: int) -> psutil.Process:
    parents = psutil.Process(process_id).parents()
    return next(process for process in parents if process.name() == "slurmstepd")


def launcher() -> int:
    marked = marked_processes(os.environ["TF4SLURM_TEST_MARK"])
    (found,) = [process.pid for process in marked if process.command.split()[1:3] == [TF4SLURM, "run"]]
    return found


def running() -> list[str]:
    """Return the agents and children that run."""
    return [str(p) for p in marked_processes(os.environ["TF4SLURM_TEST_MARK"]) if "srun" not in p.command.split()[:1]]


def wait_for_result(job: Job) -> None:
    assert wait_until((job.run_directory / "result.json").exists, 60), job.stderr


def test_killed_slurmstepd_of_a_task_ends_the_job(job: Job, process_mark: str) -> None:
    job.start(*ROLES, prefix=("salloc", "-Q", "-N4", "-n4"))
    wait_for_children(job)
    slurmstepd_of(child_of("worker/1")).kill()
    assert job.wait() == 7
    assert job.result["cause"] == "worker/1"
    assert "its slurmstepd" in job.result["reason"]
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.long
def test_killed_slurmstepd_of_a_task_ends_a_batch_job(job: Job, lab: SlurmLab, process_mark: str) -> None:
    job_id = submit(job, lab, "exec")
    slurmstepd_of(child_of("worker/1")).kill()
    assert lab.wait_for_job(job_id) == ("FAILED", "7:0")
    assert job.result["cause"] == "worker/1"
    assert "its slurmstepd" in job.result["reason"]
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.long
@pytest.mark.parametrize("target", ["chief/0", "worker/1"])
def test_killed_slurmstepd_of_a_task_without_a_launcher_ends_the_job(
    job: Job, lab: SlurmLab, process_mark: str, target: str
) -> None:
    options = ("--runs-directory", str(job.directory / "runs"), "--ps", "1")
    command = (TF4SLURM, "task", *options, "--", sys.executable, str(CHILD), str(job.children))
    step = lab.popen("srun", "-Q", "-N4", "-n4", *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_children(job)
    slurmstepd_of(child_of(target)).kill()
    wait_for_result(job)
    assert job.result["exit_code"] == 7
    assert job.result["cause"] == target
    assert "its slurmstepd" in job.result["reason"]
    assert wait_until(lambda: not running(), 60), running()
    lab.cancel_all()  # srun may wait for the tasks of that slurmstepd
    step.wait(60)
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.parametrize("start", ["exec", pytest.param("", marks=pytest.mark.long)])  # "": a child of bash
def test_killed_slurmstepd_of_the_batch_script_stops_the_job(
    job: Job, lab: SlurmLab, process_mark: str, start: str
) -> None:
    job_id = submit(job, lab, start)
    slurmstepd_of(launcher()).kill()
    wait_for_result(job)
    assert job.result["exit_code"] == 128 + signal.SIGHUP
    assert "the slurmstepd above the launcher" in job.result["reason"]
    assert f"scancel {job_id}" in job.result["reason"]
    assert wait_until(lambda: job.result["reason"] in job.stderr, 60), job.stderr
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.long
def test_killed_slurmstepd_above_local_processes_stops_the_job(job: Job, lab: SlurmLab, process_mark: str) -> None:
    submit(job, lab, "exec", "--local")
    slurmstepd_of(child_of("chief/0")).kill()
    wait_for_result(job)
    assert job.result["exit_code"] == 128 + signal.SIGHUP
    assert wait_until_gone(process_mark, timeout_seconds=30) == []
