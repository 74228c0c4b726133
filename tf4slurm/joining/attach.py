"""Find a job that waits for another chief, for the `attach` of the clusters for notebooks."""

from __future__ import annotations

import os

from tf4slurm import __version__
from tf4slurm.errors import REQUEUED, JobStateError, RendezvousClosedError, RunDirectoryError
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile
from tf4slurm.jobs.status import FORGOTTEN
from tf4slurm.joining.join import find_end


def check_attachable(job: KnownJob) -> tuple[RunDirectory, JobFile]:
    """Check that this process can be the chief of a job, as far as the job's files show it.

    Only the control service knows whether the job waits for a chief. It refuses this process if it does not.

    Returns:
        The run directory of the job, and its job.json.

    Raises:
        JobStateError: The job has ended, has no external chief, runs another version of tf4slurm, or is a local job on
            another host.
        RunDirectoryError: The job has no run directory here, or it cannot be read.
        UntrustedFileError: Another user could have written the job's files.
    """
    directory = latest_run(job)
    file = directory.read_trusted_job()
    if not file.counts:
        path = str(directory.path)
        text = f"{path!r} has no job.json yet. The job may have just started: try again in a few seconds."
        raise RunDirectoryError(text, path=path)
    state = find_end(job, file, JobFiles(directory))
    host = "" if file.process is None else file.process.host
    version = file.versions.get("tf4slurm")
    reason = ""
    if not file.options.get("external_chief"):
        reason = "is no cluster of a notebook: its chief is one of its own tasks. Start it with --external-chief"
    elif state == REQUEUED:
        reason = "was requeued and does not run yet. Attach when it runs"
    elif state == FORGOTTEN:
        reason = "has no result, and Slurm does not know it any more. Start a new cluster"
    elif state:
        reason = f"has ended ({state}). Start a new cluster: training resumes from its checkpoint"
    elif file.job_id is None and host and host != os.uname().nodename:
        reason = f"is a local job on {host}. Attach there"
    elif version != __version__:
        reason = f"runs tf4slurm {version}, this is {__version__}. Attach with the job's Python"
    if reason:
        raise JobStateError(f"{job.name} {reason}.", job=job.name, state=state or "RUNNING")
    return directory, file


def explain_refusal(name: str, error: RendezvousClosedError) -> JobStateError:
    """Return the error for a process that the control service of the job `name` has refused as its chief."""
    return JobStateError(
        f"{name} waits for no other chief: {error.reason}. Its chief must call restart() first.",
        job=name,
        state="RUNNING",
    )
