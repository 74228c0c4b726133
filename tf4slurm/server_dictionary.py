"""`get_server_dictionary()`, for scripts that start their own servers, and the cluster spec of this process."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.control.messages import cluster_from_entries
from tf4slurm.errors import InterfaceError, PlacementError, SlurmEnvironmentError
from tf4slurm.network.interfaces import INFINIBAND
from tf4slurm.placement import PACK, check_step, count_roles, place_tasks
from tf4slurm.script_client.tf4slurm_sidecar import end_script_sidecar, start_sidecar, watch_sidecar
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.scripts.sidecar_process import read_answer
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.spec.job_spec import HoldPorts
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE, TASK_VARIABLE

_ANSWER_SECONDS = 15.0  # after the timeout for the cluster; the sidecar has timeouts of its own
ClusterAndTask = tuple[Mapping[str, Sequence[str]], str, int]
"""(cluster, task_type, task_index): "host:port" of the tasks of each type, and the type and index of this process."""

_sidecars: list[subprocess.Popen[str]] = []
_current: list[ServerDictionary] = []


class ServerDictionary(NamedTuple):
    """The cluster spec, and the type and index of this process's task, as (cluster, task_type, task_index)."""

    cluster: dict[str, list[str]]
    task_type: str
    task_index: int

    @property
    def task(self) -> Task:
        return Task(self.task_type, self.task_index)

    @property
    def address(self) -> str:
        return self.cluster[self.task_type][self.task_index]

    @property
    def ps_addresses(self) -> tuple[str, ...]:
        return tuple(self.cluster.get("ps", ()))

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """All tasks of the cluster spec except the ps. The chief is first, and the order is the same everywhere."""
        roles = sorted(set(self.cluster) - {"ps"})
        return tuple(Task(role, index) for role in roles for index in range(len(self.cluster[role])))

    @property
    def is_chief(self) -> bool:
        """Whether this task is the chief, or the first worker of a job without a chief."""
        return self.task in self.training_tasks[:1]


