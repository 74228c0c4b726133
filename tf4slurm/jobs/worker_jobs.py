"""Find and cancel the Slurm jobs that `tf4slurm grow` has submitted to add workers to a job."""

from __future__ import annotations

import logging
import time

from tf4slurm.errors import Tf4SlurmError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.schema import WorkerArray
from tf4slurm.slurm.commands import cancel_job, query_queue
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import QueueEntry

logger = logging.getLogger(__name__)

_QUEUE_POLL_SECONDS = 1.0
_END_SECONDS = 5.0  # how long running Slurm jobs may take to end by themselves


def find_worker_jobs(job: KnownJob) -> list[QueueEntry]:
    """Return the Slurm jobs that `tf4slurm grow` has submitted for a job, without those that have ended or are ending.

    Those of all runs of a requeued job count. There is one for each worker, an element of a job array.
    """
    arrays = [array for run in job.run_directories for array in run.read_lines(WorkerArray) if array.job_id]
    if not arrays:
        return []
    entries = query_queue(JobId.parse(array.job_id) for array in arrays)
    return [entry for entry in entries if not (entry.has_ended or entry.state == "COMPLETING")]


def end_worker_jobs(job: KnownJob) -> None:
    """Cancel the Slurm jobs that would add workers to an ended job. Log a warning if that fails.

    Pending jobs are cancelled at once. Running ones have 5 s to end by themselves, and are then cancelled: a job on a
    lost host does not end, and Slurm would requeue it.
    """
    deadline = time.monotonic() + _END_SECONDS
    try:
        while entries := find_worker_jobs(job):
            is_late = time.monotonic() >= deadline
            if cancelled := [entry.job_id for entry in entries if entry.is_pending or is_late]:
                cancel_job(*cancelled)
            if is_late:
                break
            time.sleep(_QUEUE_POLL_SECONDS)
    except Tf4SlurmError as error:
        logger.warning("jobs that would add workers to this one are not cancelled: %s", error)
