"""What a batch script or a salloc shell knows of its allocation. With `step.py` the only reader of SLURM_*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tf4slurm.slurm.variables import Variables

_JOB_ID = "SLURM_JOB_ID"
_NUM_TASKS = "SLURM_NTASKS"
_NUM_NODES = "SLURM_JOB_NUM_NODES"
_TASKS_PER_NODE = "SLURM_NTASKS_PER_NODE"
_CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
_HET_SIZE = "SLURM_HET_SIZE"
_HET_GROUP = "_HET_GROUP_"  # and a number: of one component
_ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
_ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
_RESTART_COUNT = "SLURM_RESTART_COUNT"


@dataclass(frozen=True)
class HetComponent:
    """What one component of a heterogeneous job asked for, as `SlurmAllocation` has it of a plain job."""

    num_tasks: int | None
    cpus_per_task: int | None


@dataclass(frozen=True)
class SlurmAllocation:
    """The resources that Slurm gave to a job.

    Attributes:
        num_tasks: Number of tasks asked for; None if the job, or a component of it, only asked for nodes.
        components: Of a heterogeneous job; none of any other.
        num_nodes: Number of nodes; of a heterogeneous job, those of its first component. None if Slurm does not say.
        restart_count: How often Slurm has put the job back into the queue.
        array_element: Such as "38_2" in a job array: one of its elements has the id of the whole array as its own.
        cpus_per_task: As asked for; srun no longer inherits it since Slurm 22.05.
    """

    job_id: str
    num_tasks: int | None
    cpus_per_task: int | None
    components: tuple[HetComponent, ...] = ()
    restart_count: int = 0
    array_element: str | None = None
    num_nodes: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmAllocation | None:
        """Read the allocation from an environment; None outside of one.

        Raises:
            SlurmEnvironmentError: A variable does not read.
        """
        job_id = environ.get(_JOB_ID)
        if not job_id:
            return None
        variables = Variables(environ)
        size = 0  # a size may be left from a heterogeneous job from which this one was submitted
        if environ.get(f"{_JOB_ID}{_HET_GROUP}0") == job_id:
            size = variables.optional_number(_HET_SIZE) or 0
        components = tuple(_component(variables, f"{_HET_GROUP}{n}") for n in range(size))
        whole = _component(variables, "")
        counts = [component.num_tasks for component in components] or [whole.num_tasks]
        return cls(
            job_id,
            None if None in counts else sum(filter(None, counts)),
            whole.cpus_per_task,
            components,
            variables.optional_number(_RESTART_COUNT) or 0,
            _element(variables),
            variables.optional_number(_NUM_NODES),
        )


def _element(variables: Variables) -> str | None:
    array, element = variables.optional_text(_ARRAY_JOB_ID), variables.optional_number(_ARRAY_TASK_ID)
    return None if array is None or element is None else f"{array}_{element}"


def _component(variables: Variables, suffix: str) -> HetComponent:
    num_tasks = variables.optional_number(_NUM_TASKS + suffix)
    if num_tasks is None:
        per_node = variables.optional_number(_TASKS_PER_NODE + suffix)
        num_nodes = variables.optional_number(_NUM_NODES + suffix)
        if per_node is not None and num_nodes is not None:
            num_tasks = per_node * num_nodes
    return HetComponent(num_tasks, variables.optional_number(_CPUS_PER_TASK + suffix))
