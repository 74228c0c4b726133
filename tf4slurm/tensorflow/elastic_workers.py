"""`ElasticWorkers`: update the workers that a ClusterCoordinator uses, while they join, leave, fail and return.

It replaces the update thread of TensorFlow's failure handler, which connects to all workers at once. `ElasticWorkers`
connects to the workers that should be used and that answer. See `elastic` for TensorFlow's threads, the words for a
worker, and when `ElasticWorkers` begins.

All `Worker` objects remain in `cluster.workers`, whose positions are the workers' indices. The thread of a worker that
is not in use waits. `elastic_states` has the states of a worker, and the events that change them. The events are:

    fail         `_follow_failures`: TensorFlow has marked the worker as dead, because its closure failed
    release      `_reconcile`: the worker should not be used any more
                 `_disconnect`: the worker does not answer, or is removed from TensorFlow's ServerDef
    connect      `_reconcile`: the worker should be used, is out, and answers
    begin, end   `_ElasticWorker`: the worker's thread takes a closure, or is done with it
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import (
    PSUnavailableError,
    Worker,
    WorkerPreemptionHandler,
    _is_ps_failure,
)
from tensorflow.python.eager import context

from tf4slurm.cluster import Address
from tf4slurm.tensorflow.elastic_connections import (
    check_servers,
    end_rpcs,
    failing_fast,
    find_answering,
    lock_function_registration,
)
from tf4slurm.tensorflow.elastic_resources import PerWorkerResources, WorkerIndex
from tf4slurm.tensorflow.elastic_states import FINISHING, IDLE, RUNNING, WorkerStates

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5  # after a failed update; gRPC retries a failed connection after 1 s
_LOG_SECONDS = 30.0  # between two lines about failed updates
_MAX_ERROR_CHARACTERS = 300
_context_lock = threading.RLock()
"""Held while the workers in TensorFlow's context change, and while a function is registered on all workers.

