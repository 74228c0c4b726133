"""The Slurm allocation of a batch script or a salloc shell. Only this module and `step.py` read SLURM_* variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from tf4slurm.errors import NodelistError, SlurmEnvironmentError
from tf4slurm.network.ports import parse_ports
from tf4slurm.slurm.nodelist import MAX_NODES, expand_nodelist

_JOB_ID = "SLURM_JOB_ID"
_NUM_TASKS = "SLURM_NTASKS"
_NUM_NODES = "SLURM_JOB_NUM_NODES"
_TASKS_PER_NODE = "SLURM_NTASKS_PER_NODE"
_CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
_HET_SIZE = "SLURM_HET_SIZE"
_HET_GROUP = "_HET_GROUP_"  # followed by the number of a component
_ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
_ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
_RESTART_COUNT = "SLURM_RESTART_COUNT"
_NUMBER = re.compile(r"[0-9]{1,9}")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class Variables:
    """Parses environment variables on access; a missing or invalid variable raises SlurmEnvironmentError."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def has(self, variable: str) -> bool:
        """Return whether a variable is non-empty."""
        return bool(self._environ.get(variable))

    def text(self, variable: str) -> str:
        value = self._environ.get(variable)
        if not value:
            raise SlurmEnvironmentError(
                f"{variable} is not set: this process is not a task of a Slurm step. Start it with srun, or use "
                '"tf4slurm run", which starts local processes where there is no Slurm.',
                variable=variable,
            )
        return value

    def optional_text(self, variable: str) -> str | None:
        return self._environ.get(variable) or None

    def number(self, variable: str) -> int:
        text = self.text(variable)
        if not _NUMBER.fullmatch(text):
            self.refuse(variable, "expected a number")
        return int(text)

    def optional_number(self, variable: str) -> int | None:
        return self.number(variable) if self.has(variable) else None

    def numbers(self, variable: str) -> tuple[int, ...]:
        """Parse "0,3,4"."""
        items = self.text(variable).split(",")
        if not all(map(_NUMBER.fullmatch, items)):
            self.refuse(variable, 'expected numbers such as "0,3,4"')
        return tuple(map(int, items))

    def counts(self, variable: str) -> tuple[int, ...]:
        """Parse "3,1(x2)" into 3, 1, 1."""
        counts: list[int] = []
        for item in self.text(variable).split(","):
            match = _COUNT.fullmatch(item)
            if match is None or len(counts) + int(match[2] or 1) > MAX_NODES:
                self.refuse(variable, 'expected counts such as "3,1(x2)"')
            counts += [int(match[1])] * int(match[2] or 1)
        return tuple(counts)

    def nodes(self, variable: str) -> tuple[str, ...]:
        try:
            return expand_nodelist(self.text(variable))
        except NodelistError as error:
            self.refuse(variable, str(error), error)

    def ports(self, variable: str) -> tuple[int, ...]:
        """Parse "23000-23149,23500"; the result is empty if the variable is not set."""
        try:
            return parse_ports(self.text(variable)) if self.has(variable) else ()
        except ValueError as error:
            self.refuse(variable, str(error), error)

    def refuse(self, variable: str, problem: str, cause: Exception | None = None) -> NoReturn:
        """Raise SlurmEnvironmentError about the value of a variable."""
        value = self.text(variable)
        message = (
            f"{variable} is {value!r}: {problem}. Slurm sets no such value: the script, a module or a wrapper has "
            "changed it."
        )
        raise SlurmEnvironmentError(message, variable=variable, value=value) from cause


@dataclass(frozen=True)
class HetComponent:
    """The request of one component of a heterogeneous job, with the fields of `SlurmAllocation`."""

    num_tasks: int | None
    cpus_per_task: int | None


@dataclass(frozen=True)
class SlurmAllocation:
    """The resources that Slurm allocated to a job.

    Attributes:
        num_tasks: Number of requested tasks; None if the job, or a component of it, only requested nodes.
        cpus_per_task: Requested CPUs per task. Since Slurm 22.05 srun does not inherit this number.
        components: Components of a heterogeneous job; empty for any other job.
        restart_count: Number of times that Slurm has requeued the job.
        array_element: Id of the job array's element, such as "38_2". `job_id` can be the id of the whole array.
        num_nodes: Number of nodes (of the first component in a heterogeneous job); None if Slurm does not set it.
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
        """Read the allocation from an environment; return None outside of an allocation.

        Raises:
            SlurmEnvironmentError: A variable is invalid.
        """
        job_id = environ.get(_JOB_ID)
        if not job_id:
            return None
        variables = Variables(environ)
        size = 0  # _HET_SIZE alone can come from a heterogeneous job that submitted this job
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
            _array_element(variables),
            variables.optional_number(_NUM_NODES),
        )


def _array_element(variables: Variables) -> str | None:
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
