"""`make_elastic()`: let the workers of a running ParameterServerStrategy change, if TensorFlow's version allows it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tf4slurm.scripts.channel import ScriptChannel

_VERSIONS = ("2.16", "2.21")
"""The first and the last supported version. Tested: 2.16, 2.18 and 2.21, whose coordinators are the same."""

_PRIVATE_NAMES = {
    "coordinator": ("_cluster", "_create_per_worker_resources", "_create_per_worker_variables"),
    "cluster": ("workers", "closure_queue", "resource_cancellation_mgr", "failure_handler"),
    "failure_handler": (
        *("wait_on_failure", "_validate_preemption_failure", "_should_preemption_thread_run", "_worker_up_cond"),
        *("_cluster_update_lock", "_cluster_due_for_update_or_finish", "_error_from_recovery"),
    ),
    "worker": (
        *("_process_closure", "_process_resource_closure", "_on_worker_recovery", "_set_resources_aborted"),
        *("_register_and_schedule_resource_closure", "_resource_remote_value_refs", "_resource_tracking_lock"),
        "_is_dead_with_error",
    ),
    "queue": (
        *("put_back", "clear_tag_unlocked", "_queue", "_queue_lock", "_queue_free_slot_condition"),
        *("_cancellation_mgr", "_error", "_stop_waiting_condition"),
    ),
}
"""What `elastic_workers` uses of TensorFlow's private classes."""


def make_elastic(coordinator: Any, cluster: Mapping[str, Sequence[str]], channel: ScriptChannel | None) -> None:
    """Let workers join and leave on the agent's request, and use each lost worker again as soon as it answers.

    The chief reports the workers in use to the agent, or the reason why they cannot change. If they cannot change,
    TensorFlow's own recovery remains: it waits until all lost workers are back.

    Args:
        coordinator: A new ClusterCoordinator, which has scheduled nothing yet.
        cluster: The cluster spec with which its strategy has connected.
        channel: The connection to the agent; without one, the workers of `cluster` are those to use.
    """
    reason = _find_obstacle(coordinator)
    if not reason:
        from tf4slurm.tensorflow.elastic_workers import ElasticWorkers  # subclasses private classes of TensorFlow

        ElasticWorkers(coordinator, cluster, channel).start()
    elif channel is not None:
        channel.send(workers_error=reason)


def capture_tables_in_loops() -> None:
    """Let functions for workers use lookup tables in loops and conditions. Idempotent.

    A table has a copy on each worker, and a function gets the handle of the worker's copy when it is called. TensorFlow
    forgets to pass it into the body of a `while` or `cond`: "You must feed a value for placeholder tensor".
    """

    def capture_call_time_value(graph: Any, *arguments: Any, **options: Any) -> Any:
        return graph.capture(graph.outer_graph.capture_call_time_value(*arguments, **options))

    ControlFlowFuncGraph.capture_call_time_value = capture_call_time_value


def _find_obstacle(coordinator: Any) -> str:
    """Return the reason why the workers cannot change, as a sentence without a full stop; empty if they can."""
    first, last = _VERSIONS
    if not _numbers(first) <= _numbers(tf.__version__) <= _numbers(last):
        return f"TensorFlow {tf.__version__} is not one of the versions whose workers can change: {first} to {last}"
    cluster: Any = getattr(coordinator, "_cluster", None)
    handler = getattr(cluster, "failure_handler", None)
    if type(handler).__name__ != "WorkerPreemptionHandler":  # TF_PSS_ENABLE_COORDINATION_SERVICE selects another one
        return f"TensorFlow handles failures by its {type(handler).__name__}"
    parts = {"coordinator": coordinator, "cluster": cluster, "failure_handler": handler}
    parts |= {"worker": cluster.workers[0], "queue": cluster.closure_queue}
    for part, names in _PRIVATE_NAMES.items():
        for name in names:
            if not hasattr(parts[part], name):
                return f"The {part} of TensorFlow {tf.__version__} has no {name}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
