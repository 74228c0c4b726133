"""Join a running job as one more worker: the command `tf4slurm join`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

from tf4slurm import __version__
from tf4slurm.agent.agent import Agent
from tf4slurm.agent.child import OwnedChild
from tf4slurm.agent.rendezvous import JoiningWorker, Rendezvous
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.errors import REQUEUED, JobStateError, RunDirectoryError
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import FILE_NAMES, JobFile, Process, ResultFile
from tf4slurm.jobs.status import FORGOTTEN
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.roles import can_grow
from tf4slurm.slurm.environ import own_node_name
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.guard import start_guard
from tf4slurm.system.output import LineWriter

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


def join_job(job: KnownJob, environ: Mapping[str, str]) -> int:
    """Run one more worker of a running job, until training is over or this process receives a stop signal.

    The worker runs the job's command in the job's directory.

    Returns:
        The exit code: 0 if the job no longer needs the worker, or if a stop signal ends a worker that has registered.

    Raises:
        JobStateError: The job has ended, cannot use more workers, or runs another version of tf4slurm. Or this host
            cannot reach the job, its directory or its control.json.
        RunDirectoryError: The job has no run directory here, or it cannot be read or written.
        UntrustedFileError: Another user could have written the job's files.
    """
    directory = latest_run(job)
    file = check_joinable(job, directory, "join")
    if file.job_id is None and file.process is not None and file.process.host != os.uname().nodename:
        text = f"{job.name} is a local job on {file.process.host}. Run tf4slurm join there."
        raise JobStateError(text, job=job.name, state="RUNNING")
    place = file.directory or "."
    if not os.path.isdir(place):
        text = (
            f"The directory {place!r} of {job.name} does not exist on {os.uname().nodename}. Share it with this host."
        )
        raise JobStateError(text, job=job.name, state="RUNNING")
    check_network(job.name, file.process)
    spec = JobSpec(file.command, **file.options)
    warn_of_wait(job, directory)
    directory.add_worker_arrays()
    if not wait_for_control(directory, spec.start_timeout_seconds):
        check_joinable(job, directory, "join")  # it may have ended in the meantime
        raise JobStateError(
            f"{job.name} did not write {str(directory.control)!r} within {spec.start_timeout_seconds:g} s: its run "
            "directory is not shared with this host. Put it on a shared file system with --runs-directory.",
            job=job.name,
            state="UNKNOWN",
        )
    os.chdir(place)
    start_guard(is_in_terminal=True)
    writer = LineWriter(sys.stdout)
    rendezvous = Rendezvous(
        JoiningWorker(own_node_name(environ)), spec, lambda: ControlEndpoint.from_file(directory.control)
    )
    agent = Agent(rendezvous, OwnedChild(rendezvous, environ, directory, writer))
    try:
        exit_code = asyncio.run(_run(agent, rendezvous.client))
    finally:
        writer.close()
    if agent.was_terminated:
        print(f"tf4slurm: this worker has ended: {rendezvous.client.desired.terminate_reason}", file=sys.stderr)
    return exit_code


async def _run(agent: Agent, client: ControlClient) -> int:
    """Run the agent to its end. Return its exit code, or 128 + N if signal N stops it before it has registered."""
    running = asyncio.create_task(agent.run())
    while not running.done():
        await asyncio.wait({running}, timeout=_POLL_SECONDS)
        if client.service_address is None and client.observed.stop_signal is not None:
            running.cancel()
            return 128 + signal.Signals[client.observed.stop_signal]
    return running.result()


def check_network(name: str, launcher: Process | None) -> None:
    """Check that this process is in the same network namespace as the job `name`, whose launcher is `launcher`.

    Raises:
        JobStateError: It is not.
    """
    if _is_in_other_network_namespace(launcher):
        text = f"{name} runs in a network of its own, which no other process reaches: start it without --isolated."
        raise JobStateError(text, job=name, state="RUNNING")


def _is_in_other_network_namespace(launcher: Process | None) -> bool:
    """Return whether the launcher runs on this host in a network namespace other than that of this process.

    Return False if this is unknown: `launcher` is None, has ended, or belongs to another user.
    """
    try:
        return (
            launcher is not None
            and launcher.is_alive()
            and os.readlink(f"/proc/{launcher.id}/ns/net") != os.readlink("/proc/self/ns/net")
        )
    except OSError:  # ended since, or this user may not read it
        return False


def wait_for_control(
    directory: RunDirectory,
    timeout_seconds: float,
    *,
    poll_seconds: float = _POLL_SECONDS,
    has_ended: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait for the launcher to write control.json. Return False at the timeout, or if the job has ended.

    `has_ended` returns whether the job has ended without a result, as far as the caller knows.
    """
    deadline = time.monotonic() + timeout_seconds
    while ControlEndpoint.from_file(directory.control) is None:
        if time.monotonic() >= deadline or directory.read(ResultFile) is not None or has_ended():
            return False
        time.sleep(poll_seconds)
    return True


