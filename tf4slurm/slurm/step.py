"""Read the Slurm step of a task from its environment. Only this module and `allocation.py` read SLURM_* variables.

A sample, from `srun -N3 -n8 -m cyclic --gres=gpu:2` of Slurm 22.05:
    SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_LOCALID=4 SLURM_NODEID=0 SLURM_GTIDS=0,3,4,5,6,7
    SLURM_STEP_NUM_TASKS=8 SLURMD_NODENAME=r1-n9 SLURM_STEP_NODELIST=r1-n[9-11] SLURM_STEP_TASKS_PER_NODE=6,1(x2)
    SLURM_DISTRIBUTION=cyclic SLURM_STEP_RESV_PORTS=23006-23012 SLURM_LAUNCH_NODE_IPADDR=10.78.0.254
    CUDA_VISIBLE_DEVICES=0,1 SLURM_STEP_GPUS=0,1 SLURM_GPUS_ON_NODE=2
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tf4slurm.errors import LayoutError, SlurmEnvironmentError
from tf4slurm.slurm.allocation import Variables
from tf4slurm.slurm.layout import Component, deal_ranks, join_components, shorten, split_components

_JOB_ID = "SLURM_JOB_ID"
_STEP_ID = "SLURM_STEP_ID"
_RANK = "SLURM_PROCID"
_LOCAL_RANK = "SLURM_LOCALID"
_NODE_RANKS = "SLURM_GTIDS"
_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
_NODE_NAME = "SLURMD_NODENAME"
_NODELIST = "SLURM_STEP_NODELIST"
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_PLANE_SIZE = "SLURM_DIST_PLANESIZE"
_RESERVED_PORTS = "SLURM_STEP_RESV_PORTS"
_LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
_RESTART_COUNT = "SLURM_RESTART_COUNT"
_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
_HET_SIZE = "SLURM_HET_SIZE"
# srun sets these for "srun a : b"; sbatch and salloc set them too, beside *_HET_GROUP_* with the same values
_GROUP_JOB_ID = "SLURM_JOB_ID_PACK_GROUP_"
_GROUP_NODELIST = "SLURM_JOB_NODELIST_PACK_GROUP_"

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""The variables with which Slurm assigns GPUs: for CUDA, for ROCm, for OpenCL on ROCm, for oneAPI."""

_MAX_STEP_ID = 0xFFFFFFF0  # slurm.h: SLURM_MAX_NORMAL_STEP_ID; larger ids, also written as -1 to -15, are reserved
_SIGNED_NUMBER = re.compile(r"-?[0-9]{1,10}")
_MAX_TASKS = 10_000_000
_MAX_GROUPS = 1000
_NO_DEVICES = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class HetGroup:
    """One component of a heterogeneous job: the id of its own job, and all its nodes."""

    job_id: str
    nodes: tuple[str, ...]


class _StepVariables:
    """Parses the variables of a step on access; a missing or invalid variable raises SlurmEnvironmentError."""

    _variables: Variables

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The names of the step's nodes in Slurm's order."""
        return self._variables.nodes(_NODELIST)

    @property
    def distribution(self) -> str | None:
        """SLURM_DISTRIBUTION, such as "block" or "cyclic:block"; None if srun does not set it.

        In a heterogeneous step the variable may describe another component than this task's.
        """
        return self._variables.optional_text(_DISTRIBUTION)

    @property
    def plane_size(self) -> int | None:
        """The size of -m plane; the variable may describe another component or an outer step."""
        return self._variables.optional_number(_PLANE_SIZE)

    @property
    def visible_devices(self) -> Mapping[str, tuple[str, ...]]:
        """The devices in each non-empty variable of `VISIBLE_DEVICES`."""
        texts = {name: self._variables.text(name) for name in VISIBLE_DEVICES if self._variables.has(name)}
        return {name: () if text in _NO_DEVICES else tuple(text.split(",")) for name, text in texts.items()}

    @property
    def gpus_on_node(self) -> int | None:
        """The number of GPUs of all tasks of the step on this node; None if Slurm does not set it."""
        return self._variables.optional_number(_GPUS_ON_NODE)


class StepOutline(_StepVariables):
    """The variables of a step that TensorFlow's own resolver reads.

    An environment made by hand may lack other variables of `SlurmStep`. Then the layout is not checked against this
    task's node and ranks.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._variables = Variables(dict(environ))

    @property
    def rank(self) -> int:
        return self._variables.number(_RANK)

    @property
    def num_tasks(self) -> int:
        return self._variables.number(_NUM_TASKS)

    @property
    def tasks_per_node(self) -> tuple[int, ...]:
        return self._variables.counts(_TASKS_PER_NODE)


