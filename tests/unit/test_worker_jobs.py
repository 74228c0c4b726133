"""The Slurm jobs of joined workers at the end of their job. Slurm's programs are fakes."""

from __future__ import annotations

import pytest

from tests.growing_job import GrowingJob
from tf4slurm.jobs import worker_jobs
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import WorkerArray


def test_end_of_a_job_cancels_the_pending_workers_of_all_runs(
    growing_job: GrowingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_jobs, "_QUEUE_POLL_SECONDS", 0.01)
    growing_job.run.add_worker_arrays(WorkerArray("4712"))
    RunDirectory.create(growing_job.directory, "train-4711").add_worker_arrays(WorkerArray("4720"))
    growing_job.set_queue(("4712_0", "PENDING"), ("4720_0", "RUNNING"))
    growing_job.fake("scancel", 'echo "$@" >> cancelled; : > queue')
    worker_jobs.end_worker_jobs(growing_job.known)
    assert growing_job.cancelled == ["4712_0"]


def test_workers_that_do_not_end_with_the_job_are_cancelled(
    growing_job: GrowingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_jobs, "_END_SECONDS", 0)
    growing_job.run.add_worker_arrays(WorkerArray("4712"))
    growing_job.set_queue(("4712_0", "RUNNING"))
    worker_jobs.end_worker_jobs(growing_job.known)
    assert growing_job.cancelled == ["4712_0"]


def test_failure_of_squeue_is_a_warning(growing_job: GrowingJob, caplog: pytest.LogCaptureFixture) -> None:
    growing_job.run.add_worker_arrays(WorkerArray("4712"))
    growing_job.fake("squeue", "exit 1")
    worker_jobs.end_worker_jobs(growing_job.known)
    assert "are not cancelled" in caplog.text