def get_server_dictionary(
    tasks: Sequence[str] | Mapping[str, int],
    infiniband: bool = False,
    *,
    interface: str | None = None,
    ports: Sequence[int] | None = None,
    placement: str = PACK,
    timeout_seconds: float = 300.0,
    directory: str | os.PathLike[str] = "runs",
    exchange: bool = True,
    ps_exit_seconds: float | None = 10.0,
    cancel_on_loss: bool = True,
    hold_ports: HoldPorts = "auto",
) -> ServerDictionary:
    """Return the cluster spec of this process's Slurm step, and the process's task in it.

    The cluster spec is the same in all tasks of the step. If an agent has started this process, the launcher has formed
    the cluster, and its cluster spec is in TF_CONFIG. Under plain srun the tasks form the cluster in this call. Each
    task starts a sidecar process, which holds the task's port. The sidecar of rank 0 runs the control service. Under
    plain srun this function sets TF_GRPC_REUSE_PORT, so that TensorFlow's server can listen on the held port. It also
    sets no_proxy if the environment sets a proxy.

    Args:
        tasks: The task type of each rank ("ps", "worker", "chief", "evaluator"), in rank order. Or the number of tasks
            of each type, such as {"ps": 1, "worker": 3}.
        infiniband: The same as interface="infiniband".
        interface: Which address to use, as in the option "--interface": a name, glob, network, "infiniband",
            "fastest", host name pattern or list. Default: the route to rank 0.
        ports: Ports to choose from: one for each task of a node, and one for the control service on rank 0's node.
            Default: the tasks use ports that Slurm reserves, or else any free port. The control service uses any free
            port.
        placement: If `tasks` has numbers: "pack" (default, rank by rank) or "spread" (ps over the nodes).
        timeout_seconds: Timeout in seconds for all tasks to register (default 300).
        directory: A directory that all hosts share (default "runs"). Rank 0 writes the address of the control service
            to a file in it.
        exchange: False computes the cluster spec from this task's environment alone: no port is held, no address is
            checked, and no task is awaited. `interface` can then be a host name pattern only, by default Slurm's node
            name. In rank order, the tasks of a node get the first of `ports`, or of the ports that Slurm reserves.
        ps_exit_seconds: Under plain srun, seconds (default 10) from the end of training until this task is ended with
            exit code 0, if it is a ps or a worker in `server.join()`. For a ps, training ends when the chief has ended
            and no worker needs the ps any more; for a worker, when the chief has ended. In a job without a chief, all
            workers must have ended. None ends no task. A ps that calls `tf4slurm.shutdown` is not ended.
        cancel_on_loss: Under plain srun, end the step when a ps, or the sidecar of rank 0, is lost before training is
            over (default). Give False for scripts that continue without them.

        hold_ports: Under plain srun, how the sidecar holds the port of this task until its server listens, as in the
            option "--hold-ports": "auto" (default) for every kind of server, "always" only for TensorFlow 2.3 or newer,
            "never" not at all.

    Returns:
        The cluster spec without evaluators, such as `{"ps": ["10.1.0.4:40123"], "worker": […]}`, and the type and the
        index of this task.

    Raises:
        SlurmEnvironmentError: This process is neither a task of a Slurm step nor started by an agent.
        PlacementError: `tasks` does not fit the tasks of the step or the launcher's, or has an unknown type. Or with
            `exchange=False` there are too few ports.
        InterfaceError: The interface does not exist, or with `exchange=False` is no host name pattern.
        LayoutError: With `exchange=False`, the environment does not determine the node of each rank.
        RendezvousTimeoutError: Some tasks, which the message names, did not register in time.
        RendezvousError: The cluster did not form. The message has the reason.
    """
    counts = count_roles(tasks)
    launched = launched_server_dictionary()
    if launched is not None:
        _check_counts(launched, counts)
        return set_current_server_dictionary(launched)
    if not isinstance(tasks, Mapping):
        placement = ",".join(tasks)
    step = SlurmStep.from_environ(os.environ)
    check_step(counts, placement, step.num_tasks)
    interface = INFINIBAND if infiniband else interface
    if exchange:
        cluster = form_cluster(
            counts,
            placement,
            step,
            timeout_seconds,
            directory,
            interface,
            ports,
            ps_exit_seconds=ps_exit_seconds,
            cancel_on_loss=cancel_on_loss,
            hold_ports=hold_ports,
        )
    else:
        cluster = _compute_cluster(step, counts, placement, interface, ports)
    return set_current_server_dictionary(ServerDictionary(cluster.to_dictionary(), *cluster.member(step.rank).task))


# The cluster spec of this process


def set_current_server_dictionary(dictionary: ServerDictionary) -> ServerDictionary:
    """Let `current_server_dictionary` return `dictionary` in this process from now on. Return `dictionary`."""
    _current[:] = [dictionary]
    return dictionary


def launched_server_dictionary() -> ServerDictionary | None:
    """Return the cluster spec that the agent has set in TF_CONFIG, or None if no agent has started this process."""
    return _read_tf_config() if TASK_VARIABLE in os.environ else None


def current_server_dictionary(given: ClusterAndTask | None = None) -> ServerDictionary:
    """Return the cluster spec of this process: `given`, else the last of `get_server_dictionary`, else TF_CONFIG's.

    Raises:
        SlurmEnvironmentError: There is none of them.
        ValueError: `given` is not a tuple of three.
    """
    if given is not None:
        if not isinstance(given, tuple) or len(given) != 3:
            raise ValueError(f"cluster is {given!r}: expected a tuple (cluster, task_type, task_index).")
        cluster, task_type, task_index = given
        return ServerDictionary({role: list(addresses) for role, addresses in cluster.items()}, task_type, task_index)
    found = _current[0] if _current else _read_tf_config()
    if found is None:
        raise SlurmEnvironmentError(
            "This process has no cluster: get_server_dictionary() was not called, and TF_CONFIG is not set. Call it "
            "first, or give cluster=(cluster, task_type, task_index).",
            variable="TF_CONFIG",
        )
    return found


