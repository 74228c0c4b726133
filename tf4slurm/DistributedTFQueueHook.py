# ruff: noqa: N802, N803, N999
"""The old names of `tf4slurm.tensorflow.hooks`; kept for scripts written for tf4slurm before 0.1."""

from __future__ import annotations

import atexit
import gc
import warnings
from typing import Any

from tf4slurm.errors import PlacementError
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.done import done_queue_name
from tf4slurm.tensorflow.hooks import DoneHook
from tf4slurm.tensorflow.queues import make_queue


def create_done_queue(i: int, WorkersNumber: int) -> Any:
    """Return the queue of ps i in the graph that is being built. Use `tf4slurm.shutdown.wait_for_workers` instead.

    A ps that has taken as many items from it as there are workers may exit.
    """
    _warn("create_done_queue", "tf4slurm.shutdown.wait_for_workers")
    atexit.register(gc.freeze)  # the ps leaves in 0.1 s in place of 0.8 s, as in wait_for_workers
    return make_queue(i, done_queue_name(i), WorkersNumber)


def create_done_queues(PSNumber: int, WorkersNumber: int) -> list[Any]:
    """Return the queues of all ps. Use `tf4slurm.shutdown.signal_done` instead."""
    _warn("create_done_queues", "tf4slurm.shutdown.signal_done")
    return [make_queue(index, done_queue_name(index), WorkersNumber) for index in range(PSNumber)]


def QueueManagementHook(NumberOfPS: int | None = None, NumberOfWorkers: int | None = None) -> DoneHook:
    """Return the hook that tells every ps that this worker is done. Use `tf4slurm.tensorflow.hooks.DoneHook` instead.

    Raises:
        PlacementError: The numbers are not those of the cluster.
    """
    _warn("QueueManagementHook", "tf4slurm.tensorflow.hooks.DoneHook")
    own = current_server_dictionary()
    for asked, given, role in (
        (NumberOfPS, len(own.ps_addresses), "ps"),
        (NumberOfWorkers, len(own.training_tasks), "workers"),
    ):
        if asked is not None and asked != given:
            text = f"QueueManagementHook is to serve {asked} {role}, but the cluster has {given}. Make them agree."
            raise PlacementError(text, requested=asked, available=given)
    return DoneHook()


def _warn(old: str, new: str) -> None:
    text = f"tf4slurm.DistributedTFQueueHook.{old} is now {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
