"""What a batch script or a salloc shell knows of its allocation. With `step.py` the only reader of SLURM_*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_JOB_ID = "SLURM_JOB_ID"
_NUM_TASKS = "SLURM_NTASKS"
_NUM_NODES = "SLURM_JOB_NUM_NODES"
_TASKS_PER_NODE = "SLURM_NTASKS_PER_NODE"
_CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
_HET_SIZE = "SLURM_HET_SIZE"
_RESTART_COUNT = "SLURM_RESTART_COUNT"


@dataclass(frozen=True)
class SlurmAllocation:
    """The resources that Slurm gave to a job.

    Attributes:
        num_tasks: Number of tasks asked for; None if the job only asked for nodes.
        components: Of a heterogeneous job; 1 of any other.
        num_nodes: Number of nodes; of a heterogeneous job, those of its first component. None if Slurm does not say.
        restart_count: How often Slurm has put the job back into the queue.
        cpus_per_task: As asked for; srun no longer inherits it since Slurm 22.05.
    """

    job_id: str
    num_tasks: int | None
    cpus_per_task: int | None
    components: int = 1
    restart_count: int = 0
    num_nodes: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmAllocation | None:
        """Read the allocation from an environment; None outside of one."""
        job_id = environ.get(_JOB_ID)
        if not job_id:
            return None
        num_tasks = _number(environ, _NUM_TASKS)
        per_node, num_nodes = _number(environ, _TASKS_PER_NODE), _number(environ, _NUM_NODES)
        if num_tasks is None and per_node is not None and num_nodes is not None:
            num_tasks = per_node * num_nodes
        return cls(
            job_id,
            num_tasks,
            _number(environ, _CPUS_PER_TASK),
            _number(environ, _HET_SIZE) or 1,
            _number(environ, _RESTART_COUNT) or 0,
            num_nodes,
        )


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
