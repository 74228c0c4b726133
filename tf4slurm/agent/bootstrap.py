"""The inputs of an agent: its place in the job, the endpoint of the control service, and the job's spec."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.cluster import Address
from tf4slurm.control import munge
from tf4slurm.control.credentials import Credentials
from tf4slurm.slurm.environ import SlurmStep, own_node_name
from tf4slurm.spec import JobSpec
from tf4slurm.system.variables import (
    CERTIFICATE_VARIABLE,
    CONTROL_VARIABLE,
    RANK_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    SETTINGS_VARIABLE,
    TOKEN_VARIABLE,
)

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a named pipe does not block
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class LocalTask:
    """A task that the local launcher started: its rank, and the name of this host."""

    rank: int
    node_name: str


Place = SlurmStep | LocalTask
"""A process's place in the job: a rank of a Slurm step, or a rank that the local launcher assigned."""


def read_place(environ: Mapping[str, str]) -> Place:
    """Read the place from the local launcher's variables if they are set, else from the Slurm step's variables.

    Raises:
        SlurmEnvironmentError: Neither are set.
    """
    if RANK_VARIABLE in environ:
        return LocalTask(int(environ[RANK_VARIABLE]), own_node_name(environ))
    return SlurmStep.from_environ(environ)


@dataclass(frozen=True)
class ControlEndpoint:
    """The addresses of the control service, and the job's credentials."""

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
        """Read the launcher's variables. In a Slurm step the address of srun's host, if known, comes first."""
        addresses = [Address.from_text(text) for text in environ[CONTROL_VARIABLE].split(",")]
        if isinstance(place, SlurmStep) and place.launch_address is not None:
            addresses.insert(0, Address(place.launch_address, addresses[0].port))
        return cls(tuple(dict.fromkeys(addresses)), Credentials(environ[CERTIFICATE_VARIABLE], environ[TOKEN_VARIABLE]))

    def to_json(self) -> dict[str, object]:
        """Return the content of control.json (mode 0600). MUNGE, if it works, seals the credentials.

        The certificate is sealed too, so that an untrusted file server cannot replace it.
        """
        credentials = dataclasses.asdict(self.credentials)
        sealed = munge.seal_for_this_user(json.dumps(credentials))
        content = {"credentials": credentials} if sealed is None else {"munge": sealed}
        return {"addresses": list(map(str, self.addresses)), **content}

    @classmethod
    def from_file(cls, path: Path) -> ControlEndpoint | None:
        """Read control.json; return None if the file does not exist, is invalid, or is writable by other users.

        Raises:
            AuthenticationError: MUNGE cannot open the credentials on this host.
        """
        try:
            if path.name not in os.listdir(path.parent):  # NFS caches missing files for a minute
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
    """Return whether a launcher started this process as an agent."""
    return all(
        variable in environ for variable in (CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE)
    )


def spec_to_environ(spec: JobSpec, run_directory: Path) -> dict[str, str]:
    """Return the environment variables for `spec_from_environ`."""
    return {SETTINGS_VARIABLE: json.dumps(spec.to_json()), RUN_DIRECTORY_VARIABLE: str(run_directory)}


def spec_from_environ(command: Sequence[str], environ: Mapping[str, str]) -> tuple[JobSpec, Path]:
    """Read the job's spec and run directory from an agent's environment, which does not contain the command."""
    return JobSpec(tuple(command), **json.loads(environ[SETTINGS_VARIABLE])), Path(environ[RUN_DIRECTORY_VARIABLE])
