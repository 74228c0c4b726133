# ruff: noqa: N802, N803, N999
"""Deprecated names of `tf4slurm.tensorflow.legacy.hooks`, for scripts written for tf4slurm before 0.1."""

from __future__ import annotations

import atexit
import gc
import warnings
from typing import Any

from tf4slurm.cluster import Task
from tf4slurm.errors import PlacementError
from tf4slurm.script_client.tf4slurm_sidecar import call_after_training
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.legacy.hooks import DoneHook
from tf4slurm.tensorflow.legacy.queues import fill_done_queue, make_done_queue


def create_done_queue(i: int, WorkersNumber: int) -> Any:
    """Add a queue to the current graph and return it: ps `i` receives one item from each worker. Deprecated."""
    _warn("create_done_queue", "tf4slurm.shutdown.wait_for_workers")
    atexit.register(gc.freeze)  # as in wait_for_workers
    current = current_server_dictionary()
    if current.task == Task("ps", i):
        call_after_training(lambda: fill_done_queue(current, WorkersNumber))
    return make_done_queue(i, WorkersNumber)


def create_done_queues(PSNumber: int, WorkersNumber: int) -> list[Any]:
    """Add the queue of each ps to the current graph, as `create_done_queue` does. Return the queues. Deprecated."""
    _warn("create_done_queues", "tf4slurm.shutdown.signal_done")
    return [make_done_queue(index, WorkersNumber) for index in range(PSNumber)]


def QueueManagementHook(NumberOfPS: int | None = None, NumberOfWorkers: int | None = None) -> DoneHook:
    """Return a `DoneHook` of `tf4slurm.tensorflow.legacy.hooks`. Deprecated. The chief counts as one of the workers.

    Raises:
        PlacementError: `NumberOfPS` or `NumberOfWorkers` differs from the cluster spec.
        SlurmEnvironmentError: This process has no cluster spec.
    """
    _warn("QueueManagementHook", "tf4slurm.tensorflow.legacy.hooks.DoneHook")
    current = current_server_dictionary()
    given = (len(current.ps_addresses), len(current.training_tasks))
    if NumberOfPS not in (None, given[0]) or NumberOfWorkers not in (None, given[1]):
        raise PlacementError(
            f"QueueManagementHook got {NumberOfPS} ps and {NumberOfWorkers} workers, but the cluster has {given[0]} ps "
            f"and {given[1]} workers. Pass the cluster's numbers."
        )
    return DoneHook()


def _warn(old: str, new: str) -> None:
    warnings.warn(f"tf4slurm.DistributedTFQueueHook.{old} is now {new}", DeprecationWarning, stacklevel=3)
