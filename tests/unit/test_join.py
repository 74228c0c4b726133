"""The jobs that no worker can join, for `tf4slurm join` and `grow`. Slurm's programs are fakes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.growing_job import GrowingJob
from tf4slurm import __version__, api
from tf4slurm.errors import JobStateError, RunDirectoryError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.schema import Process, StatusFile
from tf4slurm.joining import join


def old_status(job: GrowingJob) -> None:
    job.write_job(process=Process("another", 1, 1))
    job.run.write(StatusFile(time=time.time() - 60, heartbeat_timeout_seconds=3.0))
    job.set_queue()


REFUSALS: dict[str, tuple[Callable[[GrowingJob], object], str]] = {
    "ended": (lambda job: job.end("FAILED"), r"has ended \(FAILED\)"),
    "requeued": (lambda job: job.end("REQUEUED"), "was requeued and does not run yet"),
    "killed on this host": (lambda job: job.write_job(process=Process(os.uname().nodename, 1, 1)), r"ended \(LOST\)"),
    "forgotten by Slurm": (old_status, "has no result, and Slurm does not know it any more"),
    "another version": (
        lambda job: job.write_job(versions={"tf4slurm": "0.0.9"}),
        rf"runs tf4slurm 0\.0\.9, this is {__version__}\. Start (grow|join) with the job's Python",
    ),
    "no chief": (lambda job: job.write_job(counts={"worker": 2}), "has 2 worker: only a job with a chief and ps"),
    "no elastic strategy": (lambda job: job.run.write(StatusFile(workers_error="Keras")), "more workers: Keras"),
}


@pytest.mark.parametrize(("change", "text"), REFUSALS.values(), ids=REFUSALS)
def test_job_that_can_use_no_workers_is_refused(
    growing_job: GrowingJob, change: Callable[[GrowingJob], object], text: str
) -> None:
    change(growing_job)
    with pytest.raises(JobStateError, match=text):
        api.grow(growing_job.known, 1)
    with pytest.raises(JobStateError, match=text):
        join.join_job(growing_job.known, {})
    assert (growing_job.was_submitted, growing_job.run.has_worker_arrays()) == (False, False)


@pytest.mark.parametrize("content", [None, "{"])
def test_unreadable_job_file_is_named(growing_job: GrowingJob, content: str | None) -> None:
    path = growing_job.run.path / "job.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    for call in (lambda: api.grow(growing_job.known, 1), lambda: join.join_job(growing_job.known, {})):
        with pytest.raises(RunDirectoryError, match=r"job\.json' is missing or cannot be read"):
            call()


def test_local_job_is_joined_on_its_host_only(growing_job: GrowingJob) -> None:
    growing_job.write_job(job_id=None, process=Process("other", 1, 1))
    with pytest.raises(JobStateError, match=r"is a local job on other\. Run tf4slurm join there"):
        join.join_job(KnownJob(None, "train-4711", growing_job.known.runs_directory), {})


def test_job_that_ends_before_it_invites_workers_is_named(
    growing_job: GrowingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf4slurm.joining.join.time.sleep", lambda _: growing_job.end())
    with pytest.raises(JobStateError, match=r"has ended \(COMPLETED\)"):
        join.join_job(growing_job.known, {})
    assert (growing_job.run.has_worker_arrays(), growing_job.arrays) == (True, [])
