"""Host the control service of a job: in the launcher, or in the sidecar of rank 0 under plain srun."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path

from tf4slurm.cluster import Address
from tf4slurm.control.clock import JobClock
from tf4slurm.control.credentials import ControlEndpoint, create_credentials
from tf4slurm.control.service import ControlService, max_gap_seconds
from tf4slurm.control.state import JobState
from tf4slurm.errors import InterfaceError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.interfaces import host_addresses, interface_address
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.threads import in_thread

_LOOPBACK = "127.0.0.1"
_LATE_SECONDS = 0.1
_CLOSE_SECONDS = 2.0


def make_service(
    spec: JobSpec, counts: Mapping[str, int], on_event: Callable[..., None] = lambda *_, **__: None
) -> ControlService:
    """Create the control service of a job, with new credentials. `start_service` starts it.

    Args:
        counts: Number of tasks of each role, by task type.
        on_event: Called with each event of the job (see `JobState`).
    """
    tasks = spec.place(counts, [""] * sum(counts.values()))
    clock = JobClock(max_gap_seconds(spec))
    return ControlService(JobState(tasks, spec, clock.now(), on_event), create_credentials(), clock)


async def start_service(service: ControlService, node: str | None = None, *, is_local: bool = False) -> ControlEndpoint:
    """Start the service. Return its addresses and the credentials that tasks need.

    Args:
        node: Slurm's name of this node. If it is given and the job names an interface that this node has, only the
            address on this interface is returned. Otherwise all addresses of this host are returned.
        is_local: Listen only on the loopback interface.

    Raises:
        OSError: The service cannot listen.
        PortsInUseError: None of the service's ports is free.
    """
    spec = service.state.spec
    port = await service.start(_LOOPBACK if is_local else "")
    hosts = (_LOOPBACK,) if is_local else await in_thread(_find_hosts, spec.interface, node)
    return ControlEndpoint(tuple(Address(host, port) for host in hosts), service.credentials.shared)


def _find_hosts(interface: str | None, node: str | None) -> tuple[str, ...]:
    if interface is not None and node is not None:
        with contextlib.suppress(InterfaceError):  # the agent of this task reports the error
            return (interface_address(interface, node),)
    return host_addresses() or (socket.gethostname(),)


async def wait_for_late_tasks(service: ControlService) -> None:
    """After the end of a job, wait for tasks that have not registered yet, until each has registered and terminated.

    If the service closed before, they would search for it until their start timeout expires. This function waits at
    most for the start timeout. It returns at once if the start timeout has ended the job, or if all tasks had
    registered.
    """
    state = service.state
    is_late = [record for record in state.tasks.members if not record.has_registered]
    if state.outcome is None or state.outcome.has_timed_out or not is_late:
        return
    deadline = service.clock.now() + state.spec.start_timeout_seconds
    while service.clock.now() < deadline and not all(record.is_gone for record in is_late):
        await asyncio.sleep(_LATE_SECONDS)


def write_control(endpoint: ControlEndpoint, run_directory: RunDirectory) -> None:
    """Write control.json, in which other processes find the service and its credentials.

    The other processes are tasks of plain srun, and workers that join the job.
    """
    run_directory.write_control(endpoint.to_json())


async def close_service(service: ControlService, run_directory: RunDirectory, files: Executor) -> None:
    """Close the service, and remove control.json. Wait at most 2 s for each.

    The file is removed in the executor `files`, which also writes it. So the removal follows an unfinished write.
    """
    await service.close()
    await asyncio.wait({asyncio.wrap_future(files.submit(_remove, run_directory.control))}, timeout=_CLOSE_SECONDS)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
