"""`get_server_dictionary()`: the ps/worker address map for scripts that start their own servers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf4slurm.agent.registration import JoinSettings
from tf4slurm.agent.rendezvous import agree
from tf4slurm.cluster import Address, Cluster, Member
from tf4slurm.current_cluster import ServerDictionary, launched_server_dictionary, set_current_server_dictionary
from tf4slurm.errors import InterfaceError, PlacementError
from tf4slurm.network.interfaces import INFINIBAND
from tf4slurm.network.proxies import past_proxies
from tf4slurm.placement import PACK, place_tasks
from tf4slurm.roles import SCRIPT_TASK_TYPES
from tf4slurm.slurm.step import SlurmStep


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
) -> ServerDictionary:
    """Return the address map of the step this process is a task of, agreed upon by all its tasks.

    Under an agent of tf4slurm it is the map that the launcher agreed on. Under plain srun the tasks agree among
    themselves: each has a sidecar process from then on, that of rank 0 hosts the control service. The sidecar holds
    the port, and this process's environment is told: TF_GRPC_REUSE_PORT, so that TensorFlow's server can take it, and
    no_proxy, where there is a proxy.

    Args:
        tasks: The role of each rank ("ps", "worker", "chief", "evaluator"), in rank order; or the number of tasks of
            each role, such as {"ps": 1, "worker": 3}.
        infiniband: Take the host's InfiniBand address; the same as interface="infiniband".
        interface: Which network's address: a name, glob, list, network, "infiniband", "fastest" or host-name rule (see
            `network.interfaces.interface_address`). By default the one on the route to rank 0.
        ports: Ports to choose from: one for each task of a node, and one for the control service at rank 0. By default
            those that Slurm reserves, or else any free one; for the control service any free one.
        placement: With a number of tasks of each role: "pack" (rank by rank) or "spread" (ps over the nodes).
        timeout_seconds: How long to wait for all tasks.
        directory: A directory that all hosts share; rank 0 leaves a file (0600) there for the others to find it.
        exchange: False computes the map from this task's environment alone: node names, or those that a host-name rule
            makes of them, with `ports` or the reserved ports by local rank. Nothing is held, proved or waited for.

    Returns:
        The cluster spec without the evaluators, such as {"ps": ["10.1.0.4:40123"], "worker": […]}, the role and index.

    Raises:
        SlurmEnvironmentError: This process is neither a task of a Slurm step nor started by an agent.
        PlacementError: As many roles as tasks were expected, or without an exchange a port for each task of a node.
        LayoutError: Without an exchange: the environment does not tell which node has which rank.
        RendezvousTimeoutError: Not all tasks came in time; the text names those that did not.
        RendezvousError: The tasks did not agree; the text says why.
    """
    counts = count_roles(tasks)
    launched = launched_server_dictionary()
    if launched is not None:
        _check_counts(launched, counts)
        return set_current_server_dictionary(launched)
    if not isinstance(tasks, Mapping):
        placement = ",".join(tasks)
    step = SlurmStep.from_environ(os.environ)
    if sum(counts.values()) != step.num_tasks:
        raise PlacementError(
            f"{sum(counts.values())} roles were given, but the step has {step.num_tasks} tasks. Give one role for each "
            f"rank, or ask srun for --ntasks={sum(counts.values())}.",
            requested=sum(counts.values()),
            available=step.num_tasks,
        )
    place_tasks(counts, placement, [""] * step.num_tasks)  # a list that does not fit is told before anything starts
    interface = INFINIBAND if infiniband else interface
    if not exchange:
        cluster = _from_environment(step, counts, placement, interface, ports)
        return set_current_server_dictionary(
            ServerDictionary(cluster.to_dictionary(), *cluster.members[step.rank].task)
        )
    cluster = form_cluster(
        counts, placement, step, interface=interface, ports=ports, timeout_seconds=timeout_seconds, directory=directory
    )
    os.environ["TF_GRPC_REUSE_PORT"] = "true"
    os.environ.update(past_proxies(os.environ, (member.address.host for member in cluster.members)))
    return set_current_server_dictionary(ServerDictionary(cluster.to_dictionary(), *cluster.members[step.rank].task))


def form_cluster(
    counts: Mapping[str, int],
    placement: str,
    step: SlurmStep,
    *,
    interface: str | None = None,
    ports: Sequence[int] | None = None,
    timeout_seconds: float = 300.0,
    directory: str | os.PathLike[str] = "runs",
) -> Cluster:
    """Form the cluster of a plain srun step together with all its other tasks: see `get_server_dictionary`."""
    settings = JoinSettings(
        run_directory=str(Path(directory) / f"step-{step.job_id}.{step.step_id}-{step.restart_count}"),
        interface=interface,
        ports=tuple(ports or ()),
        join_seconds=timeout_seconds,
        num_tasks=step.num_tasks,
    )
    return agree(counts, placement, settings, step)


def count_roles(tasks: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Return the number of tasks of each role that a script can have.

    Raises:
        PlacementError: Another role is among them.
    """
    counts = tasks if isinstance(tasks, Mapping) else Counter(tasks)
    unknown = sorted(set(counts) - set(SCRIPT_TASK_TYPES))
    if unknown:
        text = f"{unknown[0]!r} is not a role here: expected one of {', '.join(SCRIPT_TASK_TYPES)} for each rank."
        raise PlacementError(text, requested=sum(counts.values()), available=0)
    return {role: counts.get(role, 0) for role in SCRIPT_TASK_TYPES}


def _check_counts(launched: ServerDictionary, counts: Mapping[str, int]) -> None:
    given = {role: len(addresses) for role, addresses in launched.cluster.items()}
    asked = {role: count for role, count in counts.items() if count and role != "evaluator"}
    if asked != given:
        raise PlacementError(
            f"The script asks for {asked}, but was launched with {given}. Make them agree: the launcher's options say "
            "how many there are.",
            requested=sum(asked.values()),
            available=sum(given.values()),
        )


def _from_environment(
    step: SlurmStep, counts: Mapping[str, int], placement: str, interface: str | None, ports: Sequence[int] | None
) -> Cluster:
    nodes = step.nodes_by_rank
    rule = interface or "{host}"
    if "{host}" not in rule:
        text = (
            f'Without an exchange the address on {rule!r} is not known of other nodes: use a rule like "{{host}}-ib0".'
        )
        raise InterfaceError(text, interface=rule)
    usable = ports or (() if step.het_groups else step.reserved_ports)  # a component's own are not told apart
    local_ranks, seen = [], Counter[str]()
    for node in nodes:
        local_ranks.append(seen[node])
        seen[node] += 1
    needed = max(local_ranks) + 1
    if len(usable) < needed:
        raise PlacementError(
            f"Without an exchange each task of a node needs a port known beforehand: {needed} are needed, "
            f"{len(usable)} are there. Give ports=, or let Slurm reserve them (srun --resv-ports).",
            requested=needed,
            available=len(usable),
        )
    members = zip(place_tasks(counts, placement, nodes), nodes, local_ranks, strict=True)
    return Cluster(
        tuple(
            Member(rank, task, node, Address(rule.replace("{host}", node), usable[local_rank]))
            for rank, (task, node, local_rank) in enumerate(members)
        )
    )
