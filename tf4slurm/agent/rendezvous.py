"""The rank and node of a task, and its rendezvous with the other tasks.

In the rendezvous each task chooses an address, holds a port, registers, and checks the addresses of other tasks. When
all tasks have done this, every task has the cluster spec and may start its child process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm import __version__
from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.control.messages import JOINING_RANK, Registration
from tf4slurm.errors import PortsInUseError, Tf4SlurmError
from tf4slurm.network.interfaces import task_address
from tf4slurm.network.ports import HeldPort, hold_port
from tf4slurm.network.reachability import answer_checks, find_unreachable, members_to_check, wait_for_answers
from tf4slurm.slurm.environ import SlurmStep, own_node_name
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.variables import (
    CERTIFICATE_VARIABLE,
    CONTROL_VARIABLE,
    RANK_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    SETTINGS_VARIABLE,
    TOKEN_VARIABLE,
)

_CHECK_SECONDS = 5.0
_PORT_SECONDS, _PORT_PAUSE_SECONDS = 3.0, 0.05
_FAILURE_CHARACTERS = 900


@dataclass(frozen=True)
class LocalTask:
    """A task that the local launcher started."""

    rank: int
    node_name: str


@dataclass(frozen=True)
class JoiningWorker:
    """A worker that `tf4slurm join` adds to a running job. The service chooses its rank."""

    node_name: str
    rank: int = JOINING_RANK


@dataclass(frozen=True)
class ExternalChief:
    """The chief of a job with --external-chief, which another process than the launcher starts."""

    node_name: str
    rank: int


TaskIdentity = SlurmStep | LocalTask | JoiningWorker | ExternalChief


def read_identity(environ: Mapping[str, str]) -> TaskIdentity:
    """Read the rank and node from the variable of the local launcher, or else from the variables of the Slurm step.

    Raises:
        SlurmEnvironmentError: The local launcher's variable is missing, and those of a step are missing or invalid.
    """
    if RANK_VARIABLE in environ:
        return LocalTask(int(environ[RANK_VARIABLE]), own_node_name(environ))
    return SlurmStep.from_environ(environ)


class Rendezvous:
    """One task's registration, and the port that the task holds for its child.

    Attributes:
        failure: The reason why this task cannot take part. None if it can.
        held_port: The port of the current attempt. None before a port was chosen.
        listener: The socket that listens on `held_port` for reachability checks, until the child starts.
    """

    def __init__(
        self,
        identity: TaskIdentity,
        spec: JobSpec,
        find_endpoint: Callable[[], ControlEndpoint | None],
        *,
        owns_child: bool = True,
    ) -> None:
        """Create the rendezvous. Nothing is sent before `client.run()` is called.

        Args:
            find_endpoint: Returns the addresses and credentials of the control service. None as long as they are
                unknown.
            owns_child: False if srun started the script. Then the agent neither starts nor ends the script.
        """
        self.identity = identity
        self.spec = spec
        self.failure: Tf4SlurmError | OSError | None = None
        self.held_port: HeldPort | None = None
        self.listener: socket.socket | None = None
        self._owns_child = owns_child
        self._choosing = threading.Lock()
        self._incarnation = f"{os.getpid()}-{time.time_ns():x}-{os.urandom(4).hex()}"
        num_tasks = identity.num_tasks if isinstance(identity, SlurmStep) else spec.num_tasks
        self.client = self._make_client(find_endpoint, num_tasks)

    @property
    def rank(self) -> int:
        """The rank of this task. It is JOINING_RANK for a joined worker that has not registered."""
        rank = self.client.desired.rank
        return self.identity.rank if rank is None else rank

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that the launcher sent last. None if there is none, or if it does not contain this task.

        A worker that has just joined is not in the cluster yet.
        """
        cluster = self.client.cluster
        return cluster if cluster is not None and cluster.find(self.rank) is not None else None

    async def wait_for_cluster(self) -> Cluster | None:
        """Check the addresses of other tasks, answer their checks, and wait until the child may start.

        `client.run()` must run at the same time. It registers this task and receives the cluster.

        Returns:
            The cluster. None if the launcher terminates this task or begins another attempt first.
        """
        client = self.client
        attempt = client.observed.attempt
        server: asyncio.Server | None = None
        try:
            while True:
                await client.wait_for_change()
                if client.desired.terminate or client.desired.attempt != attempt:
                    return None
                cluster = self.cluster if client.cluster_attempt == attempt else None
                if client.desired.start_count:
                    return cluster
                if self.listener is not None and server is None:
                    server = await self._answer_checks(self.listener)
                if cluster is not None and client.observed.state == "registered":
                    await self._check_addresses(cluster)
        finally:
            if server is not None:
                server.close()

    async def begin_attempt(self, attempt: int) -> None:
        """Hold a new port for another attempt, and send it to the launcher. If no port is free, report "not_ready".

        While all ports of a range are in use, this method tries again for 3 s.
        """
        now = asyncio.get_running_loop().time
        before = self.held_port
        deadline = now() + _PORT_SECONDS
        changes: dict[str, object] = {}
        while not changes:
            try:
                changes["port"] = self._hold_port().port
            except (Tf4SlurmError, OSError) as error:
                if isinstance(error, PortsInUseError) and now() < deadline:
                    if before is not None:  # a small range: all tasks of this host must first release their ports
                        before.close()
                    await asyncio.sleep(_PORT_PAUSE_SECONDS)
                else:
                    reason = f"rank {self.rank} has no port: {str(error).rstrip('.')}"
                    changes.update(state="not_ready", detail=reason)
        if before is not None:
            before.close()
        self.client.begin_attempt(attempt, **changes)

    # Network access, which the simulated rendezvous of the tests overrides

    def _make_client(self, find_endpoint: Callable[[], ControlEndpoint | None], num_tasks: int) -> ControlClient:
        return ControlClient(find_endpoint, self._make_registration, self.spec, num_tasks)

    def _find_host(self, service: Address) -> str:
        """Return the host of this task's address: on the job's interface, or else on the route to the service."""
        return task_address(self.spec.interface, self.identity.node_name, service.host)

    def _hold_port(self) -> HeldPort:
        reserved = self.identity.port_candidates if isinstance(self.identity, SlurmStep) else ()
        self.held_port = hold_port(self.spec.ports or reserved)
        self.listener = self.held_port.listen()  # before another task receives the address and checks it
        return self.held_port

    async def _answer_checks(self, listener: socket.socket) -> asyncio.Server:
        return await answer_checks(listener, self.client.token, self.rank)

    async def _find_unreachable(self, cluster: Cluster) -> list[str]:
        """Check the addresses that this task must check. Return a clause for each check that fails, with the reason."""
        if isinstance(self.identity, JoiningWorker):
            ps = {member.task: member.address for member in cluster.members if member.task.task_type == "ps"}
            await wait_for_answers(ps, _CHECK_SECONDS)
            return [f"{task} does not answer at {address}" for task, address in ps.items()]
        members = members_to_check(cluster, self.rank)
        return await find_unreachable(members, self.client.token, _CHECK_SECONDS)

    async def _check_addresses(self, cluster: Cluster) -> None:
        while True:
            paused = self.client.paused_seconds
            faults = await self._find_unreachable(cluster)
            if not faults or self.client.paused_seconds == paused:
                break  # otherwise deadlines may have expired during a pause: check again
        if isinstance(self.identity, SlurmStep):
            try:
                members = cluster.members
                spawned = members[:-1] if self.spec.external_chief else members  # the chief is not in the step
                self.identity.check_own_place([member.node for member in spawned])
            except Tf4SlurmError as error:
                faults.append(str(error).removesuffix("."))
        self.client.update(state="not_ready" if faults else "ready", detail="; ".join(faults) or None)

    def _make_registration(self, service: Address) -> Registration:
        """Return this task's registration for the control service at the address `service`.

        If this host has no address or port for the task, the registration contains the reason. The service then ends
        the job, or refuses the task if it is a joining worker.
        """
        host, port, node = "", 0, self.identity.node_name
        with self._choosing:  # an earlier call that has timed out may still run in its thread
            self.failure = None
            try:
                host = self._find_host(service)
                port = (self.held_port or self._hold_port()).port
            except (Tf4SlurmError, OSError) as error:
                self.failure = error
        failure = None if self.failure is None else str(self.failure)[:_FAILURE_CHARACTERS]
        task = (self.identity.rank, node, host, port, self._incarnation, __version__)
        return Registration(*task, failure, self._owns_child)


def is_under_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as an agent."""
    return environ.keys() >= {CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE}


def spec_to_environ(spec: JobSpec, run_directory: Path) -> dict[str, str]:
    """Return the environment variables that `spec_from_environ` reads."""
    return {SETTINGS_VARIABLE: json.dumps(spec.to_json()), RUN_DIRECTORY_VARIABLE: str(run_directory)}


def spec_from_environ(command: Sequence[str], environ: Mapping[str, str]) -> tuple[JobSpec, Path]:
    """Return the job's options and the path of its run directory.

    Args:
        command: The job's command, which is not in the variables.
        environ: Environment variables with those of `spec_to_environ`.
    """
    return JobSpec(tuple(command), **json.loads(environ[SETTINGS_VARIABLE])), Path(environ[RUN_DIRECTORY_VARIABLE])
