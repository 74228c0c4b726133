"""A step without a launcher (`srun tf4slurm task …`): rank 0's agent hosts the control service.

The tasks find it through the run directory, which all of them derive from the step: control.json there (0600) tells
where the service listens, and the secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tf4slurm.agent import Agent
from tf4slurm.join import Join, Place, Service
from tf4slurm.launch.launcher import Launcher, Reporter
from tf4slurm.launch.plan import LaunchPlan
from tf4slurm.output import LineWriter
from tf4slurm.run_directory import RunDirectory
from tf4slurm.slurm.step import SlurmStep


async def run_self_hosted_task(
    plan: LaunchPlan, step: SlurmStep, environ: Mapping[str, str], writer: LineWriter, reporter: Reporter
) -> int:
    """Be one task of the step; return its exit code. On rank 0 that is the job's."""
    restart = f"r{step.restart_count}" if step.restart_count else ""
    path = plan.runs_directory / f"{plan.name}-{step.job_id}.{step.step_id}{restart}"
    directory = RunDirectory.open(path) if step.rank == 0 else RunDirectory(path.absolute())
    join = Join(Place.from_environ(environ), plan.to_settings(path), lambda: Service.from_file(directory.control))
    agent = Agent(plan.command, join, environ, writer)
    if step.rank != 0:
        return await agent.run(directory)
    hosting = asyncio.create_task(Launcher(plan, None, directory, reporter).run())
    acting = asyncio.create_task(agent.run(directory))
    await asyncio.wait({hosting, acting}, return_when=asyncio.FIRST_EXCEPTION)
    if acting.done():
        acting.result()
    return (await hosting).verdict.exit_code
