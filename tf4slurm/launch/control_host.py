"""`ControlHost`: a job's control service with its state, credentials and file control.json."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tf4slurm.agent.bootstrap import ControlEndpoint
from tf4slurm.cluster import Address
from tf4slurm.control.credentials import create_credentials
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState
from tf4slurm.errors import InterfaceError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.interfaces import host_addresses, interface_address
from tf4slurm.placement import place_tasks
from tf4slurm.spec import JobSpec
from tf4slurm.system.program import in_thread

LOOPBACK = "127.0.0.1"
_CLOSE_SECONDS = 2.0


class ControlHost:
    """Runs the control service of one job, in the launcher or in the sidecar of rank 0."""

    def __init__(
        self,
        counts: Mapping[str, int],
        spec: JobSpec,
        run_directory: RunDirectory,
        files: ThreadPoolExecutor,
        on_event: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """`counts` has the number of tasks of each role; `files` runs the writes to the run directory."""
        self.started_at = time.monotonic()
        tasks = place_tasks(counts, spec.placement, [""] * sum(counts.values()))
        self.state = JobState(tasks, spec, self.started_at, on_event)
        self._spec = spec
        self._run_directory = run_directory
        self._files = files
        self._credentials = create_credentials()
        self._service = ControlService(self.state, self._credentials)

    async def start(self, node: str | None = None, *, is_local: bool = False) -> ControlEndpoint:
        """Start the service; return its addresses and the credentials.

        Args:
            node: Slurm's name of this node: return only its address on the job's interface. None: return all.
            is_local: Listen only on the loopback interface.

        Raises:
            OSError: The service cannot listen.
            PlacementError: None of the service's ports is free.
        """
        port = await self._service.start(LOOPBACK if is_local else "", self._spec.service_ports)
        hosts = (LOOPBACK,) if is_local else await in_thread(_find_hosts, self._spec.interface, node)
        return ControlEndpoint(tuple(Address(host, port) for host in hosts), self._credentials.shared)

    def announce(self, endpoint: ControlEndpoint) -> None:
        """Write control.json, where tasks that srun started find the service's address. Call this in `files`."""
        self._run_directory.write_control(endpoint.to_json())

    def publish(self) -> None:
        """Send the desired states that have changed."""
        self._service.publish()

    async def wait_for_end(self) -> None:
        """Wait until the job has ended."""
        await self._service.wait_for_end()

    async def close(self) -> None:
        await self._service.close()
        await asyncio.wait({asyncio.wrap_future(self._files.submit(self._remove_control_file))}, timeout=_CLOSE_SECONDS)

    def _remove_control_file(self) -> None:
        with contextlib.suppress(OSError):
            self._run_directory.control.unlink()


def _find_hosts(interface: str | None, node: str | None) -> tuple[str, ...]:
    if interface is not None and node is not None:
        with contextlib.suppress(InterfaceError):  # the agent of this task reports the error
            return (interface_address(interface, node),)
    return host_addresses() or (socket.gethostname(),)
