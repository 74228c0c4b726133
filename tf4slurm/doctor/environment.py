"""Describe the job of this process for `tf4slurm env`: Slurm step, layout, address, cluster spec and warnings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf4slurm.errors import Tf4SlurmError
from tf4slurm.network.interfaces import is_loopback, list_interfaces, task_address
from tf4slurm.network.ports import format_ranges
from tf4slurm.server_dictionary import get_server_dictionary
from tf4slurm.slurm.commands import layout_of
from tf4slurm.slurm.environ import SlurmAllocation, SlurmStep, is_in_step, own_node_name
from tf4slurm.system.variables import TASK_VARIABLE

_LAYOUT_SECONDS = 10.0
_MOST_NODES = 16  # on a terminal


def describe_environment(
    environ: Mapping[str, str],
    interface: str | None = None,
    task_types: Sequence[str] | None = None,
    ports: Sequence[int] = (),
) -> dict[str, Any]:
    """Describe the Slurm job and step of this process, and the address and TF_CONFIG that a task here would have.

    Args:
        environ: This process's environment variables.
        interface: The network interface whose address a task uses, such as "ib0", in a form of `interface_address`.
            None for the interface on the route to the launcher.
        task_types: Task type of each rank of the step, such as ["ps", "worker"]. If TF_CONFIG is not set, it is
            computed from `task_types` and `ports`.
        ports: Ports that the tasks may use. If empty, they use the ports that Slurm reserves.

    Returns:
        A dictionary with the keys "where", "step", "nodes_by_rank", "address", "interfaces", "tf_config" and
        "warnings". A value that is unknown is None. The warnings are sentences, also about failures to find a value.

    Raises:
        SlurmEnvironmentError: A variable of the Slurm step is missing or invalid.
        ValueError: TF_CONFIG is not JSON.
    """
    step = SlurmStep.from_environ(environ) if is_in_step(environ) else None
    warnings: list[str] = []
    nodes_by_rank = address = None
    tf_config = json.loads(environ["TF_CONFIG"]) if "TF_CONFIG" in environ else None
    if tf_config is None and task_types is not None:
        with _errors_to(warnings):
            current = get_server_dictionary(list(task_types), ports=tuple(ports), exchange=False)
            task = {"type": current.task_type, "index": current.task_index}
            tf_config = {"cluster": current.cluster, "task": task}
    if step and not step.reserved_ports:
        warnings.append("Slurm reserves no ports for this step: tasks use any free ports.")
    if step:
        with _errors_to(warnings):
            nodes_by_rank = list(layout_of(step, timeout_seconds=_LAYOUT_SECONDS))
    with _errors_to(warnings):
        launcher = step.launch_address if step and step.launch_address else "127.0.0.1"
        address = task_address(interface, own_node_name(environ), launcher)
        if step and is_loopback(address):
            warnings.append(f"Only this host can reach the address {address}.")
    return {
        "where": _describe_place(environ, step),
        "step": _describe_step(step) if step else None,
        "nodes_by_rank": nodes_by_rank,
        "address": address,
        "interfaces": {each.name: list(each.addresses) for each in list_interfaces()},
        "tf_config": tf_config,
        "warnings": warnings,
    }


def format_environment(description: Mapping[str, Any]) -> str:
    """Return the text that shows the result of `describe_environment` on a terminal."""
    sections = {
        "Process": [("this process", description["where"])],
        "Slurm step": list(_step_rows(description["step"] or {})),
        "Nodes": list(_node_rows(description["nodes_by_rank"] or ())),
        "Network": list(_network_rows(description)),
        "Cluster spec": list(_cluster_rows(description["tf_config"] or {})),
        "Warnings": [("-", warning) for warning in description["warnings"]],
    }
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    texts = [
        "\n".join((title, *(f"  {name.ljust(width if title != 'Warnings' else 1)}  {text}" for name, text in rows)))
        for title, rows in sections.items()
        if rows
    ]
    return "\n\n".join(texts)


def _step_rows(step: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in step.items():
        if value not in (None, [], ""):
            yield name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value)


def _node_rows(nodes_by_rank: Sequence[str]) -> Iterator[tuple[str, str]]:
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes_by_rank):
        ranks.setdefault(node, []).append(rank)
    for node, found in list(ranks.items())[:_MOST_NODES]:
        yield node, f"rank{'s' if len(found) > 1 else ''} {format_ranges(found)}"
    if len(ranks) > _MOST_NODES:
        yield "…", f"{len(ranks) - _MOST_NODES:,} more nodes: --json shows all"


def _network_rows(description: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "address of a task", description["address"] or "none: see the warnings"
    for name, addresses in description["interfaces"].items():
        yield f"interface {name}", ", ".join(addresses) or "down, or without an address"


def _cluster_rows(tf_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    task = tf_config.get("task", {})
    if task:
        yield "this task", f"{task.get('type')}/{task.get('index')}"
    for role, addresses in tf_config.get("cluster", {}).items():
        for index, address in enumerate(addresses[:_MOST_NODES]):
            yield f"{role}/{index}", address
        if len(addresses) > _MOST_NODES:
            yield f"{role}/…", f"{len(addresses) - _MOST_NODES:,} more: --json shows all"


@contextlib.contextmanager
def _errors_to(warnings: list[str]) -> Iterator[None]:
    try:
        yield
    except (Tf4SlurmError, OSError) as error:
        warnings.append(str(error))


def _describe_place(environ: Mapping[str, str], step: SlurmStep | None) -> str:
    if TASK_VARIABLE in environ:
        return f"under an agent of tf4slurm, as {environ[TASK_VARIABLE]}"
    if step is not None:
        return f"task {step.rank} of {step.num_tasks} of Slurm step {step.job_id}.{step.step_id}"
    allocation = SlurmAllocation.from_environ(environ)
    return f"in Slurm allocation {allocation.job_id}, in no step" if allocation else "not in a Slurm job"


def _describe_step(step: SlurmStep) -> dict[str, Any]:
    return {
        "job_id": step.job_id,
        "step_id": step.step_id,
        "rank": step.rank,
        "local_rank": step.local_rank,
        "num_tasks": step.num_tasks,
        "node": step.node_name,
        "distribution": step.distribution,
        "reserved_ports": format_ranges(step.reserved_ports),
        "gpus": list(step.gpus),
        "restart_count": step.restart_count,
        "components": len(step.het_groups) or 1,
    }