The holder takes no other lock of this package.
"""


class ElasticWorkers:
    """The workers that a coordinator uses. `update` changes them.

    Attributes:
        unusable: By index, the error of each joined worker on which the first closure failed.
    """

    def __init__(
        self,
        coordinator: Any,
        cluster: Any,
        workers: Mapping[int, Address],
        ps: Mapping[int, Address],
        update_server_def: Callable[[Any], None],
    ) -> None:
        """Store the arguments, and let the objects of TensorFlow's coordinator call this one.

        A worker that is running a closure now has the state IDLE until its next closure. If it is released before, it
        is disconnected at once, without the wait for the end of its closure. The closure goes on, and its result is
        used. If the worker's server ends first, the closure runs again on another worker.

        Args:
            coordinator: The ClusterCoordinator.
            cluster: Its TensorFlow cluster, with Worker objects and the failure handler.
            workers: The workers to which TensorFlow is connected. If the first closure on one of them fails, the error
                is raised in the script. If it fails on a worker that joins later, that worker leaves.
            ps: The ps.
            update_server_def: Connects TensorFlow's context to the servers of a ServerDef.
        """
        self.unusable: dict[int, str] = {}
        self._cluster = cluster
        self._handler = cluster.failure_handler
        self._original = dict(workers)
        self._ps = ps
        self._connect = update_server_def
        self._server_def = self._handler._server_def
        self._connected = dict(workers)  # the workers in TensorFlow's ServerDef
        self._states = WorkerStates(workers)  # also workers that run a closure now count as idle until the next one
        self._leaving: set[int] = set()  # connected workers that should not be
        self._unproven: set[int] = set()  # workers that have joined and have completed no closure yet
        self._thread = threading.local()
        self._next_log = 0.0
        self._resources = PerWorkerResources(coordinator, cluster)
        lock_function_registration(context.context(), _context_lock)
        self._handler.elastic = self
        self._handler.__class__ = _ElasticHandler
        for worker in cluster.workers:
            worker.__class__ = _ElasticWorker

    @property
    def needed(self) -> set[int]:
        """The indices of the workers that must not exit yet.

        They are in use, or should leave and are still connected.
        """
        return self._states.find(IDLE, RUNNING) | self._leaving

    def update(self, workers: Mapping[int, Address]) -> None:
        """Use these workers if they answer, and no others. Call this regularly. It logs errors, and raises none."""
        for index in self.unusable.keys() - workers.keys():
            del self.unusable[index]
        try:
            self._follow_failures()
            self._reconcile({index: address for index, address in workers.items() if index not in self.unusable})
        except Exception as error:
            if _is_ps_failure(error):
                self._fail_closures(error)
            if time.monotonic() >= self._next_log:
                self._next_log = time.monotonic() + _LOG_SECONDS
                logger.warning("The workers could not be updated and will be again: %s", error)
            time.sleep(_RETRY_SECONDS)

    def stop(self) -> None:
        """End the wait of each thread whose worker is not in use, so that the thread can exit."""
        self._states.stop()

    # In the threads of workers

    def run_closure(self, worker: Any, closure: Any, run: Callable[[Any], None]) -> None:
        """Call `run(closure)` if the coordinator may use the worker now. Otherwise put the closure back into the queue.

        A worker that has failed, was released or is not connected may not be used. The worker's thread, which calls
        this method, then waits until the worker may be used again, or until `stop` is called. If the
        closure may use resources that a joined worker lacks, schedule their creation, and put the closure back, too.
        """
        with self._running(worker) as may_run:
            if not may_run or self._resources.create_missing(closure):
                # if resources were missing, the worker's thread takes their closures first
                self._cluster.closure_queue.put_back(closure)
                return
            run(closure)
            if worker.worker_index in self._states.find(IDLE, RUNNING):
                self._unproven.discard(worker.worker_index)

    def run_resource_closure(self, worker: Any, closure: Any, run: Callable[[Any], None]) -> None:
        """Call `run(closure)`, which creates a resource. If the worker is not in use, drop the closure and wait.

        The worker's thread calls this method. The wait ends when the worker is in use again, or after `stop`. If it is
        in use, `_ElasticWorker.connect` has scheduled the closure once more.
        """
        with self._running(worker) as may_run:
            if may_run:
                run(closure)

    @contextlib.contextmanager
    def _running(self, worker: Any) -> Iterator[bool]:
        """Note that the worker's thread has taken a closure. Yield whether the thread may run it in the `with` block.

        If it may not, wait at the end of the block until the worker is in use again, or `stop` is called.
        """
        index = self._thread.index = worker.worker_index
        may_run = self._states.begin(index)
        try:
            yield may_run
        finally:
            if may_run:
                self._states.change("end", [index])
            else:
                self._states.wait_until_used(index)

    def wait_until_used(self, worker: Any) -> None:
        """Wait until a failed worker is in use again, or `stop` is called."""
        self._states.wait_until_used(worker.worker_index)

    def is_fault_of_worker(self, error: Exception) -> bool:
        """Return whether `error` is that of the first closure on a joined worker. If so, add it to `unusable`.

        Other workers have run the same functions, so this worker may lack the data or a package. It leaves, and the
        closure runs again. For the error of a lost ps or of a cancelled closure, return False.
        """
        index = getattr(self._thread, "index", None)  # None in a closure that began before this object was made
        is_cancelled = self._cluster.closure_queue._cancellation_mgr.is_cancelled
        if index is None or index not in self._unproven or _is_ps_failure(error) or is_cancelled:
            return False
        text = str(getattr(error, "original_exception", error)).partition("\n")[0]
        self.unusable[index] = f"{type(error).__name__}: {text[:_MAX_ERROR_CHARACTERS]}"
        return True

    # In the thread that calls `update`

    def _follow_failures(self) -> None:
        """Set the state of workers that TensorFlow has marked as dead to OUT. Notify their threads.

        The thread of such a worker waits in TensorFlow's `wait_on_failure`. What it does next depends on the closure
        that failed:

        * The closure began after the workers became elastic: the thread calls `_ElasticWorker._on_worker_recovery`,
          which waits until the worker is in use.
        * The closure began before: the thread calls TensorFlow's `Worker._on_worker_recovery`, which removes the mark,
          and schedules the worker's resources too early. The thread then takes a closure, and waits in `_running`. When
          the worker is connected, `_ElasticWorker.connect` schedules the resources again.
        """
        with self._handler._cluster_update_lock:
            dead = {worker.worker_index: worker._is_dead_with_error for worker in self._cluster.workers}
            failed = [index for index, error in dead.items() if error and not isinstance(error, _DisconnectedError)]
            self._states.change("fail", failed)
            self._handler._worker_up_cond.notify_all()

    def _reconcile(self, wanted: Mapping[int, Address]) -> None:
        """Connect the workers in `wanted` that are out and answer. Release those that are not there, or have moved.

        A worker has moved if its address in `wanted` is not the connected one. A released worker is disconnected when
        it runs no closure any more. If it does not answer, its closure is ended.
        """
        leaving = {index for index, address in self._connected.items() if wanted.get(index) != address}
        self._leaving = leaving
        self._states.change("release", leaving)
        finishing = {index: self._connected[index] for index in leaving & self._states.find(FINISHING)}
        end_rpcs(finishing, find_answering(finishing))
        busy = self._states.find(IDLE, RUNNING, FINISHING)
        joining = find_answering({index: wanted[index] for index in wanted.keys() - busy})
        if joining or leaving - busy:
            self._reconnect(joining, {index: self._connected[index] for index in self._connected.keys() & busy})
            self._leaving = leaving & busy
        elif not busy:
            self._check_ps()  # no closure can find out

    def _reconnect(self, joining: Mapping[int, Address], kept: Mapping[int, Address]) -> None:
        """Connect TensorFlow to the workers in `joining`, and to those in `kept` that answer, but to no others."""
        alive = find_answering(kept)
        for index in kept.keys() - alive.keys():
            logger.warning("worker/%d at %s does not answer and is left out", index, kept[index])
        end_rpcs(kept, alive)
        dropped = self._disconnect(self._connected.keys() - alive.keys())
        self._check_ps()
        workers = {**alive, **joining}
        self._connect_to(workers)
        del dropped
        self._connected = workers
        self._add(joining)

    def _connect_to(self, workers: Mapping[int, Address]) -> None:
        """Connect TensorFlow to these workers and to all ps, but to no other workers.

        The call holds `_context_lock`, and returns when all these servers have answered. If a worker does not answer,
        its RPC fails after some seconds (`failing_fast`). But RPCs to a ps have no deadline. Until a silent ps answers,
        or its process ends, no worker joins or leaves, and threads that trace a function wait for the lock. Under an
        agent, this takes about `--heartbeat-timeout` (10 s) at most: then the ps counts as failed.
        """
        server_def = copy.deepcopy(self._server_def)
        (job,) = (job for job in server_def.cluster.job if job.name == "worker")
        job.tasks.clear()
        job.tasks.update({index: str(address) for index, address in workers.items()})
        started = time.monotonic()
        with failing_fast({*self._connected.values(), *workers.values()}), _context_lock:
            self._connect(server_def)
        logger.info("connected to workers %s in %.3f s", sorted(workers), time.monotonic() - started)

    def _disconnect(self, indices: Collection[int]) -> list[Any]:
        """Release these workers, and mark their resources as lost. Return the values of these resources.

        The caller keeps the values until `_connect_to` has disconnected the workers. If Python deleted them earlier,
        TensorFlow would delete them on the workers, too. `_connect_to`, which blocks all functions, would wait for
        that: a dataset's iterator takes up to 20 s.
        """
        self._states.change("release", indices)
        return [self._cluster.workers[index].disconnect() for index in indices]

    def _add(self, indices: Collection[int]) -> None:
        """Let these workers, to which TensorFlow is connected now, run closures.

        Create the Worker objects of new indices first.
        """
        workers = self._cluster.workers
        while len(workers) <= max(indices, default=-1):
            name = f"/job:worker/replica:0/task:{len(workers)}"
            workers.append(_ElasticWorker(WorkerIndex(len(workers)), name, self._cluster))
            workers[-1].disconnect()
        self._unproven |= set(indices) - self._original.keys()
        with self._states.unchanged:  # a worker's thread that takes its first closure now waits in `begin`
            for index in indices:
                workers[index].connect()
            self._states.change("connect", indices)

    def _check_ps(self) -> None:
        """Raise PSUnavailableError if a ps is lost. A ps that is only silent raises no error.

        Call this before `_connect_to`, which would remove the devices of the lost ps, and so change the errors of later
        operations. Module `elastic` says when a ps is lost.
        """
        lost = [index for index, answer in check_servers(self._ps).items() if answer is None]
        if lost:
            text = f"ps/{lost[0]} at {self._ps[lost[0]]} does not answer."
            raise PSUnavailableError(tf.errors.UnavailableError(None, None, text))

    def _fail_closures(self, error: Exception) -> None:
        """Take all closures from the queue, and let them fail with `error`.

        When a ps is lost, there may be no worker's thread left to run them.
        """
        queue = self._cluster.closure_queue
        while (closure := queue.get(timeout=0.0)) is not None:
            closure.maybe_call_with_output_remote_value(lambda value: value._set_error(error))
            queue.mark_failed(error)


class _DisconnectedError(tf.errors.UnavailableError):  # type: ignore[misc]
    """The error of a worker that `ElasticWorkers` has disconnected, although no closure has failed on it.

    As `_is_dead_with_error` of the worker, it marks the worker as dead for TensorFlow.
    """


class _ElasticHandler(WorkerPreemptionHandler):  # type: ignore[misc]
    """The class of TensorFlow's failure handler after the workers have become elastic.

    Attributes:
        elastic: The ElasticWorkers object, which updates the workers in place of TensorFlow's update thread.
    """

    elastic: ElasticWorkers

    def _validate_preemption_failure(self, e: Exception) -> None:
        """Raise `e`, unless it is the error of a failed worker.

        A joined worker on which the first closure fails is treated as a failed worker (`is_fault_of_worker`).
        """
        try:
            super()._validate_preemption_failure(e)
        except Exception:
            if not self.elastic.is_fault_of_worker(e):
                raise

    def stop(self) -> None:
        super().stop()
        self.elastic.stop()


class _ElasticWorker(Worker):  # type: ignore[misc]
    """A Worker of TensorFlow that runs closures only while it is in use.

    Its thread calls all methods but `connect` and `disconnect`.
    """

    _is_dead_with_error: Exception | bool | None

    def _process_closure(self, closure: Any) -> None:
        self.failure_handler.elastic.run_closure(self, closure, super()._process_closure)

    def _process_resource_closure(self, closure: Any) -> None:
        self.failure_handler.elastic.run_resource_closure(self, closure, super()._process_resource_closure)

    def _on_worker_recovery(self) -> None:
        """Wait until this worker, which has failed, is in use again, or the cluster is stopped.

        Unlike TensorFlow's method, create no resources: `connect` does.
        """
        self.failure_handler.elastic.wait_until_used(self)

    def connect(self) -> None:
        """Unmark this worker as dead, and schedule the creation of its resources.

        Call this after TensorFlow has connected to the worker.
        """
        super()._on_worker_recovery()

    def disconnect(self) -> list[Any]:
        """Mark this worker as dead, and its resources as lost. Create no more resources on it.

        Return the values of its resources. `ElasticWorkers._disconnect` says how long the caller keeps them.
        """
        error = _DisconnectedError(None, None, f"{self.device_name} is not connected.")
        queue = self._cluster.closure_queue
        with self._resource_tracking_lock:
            self._is_dead_with_error = self._is_dead_with_error or error
            with queue._queue_lock:
                queue.clear_tag_unlocked(self.worker_index)
            resources = [resource._values for each in self._resource_remote_value_refs if (resource := each())]
            self._set_resources_aborted(error)
        return resources
