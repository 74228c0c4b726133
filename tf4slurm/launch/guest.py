"""`tf4slurm join`: run one more worker of a running job, on this host; and the jobs of Slurm that do so."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping

from tf4slurm import __version__
from tf4slurm.agent.agent import Agent
from tf4slurm.agent.child import OwnedChild
from tf4slurm.agent.rendezvous import Guest, Rendezvous
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.errors import JobStateError, LaunchError
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import GuestFile, Process, ResultFile
from tf4slurm.roles import can_grow
from tf4slurm.slurm.commands import cancel_job, query_queue
from tf4slurm.slurm.environ import own_node_name
from tf4slurm.slurm.parsing import QueueEntry
from tf4slurm.spec import JobSpec
from tf4slurm.system.guard import start_guard
from tf4slurm.system.output import LineWriter

logger = logging.getLogger(__name__)

_CONTROL_SECONDS, _POLL_SECONDS = 20.0, 0.2
_END_SECONDS = 5.0  # for the Slurm jobs of workers whose agents have ended


def join_job(job: KnownJob, environ: Mapping[str, str]) -> int:
    """Run a worker of a running job until the job ends or this process receives SIGTERM; return its exit code.

    The worker runs the job's command in the job's directory. The exit code is 0 if the worker took part until it was no
    longer needed.

    Raises:
        JobStateError: The job has ended, or accepts no more workers.
        RunDirectoryError: The job has no run directory here.
        UntrustedFileError: Another user could have written the job's files.
    """
    directory = latest_run(job)
    file = directory.read_trusted_job()
    check_growable(job, file.counts)
    place = file.directory or "."
    if not os.path.isdir(place):
        text = (
            f"The directory {place!r} of {job.name} does not exist on {os.uname().nodename}. Share it with this host."
        )
        raise JobStateError(text, job=job.name, state="RUNNING")
    if directory.read(ResultFile) is not None:
        raise JobStateError(f"{job.name} has ended. No worker can join it.", job=job.name, state="ENDED")
    version = file.versions.get("tf4slurm")
    if version != __version__:
        text = (
            f"{job.name} runs tf4slurm {version}, this is {__version__}: run the job's version, such as its Python's."
        )
        raise JobStateError(text, job=job.name, state="RUNNING")
    if _has_own_network(file.process):
        text = f"{job.name} runs in a network of its own, which no other process reaches: start it without --isolated."
        raise JobStateError(text, job=job.name, state="RUNNING")
    if not directory.has_guests():
        directory.write(GuestFile())
    if not _wait_for_control(directory):
        raise JobStateError(
            f"{job.name} did not write {str(directory.control)!r} within {_CONTROL_SECONDS:g} s: it has ended, or its "
            "run directory is not shared with this host. Put it on a shared file system with --runs-directory.",
            job=job.name,
            state="UNKNOWN",
        )
    os.chdir(place)
    start_guard()
    writer = LineWriter(sys.stdout)
    rendezvous = Rendezvous(
        Guest(own_node_name(environ)),
        JobSpec(file.command, **file.options),
        lambda: ControlEndpoint.from_file(directory.control),
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
    """Run the agent to its end; before it has registered, a stop signal ends this process."""
    running = asyncio.create_task(agent.run())
    while not running.done():
        await asyncio.wait({running}, timeout=_POLL_SECONDS)
        if client.service_address is None and client.observed.stop_signal is not None:
            running.cancel()
            return 128 + signal.Signals[client.observed.stop_signal]
    return running.result()


def _has_own_network(launcher: Process | None) -> bool:
    """Return whether the launcher is on this host, in another network namespace."""
    try:
        return (
            launcher is not None
            and launcher.is_alive()
            and os.readlink(f"/proc/{launcher.id}/ns/net") != os.readlink("/proc/self/ns/net")
        )
    except OSError:  # ended since, or this user may not read it
        return False


def _wait_for_control(directory: RunDirectory) -> bool:
    """Wait until the launcher has written control.json; return False at the timeout."""
    deadline = time.monotonic() + _CONTROL_SECONDS
    while ControlEndpoint.from_file(directory.control) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def find_guests(*directories: RunDirectory) -> list[QueueEntry]:
    """Return the jobs of Slurm that `tf4slurm grow` has submitted during these runs of a job, until they end."""
    files = [directory.read(GuestFile) for directory in directories]
    job_ids = [job_id for file in files if file is not None for job_id in file.job_ids]
    if not job_ids:
        return []
    entries = query_queue(job_ids, expands_arrays=True)
    return [entry for entry in entries if not (entry.has_ended or entry.state == "COMPLETING")]


def end_guests(directory: RunDirectory) -> None:
    """Cancel the Slurm jobs that would add workers to an ended job.

    Running ones end by themselves. One that does not may be on a lost host, so Slurm would requeue it.
    """
    deadline = time.monotonic() + _END_SECONDS
    try:
        while guests := find_guests(directory):
            is_late = time.monotonic() >= deadline
            if cancelled := [guest.job_id for guest in guests if guest.is_pending or is_late]:
                cancel_job(*cancelled)
            if is_late:
                break
            time.sleep(_POLL_SECONDS)
    except LaunchError as error:
        logger.warning("jobs that would add workers to this one are not cancelled: %s", error)


def check_growable(job: KnownJob, counts: Mapping[str, int]) -> None:
    """Raise JobStateError if the roles of a job have no use for more workers."""
    if not can_grow(counts):
        roles = ", ".join(f"{count} {role}" for role, count in counts.items()) or "no roles"
        raise JobStateError(
            f"{job.name} has {roles}: only a job with a chief and ps can use more workers while it runs.",
            job=job.name,
            state="RUNNING",
        )
