"""A step without a launcher (`srun tf4slurm task …`): rank 0's agent hosts the control service.

The tasks find it through the run directory, which all of them derive from the step: control.json there (0600) tells
where the service listens, and the job's credentials, sealed with MUNGE for this user where that works.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tf4slurm.agent import Agent
from tf4slurm.errors import EXIT_TASK_LOST, LaunchError
from tf4slurm.join import Join, Place, Service
from tf4slurm.launch.launcher import Launcher, Reporter, Result
from tf4slurm.launch.plan import LaunchPlan
from tf4slurm.observe.registry import remember
from tf4slurm.output import LineWriter
from tf4slurm.run_directory import RunDirectory
from tf4slurm.slurm.commands import cancel_step
from tf4slurm.slurm.step import SlurmStep

logger = logging.getLogger(__name__)


def run_self_hosted_task(
    plan: LaunchPlan, step: SlurmStep, environ: Mapping[str, str], writer: LineWriter, reporter: Reporter
) -> int:
    """Be one task of the step; return its exit code. On rank 0 that is the job's."""
    restart = f"r{step.restart_count}" if step.restart_count else ""
    path = plan.runs_directory / f"{plan.name}-{step.job_id}.{step.step_id}{restart}"
    directory = RunDirectory.open(path) if step.rank == 0 else RunDirectory(path.absolute())
    join = Join(Place.from_environ(environ), plan.to_settings(path), lambda: Service.from_file(directory.control))
    agent = Agent(plan.command, join, environ, writer)
    if step.rank != 0:
        exit_code = asyncio.run(agent.run(directory))
        if exit_code == EXIT_TASK_LOST:  # rank 0 may be stopped, and srun would wait for it for ever
            _cancel(step)
        return exit_code
    remember(path.name, plan.runs_directory, environ, step.job_id)
    launcher = Launcher(plan, None, directory, reporter, facts={"job_id": step.job_id})
    result = asyncio.run(_host(launcher, agent, directory))
    if any(record.has_joined and record.status.state != "left" for record in result.records):
        reporter.close()
        _cancel(step)  # a task that is lost may only be stopped, and srun would wait for it for ever
    return result.verdict.exit_code


async def _host(launcher: Launcher, agent: Agent, directory: RunDirectory) -> Result:
    hosting = asyncio.create_task(launcher.run())
    acting = asyncio.create_task(agent.run(directory))
    await asyncio.wait({hosting, acting}, return_when=asyncio.FIRST_EXCEPTION)
    if acting.done():
        acting.result()
    return await hosting


def _cancel(step: SlurmStep) -> None:
    try:
        cancel_step(step)
    except LaunchError as error:
        logger.error("what is left of the step could not be ended: %s", error)
