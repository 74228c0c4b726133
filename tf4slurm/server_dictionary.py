"""`get_server_dictionary()`: the ps/worker address map for scripts that start their own servers."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tf4slurm.cluster import Address, Cluster, Task
from tf4slurm.control.auth import new_secret
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState, Limits, Phase
from tf4slurm.errors import PlacementError, RendezvousError, RendezvousTimeoutError
from tf4slurm.join import Join, JoinSettings, Place, Service
from tf4slurm.network.interfaces import INFINIBAND, host_addresses, interface_address
from tf4slurm.placement import PACK, SPREAD, place_tasks
from tf4slurm.roles import TASK_TYPES
from tf4slurm.run_directory import RunDirectory
from tf4slurm.slurm.step import SlurmStep

_LEAVE_SECONDS = 10.0
_held: list[Join] = []
"""The joins of this process: the ports that they hold stay held until it ends."""


class ServerDictionary(NamedTuple):
    """The address map, and which of its tasks this process is; unpacks as (cluster, task_type, task_index)."""

    cluster: dict[str, list[str]]
    task_type: str
    task_index: int


def get_server_dictionary(
    tasks: Sequence[str] | Mapping[str, int],
    infiniband: bool = False,
    *,
    interface: str | None = None,
    ports: Sequence[int] | None = None,
    placement: str = PACK,
    timeout_seconds: float = 300.0,
    directory: str | os.PathLike[str] = "runs",
) -> ServerDictionary:
    """Return the address map of the step this process is a task of, agreed upon by all its tasks.

    Under an agent of tf4slurm it is the map that the launcher agreed on. Under plain srun the tasks agree among
    themselves, through the control service that rank 0 hosts in a thread until all have the map. From then on this
    process holds its port, and TF_GRPC_REUSE_PORT is set in its environment, so that TensorFlow's server can take it.

    Args:
        tasks: The role of each rank ("ps", "worker", "chief", "evaluator"), in rank order; or the number of tasks of
            each role, such as {"ps": 1, "worker": 3}.
        infiniband: Take the host's InfiniBand address; the same as interface="infiniband".
        interface: Which network's address: a name, glob, list, network, "infiniband", "fastest" or host-name rule (see
            `network.interfaces.interface_address`). By default the one on the route to rank 0.
        ports: Ports to choose from; by default those that Slurm reserves, or else any free one.
        placement: With a number of tasks of each role: "pack" (rank by rank) or "spread" (ps over the nodes).
        timeout_seconds: How long to wait for all tasks.
        directory: A directory that all hosts share; rank 0 leaves a file (0600) there for the others to find it.

    Returns:
        The cluster spec without the evaluators, such as {"ps": ["10.1.0.4:40123"], "worker": […]}, the role and index.

    Raises:
        SlurmEnvironmentError: This process is neither a task of a Slurm step nor started by an agent.
        PlacementError: As many roles as tasks were expected.
        RendezvousTimeoutError: Not all tasks came in time; the text names those that did not.
        RendezvousError: The tasks did not agree; the text says why.
    """
    counts = {role: tasks.get(role, 0) for role in TASK_TYPES} if isinstance(tasks, Mapping) else _count(tasks)
    launched = launched_dictionary()
    if launched is not None:
        _check_counts(launched, counts)
        return launched
    if not isinstance(tasks, Mapping):
        placement = ",".join(tasks)
    step = SlurmStep.from_environ(os.environ)
    if sum(counts.values()) != step.num_tasks:
        raise PlacementError(
            f"{sum(counts.values())} roles were given, but the step has {step.num_tasks} tasks. Give one role for each "
            f"rank, or ask srun for --ntasks={sum(counts.values())}.",
            requested=sum(counts.values()),
            available=step.num_tasks,
        )
    place_tasks(counts, placement, [""] * step.num_tasks)  # a list that does not fit is told before anything starts
    settings = JoinSettings(
        run_directory=str(Path(directory) / f"step-{step.job_id}.{step.step_id}-{step.restart_count}"),
        interface=INFINIBAND if infiniband else interface,
        ports=tuple(ports or ()),
        join_seconds=timeout_seconds,
    )
    cluster = _Agreement(counts, placement, settings, step).wait()
    os.environ["TF_GRPC_REUSE_PORT"] = "true"
    return ServerDictionary(cluster.to_dictionary(), *cluster.members[step.rank].task)


def _count(roles: Sequence[str]) -> dict[str, int]:
    unknown = sorted(set(roles) - set(TASK_TYPES))
    if unknown:
        text = f"{unknown[0]!r} is not a role: expected one of {', '.join(TASK_TYPES)} for each rank."
        raise PlacementError(text, requested=len(roles), available=0)
    return {role: list(roles).count(role) for role in TASK_TYPES}


def launched_dictionary() -> ServerDictionary | None:
    """Return the map on which the launcher agreed; None if this process has no agent of tf4slurm."""
    if "TF4SLURM_TASK" not in os.environ or "TF_CONFIG" not in os.environ:
        return None
    config = json.loads(os.environ["TF_CONFIG"])
    return ServerDictionary(config["cluster"], *Task(config["task"]["type"], config["task"]["index"]))


def _check_counts(launched: ServerDictionary, counts: Mapping[str, int]) -> None:
    given = {role: len(addresses) for role, addresses in launched.cluster.items()}
    asked = {role: count for role, count in counts.items() if count and role != "evaluator"}
    if asked != given:
        raise PlacementError(
            f"The script asks for {asked}, but was launched with {given}. Make them agree: the launcher's options say "
            "how many there are.",
            requested=sum(asked.values()),
            available=sum(given.values()),
        )


class _Agreement:
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