def _read_tf_config() -> ServerDictionary | None:
    if "TF_CONFIG" not in os.environ:
        return None
    config = json.loads(os.environ["TF_CONFIG"])
    return ServerDictionary(config["cluster"], *Task(config["task"]["type"], config["task"]["index"]))


def _check_counts(launched: ServerDictionary, counts: Mapping[str, int]) -> None:
    given = {role: len(addresses) for role, addresses in launched.cluster.items()}
    asked = {role: count for role, count in counts.items() if count and role != "evaluator"}
    if asked != given:
        raise PlacementError(
            f"The script asks for {asked}, but was launched with {given}. Change the script or the launcher's options."
        )


# Under plain srun


def form_cluster(
    counts: Mapping[str, int],
    placement: str,
    step: SlurmStep,
    timeout_seconds: float,
    directory: str | os.PathLike[str] = "runs",
    interface: str | None = None,
    ports: Sequence[int] | None = None,
    *,
    ps_exit_seconds: float | None = 10.0,
    cancel_on_loss: bool = True,
    hold_ports: HoldPorts = "auto",
) -> Cluster:
    """Start this process's sidecar (`launch/sidecar_program.py`), which forms the step's cluster. Return the cluster.

    The sidecar opens a script channel for this process, and runs until this process ends. The sidecar of rank 0 runs
    the control service, until all tasks have ended.

    `counts` and `placement` are those of `place_tasks`. The other arguments and the exceptions are those of
    `get_server_dictionary`.
    """
    request = {
        "counts": dict(counts),
        "placement": placement,
        "directory": os.fspath(directory),
        "number": len(_sidecars) + 1,  # the same in all tasks, which make the same calls
        "interface": interface,
        "ports": list(ports or ()),
        "timeout_seconds": timeout_seconds,
        "cancels_step": cancel_on_loss,
        "hold_ports": hold_ports,
    }
    sidecar = start_sidecar("launch.sidecar_program", request)
    _sidecars.append(sidecar)
    atexit.register(end_script_sidecar, sidecar, os.getpid(), runs_service=step.rank == 0)
    answer = read_answer(sidecar, timeout_seconds + _ANSWER_SECONDS)
    os.environ[SCRIPT_CHANNEL_VARIABLE] = answer["channel"]
    os.environ.update(answer["environment"])
    cluster = cluster_from_entries(answer["entries"])
    channel = find_script_channel()
    if channel is not None:
        tasks = [member.task for member in cluster.members]
        watch_sidecar(channel, sidecar.pid, cluster.member(step.rank).task, tasks, ps_exit_seconds)
    return cluster


# With exchange=False


def _compute_cluster(
    step: SlurmStep, counts: Mapping[str, int], placement: str, interface: str | None, ports: Sequence[int] | None
) -> Cluster:
    nodes = step.nodes_by_rank
    pattern = interface or "{host}"
    if "{host}" not in pattern:
        text = f"Without an exchange, the address on {pattern!r} of other nodes is unknown: give a host name pattern "
        raise InterfaceError(f'{text}such as "{{host}}-ib0".', interface=pattern)
    usable = ports or (() if step.het_groups else step.reserved_ports)  # Slurm does not report each component's ports
    most_tasks = max(Counter(nodes).values())
    if len(usable) < most_tasks:
        raise PlacementError(
            f"Without an exchange, each task of a node needs a port that is known before: {most_tasks} are needed, "
            f"{len(usable)} are available. Give ports=, or let Slurm reserve them (srun --resv-ports)."
        )
    free = {node: iter(usable) for node in nodes}
    tasks = place_tasks(counts, placement, nodes)
    return Cluster(
        tuple(
            Member(rank, task, node, Address(pattern.replace("{host}", node), next(free[node])))
            for rank, (task, node) in enumerate(zip(tasks, nodes, strict=True))
        )
    )
