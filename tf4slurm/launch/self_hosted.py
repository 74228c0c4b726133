"""A step without a launcher (`srun tf4slurm task …`): rank 0's agent hosts the control service.

The tasks find it through the run directory, which all of them derive from the step: control.json there (0600) tells
where the service listens, and the job's credentials, sealed with MUNGE for this user where that works.

srun exits with the highest exit code of its tasks; a killed task has 128 and the number of its signal. So rank 0 exits
with the job's exit code, the others with 0, and the step is cancelled only for a task that does not end by itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Mapping

from tf4slurm.agent.agent import Agent
from tf4slurm.agent.bootstrap import ControlEndpoint, join_settings, read_place
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.cluster import Address
from tf4slurm.control.client import ControlClient
from tf4slurm.errors import EXIT_TASK_LOST, LaunchError, RunDirectoryError
from tf4slurm.jobs.registry import remember
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile, StatusFile
from tf4slurm.jobs.status import last_known
from tf4slurm.launch.launcher import Launcher, Reporter, Result
from tf4slurm.slurm.commands import cancel_step
from tf4slurm.slurm.step import SlurmStep
from tf4slurm.spec import JobSpec
from tf4slurm.system.output import LineWriter

logger = logging.getLogger(__name__)

_FILE_SYSTEM_SECONDS = 5.0
_RESULT_SECONDS, _POLL_SECONDS = 2.0, 0.05
_CONNECT_SECONDS = 1.0


def run_self_hosted_task(
    spec: JobSpec, step: SlurmStep, environ: Mapping[str, str], writer: LineWriter, reporter: Reporter
) -> int:
    """Be one task of the step; return its exit code. On rank 0 that is the job's."""
    restart = f"r{step.restart_count}" if step.restart_count else ""
    path = spec.runs_directory / f"{spec.name}-{step.job_id}.{step.step_id}{restart}"
    directory = RunDirectory.open(path) if step.rank == 0 else RunDirectory(path.absolute())
    join = Rendezvous(
        read_place(environ), join_settings(spec, path), lambda: ControlEndpoint.from_file(directory.control)
    )
    agent = Agent(spec.command, join, environ, writer)
    if step.rank != 0:
        exit_code = asyncio.run(agent.run(directory))
        if agent.has_lost_launcher and join.client.cluster is not None:
            _end_without_rank_0(join.client, directory, step)
        return 0 if agent.has_left else exit_code
    remember(path.name, spec.runs_directory, environ, step.job_id)
    launcher = Launcher(spec, None, directory, reporter, facts={"job_id": step.job_id}, node=step.node_name)
    result = asyncio.run(_host(launcher, agent, directory))
    if any(
        record.has_registered and record.is_connected and record.observed.state != "terminated"
        for record in result.records
    ):
        reporter.close()
        _cancel(step)  # its agent may only be stopped, and srun would wait for it for ever
    return result.outcome.exit_code


async def _host(launcher: Launcher, agent: Agent, directory: RunDirectory) -> Result:
    hosting = asyncio.create_task(launcher.run())
    acting = asyncio.create_task(agent.run(directory))
    await asyncio.wait({hosting, acting}, return_when=asyncio.FIRST_EXCEPTION)
    if acting.done():
        acting.result()
    return await hosting


def _end_without_rank_0(client: ControlClient, directory: RunDirectory, step: SlurmStep) -> None:
    """Write the result that rank 0 could not write, and see to the end of the step."""
    has_written: list[bool] = []
    thread = threading.Thread(target=lambda: has_written.append(_write_result(client, directory)), daemon=True)
    thread.start()
    thread.join(_FILE_SYSTEM_SECONDS)
    if has_written != [False] and not _has_ended(client.service_address):  # one scancel, not one of each task
        _cancel(step)  # rank 0 may only be stopped, and srun would wait for it for ever


def _write_result(client: ControlClient, directory: RunDirectory) -> bool:
    """Write the result in the task that removes control.json; in the others wait for it. Return whether it is that one.

    A result that is there already is rank 0's own, and stays.
    """
    try:
        directory.control.unlink()
    except OSError:
        deadline = time.monotonic() + _RESULT_SECONDS
        while directory.read(ResultFile) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return False
    if directory.read(ResultFile) is not None:
        return True
    assert client.cluster is not None
    rank_0 = client.cluster.members[0]
    status = directory.read(StatusFile)
    what = f"The agent of {rank_0.task} on {rank_0.node}, which hosted the control service, is lost."
    result = ResultFile(
        exit_code=EXIT_TASK_LOST,
        reason=f"{what} {last_known(directory)}".strip(),
        cause=str(rank_0.task),
        seconds=status.seconds if status is not None else None,
        attempts=client.observed.attempt,
    )
    try:
        directory.write_result(result)
    except RunDirectoryError as error:
        logger.error("%s", error)
    return True


def _has_ended(address: Address | None) -> bool:
    """Whether the process that listened there has ended: its host refuses a connection. A stopped one accepts it."""
    try:
        if address is not None:
            socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _cancel(step: SlurmStep) -> None:
    try:
        cancel_step(step)
    except LaunchError as error:
        logger.error("what is left of the step could not be ended: %s", error)
