"""`tf4slurm run`: one job, here or on the hosts of the allocation this runs in."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from tf4slurm.cli.options import job_options, make_plan
from tf4slurm.cli.reporter import PlainReporter, make_reporter
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.launch.launcher import LAUNCHER_SIGNALS, Launcher, Result
from tf4slurm.launch.plan import LaunchPlan, check_command, check_ports
from tf4slurm.launch.requeue import Requeue
from tf4slurm.launch.spawn_local import LocalSpawner
from tf4slurm.launch.spawn_srun import SrunSpawner
from tf4slurm.launch.spawner import Spawner
from tf4slurm.network.interfaces import interface_address
from tf4slurm.run_directory import RunDirectory
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.slurm.step import SlurmStep, is_in_step

logger = logging.getLogger(__name__)


@click.command()
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@click.option(
    "--requeue",
    type=click.IntRange(min=0),
    metavar="N",
    help="Put a batch job that is stopped back into Slurm's queue: at most N times for its time limit, always after a "
    "preemption.",
)
@job_options
@click.pass_obj
def run(environ: dict[str, str], /, local: bool, requeue: int | None, **options: Any) -> None:
    """Run COMMAND once per task as one TensorFlow cluster, and end it whatever happens.

    On a laptop the tasks are local processes; inside a Slurm allocation they are started with srun. COMMAND stands
    after "--" and finds its place in TF_CONFIG.
    """
    allocation = None if local else SlurmAllocation.from_environ(environ)
    check_place(environ, allocation)
    if requeue is not None and allocation is None:
        raise click.UsageError("--requeue needs a job of Slurm: there is no queue here.")
    if allocation is not None and allocation.restart_count:
        logger.warning("this job was put back into the queue %d times", allocation.restart_count)
    plan = make_plan(allocation.num_tasks if allocation else None, **options)
    result = launch(plan, environ, allocation, make_reporter, requeue)
    sys.exit(result.verdict.exit_code)


def check_place(environ: Mapping[str, str], allocation: SlurmAllocation | None) -> None:
    """Check that one launcher can run the job from here.

    Raises:
        SlurmEnvironmentError: It cannot; the text says what does.
    """
    if allocation is not None and is_in_step(environ) and SlurmStep.from_environ(environ).num_tasks > 1:
        raise SlurmEnvironmentError(
            '"tf4slurm run" was itself started by srun on several tasks, and each would launch a job. Leave srun out: '
            'run starts it; or use "srun tf4slurm task".',
            variable="SLURM_STEP_NUM_TASKS",
        )
    if allocation is not None and allocation.components > 1:
        raise SlurmEnvironmentError(
            f'"tf4slurm run" starts one step, but this heterogeneous job has {allocation.components} components. Start '
            "the tasks yourself, roles in rank order: srun --het-group=0 tf4slurm task --placement ps,worker,worker … "
            ": --het-group=1 tf4slurm task --placement ps,worker,worker …",
            variable="SLURM_HET_SIZE",
        )


def launch(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    allocation: SlurmAllocation | None,
    start_reporter: Callable[[int], PlainReporter],
    requeue: int | None = None,
) -> Result:
    """Run the plan to its end, here or in the allocation; return how it went.

    Raises:
        Tf4SlurmError: Something is wrong with it that can be told before anything starts.
    """
    check_command(plan.command)
    if allocation is None:
        check_ports(plan.ports, plan.num_tasks)
        if plan.interface is not None:
            interface_address(plan.interface)
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)  # until the launcher can take them
    run_directory = RunDirectory.create(plan.runs_directory, f"{plan.name}-{_job_id(allocation)}")
    spawner: Spawner
    if allocation is None:
        spawner = LocalSpawner(plan.num_tasks, plan.command, environ)
    else:
        spawner = SrunSpawner(allocation, plan.num_tasks, plan.command, environ)
    requeuer = Requeue(allocation.job_id, requeue) if allocation is not None and requeue is not None else None
    reporter = start_reporter(plan.num_tasks)  # now: it may start a thread, which no fork survives
    try:
        return asyncio.run(Launcher(plan, spawner, run_directory, reporter, requeuer).run())
    finally:
        reporter.close()


def _job_id(allocation: SlurmAllocation | None) -> str:
    return allocation.job_id if allocation else time.strftime("%Y%m%d-%H%M%S")