def check_joinable(job: KnownJob, directory: RunDirectory, verb: str) -> JobFile:
    """Check that a worker that this version of tf4slurm starts can join a run of a job. Return the run's job.json.

    Args:
        directory: The run directory.
        verb: The command that the user has called, such as "join", for the error message.

    Raises:
        JobStateError: The run has ended, runs another version of tf4slurm, or cannot use more workers.
        RunDirectoryError: job.json is missing or cannot be read.
        UntrustedFileError: Another user could have written the file.
    """
    file = directory.read_trusted_job()
    files = JobFiles(directory)
    if not file.counts:
        path = str(directory.path / FILE_NAMES[JobFile])
        text = f"{path!r} is missing or cannot be read. The job may have just started: try again in a few seconds."
        raise RunDirectoryError(text, path=path)
    state = find_end(job, file, files)
    reason = ""
    version = file.versions.get("tf4slurm")
    if state == REQUEUED:
        reason = "was requeued and does not run yet. Add workers when it runs"
    elif state == FORGOTTEN:
        reason = "has no result, and Slurm does not know it any more. No worker can join it"
    elif state:
        reason = f"has ended ({state}). No worker can join it"
    elif not can_grow(file.counts):
        roles = ", ".join(f"{count} {role}" for role, count in file.counts.items())
        reason = f"has {roles}: only a job with a chief and ps can use more workers while it runs"
    elif version != __version__:
        reason = f"runs tf4slurm {version}, this is {__version__}. Start {verb} with the job's Python"
    elif files.status.workers_error:
        reason = f"cannot use more workers: {files.status.workers_error}"
    if reason:
        raise JobStateError(f"{job.name} {reason}.", job=job.name, state=state or "RUNNING")
    return file


def warn_of_wait(job: KnownJob, directory: RunDirectory) -> None:
    """Log a warning if the chief's script has not said yet that workers can join this run of a job."""
    if not JobFiles(directory).status.accepts_workers:
        logger.warning(
            "the chief of %s has made no strategy yet. A new worker waits until its script calls "
            "parameter_server_strategy() or job_strategy() of tf4slurm.tensorflow, at most --start-timeout, and leaves "
            "with exit code 6 without such a call",
            job.name,
        )


def find_end(job: KnownJob, file: JobFile, files: JobFiles) -> str:
    """Return the state of a run that has ended or is forgotten, or else "". Query Slurm only if status.json is old."""
    launcher = file.process
    is_lost = launcher is not None and launcher.host == os.uname().nodename and not launcher.is_alive()
    result = files.run.read(ResultFile)  # after `is_lost`: the launcher may end in between
    age = files.status_age_seconds
    if result is None and not is_lost and age is not None and age > files.status.stale_seconds:
        (status,) = StatusReader([job]).read()
        return "" if status.can_change else status.state
    return result.state if result is not None else "LOST" if is_lost else ""
