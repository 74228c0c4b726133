"""Run a job from this process, with local agents or with srun in the Slurm allocation of this process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tf4slurm.errors import OptionError, PlacementError, PortsInUseError, SlurmEnvironmentError
from tf4slurm.jobs.formatting import format_count
from tf4slurm.jobs.registry import register_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch.checks import check_command, check_program_source, warn_of_resolver
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.requeue import Requeue
from tf4slurm.launch.result_files import Result, recording_failure
from tf4slurm.launch.spawners import LocalSpawner, Spawner, SrunSpawner
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.network.interfaces import interface_address
from tf4slurm.network.isolation import isolate
from tf4slurm.network.ports import count_free, format_ranges
from tf4slurm.slurm.commands import confirm_element, query_allocation
from tf4slurm.slurm.environ import SlurmAllocation, SlurmStep, is_in_step, own_node_name, without_step
from tf4slurm.spec.batch_spec import parse_pairs
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS

logger = logging.getLogger(__name__)


def find_allocation(environ: Mapping[str, str], *, local: bool = False) -> SlurmAllocation | None:
    """Return the Slurm allocation in which the job runs. Return None with `local` or outside of an allocation.

    Raises:
        SlurmEnvironmentError: A variable of Slurm is invalid, this process is one of several tasks of a step, or a
            component of a heterogeneous job has no number of tasks.
        LaunchError: This process is in a step, and Slurm does not answer how many tasks the job has.
    """
    allocation = None if local else SlurmAllocation.from_environ(environ)
    if allocation is None:
        return None
    if is_in_step(environ) and SlurmStep.from_environ(environ).num_tasks > 1:
        raise SlurmEnvironmentError(
            'srun started "tf4slurm run" on several tasks, and each would launch a job. Omit srun, which "tf4slurm '
            'run" starts, or use "srun tf4slurm task".',
            variable="SLURM_STEP_NUM_TASKS",
        )
    allocation = confirm_element(allocation)
    if is_in_step(environ) and not allocation.components:  # a heterogeneous job has variables for its own numbers
        allocation = query_allocation(allocation)
    if allocation.components and allocation.num_tasks is None:
        raise SlurmEnvironmentError(
            "A component of this heterogeneous job did not request a number of tasks, so the role of each rank is "
            "unknown. Give each component --ntasks.",
            variable="SLURM_HET_SIZE",
        )
    return allocation


def run_job(
    spec: JobSpec,
    environ: Mapping[str, str],
    allocation: SlurmAllocation | None,
    start_terminal_output: Callable[[int], TerminalOutput],
    *,
    isolated: bool = False,
    arguments: Sequence[str] = (),
    answer: str | None = None,
    element: str | None = None,
) -> Result:
    """Run a job to its end, in `allocation` or, if that is None, on this host. Return its result.

    Args:
        start_terminal_output: Called with the number of tasks, immediately before the job starts.
        isolated: Run local processes in a network namespace of their own.
        arguments: The command line of this process, which `tf4slurm resume` repeats.
        answer: Path of a file to which the path of the run directory is written. The program that has started this
            process by `api` reads the file. None (default) for no file.
        element: Name of the run directory of an element of a local sweep, which is registered already. None (default)
            for any other job.

    Raises:
        Tf4SlurmError: An option is invalid, or the job cannot start.
    """
    spec = spec.for_tasks(allocation.num_tasks if allocation else None)
    if isolated:
        _isolate(spec, allocation)  # before the checks, because it changes the network interfaces
    check_program_source(spec.command)
    check_command(spec)
    warn_of_resolver(spec.command)
    if allocation is None:
        check_ports(spec.ports, spec.num_tasks, spec.control_port)
        check_free_ports(spec.ports, spec.num_tasks, spec.control_port)
        if spec.interface is not None:
            interface_address(spec.interface, own_node_name(environ))
    _warn(spec, allocation, isolated=isolated)
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)  # until the launcher handles them
    job_id = str(allocation.job_id) if allocation else None
    name = element or f"{spec.name}-{job_id or time.strftime('%Y%m%d-%H%M%S')}"
    run_directory = RunDirectory.create(spec.runs_directory, name)
    with recording_failure(run_directory):
        if element is None:
            register_job(name if job_id else run_directory.path.name, spec.runs_directory, environ, job_id)
        # Read before the answer, which fails if the process has ended.
        starter_id = os.getppid() if answer is not None and spec.external_chief else None
        if answer is not None:
            Path(answer).write_bytes(os.fsencode(run_directory.path))
        requeue = None
        if allocation is not None and spec.requeue is not None:
            requeue = Requeue(allocation.job_id, spec.requeue, allocation.restart_count)
        spawner = _make_spawner(spec, environ, allocation)
        terminal = start_terminal_output(spec.num_tasks)  # last: it may start a thread, which forks do not copy
        try:
            launcher = Launcher(
                *(spec, spawner, run_directory, terminal, requeue),
                job_id=job_id,
                arguments=arguments,
                starter_id=starter_id,
                has_person=allocation is None or answer is not None or _has_terminal(),
            )
            return asyncio.run(launcher.run())
        finally:
            terminal.close()


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal, in which a person can press Ctrl-C."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _isolate(spec: JobSpec, allocation: SlurmAllocation | None) -> None:
    """Move this process into a new network namespace.

    Raise OptionError if there is an allocation, because its hosts must reach each other, or for an external chief.
    """
    if spec.external_chief:
        raise OptionError(
            "--isolated starts the tasks in a network of their own, which an external chief cannot reach. Omit one.",
            option="isolated",
        )
    if allocation is not None:
        raise OptionError(
            "--isolated is for local processes: the hosts of an allocation must reach each other.", option="isolated"
        )
    isolate()


def _warn(spec: JobSpec, allocation: SlurmAllocation | None, *, isolated: bool) -> None:
    if allocation is None and not isolated and spec.num_tasks > 1 and sys.platform == "linux":
        logger.warning(
            "TensorFlow's servers listen on all interfaces of this host, without authentication: --isolated closes "
            "them to other hosts and users"
        )
    if allocation is not None and allocation.restart_count:
        logger.warning("Slurm has requeued this job %s", format_count(allocation.restart_count, "time"))


def _make_spawner(spec: JobSpec, environ: Mapping[str, str], allocation: SlurmAllocation | None) -> Spawner:
    if allocation is None:
        return LocalSpawner(spec, environ)
    pairs = parse_pairs("srun", spec.srun).items()
    options = tuple(f"--{name}={value}" if value else f"--{name}" for name, value in pairs)
    return SrunSpawner(spec, allocation, without_step(environ), options)


def check_ports(ports: Sequence[int], tasks_per_host: int, control_port: int | None) -> None:
    """Check that `ports` has a port for each task of a host and for the control service. Empty `ports` are valid.

    The control service needs none of them if `control_port` is another port.

    Raises:
        PlacementError: There are too few ports.
    """
    requested = _count_needed(ports, tasks_per_host, control_port)
    if ports and len(ports) < requested:
        raise PlacementError(
            f"{len(ports)} ports ({format_ranges(ports)}) are too few for {tasks_per_host} tasks on one host and the "
            f"control service. Give --ports a range of at least {requested}."
        )


def check_free_ports(ports: Sequence[int], tasks_per_host: int, control_port: int | None) -> None:
    """Check that enough of `ports` are free on this host. If none is, the control service or a task reports it.

    Raises:
        PortsInUseError: Some are free, but fewer than `check_ports` requests.
    """
    needed = _count_needed(ports, tasks_per_host, control_port)
    try:
        num_free = count_free(ports, needed)
    except OSError:  # the task that tries to bind the port reports it
        return
    if 0 < num_free < needed:
        raise PortsInUseError(
            f"Only {num_free} of the {len(ports)} ports {format_ranges(ports)} {'is' if num_free == 1 else 'are'} free "
            f"on this host, but the job needs {needed}: one for each of {format_count(tasks_per_host, 'task')}"
            f"{' and one for the control service' if needed > tasks_per_host else ''}. Give another range, or a larger "
            "one."
        )


def _count_needed(ports: Sequence[int], tasks_per_host: int, control_port: int | None) -> int:
    return tasks_per_host + (control_port is None or control_port in ports)
