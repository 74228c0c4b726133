"""What an agent needs to join its job: its place in it, the endpoint of the control service, and the settings."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.cluster import Address
from tf4slurm.control import munge
from tf4slurm.control.credentials import Credentials
from tf4slurm.slurm.step import SlurmStep, own_node_name
from tf4slurm.spec import JobSpec
from tf4slurm.system.variables import (
    CERTIFICATE_VARIABLE,
    CONTROL_VARIABLE,
    RANK_VARIABLE,
    SETTINGS_VARIABLE,
    TOKEN_VARIABLE,
)

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a named pipe in its place does not block
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


def join_settings(spec: JobSpec, run_directory: Path) -> JoinSettings:
    """Return what the tasks of a job need to know."""
    return JoinSettings(
        run_directory=str(run_directory),
        interface=spec.interface,
        ports=spec.ports,
        heartbeat_interval_seconds=spec.heartbeat_interval_seconds,
        heartbeat_timeout_seconds=spec.heartbeat_timeout_seconds,
        join_seconds=spec.start_timeout_seconds,
        gpus_per_worker=spec.gpus_per_worker,
        serve_seconds=spec.start_timeout_seconds if spec.stall_timeout_seconds is not None else None,
        stop_signal=signal.Signals[spec.stop_signal],
        python=spec.data_service_python,
        num_tasks=spec.num_tasks,
    )


@dataclass(frozen=True)
class LocalTask:
    """A task that the local launcher started: its rank, and the name of this host."""

    rank: int
    node_name: str


Place = SlurmStep | LocalTask
"""Where in the job a process is: inside a Slurm step, or started by the local launcher."""


def read_place(environ: Mapping[str, str]) -> Place:
    """Read the place from the variables of the local launcher, else from those of the Slurm step.

    Raises:
        SlurmEnvironmentError: Neither are set.
    """
    if RANK_VARIABLE in environ:
        return LocalTask(int(environ[RANK_VARIABLE]), own_node_name(environ))
    return SlurmStep.from_environ(environ)


@dataclass(frozen=True)
class ControlEndpoint:
    """Addresses of the job's control service, and the job's credentials."""

    addresses: tuple[Address, ...]
    credentials: Credentials

    def to_environ(self) -> dict[str, str]:
        return {
            CONTROL_VARIABLE: ",".join(map(str, self.addresses)),
            TOKEN_VARIABLE: self.credentials.token,
            CERTIFICATE_VARIABLE: self.credentials.certificate,
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], place: Place) -> ControlEndpoint:
        """Read the launcher's variables. The address of srun's host, which Slurm provides, comes first."""
        addresses = [Address.from_text(text) for text in environ[CONTROL_VARIABLE].split(",")]
        if isinstance(place, SlurmStep) and place.launch_address is not None:
            addresses.insert(0, Address(place.launch_address, addresses[0].port))
        return cls(tuple(dict.fromkeys(addresses)), Credentials(environ[CERTIFICATE_VARIABLE], environ[TOKEN_VARIABLE]))

    def to_json(self) -> dict[str, object]:
        """Return the content of control.json (0600), with credentials that MUNGE has sealed where it works.

        MUNGE seals the certificate too, so that an untrusted file server cannot replace it.
        """
        credentials = dataclasses.asdict(self.credentials)
        sealed = munge.seal_for_this_user(json.dumps(credentials))
        content = {"credentials": credentials} if sealed is None else {"munge": sealed}
        return {"addresses": list(map(str, self.addresses)), **content}

    @classmethod
    def from_file(cls, path: Path) -> ControlEndpoint | None:
        """Read control.json; None if it does not exist yet, or if another user can write it.

        Raises:
            AuthenticationError: MUNGE does not open the credentials on this host.
        """
        try:
            if path.name not in os.listdir(path.parent):  # NFS caches for a minute that a file is missing
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
    """Return whether a launcher of tf4slurm started this process as an agent."""
    return all(
        variable in environ for variable in (CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE)
    )


def settings_to_environ(settings: JoinSettings) -> dict[str, str]:
    return {SETTINGS_VARIABLE: json.dumps(dataclasses.asdict(settings))}


def settings_from_environ(environ: Mapping[str, str]) -> JoinSettings:
    """Read the settings from an agent's environment."""
    fields = json.loads(environ[SETTINGS_VARIABLE])
    return JoinSettings(**{**fields, "ports": tuple(fields["ports"])})


def rank_to_environ(rank: int) -> dict[str, str]:
    return {RANK_VARIABLE: str(rank)}