@dataclass(frozen=True)
class SlurmStep(_StepVariables):
    """The step that this process is a task of.

    Every task needs the fields. Properties are parsed on access, so that an invalid variable affects only callers that
    need it. A property raises SlurmEnvironmentError if its variable is missing or invalid.

    Attributes:
        rank: 0-based rank in the step (SLURM_PROCID).
        local_rank: 0-based rank among the tasks on this node.
        num_tasks: Number of tasks of the step.
        node_name: Slurm's name of the node, which may differ from the host name.
        reserved_ports: Ports that Slurm reserves for this step on each of its nodes; empty if the site reserves none.
        launch_address: An address of the host on which srun runs; None if Slurm does not set it.
    """

    job_id: str
    step_id: str
    rank: int
    local_rank: int
    num_tasks: int
    node_name: str
    reserved_ports: tuple[int, ...]
    launch_address: str | None
    _variables: Variables = field(repr=False, compare=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmStep:
        """Read the step from an environment.

        Raises:
            SlurmEnvironmentError: This process is not a task of a step, or a variable is invalid.
        """
        variables = Variables(dict(environ))
        step_id = variables.text(_STEP_ID)
        if _is_reserved(step_id):
            raise SlurmEnvironmentError(
                f"{_STEP_ID} is {step_id!r}: this process is the batch script or the shell of a job, not a task of a "
                'Slurm step. Start it with srun, or use "tf4slurm run".',
                variable=_STEP_ID,
                value=step_id,
            )
        return cls(
            job_id=variables.text(_JOB_ID),
            step_id=step_id,
            rank=variables.number(_RANK),
            local_rank=variables.number(_LOCAL_RANK),
            num_tasks=variables.number(_NUM_TASKS),
            node_name=variables.text(_NODE_NAME),
            reserved_ports=variables.ports(_RESERVED_PORTS),
            launch_address=variables.optional_text(_LAUNCH_ADDRESS),
            _variables=variables,
        )

    @property
    def port_candidates(self) -> tuple[int, ...]:
        """The reserved ports, rotated by the local rank: tasks of a node first try different ports."""
        start = self.local_rank % len(self.reserved_ports) if self.reserved_ports else 0
        return self.reserved_ports[start:] + self.reserved_ports[:start]

    @property
    def restart_count(self) -> int:
        """The number of times that Slurm has requeued the job."""
        return self._variables.optional_number(_RESTART_COUNT) or 0

    @cached_property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks on this task's node, by local rank."""
        return self._variables.numbers(_NODE_RANKS)

    @cached_property
    def tasks_per_node(self) -> tuple[int, ...]:
        """The number of tasks on each of `nodes`."""
        counts = self._variables.counts(_TASKS_PER_NODE)
        if len(counts) != len(self.nodes) or sum(counts) != self.num_tasks or self.num_tasks > _MAX_TASKS:
            problem = f"expected {len(self.nodes)} counts as in {_NODELIST}, {self.num_tasks} in all as in {_NUM_TASKS}"
            self._variables.refuse(_TASKS_PER_NODE, problem)
        return counts

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of this task, from the first non-empty variable of `VISIBLE_DEVICES`; empty if it has none."""
        return next(iter(self.visible_devices.values()), ())

    @cached_property
    def het_groups(self) -> tuple[HetGroup, ...]:
        """The components of the heterogeneous job, including those outside this step; empty for any other job."""
        size = self._variables.optional_number(_HET_SIZE) or 0
        if size > _MAX_GROUPS:
            self._variables.refuse(_HET_SIZE, f"expected at most {_MAX_GROUPS} components")
        if self._variables.optional_text(f"{_GROUP_JOB_ID}0") != self.job_id:
            return ()  # the variables come from a heterogeneous job that submitted this job
        return tuple(
            HetGroup(self._variables.text(f"{_GROUP_JOB_ID}{n}"), self._variables.nodes(f"{_GROUP_NODELIST}{n}"))
            for n in range(size)
        )

    @cached_property
    def nodes_by_rank(self) -> tuple[str, ...]:
        """The node of each rank, checked against this task's node and ranks.

        Raises:
            LayoutError: The environment does not determine the layout, or contradicts itself. `commands.layout_of`
                then queries Slurm.
        """
        step = Component(self.nodes, self.tasks_per_node)
        components = split_components(step, [group.nodes for group in self.het_groups]) if self.het_groups else (step,)
        if len(components) > 1:
            nodes_by_rank = join_components(components, self.node_name, frozenset(self.node_ranks))
        else:
            nodes_by_rank = deal_ranks(step, self.distribution, self.plane_size)
        self.check_own_place(nodes_by_rank)
        return nodes_by_rank

    def check_own_place(self, nodes_by_rank: Sequence[str]) -> None:
        """Raise LayoutError if a layout contradicts the environment of this task."""
        node = self.node_name
        own_ranks = [rank for rank, other in enumerate(nodes_by_rank) if other == node]
        if len(nodes_by_rank) != self.num_tasks or self.rank >= self.num_tasks:
            difference = f"the step has {self.num_tasks} tasks, but the layout {len(nodes_by_rank)}"
        elif nodes_by_rank[self.rank] != node:
            difference = f"its node is {node!r}, but {nodes_by_rank[self.rank]!r} in the layout"
        elif own_ranks != list(self.node_ranks):
            difference = f"{node!r} has the ranks {shorten(self.node_ranks)}, but {shorten(own_ranks)} in the layout"
        elif own_ranks.index(self.rank) != self.local_rank:
            difference = (
                f"it is task {self.local_rank} of {node!r}, but task {own_ranks.index(self.rank)} in the layout"
            )
        else:
            return
        raise LayoutError(
            f"The layout of the step contradicts rank {self.rank}: {difference}. Slurm has placed the tasks in another "
            "way than its variables state; request -m block or -m cyclic.",
            distribution=self.distribution,
        )


def own_node_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's name of this node, which may differ from the host name; the host name outside of Slurm."""
    return environ.get(_NODE_NAME) or socket.gethostname()


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of a Slurm step; a batch script and an interactive shell are not."""
    return _STEP_ID in environ and _RANK in environ and not _is_reserved(environ[_STEP_ID])


def _is_reserved(step_id: str) -> bool:
    """Return whether Slurm gives this step id to a batch script (seen in Slurm 26.05) or an interactive shell."""
    return _SIGNED_NUMBER.fullmatch(step_id) is not None and not 0 <= int(step_id) <= _MAX_STEP_ID
