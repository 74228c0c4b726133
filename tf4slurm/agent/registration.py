"""How a task becomes a member: its place in the job, its address, the port it holds, and the stream that says so."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm import __version__
from tf4slurm.cluster import Address, Cluster
from tf4slurm.control import munge
from tf4slurm.control.client import Membership
from tf4slurm.control.credentials import Credentials
from tf4slurm.control.messages import Registration
from tf4slurm.errors import PlacementError, Tf4SlurmError
from tf4slurm.network.interfaces import interface_address, route_address
from tf4slurm.network.ports import HeldPort, hold_port
from tf4slurm.network.reachability import ReachabilityServer, find_unreachable, members_to_check
from tf4slurm.slurm.step import SlurmStep, own_node_name
from tf4slurm.system.variables import (
    CERTIFICATE_VARIABLE,
    CONTROL_VARIABLE,
    RANK_VARIABLE,
    SETTINGS_VARIABLE,
    TOKEN_VARIABLE,
)

logger = logging.getLogger(__name__)

_PROOF_SECONDS = 5.0
_PORT_SECONDS, _PORT_PAUSE_SECONDS = 3.0, 0.05
_FAILURE_CHARACTERS = 900
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe that someone put there is not waited for
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class JoinSettings:
    """What is the same for every task of a job; times in seconds.

    Attributes:
        run_directory: Where the job's files are.
        interface: Name of the network interface whose address goes into the map; None for the route to the launcher.
        ports: The ports to choose from; none for those that Slurm reserves, or else any free one.
        join_seconds: How long the control service is looked for.
        num_tasks: How many the job has; a service of many is given more time to answer.
        gpus_per_worker: How many GPUs each task that uses them gets; None for an even share of what Slurm gave.
        serve_seconds: How long a child may take until its server answers for the first time; None for no limit.
        stop_signal: Number of the signal that tells a script to save and stop, where it does not ask by itself.
        python: The Python that runs what a role has in place of the user's command; empty where no role has.
    """

    run_directory: str
    interface: str | None = None
    ports: tuple[int, ...] = ()
    heartbeat_interval_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 10.0
    join_seconds: float = 300.0
    gpus_per_worker: int | None = None
    serve_seconds: float | None = None
    stop_signal: int = signal.SIGTERM
    python: str = ""
    num_tasks: int = 1


@dataclass(frozen=True)
class Place:
    """Where in the job this process is: its rank, its node, and its Slurm step if it is in one."""

    rank: int
    node: str
    step: SlurmStep | None = None

    @property
    def reserved_ports(self) -> tuple[int, ...]:
        return self.step.port_candidates if self.step else ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Place:
        """Read the place from what the local launcher set, else from the Slurm step.

        Raises:
            SlurmEnvironmentError: Neither is there.
        """
        if RANK_VARIABLE in environ:
            return cls(int(environ[RANK_VARIABLE]), own_node_name(environ))
        return cls.from_step(SlurmStep.from_environ(environ))

    @classmethod
    def from_step(cls, step: SlurmStep) -> Place:
        return cls(step.rank, step.node_name, step)


@dataclass(frozen=True)
class Service:
    """Where the control service of the job may be reached, and the job's credentials."""

    addresses: tuple[Address, ...]
    credentials: Credentials

    def to_environ(self) -> dict[str, str]:
        return {
            CONTROL_VARIABLE: ",".join(map(str, self.addresses)),
            TOKEN_VARIABLE: self.credentials.token,
            CERTIFICATE_VARIABLE: self.credentials.certificate,
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], place: Place) -> Service:
        """Read what the launcher set; the address of srun's host, which Slurm knows, comes first."""
        addresses = [Address.from_text(text) for text in environ[CONTROL_VARIABLE].split(",")]
        if place.step is not None and place.step.launch_address is not None:
            addresses.insert(0, Address(place.step.launch_address, addresses[0].port))
        return cls(tuple(dict.fromkeys(addresses)), Credentials(environ[CERTIFICATE_VARIABLE], environ[TOKEN_VARIABLE]))

    def to_json(self) -> dict[str, object]:
        """Return the content of control.json (0600): the credentials are readable only where MUNGE does not work.

        MUNGE seals the certificate too, so that a file server that is not trusted cannot exchange it.
        """
        credentials = dataclasses.asdict(self.credentials)
        sealed = munge.seal_for_this_user(json.dumps(credentials))
        content = {"credentials": credentials} if sealed is None else {"munge": sealed}
        return {"addresses": list(map(str, self.addresses)), **content}

    @classmethod
    def from_file(cls, path: Path) -> Service | None:
        """Read what the task that hosts the service wrote; None if it is not there yet, or is not this user's alone.

        Raises:
            AuthenticationError: MUNGE does not open the credentials on this host.
        """
        try:
            if path.name not in os.listdir(path.parent):  # NFS remembers for a minute that a file was not there
                return None
            with open(os.open(path, _READ_FLAGS), encoding="utf-8") as file:
                facts = os.fstat(file.fileno())
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & _OTHERS_WRITE:
                    return None
                content = json.load(file)
            addresses = tuple(map(Address.from_text, content["addresses"]))
            if "munge" in content:
                content["credentials"] = json.loads(munge.open_from_this_user(content["munge"]))
            return cls(addresses, Credentials(**content["credentials"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def is_under_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of tf4slurm started this process as an agent."""
    return all(
        variable in environ for variable in (CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE)
    )


def settings_to_environ(settings: JoinSettings) -> dict[str, str]:
    return {SETTINGS_VARIABLE: json.dumps(dataclasses.asdict(settings))}


def settings_from_environ(environ: Mapping[str, str]) -> JoinSettings:
    """Read what a launcher of the same version wrote."""
    fields = json.loads(environ[SETTINGS_VARIABLE])
    return JoinSettings(**{**fields, "ports": tuple(fields["ports"])})


def rank_to_environ(rank: int) -> dict[str, str]:
    return {RANK_VARIABLE: str(rank)}


class Join:
    """One task's membership and the port it holds for its child."""

    def __init__(self, place: Place, settings: JoinSettings, find_service: Callable[[], Service | None]) -> None:
        self.place = place
        self.token = ""
        self.failure: Tf4SlurmError | OSError | None = None
        self.held_port: HeldPort | None = None
        self.listener: socket.socket | None = None
        self.settings = settings
        self._find_service = find_service
        self._choosing = threading.Lock()
        self._incarnation = f"{os.getpid()}-{time.time_ns():x}-{os.urandom(4).hex()}"
        self.membership = Membership(
            self._addresses,
            self._make_hello,
            heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
            join_seconds=settings.join_seconds,
            num_tasks=settings.num_tasks,
        )

    async def agree(self) -> Cluster | None:
        """Agree with the other tasks on the cluster: answer on the held port, prove what is asked, wait for the others.

        Returns:
            The cluster, once every address in it is proved; None if this task is told to leave, or to begin another
            attempt (`renew`), before that.
        """
        proof = ReachabilityServer()
        attempt = self.membership.status.attempt
        try:
            while True:
                await self.membership.wait_for_change()
                order, agreed = self.membership.order, self.membership.map
                if order.leave or order.attempt != attempt:
                    return None
                cluster = agreed.to_cluster() if agreed is not None and agreed.attempt == attempt else None
                if order.starts:
                    return cluster
                if self.listener is not None:
                    await proof.start(self.listener, self.token, self.place.rank)
                if cluster is not None and self.membership.status.state == "registered":
                    await self._prove(cluster)
        finally:
            proof.close()

    async def renew(self, attempt: int) -> None:
        """Begin another attempt, with another port than before; a failure is told to the launcher."""
        before = self.held_port
        fresh: dict[str, object] = {}
        try:
            try:
                self._hold_port()
            except PlacementError:  # a narrow range: all of this host give back their old ones first
                if before is not None:
                    before.close()
                await self._hold_port_in_time()
            fresh["port"] = self.held_port.port if self.held_port is not None else 0
        except (Tf4SlurmError, OSError) as error:
            fresh.update(state="not_ready", detail=f"rank {self.place.rank} has no port: {str(error).rstrip('.')}")
        if before is not None:
            before.close()
        self.membership.begin_attempt(attempt, **fresh)

    async def _hold_port_in_time(self) -> None:
        deadline = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                self._hold_port()
                return
            except PlacementError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_PORT_PAUSE_SECONDS)

    def _hold_port(self) -> None:
        self.held_port = hold_port(self.settings.ports or self.place.reserved_ports)
        self.listener = self.held_port.listen()  # before anyone can know the address and ask for proof

    async def _prove(self, cluster: Cluster) -> None:
        """Prove the addresses that are ours to prove, and hold the map against what Slurm told this task."""
        members = members_to_check(cluster, self.place.rank)
        faults = await find_unreachable(members, self.token, _PROOF_SECONDS)
        if self.place.step is not None:
            try:
                self.place.step.check_own_place([member.node for member in cluster.members])
            except Tf4SlurmError as error:
                faults.append(str(error).removesuffix("."))
        self.membership.report(state="not_ready" if faults else "ready", detail="; ".join(faults) or None)

    def _addresses(self) -> tuple[Sequence[Address], Credentials | None]:
        service = self._find_service()
        if service is None:
            return (), None
        self.token = service.credentials.token
        return service.addresses, service.credentials

    def _make_hello(self, service: Address) -> Registration:
        """Choose the address that suits this address of the service, and hold a port once; called in a thread.

        A failure is reported to the launcher, which ends the job with it.
        """
        host, port, settings = "", 0, self.settings
        with self._choosing:  # an earlier thread, whose caller has timed out, may still be at it
            self.failure = None
            try:
                host = (
                    interface_address(settings.interface, self.place.node)
                    if settings.interface
                    else route_address(service.host)
                )
                if self.held_port is None:
                    self._hold_port()
                port = self.held_port.port if self.held_port is not None else 0
            except (Tf4SlurmError, OSError) as error:
                self.failure = error
        failure = None if self.failure is None else str(self.failure)[:_FAILURE_CHARACTERS]
        return Registration(self.place.rank, self.place.node, host, port, self._incarnation, __version__, failure)
