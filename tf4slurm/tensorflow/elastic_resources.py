"""Create on joined workers what each worker has of its own: dataset iterators, lookup tables and variables.

In TensorFlow, a PerWorkerValue has one RemoteValue per worker, in the order of the workers' indices. Each RemoteValue
belongs to a closure that creates it on its worker, and creates it again after the worker has failed. For a joined
worker, this module makes a closure of the same function, and appends its RemoteValue.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


class WorkerIndex(int):
    """The index of a worker, as an int that TensorFlow converts to a tensor on the chief's CPU.

    TensorFlow makes this tensor at each call of a function that uses `experimental_get_current_worker_index()`. From a
    plain int, it would make the tensor on the worker, and hold Python's GIL until the worker answers. So a suspended
    worker would block the whole chief.
    """

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
            return tf.constant(int(self), dtype, name=name or "index")


class PerWorkerResources:
    """Lists the resources that a coordinator has created on its workers, and creates them on joined workers, too."""

    def __init__(self, coordinator: Any, cluster: Any) -> None:
        """Find the resources that the coordinator has created, and record those that it creates later.

        TensorFlow has no list of them, so they are searched for with Python's garbage collector. This takes less than
        1 s. A joined worker creates them in the same order as the first worker: a dataset may need a table that is
        older.
        """
        self._cluster = cluster
        self._lock = threading.Lock()
        self._known: list[weakref.ref[Any]] = []  # not all are arguments of closures: functions may capture them
        for name in ("_create_per_worker_resources", "_create_per_worker_variables"):
            setattr(coordinator, name, self._remember(getattr(coordinator, name)))
        resources = [resource() for resource in cluster.workers[0]._resource_remote_value_refs]
        numbers = {id(resource): number for number, resource in enumerate(resources) if resource is not None}
        own = [values for values in _find_per_worker_values(resources) if id(values._values[0]) in numbers]
        own.sort(key=lambda values: numbers[id(values._values[0])])
        with self._lock:
            self._known += map(weakref.ref, own)

    def create_missing(self, closure: Any) -> bool:
        """Schedule the creation of resources that the closure may use, on each worker that lacks them.

        These are the resources among its arguments, and all others of the coordinator, because its function may have
        captured any of them. Return whether any were missing. The closure must then run later, after their creation.
        """
        workers = tuple(self._cluster.workers)
        is_incomplete = False
        with self._lock:
            captured = (each() for each in self._known)  # all that the function may have captured
            for values in (*captured, *tf.nest.flatten((closure._args, closure._kwargs))):
                if isinstance(values, tf.distribute.coordinator.PerWorkerValue) and len(values._values) < len(workers):
                    is_incomplete = True
                    first = values._values[0]
                    values._values += tuple(_copy_to(first, worker) for worker in workers[len(values._values) :])
        return is_incomplete

    def _remember(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def create_and_remember(*args: Any, **kwargs: Any) -> Any:
            values = create(*args, **kwargs)
            with self._lock:
                self._known = [each for each in self._known if each() is not None] + [weakref.ref(values)]
            return values

        return create_and_remember


def _find_per_worker_values(resources: Iterable[Any]) -> list[Any]:
    """Return the PerWorkerValues that contain one of these RemoteValues.

    `gc.get_objects` would be simpler, but it also refers to tuples that other threads are making. Python then raises
    SystemError in those threads.
    """
    tuples = [each for each in gc.get_referrers(*resources) if type(each) is tuple]
    owners = gc.get_referrers(*tuples)  # before Python 3.11, the dictionaries of their attributes
    owners += gc.get_referrers(*(each for each in owners if type(each) is dict))
    found = [each for each in owners if issubclass(type(each), tf.distribute.coordinator.PerWorkerValue)]
    return list({id(each): each for each in found}.values())


def _copy_to(resource: Any, worker: Any) -> Any:
    """Schedule the creation of a resource like `resource`, a RemoteValue, on `worker`. Return its RemoteValue."""
    original = resource._closure
    closure = type(original)(
        original._function, worker._cluster.resource_cancellation_mgr, original._args, original._kwargs
    )
    copied = worker._register_and_schedule_resource_closure(closure)
    copied._type_spec = resource._type_spec
    return copied
