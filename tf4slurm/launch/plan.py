"""What is to be launched: a frozen plan, and the checks that need nothing started."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tf4slurm.control.limits import Limits
from tf4slurm.errors import CommandError, PlacementError
from tf4slurm.network.ports import format_ports
from tf4slurm.placement import PACK

if TYPE_CHECKING:
    from tf4slurm.agent.bootstrap import JoinSettings

_PYTHON = re.compile(r"python[\d.]*")
_INTERPRETER = re.compile(_PYTHON.pattern + "|bash|sh")
_NO_SCRIPT_FOLLOWS = re.compile(r"-[A-Za-z]*[cms]|-$")  # -c CODE, -m MODULE, bash -lc, or - for standard input
_SCRIPT_ENDINGS = (".py", ".sh")


@dataclass(frozen=True)
class LaunchPlan:
    """One job: as many tasks of each role as `counts` says run `command`, within `limits`, on the asked network.

    Attributes:
        gpus_per_worker: How many of a node's GPUs each task that uses them gets; None for an even share.
        placement: Which rank has which role; see `placement.place_tasks`.
        name: The first half of the run directory's name.
        stop_signal: Number of the signal that tells a script to save and stop, where it does not ask by itself.
        interface: Name of a network interface, or None for the route to the launcher.
        ports: The ports to choose from; none for those that Slurm reserves, or else any free one.
        control_port: The port of the control service; None for the last free one of `ports`, or any if these are none.
        data_python: The Python of the data service's servers; None for that of the command.
    """

    counts: Mapping[str, int]
    command: tuple[str, ...]
    name: str
    runs_directory: Path
    limits: Limits = field(default_factory=Limits)
    interface: str | None = None
    ports: tuple[int, ...] = ()
    control_port: int | None = None
    placement: str = PACK
    gpus_per_worker: int | None = None
    stop_signal: int = signal.SIGTERM
    data_python: str | None = None

    @property
    def num_tasks(self) -> int:
        return sum(self.counts.values())

    @property
    def service_ports(self) -> tuple[int, ...]:
        """The ports that the control service tries, in this order; empty for any free one."""
        return self.ports[::-1] if self.control_port is None else (self.control_port,)  # tasks take the first ones

    @property
    def python(self) -> str:
        """The Python for what some roles run in place of the command; empty if it is not known."""
        program = self.command[0]
        return self.data_python or (program if _PYTHON.fullmatch(os.path.basename(program)) else "")

    def to_settings(self, run_directory: Path) -> JoinSettings:
        from tf4slurm.agent.bootstrap import (
            JoinSettings,  # loads asyncio, which who only writes a script down does not need
        )

        return JoinSettings(
            run_directory=str(run_directory),
            interface=self.interface,
            ports=self.ports,
            heartbeat_interval_seconds=self.limits.heartbeat_interval_seconds,
            heartbeat_timeout_seconds=self.limits.heartbeat_timeout_seconds,
            join_seconds=self.limits.start_timeout_seconds,
            gpus_per_worker=self.gpus_per_worker,
            serve_seconds=self.limits.start_timeout_seconds if self.limits.stall_seconds is not None else None,
            stop_signal=int(self.stop_signal),
            python=self.python,
            num_tasks=self.num_tasks,
        )


def check_ports(ports: Sequence[int], tasks_per_host: int, control_port: int | None) -> None:
    """Check that a range has a port for each task of a host, and one for the control service if it takes one of them.

    Raises:
        PlacementError: It has not.
    """
    requested = tasks_per_host + (control_port is None or control_port in ports)
    if ports and len(ports) < requested:
        raise PlacementError(
            f"{len(ports)} ports ({format_ports(ports)}) are too few for {tasks_per_host} tasks on one host and the "
            f"control service. Give --ports a range of at least {requested}.",
            requested=requested,
            available=len(ports),
        )


def check_command(command: Sequence[str]) -> None:
    """Check that the program, and the script that a known interpreter is given, are there and can be run.

    Raises:
        CommandError: They are not.
    """
    program = command[0]
    if shutil.which(program) is None:
        if not os.path.exists(program):
            what, todo = "does not exist", "Check its name, or the environment that should provide it"
        else:
            what, todo = (
                "is not executable",
                f'Start it with its interpreter, such as "python {program}", or chmod +x it',
            )
        raise CommandError(f"The program {program!r} {what}. {todo}.", command=command)
    if not _INTERPRETER.fullmatch(os.path.basename(program)):
        return
    for argument in command[1:]:
        if _NO_SCRIPT_FOLLOWS.match(argument) or os.path.isfile(argument):
            return
        if argument.endswith(_SCRIPT_ENDINGS) and not argument.startswith("-"):
            raise CommandError(
                f"The script {argument!r} does not exist in {os.getcwd()}. Check its path.", command=command
            )
