"""Extend TensorFlow's `SlurmClusterResolver`, so that it supports every distribution of ranks over nodes."""

from __future__ import annotations

import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tf4slurm.errors import LayoutError, PlacementError
from tf4slurm.placement import count_roles
from tf4slurm.roles import TASK_TYPES, role_of
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.server_dictionary import (
    ServerDictionary,
    form_cluster,
    get_server_dictionary,
    launched_server_dictionary,
    set_current_server_dictionary,
)
from tf4slurm.slurm.commands import layout_of
from tf4slurm.slurm.environ import SlurmStep, is_in_step
from tf4slurm.slurm.gpus import gpu_environ, is_list_of_one_task
from tf4slurm.slurm.layout import deal_ranks, rename_nodes
from tf4slurm.tensorflow.servers import run_server

_PORT_BASE = 8888


class SlurmClusterResolver(tf.distribute.cluster_resolver.SlurmClusterResolver):  # type: ignore[misc]
    """Resolves the cluster of this process's Slurm step for tf.distribute.

    Ranks are assigned to TensorFlow jobs in the alphabetical order of the job names, as in TensorFlow's class. Unlike
    that class, this one supports every distribution of ranks over nodes, and raises an error if the node of a rank is
    unknown. Under an agent of tf4slurm, the launcher's cluster spec is used, and the agent has selected the GPUs.

    A subclass that gets ranks and hosts from another source overrides `_resolve_own_rank`, `_resolve_num_tasks`,
    `_resolve_hostlist` and `_resolve_task_configuration`. As in TensorFlow, its ranks must fill one host after the
    other, in the order of the sorted host names.

    Attributes:
        task_type: The TensorFlow job name of this task. Unlike in TensorFlow, it is known before `cluster_spec` is
            called.
        task_id: The index of this task in its TensorFlow job.
        rpc_layer: The protocol of the addresses that `master` returns.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = _PORT_BASE,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        interface: str | None = None,
        infiniband: bool = False,
    ) -> None:
        """Resolve the cluster.

        With `interface` or `infiniband`, the call returns when all tasks of the step have created a resolver.

        Args:
            jobs: Number of tasks by TensorFlow job name, such as {"ps": 1, "worker": 3} (default: all tasks are
                workers).
            port_base: Port of the first task on each node (default 8888). Each further task on the node has the next
                port. With `interface` or `infiniband`, ports are chosen as in `get_server_dictionary`. A value other
                than 8888 is then the first of a range with one port for each task, and one for the control service.
            gpus_per_node: Number of GPUs to use on each node (default: all that Slurm granted).
            gpus_per_task: Number of GPUs for each task. By default the tasks of a node divide its GPUs. In a cluster
                with ps, only workers get GPUs.
            tasks_per_node: Number of tasks on each node, as one number or by host name. Only subclasses with ranks of
                their own need it.
            auto_set_gpu: Let `cluster_spec` set CUDA_VISIBLE_DEVICES and similar variables to this task's share of the
                granted GPUs (default). If Slurm granted none, but other arguments give a number of GPUs, each task (a
                ps, too) gets a share of the GPUs from 0.
            interface: Network whose addresses are used, as for `get_server_dictionary`. The ports are reserved until
                TensorFlow's server opens them.
            infiniband: Same as interface="infiniband".

        Raises:
            SlurmEnvironmentError: A variable of Slurm is missing or invalid.
            LayoutError: The node of a rank cannot be determined.
            PlacementError: The numbers of tasks or GPUs do not match the step, or under an agent the cluster spec.
            RendezvousError: With `interface` or `infiniband`, the tasks did not form a cluster in time.
        """
        self.rpc_layer = rpc_layer
        self._gpus_per_node = gpus_per_node
        self._gpus_per_task = gpus_per_task
        self._auto_set_gpu = auto_set_gpu
        self._step = SlurmStep(os.environ)
        self._node_ranks: Sequence[int] = ()
        launched = launched_server_dictionary()
        if launched is not None:  # the agent has selected the GPUs
            given = launched if jobs is None else get_server_dictionary(jobs)
            self._cluster_allocation, self.task_type, self.task_id = given
            return
        self._rank = self._resolve_own_rank()
        self._jobs = {"worker": self._resolve_num_tasks()} if jobs is None else dict(jobs)
        if tasks_per_node is None:
            self._task_configuration = self._resolve_task_configuration()
        elif isinstance(tasks_per_node, Mapping):
            self._task_configuration = dict(tasks_per_node)
        else:
            self._task_configuration = dict.fromkeys(self._resolve_hostlist(), int(tasks_per_node))
        self._names = [name for name, count in sorted(self._jobs.items()) for _ in range(count)]
        self._check_counts()
        self.task_type = self._names[self._rank]
        self.task_id = self._rank - self._names.index(self.task_type)
        if interface is not None or infiniband:
            ports = None if port_base == _PORT_BASE else range(port_base, min(port_base + len(self._names) + 1, 65536))
            given = get_server_dictionary(self._names, infiniband, interface=interface, ports=ports)
            self._cluster_allocation = given.cluster
            self._node_ranks = self._step.node_ranks
            return
        hosts = self._hosts_by_rank(isinstance(tasks_per_node, Mapping))
        indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        addresses = iter([f"{host}:{port_base + next(indices[host])}" for host in hosts])
        self._cluster_allocation = {
            name: list(itertools.islice(addresses, count)) for name, count in sorted(self._jobs.items())
        }
        self._node_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[self._rank]]

    # Methods that subclasses override

    def _resolve_own_rank(self) -> int:
        """Return the rank of this task, from 0."""
        return SlurmStep(os.environ).rank

    def _resolve_num_tasks(self) -> int:
        """Return the number of tasks of the step."""
        return SlurmStep(os.environ).num_tasks

    def _resolve_hostlist(self) -> list[str]:
        """Return the names of the step's nodes."""
        return list(SlurmStep(os.environ).nodes)

    def _resolve_task_configuration(self) -> dict[str, int]:
        """Return the number of tasks on each host, by host name."""
        return dict(zip(self._resolve_hostlist(), SlurmStep(os.environ).tasks_per_node, strict=False))

    # TensorFlow's interface

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the cluster spec. With `auto_set_gpu`, also set the environment variables that select the GPUs."""
        if self._auto_set_gpu:
            os.environ.update(self._gpu_environ())
        return tf.train.ClusterSpec(self._cluster_allocation)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return this task's number of GPUs, such as {"GPU": 2}. Ignore the arguments.

        It is `gpus_per_task`, else the number that `cluster_spec` selects, else the number that TensorFlow sees.
        """
        if self._gpus_per_task is not None:
            return {"GPU": self._gpus_per_task}
        lists = self._gpu_environ().values()
        if not lists:
            return {"GPU": len(tf.config.list_physical_devices("GPU"))}
        return {"GPU": max(0 if devices == "-1" else len(devices.split(",")) for devices in lists)}

    # Additions to TensorFlow's interface

    def serve(self, *, timeout_seconds: float = 300.0) -> None:
        """Run the server of a ps, or of a worker in a job with a chief, until training is over, then exit.

        In other tasks, the call returns. Call it in every task before creating the strategy, instead of
        `tf.distribute.Server(…).join()`. Training is over when the chief, or without a chief every worker, has ended.
        Under an agent, the agent then terminates the process. Under plain srun, the tasks first form a cluster as in
        `get_server_dictionary`, and the exit code is 1 if training failed, else 0. In a job without ps, the call
        returns at once.

        Args:
            timeout_seconds: Under plain srun, timeout in seconds for all tasks to form a cluster (default 300).

        Raises:
            SystemExit: In a ps, or a worker in a job with a chief: training is over.
            SlurmEnvironmentError: This process has no agent and is not in a Slurm step.
            PlacementError: A TensorFlow job name in `jobs` is not a role of tf4slurm.
            RendezvousError: The tasks did not form a cluster in time.
        """
        if "ps" not in self._cluster_allocation:
            return
        current = set_current_server_dictionary(
            ServerDictionary(self._cluster_allocation, self.task_type, self.task_id)
        )
        channel = None
        if launched_server_dictionary() is None:  # an agent terminates its child when training is over
            if find_script_channel() is None:
                step = SlurmStep.from_environ(os.environ)
                form_cluster(count_roles(self._names), ",".join(self._names), step, timeout_seconds=timeout_seconds)
            channel = find_script_channel()
        if role_of(current.task_type, has_chief="chief" in current.cluster).is_waited_for:
            if channel is not None:
                channel.completion_signal.send_at_exit()
            return
        self.cluster_spec()  # sets which GPUs this task sees
        run_server(current, channel)

    # How the cluster is determined

    def _check_counts(self) -> None:
        available, requested = sum(self._task_configuration.values()), len(self._names)
        if requested != available or not 0 <= self._rank < requested:
            raise PlacementError(
                f"The jobs {self._jobs} have {requested} tasks, but there are {available}, and this one has rank "
                f"{self._rank}. Give as many as srun's --ntasks."
            )
        if self._gpus_per_node is not None and self._gpus_per_task is not None:
            requested = self._gpus_per_task * max(self._task_configuration.values())
            if requested > self._gpus_per_node:
                raise PlacementError(
                    f"{self._gpus_per_task} GPUs for each task need {requested} on the fullest node, but "
                    f"gpus_per_node is {self._gpus_per_node}. Lower gpus_per_task, or put fewer tasks on a node."
                )

    def _hosts_by_rank(self, has_own_configuration: bool) -> Sequence[str]:
        """Return the host name of each rank, in the order of the ranks.

        `has_own_configuration` is true if the user gave `tasks_per_node` by host name.
        """
        if not self._overrides("_resolve_own_rank") and is_in_step(os.environ):
            return rename_nodes(layout_of(self._step), self._step.nodes, self._task_configuration)
        if not has_own_configuration and not self._overrides(
            "_resolve_own_rank", "_resolve_hostlist", "_resolve_task_configuration"
        ):
            return deal_ranks(self._task_configuration, self._step.distribution, self._step.plane_size)
        # As in TensorFlow. The hosts are sorted, because known subclasses build the mapping from a set, whose order
        # differs between processes.
        found = [host for host, count in sorted(self._task_configuration.items()) for _ in range(count)]
        here = {socket.gethostname(), socket.gethostname().partition(".")[0]} & set(self._task_configuration)
        if here and found[self._rank] not in here:
            raise LayoutError(
                f"The cluster spec is wrong: rank {self._rank} is on {min(here)!r}, but the cluster spec puts it on "
                f"{found[self._rank]!r}. A subclass's ranks must follow the sorted host names."
            )
        return found

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(SlurmClusterResolver, name) for name in names)

    def _gpu_environ(self) -> dict[str, str]:
        """Return the environment variables that select this task's GPUs.

        The result is empty in three cases: the agent has selected the GPUs, the user hides the GPUs that Slurm granted,
        or neither Slurm nor the arguments name any.
        """
        if not self._node_ranks:
            return {}
        granted, on_node = self._step.visible_devices, self._step.gpus_on_node
        limit, per_task = self._gpus_per_node, self._gpus_per_task
        most_tasks = max(self._task_configuration.values())
        sees_gpus = {name: self._sees_gpus(name) for name in self._jobs}
        if not self._step.gpus:
            if on_node or (limit is None and per_task is None):  # the user hides granted GPUs, or asks for none
                return {}
            numbers = range((per_task or 0) * most_tasks if limit is None else limit)
            granted, on_node = {"CUDA_VISIBLE_DEVICES": tuple(map(str, numbers))}, None
            sees_gpus = dict.fromkeys(self._jobs, True)
        visible = next(iter(granted.values()))
        if not is_list_of_one_task(visible, on_node):
            granted, on_node = {name: devices[:limit] for name, devices in granted.items()}, None
            if per_task is None and all(sees_gpus.values()):
                per_task = len(visible[:limit]) // most_tasks or None  # equal shares, as collectives require
        on_this_node = [sees_gpus[self._names[rank]] for rank in self._node_ranks]
        return gpu_environ(granted, on_node, self._node_ranks.index(self._rank), on_this_node, per_task)

    def _sees_gpus(self, task_type: str) -> bool:
        """Return whether tasks of this role use GPUs. In a job with ps, chief, ps and evaluators do not."""
        if "ps" not in self._jobs or task_type not in TASK_TYPES:
            return True
        return role_of(task_type, has_chief="chief" in self._jobs).sees_gpus
