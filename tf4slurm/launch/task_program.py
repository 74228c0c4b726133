"""`srun tf4slurm task`: each task has an agent, and rank 0's process also runs the launcher."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping

from tf4slurm.agent.agent import Agent
from tf4slurm.agent.child import OwnedChild
from tf4slurm.cluster import Address
from tf4slurm.control.client import ControlClient
from tf4slurm.errors import EXIT_TASK_LOST
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.registry import register_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.launch.checks import check_command, check_program_source, warn_of_resolver
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.plain_srun import FILE_SYSTEM_SECONDS, claim, end_step, make_rendezvous
from tf4slurm.launch.result_files import Result, recording_failure, save_result
from tf4slurm.launch.spawners import ExternalSpawner
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.slurm.commands import confirm_element
from tf4slurm.slurm.environ import SlurmAllocation, SlurmStep
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS
from tf4slurm.system.output import LineWriter

logger = logging.getLogger(__name__)

_RESULT_SECONDS, _POLL_SECONDS = 2.0, 0.05
_CONNECT_SECONDS = 1.0


def run_task(
    spec: JobSpec, step: SlurmStep, environ: Mapping[str, str], writer: LineWriter, terminal: TerminalOutput
) -> int:
    """Run one task of the step. Return the exit code for this process.

    On rank 0 this is the exit code of the job. On other ranks it is usually 0 (see `plain_srun.py`). For a task that
    does not take part in the job, or has lost the launcher, it is the exit code of its agent.

    Args:
        writer: Receives the lines that the child prints.
        terminal: Receives the events of the job. Used on rank 0 only.

    Raises:
        CommandError: See `check_program_source` and `check_command`.
        OptionError: See `check_command`.
        RunDirectoryError: Rank 0 cannot create the run directory.
    """
    check_program_source(spec.command)
    check_command(spec)
    restart = f"r{step.restart_count}" if step.restart_count else ""
    path = spec.runs_directory / f"{spec.name}-{step.job_id}.{step.step_id}{restart}"
    if step.rank == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)  # until the agent handles them
        directory = RunDirectory.open(path)
        with recording_failure(directory):
            return _run_rank_0(spec, step, environ, directory, writer, terminal)
    directory = RunDirectory(path.absolute())
    agent, client = _make_agent(spec, step, environ, directory, writer)
    exit_code = asyncio.run(agent.run())
    if agent.has_lost_launcher and client.cluster is not None:
        _end_without_rank_0(client, directory, step)
    if step.rank == 1 and client.desired.exit_code:
        logger.error("%s The step ends.", client.desired.terminate_reason)
    return client.desired.exit_code if agent.was_terminated else exit_code


def _make_agent(
    spec: JobSpec, step: SlurmStep, environ: Mapping[str, str], directory: RunDirectory, writer: LineWriter
) -> tuple[Agent, ControlClient]:
    rendezvous = make_rendezvous(step, spec, directory, owns_child=True)
    return Agent(rendezvous, OwnedChild(rendezvous, environ, directory, writer)), rendezvous.client


def _run_rank_0(
    spec: JobSpec,
    step: SlurmStep,
    environ: Mapping[str, str],
    directory: RunDirectory,
    writer: LineWriter,
    terminal: TerminalOutput,
) -> int:
    """Run the launcher and the agent of rank 0. Return the exit code of the job. The arguments are as in `run_task`."""
    agent, _ = _make_agent(spec, step, environ, directory, writer)
    warn_of_resolver(spec.command)
    allocation = SlurmAllocation.from_environ(environ)
    job_id = str(confirm_element(allocation).job_id) if allocation else step.job_id
    register_job(directory.path.name, spec.runs_directory, environ, job_id)
    step_id = f"{step.job_id}.{step.step_id}"
    launcher = Launcher(spec, ExternalSpawner(), directory, terminal, job_id=job_id, node=step.node_name, step=step_id)

    async def run_both() -> Result:
        return (await asyncio.gather(launcher.run(), agent.run()))[0]

    result = asyncio.run(run_both())
    if launcher.leaves_step_running:
        terminal.close()
        end_step(step)
    return result.file.exit_code


def _end_without_rank_0(client: ControlClient, directory: RunDirectory, step: SlurmStep) -> None:
    """Write the job's result, which the lost rank 0 could not write, and make sure that the step ends."""
    has_written: list[bool] = []
    thread = threading.Thread(target=lambda: has_written.append(_write_result(client, directory)), daemon=True)
    thread.start()
    thread.join(FILE_SYSTEM_SECONDS)
    if has_written != [False] and not _has_ended(client.service_address):  # one task runs scancel, not all
        end_step(step)  # rank 0 may be stopped by a signal, and srun would wait for it for ever


def _write_result(client: ControlClient, directory: RunDirectory) -> bool:
    """Write the job's result, unless another task does. Return whether this task does it: see `claim`.

    Every task but rank 0 calls this function. If rank 0 has written a result before, it is kept. A task that does not
    write the result waits for it, at most 2 s.
    """
    if not claim(directory):
        deadline = time.monotonic() + _RESULT_SECONDS
        while directory.read(ResultFile) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return False
    if directory.read(ResultFile) is not None:
        return True
    assert client.cluster is not None
    rank_0 = client.cluster.member(0)
    files = JobFiles(directory)
    what = f"The agent of {rank_0.task} on {rank_0.node}, which hosted the control service, is lost."
    content = ResultFile(
        exit_code=EXIT_TASK_LOST,
        reason=f"{what} {files.describe_last_state()}".strip(),
        cause=str(rank_0.task),
        seconds=files.status.seconds or None,
        attempts=client.observed.attempt,
    )
    logger.error("%s The step ends.", what)
    save_result(content, directory)
    return True


def _has_ended(address: Address | None) -> bool:
    """Return whether the process that listened at `address` has ended: its host refuses connections there.

    A process stopped by SIGSTOP has not ended: its host still accepts connections. If the host does not answer or
    `address` is None, the result is False.
    """
    if address is None:
        return False
    try:
        socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
