"""Read the allocation and the step of this process from SLURM_* variables.

The SBATCH_* variables of a submission are handled by `submission/submit.py`.

A sample, from `srun -N3 -n8 -m cyclic --gres=gpu:2` of Slurm 22.05:
    SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_LOCALID=4 SLURM_NODEID=0 SLURM_GTIDS=0,3,4,5,6,7
    SLURM_STEP_NUM_TASKS=8 SLURMD_NODENAME=r1-n9 SLURM_STEP_NODELIST=r1-n[9-11] SLURM_STEP_TASKS_PER_NODE=6,1(x2)
    SLURM_DISTRIBUTION=cyclic SLURM_STEP_RESV_PORTS=23006-23012 SLURM_LAUNCH_NODE_IPADDR=10.78.0.254
    CUDA_VISIBLE_DEVICES=0,1 SLURM_STEP_GPUS=0,1 SLURM_GPUS_ON_NODE=2
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from tf4slurm.errors import LayoutError, SlurmEnvironmentError
from tf4slurm.network.ports import parse_ports
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.layout import deal_ranks, join_components, shorten, split_components
from tf4slurm.slurm.nodelist import MAX_NODES, expand_nodelist

T = TypeVar("T")
Default = TypeVar("Default")

_JOB_ID = "SLURM_JOB_ID"
_STEP_ID = "SLURM_STEP_ID"
_RANK = "SLURM_PROCID"
_NODE_NAME = "SLURMD_NODENAME"
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_RESTART_COUNT = "SLURM_RESTART_COUNT"
_HET_SIZE = "SLURM_HET_SIZE"
# srun sets these for "srun a : b". sbatch and salloc set them, too, and *_HET_GROUP_* with the same values.
_GROUP_JOB_ID = "SLURM_JOB_ID_PACK_GROUP_"
_GROUP_NODELIST = "SLURM_JOB_NODELIST_PACK_GROUP_"

VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
"""The variables in which Slurm lists the GPUs of a task, for CUDA, ROCm (two), OpenCL on ROCm, and oneAPI."""

# srun sets these for the tasks of a step. An srun that such a task runs would read some of them as its options.
_STEP_VARIABLES = (
    "SLURM_CPUS_ON_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_GTIDS",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_LOCALID",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_TASK_PID",
    "SLURM_TASKS_PER_NODE",
)
_STEP_PREFIXES = (
    "SLURM_CPU_BIND",
    "SLURM_DIST_",
    "SLURM_MEM_BIND",
    "SLURM_PTY_",
    "SLURM_SRUN_",
    "SLURM_STEP",
    "SLURM_TRES_PER_TASK",
)

_MAX_STEP_ID = 0xFFFFFFF0  # slurm.h: SLURM_MAX_NORMAL_STEP_ID; larger ids, also written as -1 to -15, are reserved
_SIGNED_NUMBER = re.compile(r"-?[0-9]{1,10}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_MAX_TASKS = 10_000_000
_MAX_COMPONENTS = 1000
_NO_DEVICES = ("", "-1", "NoDevFiles")


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError("expected a number")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    items = text.split(",")
    if not all(map(_NUMBER.fullmatch, items)):
        raise ValueError('expected numbers such as "0,3,4"')
    return tuple(map(int, items))


def _counts(text: str) -> tuple[int, ...]:
    """Parse a list of counts in Slurm's notation, one per node: "3,1(x2)" stands for 3, 1, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None or len(counts) + int(match[2] or 1) > MAX_NODES:
            raise ValueError('expected counts such as "3,1(x2)"')
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _num_components(text: str) -> int:
    if _number(text) > _MAX_COMPONENTS:
        raise ValueError(f"expected at most {_MAX_COMPONENTS} components")
    return int(text)


