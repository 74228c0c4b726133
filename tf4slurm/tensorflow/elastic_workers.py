"""`ElasticWorkers`: the workers that a ClusterCoordinator uses, while they join, leave, fail and return.

TensorFlow has no public function for this. Its coordinator has a thread per worker, which takes closures from a queue,
and a failure handler, in which the thread of a failed worker waits. TensorFlow's handler connects to all workers again
at once, so it waits until all lost workers are back. This one connects to those that answer.

All `Worker` objects remain in `cluster.workers`, whose positions are the workers' indices. The thread of a worker that
is not in use waits, as that of a failed worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from tf4slurm.network.reachability import is_answering
from tf4slurm.scripts.channel import ScriptChannel

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
_RETRY_SECONDS = 0.5  # after a failed update; gRPC opens a connection that failed again after 1 s
_LOG_SECONDS = 30.0  # between two lines about failed updates
_MAX_ERROR_CHARACTERS = 300
_MAX_UNUSABLE = 50  # in one message
_FAIL_FAST = "GRPC_FAIL_FAST"  # TensorFlow reads it at each RPC
_NOT_PARSED = "Unable to parse request"
_MAX_NOT_PARSED = 5  # in a row on a worker; a request that is really invalid fails each time
_context_lock = threading.RLock()
"""Held while the workers in TensorFlow's context change, and while a function is registered on all workers.

