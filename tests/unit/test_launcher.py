"""What the launcher does for joined workers, without processes. Slurm's programs are fakes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.growing_job import GrowingJob
from tf4slurm import __version__
from tf4slurm.cluster import Address
from tf4slurm.control.credentials import ControlEndpoint, create_credentials
from tf4slurm.control.messages import JOINING_RANK, Registration
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch import launcher
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.spawners import SrunSpawner
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.job_spec import JobSpec

SPEC = JobSpec(("python", "train.py"), name="train", workers=1)


def make_launcher(job: GrowingJob, job_id: str | None = "4711") -> Launcher:
    spawner = SrunSpawner(SPEC, SlurmAllocation(JobId(4711), SPEC.num_tasks, None), {})
    return Launcher(SPEC, spawner, job.run, TerminalOutput(), job_id=job_id)


def test_launcher_ends_the_workers_of_all_runs(growing_job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[KnownJob] = []
    monkeypatch.setattr(launcher, "end_worker_jobs", found.append)
    growing_job.run = RunDirectory.create(growing_job.directory, "train-4711")
    for job_id in ("4711", None):
        asyncio.run(make_launcher(growing_job, job_id)._end_worker_jobs())
    assert found == [growing_job.known]


def test_launcher_waits_a_bounded_time_for_slurm(growing_job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_END_JOBS_SECONDS", 0.05)
    may_end, ended = threading.Event(), threading.Event()

    def end_worker_jobs(_: KnownJob) -> None:
        may_end.wait(120)
        ended.set()

    monkeypatch.setattr(launcher, "end_worker_jobs", end_worker_jobs)
    asyncio.run(make_launcher(growing_job)._end_worker_jobs())
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_control_file_is_written_again_after_an_error(
    growing_job: GrowingJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "_PUBLISH_POLL_SECONDS", 0.01)
    calls: list[object] = []

    def write(*_: object) -> None:
        calls.append(None)
        if len(calls) < 3:
            raise RunDirectoryError("The disk is full.", path="control.json")

    monkeypatch.setattr(launcher, "write_control", write)
    growing_job.run.add_worker_arrays()
    endpoint = ControlEndpoint((Address("n1", 1),), create_credentials().shared)
    asyncio.run(asyncio.wait_for(make_launcher(growing_job)._publish_control(endpoint), 60))
    assert (len(calls), caplog.text.count("The disk is full.")) == (3, 1)


def test_joined_worker_is_not_an_agent_of_the_step(growing_job: GrowingJob) -> None:
    found = make_launcher(growing_job)
    for rank in (JOINING_RANK, 0):
        registration = Registration(rank, "n1", "10.0.0.1", 4000, f"agent-{rank}", __version__)
        record = found._service.receiver.on_registration(registration, time.monotonic())
        record.is_connected = True
        assert found.leaves_step_running == (rank == 0)
