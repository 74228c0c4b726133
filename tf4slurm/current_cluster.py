"""`ServerDictionary`: the address map with this process's place in it, and which one this process has."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf4slurm.cluster import Task
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.system.variables import TASK_VARIABLE

_kept: list[ServerDictionary] = []


class ServerDictionary(NamedTuple):
    """The address map, and which of its tasks this process is; unpacks as (cluster, task_type, task_index)."""

    cluster: dict[str, list[str]]
    task_type: str
    task_index: int

    @property
    def task(self) -> Task:
        """This process's task."""
        return Task(self.task_type, self.task_index)

    @property
    def ps_addresses(self) -> tuple[str, ...]:
        return tuple(self.cluster.get("ps", ()))

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """Every task of the cluster but the ps, in the same order in all processes, whoever leads first."""
        roles = sorted(set(self.cluster) - {"ps"})
        return tuple(Task(role, index) for role in roles for index in range(len(self.cluster[role])))

    @property
    def leads(self) -> bool:
        """Whether this task is the chief, or where there is none the first worker."""
        return self.task in self.training_tasks[:1]


def set_current_server_dictionary(dictionary: ServerDictionary) -> ServerDictionary:
    """Remember the map as this process's; return it."""
    _kept[:] = [dictionary]
    return dictionary


def launched_server_dictionary() -> ServerDictionary | None:
    """Return the map on which the launcher agreed; None if this process has no agent of tf4slurm."""
    if TASK_VARIABLE not in os.environ or "TF_CONFIG" not in os.environ:
        return None
    return _read_tf_config()


def current_server_dictionary(
    cluster: Mapping[str, Sequence[str]] | None = None, task_type: str | None = None, task_index: int | None = None
) -> ServerDictionary:
    """Return the map of this process: as given, else what `get_server_dictionary` returned last, else TF_CONFIG's.

    Args:
        cluster: The addresses of each role, such as {"ps": ["n1:4001"], "worker": ["n1:4002"]}.
        task_type: The role of this process, given with `cluster`.
        task_index: Its 0-based index in its role, given with `cluster`.

    Raises:
        ValueError: Some of the three are given, but not all.
        SlurmEnvironmentError: Nothing is given and nothing is there.
    """
    if cluster is not None and task_type is not None and task_index is not None:
        return ServerDictionary({role: list(addresses) for role, addresses in cluster.items()}, task_type, task_index)
    if (cluster, task_type, task_index) != (None, None, None):
        raise ValueError("cluster, task_type and task_index belong together: give all three or none.")
    if _kept:
        return _kept[0]
    if "TF_CONFIG" in os.environ:
        return _read_tf_config()
    raise SlurmEnvironmentError(
        "This process has no cluster: get_server_dictionary() was not called, and TF_CONFIG is not set. Call it first, "
        "or give cluster, task_type and task_index.",
        variable="TF_CONFIG",
    )


def _read_tf_config() -> ServerDictionary:
    config = json.loads(os.environ["TF_CONFIG"])
    return ServerDictionary(config["cluster"], *Task(config["task"]["type"], config["task"]["index"]))
