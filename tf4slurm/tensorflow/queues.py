"""TensorFlow queues on the ps, for completion signals and for the start barrier of training tasks.

Only graph sessions reach these queues; an eager operation on the same device uses a different queue. See
https://www.tensorflow.org/api_docs/python/tf/queue/FIFOQueue.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.completion_signal import CompletionSignal, get_completion_signal
from tf4slurm.errors import ShutdownError, ShutdownTimeoutError
from tf4slurm.script_channel import find_script_channel
from tf4slurm.server_dictionary import ServerDictionary

_PUT_SECONDS = 5.0  # a running ps answers within milliseconds; one that has exited never does
_UNBOUNDED = -1
_CLOSE_SECONDS = 1.0
_WAKE_SECONDS = 1.0
_REPLY_SECONDS = 0.2
"""Seconds that a ps keeps running after the last signal. If it exits at once, the sender often gets no reply (6 of 8
times) and waits 5 s. The reply takes 0.01 s."""

_start_barriers: dict[Task, StartBarrier] = {}


class PsQueue:
    """A queue of integers on a ps. Processes that use the same ps, name and capacity share the queue.

    Sessions connect to this ps only, so all other tasks may have exited. All methods raise ShutdownError if the ps is
    lost.
    """

    def __init__(self, address: str, ps_index: int, name: str, capacity: int = _UNBOUNDED) -> None:
        """Build the graph without connecting."""
        self._target = f"grpc://{address}"
        self._device = f"/job:ps/task:{ps_index}"
        self._graph = tf.Graph()
        with self._graph.as_default():
            queue = make_queue(ps_index, name, capacity)
            self._number = tf.compat.v1.placeholder(tf.int32, shape=())
            self._put = queue.enqueue(self._number)
            self._take = queue.dequeue()
            self._take_and_put_back = queue.enqueue(queue.dequeue())

    def put(self, number: int) -> None:
        """Append a number, within 5 s. No Python thread is started, so this works while the interpreter exits."""
        session = self._open(_PUT_SECONDS)
        try:
            session.run(self._put, {self._number: number})
        except tf.errors.OpError as error:
            raise ShutdownError(
                f"{self._device} at {self._target} did not receive the signal: {error.message}. Expected a running "
                "TensorFlow server there. See the log of that ps."
            ) from error
        finally:
            _close(session)

    def take(self, timeout_seconds: float | None) -> int:
        """Wait for a number and remove it, or raise TimeoutError; with None wait without a limit.

        Signal handlers run during the wait.
        """
        return int(self._wait(self._take, timeout_seconds))

    def wait_until_filled(self, timeout_seconds: float | None) -> None:
        """Wait for a number like `take`, but leave it in the queue."""
        self._wait(self._take_and_put_back, timeout_seconds)

    def _open(self, timeout_seconds: float | None) -> tf.compat.v1.Session:
        timeout = 0 if timeout_seconds is None else max(1, int(timeout_seconds * 1000))  # 0 means no timeout
        config = tf.compat.v1.ConfigProto(device_filters=[self._device], operation_timeout_in_ms=timeout)
        return tf.compat.v1.Session(self._target, graph=self._graph, config=config)

    def _wait(self, operation: Any, timeout_seconds: float | None) -> Any:
        """Run in a thread: a waiting session delays signal handlers, and TensorFlow's timeout may lose an item."""
        session = self._open(None)
        result = _in_thread(lambda: session.run(operation))
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            # a signal that arrives just before the main thread sleeps is handled only when the thread wakes
            while not futures.wait([result], max(0.0, min(_WAKE_SECONDS, deadline - time.monotonic()))).done:
                if time.monotonic() >= deadline:
                    raise TimeoutError
            return result.result()
        except tf.errors.OpError as error:
            text = f"Lost the connection to {self._device} at {self._target}: {error.message}. See the log of that ps."
            raise ShutdownError(text) from error
        finally:  # closing a session blocks until it is connected to its ps
            futures.wait([_in_thread(lambda: _close(session))], _CLOSE_SECONDS)


class DoneQueues:
    """The done queues of a cluster: one on each ps, with one number for each finished training task.

    The number is the task's 1-based position among the training tasks, negative if the task failed. Scripts that use
    the old `create_done_queue` expect these names and capacities.
    """

    def __init__(self, current: ServerDictionary) -> None:
        self._current = current
        self._queues = [
            PsQueue(address, index, done_queue_name(index), len(current.training_tasks))
            for index, address in enumerate(current.ps_addresses)
        ]

    def send(self, failed: bool) -> None:
        """Send this task's completion signal to every ps, then raise the first error, if any."""
        tasks = self._current.training_tasks
        if self._current.task not in tasks:  # an evaluator is outside the cluster, and no ps waits for it
            return
        number = tasks.index(self._current.task) + 1
        errors = []
        for queue in self._queues:
            try:
                queue.put(-number if failed else number)
            except ShutdownError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def receive(self, timeout_seconds: float | None) -> tuple[Task, bool]:
        """Wait on this ps for the next completion signal.

        Returns:
            The task that sent the signal, and whether the task reported a failure.

        Raises:
            TimeoutError: No signal came within `timeout_seconds`.
            ShutdownError: The sender has a different cluster spec.
        """
        tasks = self._current.training_tasks
        number = self._queues[self._current.task_index].take(timeout_seconds)
        if not 0 < abs(number) <= len(tasks):
            raise ShutdownError(
                f"The done queue holds {number}, but the cluster has {len(tasks)} training tasks. Give every process "
                "the same cluster."
            )
        return tasks[abs(number) - 1], number < 0