def _required(environ: Mapping[str, str], variable: str, parse: Callable[[str], T]) -> T:
    """Return the parsed value of a variable. A missing, empty or invalid value raises SlurmEnvironmentError."""
    value = environ.get(variable)
    if not value:
        raise SlurmEnvironmentError(
            f"{variable} is not set: this process is not a task of a Slurm step. Start it with srun, or use "
            '"tf4slurm run", which starts local processes where there is no Slurm.',
            variable=variable,
        )
    try:
        return parse(value)
    except ValueError as error:
        raise SlurmEnvironmentError(
            f"{variable} is {value!r}: {error}. Slurm sets no such value: the script, a module or a wrapper has "
            "changed it.",
            variable=variable,
            value=value,
        ) from error


def _optional(environ: Mapping[str, str], variable: str, parse: Callable[[str], T], default: Default) -> T | Default:
    """Return the parsed value of a variable, or the default if the variable is missing or empty."""
    return _required(environ, variable, parse) if environ.get(variable) else default


@dataclass(frozen=True)
class HetComponent:
    """One component of a heterogeneous job.

    Attributes:
        num_tasks: Number of requested tasks. None if the component requested only nodes.
        cpus_per_task: Requested CPUs per task, or None without a request.
    """

    num_tasks: int | None
    cpus_per_task: int | None


@dataclass(frozen=True)
class SlurmAllocation:
    """The resources that Slurm allocated to a job.

    Attributes:
        job_id: Id of the job; of the element in a job array.
        num_tasks: Number of requested tasks. None if the job, or a component of it, requested only nodes.
        cpus_per_task: Requested CPUs per task, or None without a request. Since Slurm 22.05 srun does not take this
            number from the job, so it must be passed on as --cpus-per-task.
        components: Components of a heterogeneous job; empty for any other job.
        restart_count: Number of times that Slurm has requeued the job.
        num_nodes: Number of nodes (of the first component in a heterogeneous job); None if Slurm does not set it.
        number: The number that Slurm gives to this job, element or component alone.
    """

    job_id: JobId
    num_tasks: int | None
    cpus_per_task: int | None
    components: tuple[HetComponent, ...] = ()
    restart_count: int = 0
    num_nodes: int | None = None
    number: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmAllocation | None:
        """Read the allocation from an environment, or return None outside of an allocation.

        A job that an element of an array has submitted has the element's variables, too. `commands.confirm_element`
        finds out.

        Raises:
            SlurmEnvironmentError: A variable is invalid.
        """
        own_number = _optional(environ, _JOB_ID, _number, None)
        if own_number is None:
            return None
        size = 0  # _HET_SIZE alone can come from a heterogeneous job that submitted this job
        if environ.get(f"{_JOB_ID}_HET_GROUP_0") == str(own_number):
            size = _optional(environ, _HET_SIZE, _num_components, 0)
        components = tuple(_component(environ, f"_HET_GROUP_{number}") for number in range(size))
        whole = _component(environ, "")
        counts = [component.num_tasks for component in components or (whole,)]
        array = _optional(environ, "SLURM_ARRAY_JOB_ID", _number, None)
        element = _optional(environ, "SLURM_ARRAY_TASK_ID", _number, None)
        return cls(
            JobId(own_number) if array is None or element is None else JobId(array, (element,)),
            num_tasks=None if None in counts else sum(filter(None, counts)),
            cpus_per_task=whole.cpus_per_task,
            components=components,
            restart_count=_optional(environ, _RESTART_COUNT, _number, 0),
            num_nodes=_optional(environ, "SLURM_JOB_NUM_NODES", _number, None),
            number=own_number,
        )


