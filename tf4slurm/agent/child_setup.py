"""The command and the environment variables with which an agent starts its child."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.agent.container import container_command
from tf4slurm.agent.rendezvous import TaskIdentity
from tf4slurm.cluster import Cluster, Task, fill_in
from tf4slurm.errors import PlacementError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.reachability import bypass_proxies
from tf4slurm.roles import role_of
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.slurm.gpus import HIDDEN_GPUS, gpu_environ
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_limits import MAX_TEXT_BYTES
from tf4slurm.system.variables import (
    ATTEMPT_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    SCRIPT_CHANNEL_VARIABLE,
    SCRIPT_CLIENT,
    SERVICES_VARIABLE,
    TASK_VARIABLE,
    base_environment,
)

_HOME = Path(__file__).parents[1]


@dataclass(frozen=True)
class ChildSetup:
    """Makes the command and the environment variables of an agent's children.

    Attributes:
        environ: The agent's environment variables.
        identity: The rank and the node of the agent's task.
        spec: The options of the job.
        run_directory: The run directory of the job.
    """

    environ: Mapping[str, str]
    identity: TaskIdentity
    spec: JobSpec
    run_directory: RunDirectory

    def make_command(self, cluster: Cluster, task: Task, attempt: int) -> Sequence[str]:
        """Return the child's command. This may wait for a file system, so call it in a thread.

        A task of the data service runs a program of tf4slurm with the script's Python. The command has the path of this
        program, because that Python may lack tf4slurm.

        Raises:
            CommandError: See `container_command`.
        """
        role = role_of(task.task_type, has_chief=cluster.has_chief)
        command: Sequence[str] = fill_in(self.spec.command, cluster.to_dictionary(), task)
        if role.program:
            work = self.run_directory.work(task, attempt)
            command = (self.spec.data_service_python, str(_HOME / role.program), str(work))
        if not self.spec.container:
            return command
        paths = (self.run_directory.path, _HOME if role.program else SCRIPT_CLIENT)
        return container_command(self.spec.container, command, paths, self.environ, sees_gpus=role.sees_gpus)

    def make_environment(self, cluster: Cluster, task: Task, attempt: int, channel_name: str) -> dict[str, str]:
        """Return the child's environment variables: the agent's, and those for the task, its cluster and its GPUs.

        The variables from the launcher, such as the job's credentials, are left out.

        Raises:
            PlacementError: The cluster is too large for TF_CONFIG, or there are too few GPUs for --gpus-per-worker.
        """
        result = base_environment(self.environ)
        result["TF_CONFIG"] = check_length(cluster.to_tf_config(task), len(cluster.members))
        result[TASK_VARIABLE] = str(task)
        result[ATTEMPT_VARIABLE] = str(attempt)
        result[RUN_DIRECTORY_VARIABLE] = str(self.run_directory.path)
        result[SCRIPT_CHANNEL_VARIABLE] = channel_name
        result[SERVICES_VARIABLE] = json.dumps(cluster.to_services())
        result.update(self._gpu_environ(cluster, task))
        result.update(bypass_proxies(result, (member.address.host for member in cluster.members)))
        return result

    def _gpu_environ(self, cluster: Cluster, task: Task) -> dict[str, str]:
        identity = self.identity
        if not isinstance(identity, SlurmStep):
            return {} if role_of(task.task_type, has_chief=cluster.has_chief).sees_gpus else HIDDEN_GPUS
        step = cluster.members[: identity.num_tasks]  # without joined workers, which have GPUs of their own
        types = [member.task.task_type for member in step if member.node == identity.node_name]
        roles = [role_of(each, has_chief=cluster.has_chief) for each in types]
        return gpu_environ(
            identity.visible_devices,
            identity.gpus_on_node,
            identity.local_rank,
            [role.sees_gpus for role in roles],
            self.spec.gpus_per_worker,
            [role.is_spare for role in roles],
        )


def check_length(tf_config: str, num_tasks: int) -> str:
    """Return `tf_config` unchanged if it fits into the environment variable TF_CONFIG.

    TensorFlow reads the cluster from this variable only. `num_tasks`, the number of tasks of the cluster, is for the
    error message.

    Raises:
        PlacementError: The variable is too long for Linux.
    """
    length, limit = len(f"TF_CONFIG={tf_config}"), MAX_TEXT_BYTES
    if length < limit:
        return tf_config
    text = f"The cluster of {num_tasks:,} tasks makes TF_CONFIG {length:,} bytes long"
    why = f"{text}, and Linux gives no process a variable of {limit:,} or more. Start fewer tasks."
    raise PlacementError(why)
