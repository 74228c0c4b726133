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
from click.core import ParameterSource

from tf4slurm.cli.options import given, job_options
from tf4slurm.cli.reporter import PlainReporter, make_reporter
from tf4slurm.cli.settings import site_option
from tf4slurm.cli.submission_options import parse_srun
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.jobs.registry import remember
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch.checks import check_command, check_ports
from tf4slurm.launch.launcher import LAUNCHER_SIGNALS, Launcher, Result
from tf4slurm.launch.local_spawner import LocalSpawner
from tf4slurm.launch.requeue import Requeue
from tf4slurm.launch.spawner import Spawner
from tf4slurm.launch.srun_spawner import SrunSpawner
from tf4slurm.network.interfaces import interface_address
from tf4slurm.network.isolation import isolate
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.slurm.step import SlurmStep, is_in_step, own_node_name
from tf4slurm.spec import JobSpec, make_spec

logger = logging.getLogger(__name__)


@click.command()
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@click.option(
    "--isolated",
    is_flag=True,
    help="Run local processes in a network of their own, which has only loopback: no other host or user reaches them.",
)
@site_option
@job_options("run")
@click.pass_context
def run(context: click.Context, /, local: bool, isolated: bool, **options: Any) -> None:
    """Run COMMAND once per task as one TensorFlow cluster, and end it whatever happens.

    On a laptop the tasks are local processes; inside a Slurm allocation they are started with srun. COMMAND stands
    after "--" and finds its place in TF_CONFIG.

    In COMMAND {ps_hosts}, {worker_hosts}, {chief_hosts} ("host:port,host:port"), {task_type} or {job_name}, and
    {task_index} are filled in for each task.
    """
    environ: dict[str, str] = context.obj
    allocation = None if local else SlurmAllocation.from_environ(environ)
    check_place(environ, allocation)
    if allocation is None:
        for option in ("requeue", "srun"):  # in settings they are meant for where there is one
            if context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{option} needs a job of Slurm, and there is none here.")
    if allocation is not None and allocation.restart_count:
        logger.warning("this job was put back into the queue %d times", allocation.restart_count)
    spec = make_spec(given(options), allocation.num_tasks if allocation else None)
    if isolated and allocation is not None:
        raise click.UsageError("--isolated is for local processes: the hosts of an allocation must reach each other.")
    if isolated:
        isolate()
    elif allocation is None and spec.num_tasks > 1 and sys.platform == "linux":
        logger.warning(
            "TensorFlow's servers listen on all interfaces of this host, without authentication: --isolated closes "
            "them to other hosts and users"
        )
    result = launch(spec, environ, allocation, make_reporter)
    sys.exit(result.outcome.exit_code)


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
    if allocation is not None and allocation.components and allocation.num_tasks is None:
        raise SlurmEnvironmentError(
            "A component of this heterogeneous job did not ask for a number of tasks, so where each role runs is not "
            "known. Give each component --ntasks.",
            variable="SLURM_HET_SIZE",
        )


def launch(
    spec: JobSpec,
    environ: Mapping[str, str],
    allocation: SlurmAllocation | None,
    start_reporter: Callable[[int], PlainReporter],
) -> Result:
    """Run a job to its end, here or in the allocation; return how it ended.

    Raises:
        Tf4SlurmError: Something is wrong with it that can be told before anything starts.
    """
    check_command(spec.command)
    if spec.data_workers:
        check_command((spec.python,))
    if allocation is None:
        check_ports(spec.ports, spec.num_tasks, spec.control_port)
        if spec.interface is not None:
            interface_address(spec.interface, own_node_name(environ))
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)  # until the launcher can take them
    job_id = allocation.job_id if allocation else None
    name = f"{spec.name}-{job_id or time.strftime('%Y%m%d-%H%M%S')}"
    run_directory = RunDirectory.create(spec.runs_directory, name)
    remember(name if job_id else run_directory.path.name, spec.runs_directory, environ, job_id)
    spawner: Spawner
    if allocation is None:
        spawner = LocalSpawner(spec.num_tasks, spec.command, environ)
    else:
        spawner = SrunSpawner(allocation, spec.num_tasks, spec.command, environ, parse_srun(spec.srun))
    requeuer = None
    if allocation is not None and spec.requeue is not None:
        requeuer = Requeue(allocation.job_id, spec.requeue, allocation.array_element)
    facts = {"job_id": job_id, "arguments": tuple(sys.argv)}
    reporter = start_reporter(spec.num_tasks)  # now: it may start a thread, which no fork survives
    try:
        return asyncio.run(Launcher(spec, spawner, run_directory, reporter, requeuer, facts).run())
    finally:
        reporter.close()