def wait_for_done_queue(current: ServerDictionary, timeout_seconds: float | None) -> set[Task]:
    """Wait on a ps until every training task has sent its completion signal; return the tasks that failed.

    Raises:
        ShutdownTimeoutError: Signals are missing at the timeout; a killed worker sends none.
    """
    queues = DoneQueues(current)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    has_failed: dict[Task, bool] = {}
    while missing := [task for task in current.training_tasks if task not in has_failed]:
        try:
            task, failed = queues.receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise ShutdownTimeoutError(
                f"{format_tasks(missing)} sent no completion signal within {timeout_seconds} s. See their logs, or "
                "raise timeout_seconds.",
                missing=[str(task) for task in missing],
            ) from None
        has_failed[task] = failed
    time.sleep(_REPLY_SECONDS)
    return {task for task, failed in has_failed.items() if failed}


def queue_completion_signal(current: ServerDictionary) -> CompletionSignal:
    """Return the completion signal of this process to the queues; hooks and `tf4slurm.shutdown` share it."""
    queues = DoneQueues(current)

    def send(failed: bool) -> None:
        try:
            queues.send(failed)
        finally:  # last: a ps that waits on the control service then exits without reading its queue
            channel = find_script_channel()
            if channel is not None:
                channel.send(completion="failed" if failed else "done")

    return get_completion_signal(f"queues of {current.task}", send)


class StartBarrier:
    """The barrier at which training tasks wait for the chief's session, and then for all tasks' sessions.

    Queues on ps 0 hold its state for the rest of the job, so a restarted task does not wait again.
    """

    def __init__(self, current: ServerDictionary) -> None:
        self._current = current
        address = current.ps_addresses[0]
        self._chief_arrived = PsQueue(address, 0, "tf4slurm_chief_arrived")
        self._arrivals = PsQueue(address, 0, "tf4slurm_arrivals")
        self._all_arrived = PsQueue(address, 0, "tf4slurm_all_arrived")
        self._missing = set(current.training_tasks) - {current.task}
        self._collector: threading.Thread | None = None

    @property
    def missing(self) -> tuple[Task, ...]:
        """The tasks that have not arrived; known in the chief only."""
        return tuple(task for task in self._current.training_tasks if task in self._missing)

    def arrive(self) -> None:
        """Register this task's session; the chief also starts a thread that counts the registrations of other tasks."""
        if not self._current.is_chief:
            self._arrivals.put(self._current.training_tasks.index(self._current.task))
            return
        self._chief_arrived.put(1)
        if self._collector is None:
            self._collector = threading.Thread(target=self._collect, daemon=True)
            self._collector.start()

    def wait_for_chief(self, timeout_seconds: float) -> None:
        """Wait until the chief has created its session and the variables, or raise TimeoutError."""
        if not self._current.is_chief:
            self._chief_arrived.wait_until_filled(timeout_seconds)

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Wait until all training tasks have a session, or raise TimeoutError."""
        self._all_arrived.wait_until_filled(timeout_seconds)

    def _collect(self) -> None:
        tasks = self._current.training_tasks
        try:
            while self._missing:
                self._missing.discard(tasks[self._arrivals.take(None)])
            self._all_arrived.put(1)
        except ShutdownError:  # the training session gets the same error and reports it
            pass


def get_start_barrier(current: ServerDictionary) -> StartBarrier:
    """Return the start barrier that all hooks of this process share."""
    return _start_barriers.setdefault(current.task, StartBarrier(current))


def make_queue(ps_index: int, name: str, capacity: int) -> tf.queue.FIFOQueue:
    """Add a queue with this shared name to the current graph."""
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(capacity, tf.int32, shared_name=name)


def done_queue_name(ps_index: int) -> str:
    """Return the shared name of the done queue on a ps."""
    return f"done_queue{ps_index}"


def _close(session: tf.compat.v1.Session) -> None:
    with contextlib.suppress(tf.errors.OpError):  # the ps may have exited
        session.close()


def _in_thread(action: Callable[[], object]) -> futures.Future[object]:
    """Run the action in a daemon thread; an executor's thread would keep the process from exiting."""
    result: futures.Future[object] = futures.Future()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as error:  # raised again by result.result()
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
