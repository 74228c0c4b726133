"""What is looked at on one host, this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf4slurm.doctor.directory import check_directory
from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.host import check_host
from tf4slurm.doctor.software import check_software


@dataclass(frozen=True)
class Wishes:
    """What a job would be told, and so what has to work for it.

    Attributes:
        interface: As for `network.interfaces.interface_address`; None for any.
        ports: The ports to choose from; none for any.
        is_quick: Whether TensorFlow and pip are not started.
    """

    runs_directory: Path
    interface: str | None = None
    ports: tuple[int, ...] = ()
    is_quick: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "runs_directory": str(self.runs_directory.absolute()),
            "interface": self.interface,
            "ports": list(self.ports),
            "is_quick": self.is_quick,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Wishes:
        return cls(Path(value["runs_directory"]), value["interface"], tuple(value["ports"]), bool(value["is_quick"]))


def check_here(environ: Mapping[str, str], wishes: Wishes, name: str) -> tuple[list[Finding], float | None]:
    """Look at this host; return also how far the file server's clock is ahead of its own, in seconds, if that is known.

    `name` tells what is written here from what other hosts write at the same time.
    """
    directory, skew = check_directory(wishes.runs_directory, name)
    software = check_software(environ, is_quick=wishes.is_quick)
    return [*software, directory, *check_host(environ, wishes.interface, wishes.ports)], skew