Else the registration may fail: "Client for target … not found". The holder takes no other lock of this package.
"""


class ElasticWorkers(WorkerPreemptionHandler):  # type: ignore[misc]
    """Replaces the failure handler of a coordinator, and connects to the workers that should be used and answer."""

    def __init__(self, coordinator: Any, cluster: Mapping[str, Sequence[str]], channel: ScriptChannel | None) -> None:
        """Replace the failure handler; the arguments are those of `make_elastic`."""
        self._cluster = coordinator._cluster
        self._original = _parse(enumerate(cluster["worker"]))
        self._ps = _parse(enumerate(cluster["ps"]))
        self._channel = channel
        self._server_def = context.get_server_def()
        self._connected = dict(self._original)  # the workers in TensorFlow's server_def
        self._changed = threading.Condition()
        self._used = set(self._original)  # the connected workers that may run closures
        self._running: set[int] = set()  # the workers that run a closure
        self._unproven: set[int] = set()  # workers that have joined and have completed no closure yet
        self._unusable: dict[int, str] = {}  # the error of the first closure on a worker that has joined
        self._reported: dict[str, object] = {}
        self._leaving: set[int] = set()  # connected workers that should not be
        self._next_log = 0.0
        self._is_stopped = False
        self._resources: list[weakref.ref[Any]] = []  # which functions, also of later resources, may capture
        self._completing = threading.Lock()
        self._thread = threading.local()
        # what the inherited wait_on_failure uses; the constructor of the base class would start a thread
        self._cluster_update_lock = contextlib.nullcontext()
        self._cluster_due_for_update_or_finish = threading.Event()
        self._worker_up_cond = self
        self._error_from_recovery = None
        self._should_preemption_thread_run = True
        self._replace(coordinator)

    def start(self) -> None:
        """Report the workers in use, and follow changes in a thread."""
        self._report()
        threading.Thread(target=self._run, name="tf4slurm-workers", daemon=True).start()

    def stop(self) -> None:
        """End the thread; called by TensorFlow's cluster."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def process(self, worker: Any, closure: Any, process: Callable[[Any], None], is_resource: bool) -> None:
        """Run a closure in the thread of a worker, or wait until the worker is in use."""
        index = worker.worker_index
        with self._changed:
            is_used = index in self._used
            if is_used:
                self._running.add(index)
        if not is_used:
            if not is_resource:  # resources are created again when the worker is used
                self._cluster.closure_queue.put_back(closure)
            self._wait_until_used(index)
            return
        self._thread.index = index
        try:
            if not is_resource and self._complete(closure):
                self._cluster.closure_queue.put_back(closure)  # this thread first takes the closures of its resources
            else:
                process(closure)
                with self._changed:
                    if not is_resource and index in self._used:
                        self._unproven.discard(index)
        finally:
            self._end_closure(index)

    def wait(self, _timeout_seconds: float) -> None:
        """Wait in the thread of a failed worker until it is in use; called by the inherited wait_on_failure."""
        index = self._thread.index
        with self._changed:
            self._used.discard(index)
        self._end_closure(index)
        self._wait_until_used(index)

    @contextlib.contextmanager
    def wait_on_failure(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Handle errors as TensorFlow does; run a closure again whose request the worker could not parse.

        While one thread sends the request of a function, another may instantiate a function for the first time; the
        vector that both use then moves in memory, and the request has arbitrary bytes as its device
        (EagerClusterFunctionLibraryRuntime::Run, TensorFlow 2.21). TensorFlow runs a closure again after a
        CancelledError.
        """
        with super().wait_on_failure(*args, **kwargs):
            count, self._thread.not_parsed = getattr(self._thread, "not_parsed", 0), 0
            try:
                yield
            except tf.errors.InternalError as error:
                if _NOT_PARSED not in str(error) or count >= _MAX_NOT_PARSED:
                    raise
                self._thread.not_parsed = count + 1
                raise tf.errors.CancelledError(error.node_def, error.op, error.message) from error

    def _validate_preemption_failure(self, e: Exception) -> None:
        """Raise an error of the script; an error of the first closure on a worker that has joined is the worker's."""
        try:
            super()._validate_preemption_failure(e)
        except Exception:
            index = self._thread.index
            if (
                index not in self._unproven
                or _is_ps_failure(e)
                or self._cluster.closure_queue._cancellation_mgr.is_cancelled
            ):
                raise
            text = str(getattr(e, "original_exception", e)).partition("\n")[0]
            with self._changed:
                self._unusable[index] = f"{type(e).__name__}: {text[:_MAX_ERROR_CHARACTERS]}"

    def _replace(self, coordinator: Any) -> None:
        """Replace the failure handler and the class of each worker, and remember the resources on workers."""
        replaced, self._cluster.failure_handler = self._cluster.failure_handler, self
        for worker in self._cluster.workers:
            worker.failure_handler = self
            worker.__class__ = _ElasticWorker
            worker.worker_index = _WorkerIndex(worker.worker_index)
        replaced.stop()
        for name in ("_create_per_worker_resources", "_create_per_worker_variables"):
            setattr(coordinator, name, self._remember(getattr(coordinator, name)))
        tensorflow = context.context()
        for name in ("add_c_function", "add_function_def"):
            setattr(tensorflow, name, _lock_context(getattr(tensorflow, name)))

    def _remember(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def create_and_remember(*args: Any, **kwargs: Any) -> Any:
            values = create(*args, **kwargs)
            with self._completing:
                self._resources = [each for each in self._resources if each() is not None] + [weakref.ref(values)]
            return values

        return create_and_remember

    def _complete(self, closure: Any) -> bool:
        """Create the closure's resources on workers that have joined since; return whether any was missing."""
        workers = tuple(self._cluster.workers)
        is_incomplete = False
        with self._completing:
            captured = (each() for each in self._resources)
            for values in (*captured, *tf.nest.flatten((closure._args, closure._kwargs))):
                if isinstance(values, tf.distribute.coordinator.PerWorkerValue) and len(values._values) < len(workers):
                    is_incomplete = True
                    first = values._values[0]
                    values._values += tuple(_copy_to(first, worker) for worker in workers[len(values._values) :])
        return is_incomplete

    def _wait_until_used(self, index: int) -> None:
        """Wait until the worker is in use, or the cluster is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._used or self._is_stopped)

    def _end_closure(self, index: int) -> None:
        with self._changed:
            self._running.discard(index)
            if index not in self._used:
                self._changed.notify_all()

    def _run(self) -> None:
        """Connect to the workers that should be used, until the cluster is stopped."""
        while not self._is_stopped and threading.main_thread().is_alive():
            try:
                self._reconcile()
            except Exception as error:
                if _is_ps_failure(error):
                    self._fail(error)
                if time.monotonic() >= self._next_log:
                    self._next_log = time.monotonic() + _LOG_SECONDS
                    logger.warning("The workers could not be updated and will be again: %s", error)
                time.sleep(_RETRY_SECONDS)
            self._report()
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def _report(self) -> None:
        with self._changed:
            used = tuple(sorted(self._used | self._leaving))
            unusable = tuple(self._unusable.items())[:_MAX_UNUSABLE]  # others follow when these have left
            changes: dict[str, object] = {"workers": used, "unusable_workers": unusable}
        if self._channel is not None and changes != self._reported:
            self._reported = changes
            self._channel.send(**changes)

    def _reconcile(self) -> None:
        """Disconnect workers that should not be used, and connect those that should and answer."""
        wanted = self._wanted()
        with self._changed:
            leaving = {index for index, address in self._connected.items() if wanted.get(index) != address}
            self._leaving = leaving
            self._used -= leaving
            running, used = set(self._running), set(self._used)
        finishing = {index: self._connected[index] for index in leaving & running}
        _end_closures(finishing, _find_answering(finishing))
        joining = _find_answering({i: wanted[i] for i in wanted.keys() - used - running})
        if not joining and not leaving - running:
            if not used | running:
                self._check_ps()  # no closure can find out
            return
        kept = {index: address for index, address in self._connected.items() if index in used | running}
        alive = _find_answering(kept)
        for index in kept.keys() - alive.keys():
            logger.warning("worker/%d at %s does not answer and is left out", index, kept[index])
        _end_closures(kept, alive)
        dropped = self._drop(self._connected.keys() - alive.keys())
        addresses = alive | joining
        self._check_ps()
        self._update(addresses)
        del dropped
        with self._changed:
            self._connected = addresses
            self._leaving = leaving & running
        self._add(joining)

    def _wanted(self) -> dict[int, Address]:
        workers = _parse(self._channel.desired.workers if self._channel is not None else ()) or self._original
        with self._changed:
            self._unusable = {index: error for index, error in self._unusable.items() if index in workers}
        return {index: address for index, address in workers.items() if index not in self._unusable}

    def _drop(self, indices: Collection[int]) -> list[Any]:
        """Use these workers no more; return their resources, which are lost.

        Keep them until an update has disconnected the workers. Earlier, TensorFlow would delete the resources on the
        workers, and the update, which blocks all functions, would wait: a dataset's iterator takes up to 20 s.
        """
        with self._changed:
            self._used -= set(indices)
        return [self._cluster.workers[index].disconnect() for index in indices]

    def _add(self, indices: Collection[int]) -> None:
        """Use these connected workers."""
        workers = self._cluster.workers
        while len(workers) <= max(indices, default=-1):
            worker = _ElasticWorker(
                _WorkerIndex(len(workers)), f"/job:worker/replica:0/task:{len(workers)}", self._cluster
            )
            worker.disconnect()
            workers.append(worker)
        for index in indices:
            workers[index]._on_worker_recovery()
        with self._changed:
            self._used |= set(indices)
            self._unproven |= set(indices) - self._original.keys()
            self._changed.notify_all()

    def _update(self, workers: Mapping[int, Address]) -> None:
        """Let TensorFlow connect to these workers."""
        server_def = copy.deepcopy(self._server_def)
        (job,) = (job for job in server_def.cluster.job if job.name == "worker")
        job.tasks.clear()
        job.tasks.update({index: str(address) for index, address in workers.items()})
        before = os.environ[_FAIL_FAST]
        os.environ[_FAIL_FAST] = "true"  # else the update would wait for a worker that fails now
        started = time.monotonic()
        try:
            with _not_waiting_for({*self._connected.values(), *workers.values()}), _context_lock:
                context.context().update_server_def(server_def)
        finally:
            os.environ[_FAIL_FAST] = before
        logger.info("connected to workers %s in %.3f s", sorted(workers), time.monotonic() - started)

    def _check_ps(self) -> None:
        """Raise PSUnavailableError if a ps is lost: an update would remove its devices, and so change later errors."""
        lost = [index for index, answer in _check(self._ps).items() if answer is None]
        if lost:
            text = f"ps/{lost[0]} at {self._ps[lost[0]]} does not answer."
            raise PSUnavailableError(tf.errors.UnavailableError(None, None, text))

    def _fail(self, error: Exception) -> None:
        """Let the queued closures and the coordinator's next function fail: all workers may wait to be connected."""
        queue = self._cluster.closure_queue
        with queue._queue_lock:
            while not queue._queue.empty():
                closure = queue._queue.get(block=False)
                queue._queue_free_slot_condition.notify()
                closure.maybe_call_with_output_remote_value(lambda value: value._set_error(error))
            queue._error = queue._error or error
            queue._stop_waiting_condition.notify_all()


class _WorkerIndex(int):
    """The index of a worker; as a tensor, which functions may capture, it is in the chief.

    TensorFlow would create the tensor on the worker while it holds the GIL: a stopped worker would stop this process.
    """

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
            return tf.constant(int(self), dtype, name=name or "index")


class _ElasticWorker(Worker):  # type: ignore[misc]
    """A worker that may be out of use."""

    def _process_closure(self, closure: Any) -> None:
        self.failure_handler.process(self, closure, super()._process_closure, is_resource=False)

    def _process_resource_closure(self, closure: Any) -> None:
        self.failure_handler.process(self, closure, super()._process_resource_closure, is_resource=True)

    def _on_worker_recovery(self) -> None:
        """Create the resources; TensorFlow calls this again in the thread of a failed worker."""
        if self._is_dead_with_error:
            super()._on_worker_recovery()

    def disconnect(self) -> list[Any]:
        """Mark all resources as lost, as after a failure; return them."""
        error = tf.errors.UnavailableError(None, None, f"{self.device_name} is not connected.")
        queue = self._cluster.closure_queue
        with self._resource_tracking_lock:
            self._is_dead_with_error = error
            with queue._queue_lock:
                queue.clear_tag_unlocked(self.worker_index)
            resources = [resource._values for each in self._resource_remote_value_refs if (resource := each())]
            self._set_resources_aborted(error)
        return resources


def _lock_context(register: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return TensorFlow's function that registers a function on all workers, so that it waits for an update to end.

    All tracing comes here: of closures, datasets, `evaluate`, saves and the script. TensorFlow first lists the workers,
    and then looks each up (EagerContext::MaybeRegisterFunctionRemotely). It would fail if one leaves in between.
    """

    def register_locked(function: Any) -> None:
        with _context_lock:
            register(function)

    return register_locked


def _copy_to(resource: Any, worker: Any) -> Any:
    """Create the same resource on another worker."""
    original = resource._closure
    closure = type(original)(
        original._function, worker._cluster.resource_cancellation_mgr, original._args, original._kwargs
    )
    copied = worker._register_and_schedule_resource_closure(closure)
    copied._type_spec = resource._type_spec
    return copied


def _parse(texts: Iterable[tuple[int, str]]) -> dict[int, Address]:
    return {index: Address.from_text(text) for index, text in texts}


def _find_answering(servers: Mapping[int, Address]) -> dict[int, Address]:
    """Return the servers that answer."""
    return {index: servers[index] for index, answer in _check(servers).items() if answer}


def _check(servers: Mapping[int, Address]) -> dict[int, bool | None]:
    """Return the results of `is_answering`."""

    async def check() -> list[bool | None]:
        return await asyncio.gather(*(is_answering(address, _ANSWER_SECONDS) for address in servers.values()))

    return dict(zip(servers, asyncio.run(check()) if servers else (), strict=True))


@contextlib.contextmanager
def _not_waiting_for(addresses: Collection[Address]) -> Iterator[None]:
    """Let RPCs to servers that stop answering fail while the block runs."""
    is_over = threading.Event()
    servers = dict(enumerate(addresses))

    def watch() -> None:
        while not is_over.wait(1.0):
            _end_closures(servers, _find_answering(servers))

    threading.Thread(target=watch, name="tf4slurm-workers-update", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _end_closures(servers: Mapping[int, Address], alive: Collection[int]) -> None:
    """Let the RPCs to the other servers fail, and so the closures that run on them."""
    shut_down_connections({address for index, address in servers.items() if index not in alive})


def shut_down_connections(addresses: Collection[Address]) -> None:
    """Shut down this process's TCP connections to these addresses, so that the RPCs over them fail."""
    peers = set()
    for address in addresses:
        with contextlib.suppress(socket.gaierror):
            peers |= {found[4][:2] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}
    for name in os.listdir("/proc/self/fd") if peers else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            duplicate = os.dup(int(name))
            if not os.readlink(f"/proc/self/fd/{duplicate}").startswith("socket:"):
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = connection.getpeername()[:2]
                    if (host.removeprefix("::ffff:"), port) in peers:
                        connection.shutdown(socket.SHUT_RDWR)