def find_node_and_submit_host(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return Slurm's name of the node of a job on which this process runs, and the host of the submission.

    Both are "" outside of a job, and in the shell of salloc on a login node. The host is "" if it is unknown.
    """
    node = environ.get(_NODE_NAME, "") if environ.get(_JOB_ID) else ""
    return node, environ.get("SLURM_SUBMIT_HOST", "") if node else ""


def _component(environ: Mapping[str, str], suffix: str) -> HetComponent:
    def read(variable: str) -> int | None:
        return _optional(environ, variable + suffix, _number, None)

    num_tasks = read("SLURM_NTASKS")
    if num_tasks is None:
        per_node, num_nodes = read("SLURM_NTASKS_PER_NODE"), read("SLURM_JOB_NUM_NODES")
        if per_node is not None and num_nodes is not None:
            num_tasks = per_node * num_nodes
    return HetComponent(num_tasks, read("SLURM_CPUS_PER_TASK"))


def _required_attribute(variable: str, parse: Callable[[str], T]) -> cached_property[T]:
    return cached_property(lambda step: _required(step.environ, variable, parse))


def _optional_attribute(variable: str, parse: Callable[[str], T], default: Default) -> cached_property[T | Default]:
    return cached_property(lambda step: _optional(step.environ, variable, parse, default))


class SlurmStep:
    """The Slurm step to which this task belongs, as the task's environment variables describe it.

    Attributes are parsed on access, so that an invalid variable affects only callers that need it. An attribute raises
    SlurmEnvironmentError if its variable is invalid, or if it is missing and no default is given here. `from_environ`
    checks the variables that every task needs.

    Attributes:
        job_id: The number that Slurm gives to this job, element or component alone, as text. With `step_id` it is the
            id of the step. `SlurmAllocation.job_id` is the id by which the job is known.
        rank: 0-based rank in the step.
        local_rank: 0-based rank among the tasks on this node.
        node_name: Slurm's name of the node, which may differ from the host name.
        node_ranks: The ranks on this node, by local rank.
        nodes: The names of the step's nodes in Slurm's order.
        tasks_per_node: The number of tasks on each of `nodes`, as in the variable. `tasks_by_node` has the same numbers
            by node, after a check against `nodes` and `num_tasks`.
        distribution: How ranks are distributed, such as "block" or "cyclic:block". None if srun does not set it. In a
            heterogeneous step this may be the distribution of another component.
        plane_size: The number of consecutive ranks on one node with -m plane. None if srun does not set it. This may be
            the number of another component or of an outer step.
        reserved_ports: Ports that Slurm reserves for this step on each of its nodes; empty if the site reserves none.
        launch_address: An address of the host on which srun runs; None if Slurm does not set it.
        restart_count: The number of times that Slurm has requeued the job (default 0).
        gpus_on_node: The number of GPUs of all tasks of the step on this node; None if Slurm does not set it.
    """

    job_id = _required_attribute(_JOB_ID, str)
    step_id = _required_attribute(_STEP_ID, str)
    rank = _required_attribute(_RANK, _number)
    local_rank = _required_attribute("SLURM_LOCALID", _number)
    num_tasks = _required_attribute("SLURM_STEP_NUM_TASKS", _number)
    node_name = _required_attribute(_NODE_NAME, str)
    node_ranks = _required_attribute("SLURM_GTIDS", _numbers)
    nodes = _required_attribute("SLURM_STEP_NODELIST", expand_nodelist)
    tasks_per_node = _required_attribute(_TASKS_PER_NODE, _counts)
    distribution = _optional_attribute("SLURM_DISTRIBUTION", str, None)
    plane_size = _optional_attribute("SLURM_DIST_PLANESIZE", _number, None)
    reserved_ports = _optional_attribute("SLURM_STEP_RESV_PORTS", parse_ports, ())
    launch_address = _optional_attribute("SLURM_LAUNCH_NODE_IPADDR", str, None)
    restart_count = _optional_attribute(_RESTART_COUNT, _number, 0)
    gpus_on_node = _optional_attribute("SLURM_GPUS_ON_NODE", _number, None)

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmStep:
        """Read the step from an environment.

        Raises:
            SlurmEnvironmentError: This process is not a task of a step, or a variable that each task needs is missing
                or invalid.
        """
        step = cls(environ)
        if _is_reserved(step.step_id):
            raise SlurmEnvironmentError(
                f"{_STEP_ID} is {step.step_id!r}: this process is the batch script or the shell of a job, not a task "
                'of a Slurm step. Start it with srun, or use "tf4slurm run".',
                variable=_STEP_ID,
                value=step.step_id,
            )
        for name in ("job_id", "rank", "local_rank", "num_tasks", "node_name", "reserved_ports"):
            getattr(step, name)
        return step

    @property
    def port_candidates(self) -> tuple[int, ...]:
        """The reserved ports, rotated by the local rank, so that the tasks of a node first try different ports."""
        start = self.local_rank % len(self.reserved_ports) if self.reserved_ports else 0
        return self.reserved_ports[start:] + self.reserved_ports[:start]

    @property
    def visible_devices(self) -> dict[str, tuple[str, ...]]:
        """The names of the devices in each variable of `VISIBLE_DEVICES` that is not empty, by variable.

        A variable that hides all devices, such as one with the value "-1", has an empty tuple.
        """
        texts = {name: self.environ[name] for name in VISIBLE_DEVICES if self.environ.get(name)}
        return {name: () if text in _NO_DEVICES else tuple(text.split(",")) for name, text in texts.items()}

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names of the devices in the first variable of `VISIBLE_DEVICES` that is not empty, such as ("0", "1")."""
        return next(iter(self.visible_devices.values()), ())

    @cached_property
    def tasks_by_node(self) -> dict[str, int]:
        counts = _required(self.environ, _TASKS_PER_NODE, self._parse_tasks_per_node)
        return dict(zip(self.nodes, counts, strict=True))

    def _parse_tasks_per_node(self, text: str) -> tuple[int, ...]:
        counts = _counts(text)
        if len(counts) != len(self.nodes) or sum(counts) != self.num_tasks or self.num_tasks > _MAX_TASKS:
            raise ValueError(
                f"expected {len(self.nodes)} counts as in SLURM_STEP_NODELIST, {self.num_tasks} in all as in "
                "SLURM_STEP_NUM_TASKS"
            )
        return counts

    @cached_property
    def het_groups(self) -> dict[str, tuple[str, ...]]:
        """The nodes of each component of a heterogeneous job, by the component's job id. Empty for other jobs."""
        size = _optional(self.environ, _HET_SIZE, _num_components, 0)
        if self.environ.get(f"{_GROUP_JOB_ID}0") != self.job_id:
            return {}  # the variables come from a heterogeneous job that submitted this job
        job_ids = [_required(self.environ, f"{_GROUP_JOB_ID}{number}", str) for number in range(size)]
        nodes = [_required(self.environ, f"{_GROUP_NODELIST}{number}", expand_nodelist) for number in range(size)]
        return dict(zip(job_ids, nodes, strict=True))

    @cached_property
    def nodes_by_rank(self) -> tuple[str, ...]:
        """The node of each rank. The result agrees with this task's own rank and node (see `check_own_place`).

        Raises:
            LayoutError: The environment contradicts itself or does not determine the layout. `commands.layout_of`
                queries Slurm in this case.
        """
        groups = self.het_groups.values()
        components = split_components(self.tasks_by_node, groups) if groups else []
        if len(components) > 1:
            nodes_by_rank = join_components(components, self.node_name, frozenset(self.node_ranks))
        else:
            nodes_by_rank = deal_ranks(self.tasks_by_node, self.distribution, self.plane_size)
        self.check_own_place(nodes_by_rank)
        return nodes_by_rank

    def check_own_place(self, nodes_by_rank: Sequence[str]) -> None:
        """Check that a layout agrees with this task's rank and node, and with the ranks on its node.

        `nodes_by_rank` is the layout: the node of each rank.

        Raises:
            LayoutError: The layout disagrees.
        """
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
            f"way than its variables state (distribution {self.distribution!r}); request -m block or -m cyclic."
        )


def own_node_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's name of this node, which may differ from the host name. Outside of Slurm return the host name."""
    return environ.get(_NODE_NAME) or socket.gethostname()


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of a Slurm step. A batch script and an interactive shell are not."""
    return _STEP_ID in environ and _RANK in environ and not _is_reserved(environ[_STEP_ID])


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of this process's step, which an srun would read as its options.

    Outside of a step nothing is removed.
    """
    if not is_in_step(environ):
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name not in _STEP_VARIABLES and not name.startswith(_STEP_PREFIXES)
    }


def _is_reserved(step_id: str) -> bool:
    """Return whether Slurm gives this step id to a batch script (seen in Slurm 26.05) or an interactive shell."""
    return _SIGNED_NUMBER.fullmatch(step_id) is not None and not 0 <= int(step_id) <= _MAX_STEP_ID
