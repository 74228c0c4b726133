"""What a process sees of its job: for people who wonder why a map is as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tf4slurm.errors import LaunchError, Tf4SlurmError
from tf4slurm.network.interfaces import interface_address, is_loopback, list_interfaces, route_address
from tf4slurm.network.ports import format_ports
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.slurm.commands import layout_of
from tf4slurm.slurm.step import SlurmStep, is_in_step, own_node_name
from tf4slurm.system.variables import TASK_VARIABLE


def describe_environment(environ: Mapping[str, str], interface: str | None = None) -> dict[str, Any]:
    """Return what this process is part of, what it would take as its address, and what is doubtful.

    Returns:
        {"where", "step", "nodes_by_rank", "address", "interfaces", "tf_config", "doubts"}; what there is not is None.
        "doubts" has one sentence for each thing that would fail, or may be meant otherwise.
    """
    doubts: list[str] = []
    step = SlurmStep.from_environ(environ) if is_in_step(environ) else None
    return {
        "where": _where(environ, step),
        "step": _describe_step(step, doubts) if step else None,
        "nodes_by_rank": _find_layout(step, doubts) if step else None,
        "address": _find_address(environ, step, interface, doubts),
        "interfaces": {each.name: list(each.addresses) for each in list_interfaces()},
        "tf_config": json.loads(environ["TF_CONFIG"]) if "TF_CONFIG" in environ else None,
        "doubts": doubts,
    }


def _where(environ: Mapping[str, str], step: SlurmStep | None) -> str:
    if TASK_VARIABLE in environ:
        return f"under an agent of tf4slurm, as {environ[TASK_VARIABLE]}"
    if step is not None:
        return f"task {step.rank} of {step.num_tasks} of Slurm step {step.job_id}.{step.step_id}"
    allocation = SlurmAllocation.from_environ(environ)
    return f"in Slurm allocation {allocation.job_id}, in no step" if allocation else "not in a Slurm job"


def _describe_step(step: SlurmStep, doubts: list[str]) -> dict[str, Any]:
    if not step.reserved_ports:
        doubts.append("Slurm reserves no ports for this step: any free ones are taken.")
    return {
        "job_id": step.job_id,
        "step_id": step.step_id,
        "rank": step.rank,
        "local_rank": step.local_rank,
        "num_tasks": step.num_tasks,
        "node": step.node_name,
        "distribution": step.distribution,
        "reserved_ports": format_ports(step.reserved_ports),
        "gpus": list(step.gpus),
        "restart_count": step.restart_count,
        "components": len(step.het_groups) or 1,
    }


def _find_layout(step: SlurmStep, doubts: list[str]) -> list[str] | None:
    try:
        return list(layout_of(step, timeout_seconds=10))
    except (Tf4SlurmError, LaunchError) as error:
        doubts.append(str(error))
        return None


def _find_address(
    environ: Mapping[str, str], step: SlurmStep | None, interface: str | None, doubts: list[str]
) -> str | None:
    try:
        if interface is not None:
            address = interface_address(interface, own_node_name(environ))
        else:
            address = route_address(step.launch_address if step and step.launch_address else "127.0.0.1")
    except (Tf4SlurmError, OSError) as error:
        doubts.append(str(error))
        return None
    if step is not None and is_loopback(address):
        doubts.append(f"The address {address} is one that only this host can reach.")
    return address
