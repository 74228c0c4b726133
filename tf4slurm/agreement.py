"""The tasks of a step agreeing on a map among themselves: rank 0 hosts the control service until all have it."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.auth import new_secret
from tf4slurm.control.limits import Limits
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState, Phase
from tf4slurm.errors import RendezvousError, RendezvousTimeoutError
from tf4slurm.join import Join, JoinSettings, Place, Service
from tf4slurm.network.interfaces import host_addresses, interface_address
from tf4slurm.placement import SPREAD, place_tasks
from tf4slurm.run_directory import RunDirectory
from tf4slurm.slurm.step import SlurmStep

_LEAVE_SECONDS = 10.0
_held: list[Join] = []
"""The joins of this process: the ports that they hold stay held until it ends."""


class Agreement:
    """The tasks of a step agreeing on a map: in a thread, so that the caller may have an event loop of its own."""

    def __init__(self, counts: Mapping[str, int], placement: str, settings: JoinSettings, step: SlurmStep) -> None:
        self._counts = counts
        self._placement = placement
        self._settings = settings
        self._step = step
        self._found: Cluster | RendezvousError | BaseException | None = None
        self._is_found = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tf4slurm-agreement")

    def wait(self) -> Cluster:
        """Return the cluster, or raise what kept the tasks from agreeing.

        The thread goes on until the others have the map too; the interpreter waits for it at its end.
        """
        self._thread.start()
        self._is_found.wait()
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found

    def _run(self) -> None:
        try:
            asyncio.run(self._agree())
        except BaseException as error:
            self._tell(error)

    def _tell(self, found: Cluster | BaseException) -> None:
        if not self._is_found.is_set():
            self._found = found
            self._is_found.set()

    async def _agree(self) -> None:
        path = Path(self._settings.run_directory)
        directory = RunDirectory.open(path) if self._step.rank == 0 else RunDirectory(path.absolute())
        hosting = asyncio.create_task(self._host(directory)) if self._step.rank == 0 else None
        place = Place.from_step(self._step)
        join = Join(place, self._settings, lambda: Service.from_file(directory.control))
        member = asyncio.create_task(join.membership.run())
        agreeing = asyncio.create_task(join.agree())
        try:
            await asyncio.wait({member, agreeing, *filter(None, [hosting])}, return_when=asyncio.FIRST_COMPLETED)
            if not agreeing.done():
                await (hosting if hosting is not None and hosting.done() else member)
            cluster = await agreeing
            if cluster is None:
                raise _failure(join)
            _held.append(join)
            if join.listener is not None:
                join.listener.close()
            self._tell(cluster)
        finally:
            join.membership.report(state="left")
            await asyncio.wait({member}, timeout=_LEAVE_SECONDS)
            if hosting is not None:
                await hosting

    async def _host(self, directory: RunDirectory) -> None:
        """Host the control service until every task has the map and has left."""
        place = functools.partial(place_tasks, self._counts, self._placement)
        limits = Limits(
            start_timeout_seconds=self._settings.join_seconds,
            beat_seconds=self._settings.beat_seconds,
            dead_after_seconds=self._settings.dead_after_seconds,
            leave_seconds=0,
        )
        needs_nodes = self._placement == SPREAD
        tasks = place([""] * self._step.num_tasks)
        state = JobState(tasks, limits, time.monotonic(), lambda *_: None, place if needs_nodes else None)
        secret = new_secret()
        service = ControlService(state, secret)
        port = await service.start()
        interface = self._settings.interface
        hosts = (interface_address(interface),) if interface else host_addresses()
        directory.write_control(Service(tuple(Address(host, port) for host in hosts), secret).to_json())
        try:
            ending = asyncio.create_task(service.wait_for_end())
            while not ending.done():
                if state.phase is Phase.TRAINING:
                    state.finish(time.monotonic())
                    service.publish()
                await asyncio.wait({ending}, timeout=limits.beat_seconds / 10)
            ending.result()
        finally:
            await service.close()
            directory.control.unlink(missing_ok=True)


def _failure(join: Join) -> Exception:
    if join.failure is not None:
        return join.failure
    reason = join.membership.order.reason or "The tasks did not agree on a map."
    return RendezvousTimeoutError(reason) if "did not form within" in reason else RendezvousError(reason)
