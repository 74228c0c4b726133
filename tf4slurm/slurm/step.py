"""What a task's environment says about its Slurm step. With `allocation.py` the only reader of SLURM_*.

A sample, from `srun -N3 -n8` of Slurm 22.05:
    SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=8 SLURMD_NODENAME=r1-n9
    SLURM_STEP_RESV_PORTS=23006-23012 SLURM_LAUNCH_NODE_IPADDR=10.78.0.254
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.network.ports import parse_ports

_JOB_ID = "SLURM_JOB_ID"
_STEP_ID = "SLURM_STEP_ID"
_RANK = "SLURM_PROCID"
_LOCAL_RANK = "SLURM_LOCALID"
_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
_NODE_NAME = "SLURMD_NODENAME"
_RESERVED_PORTS = "SLURM_STEP_RESV_PORTS"
_LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
_RESTART_COUNT = "SLURM_RESTART_COUNT"


@dataclass(frozen=True)
class SlurmStep:
    """One task's view of its step.

    Attributes:
        rank: 0-based over the step (SLURM_PROCID); `local_rank` the same over the node.
        num_tasks: Number of tasks of the step.
        reserved_ports: Ports that Slurm keeps for this step on each of its nodes; empty where the site reserves none.
        launch_address: An address of the host on which srun runs; None if Slurm does not say.
        restart_count: How often Slurm has requeued the job.
    """

    job_id: str
    step_id: str
    rank: int
    local_rank: int
    num_tasks: int
    node_name: str
    reserved_ports: tuple[int, ...]
    launch_address: str | None
    restart_count: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmStep:
        """Read the step from an environment.

        Raises:
            SlurmEnvironmentError: This process is not a task of a step, or a variable does not read.
        """
        ports = environ.get(_RESERVED_PORTS, "")
        try:
            reserved_ports = parse_ports(ports) if ports else ()
        except ValueError as error:
            raise SlurmEnvironmentError(f"{_RESERVED_PORTS}: {error}", variable=_RESERVED_PORTS, value=ports) from error
        return cls(
            job_id=_text(environ, _JOB_ID),
            step_id=_text(environ, _STEP_ID),
            rank=_number(environ, _RANK),
            local_rank=_number(environ, _LOCAL_RANK),
            num_tasks=_number(environ, _NUM_TASKS),
            node_name=_text(environ, _NODE_NAME),
            reserved_ports=reserved_ports,
            launch_address=environ.get(_LAUNCH_ADDRESS) or None,
            restart_count=_number(environ, _RESTART_COUNT) if environ.get(_RESTART_COUNT) else 0,
        )

    @property
    def port_candidates(self) -> tuple[int, ...]:
        """The reserved ports, turned so that the tasks of one node try different ones first."""
        start = self.local_rank % len(self.reserved_ports) if self.reserved_ports else 0
        return self.reserved_ports[start:] + self.reserved_ports[:start]


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a Slurm step (a batch script is not)."""
    return _STEP_ID in environ and _RANK in environ


def _text(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable)
    if not value:
        raise SlurmEnvironmentError(
            f'{variable} is not set: this process is not a task of a Slurm step. Start it with srun, or use "tf4slurm '
            'run", which starts local processes where there is no Slurm.',
            variable=variable,
        )
    return value


def _number(environ: Mapping[str, str], variable: str) -> int:
    text = _text(environ, variable)
    if not text.isdecimal():
        raise SlurmEnvironmentError(
            f"{variable} is {text!r}: expected a number. Something has changed what Slurm set.",
            variable=variable,
            value=text,
        )
    return int(text)
