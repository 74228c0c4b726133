"""`PsQueue`: a TensorFlow queue on a ps, used from any process of the job.

A queue of a graph is reached by a graph session only; an eager operation on the same device has another one.
Read beside https://www.tensorflow.org/api_docs/python/tf/queue/FIFOQueue.
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

from tf4slurm.errors import ShutdownError

PUT_SECONDS = 5.0
"""How long a put may take. It takes milliseconds where the ps answers, and a ps that is gone never does."""

UNBOUNDED = -1
_CLOSE_SECONDS = 1.0
_WAKE_SECONDS = 1.0


class PsQueue:
    """A queue of whole numbers on a ps. Whoever names the same ps, name and capacity has the same queue.

    It is reached by sessions to the ps's own address that look at no other task, so the others may be gone.
    """

    def __init__(self, address: str, ps_index: int, name: str, capacity: int = UNBOUNDED) -> None:
        """Make no connection yet.

        Args:
            address: "host:port" of the ps.
            ps_index: Its index, as its server has it.
            name: The name by which the queue is shared.
            capacity: How many items it holds; all must give the same.
        """
        self._target = f"grpc://{address}"
        self._device = f"/job:ps/task:{ps_index}"
        self._graph = tf.Graph()
        with self._graph.as_default():
            queue = make_queue(ps_index, name, capacity)
            self._number = tf.compat.v1.placeholder(tf.int32, shape=())
            self._put = queue.enqueue(self._number)
            self._take = queue.dequeue()
            self._pass = queue.enqueue(queue.dequeue())

    def put(self, number: int, timeout_seconds: float = PUT_SECONDS) -> None:
        """Append a number. It starts no thread of Python, so it may be called while the interpreter exits.

        Raises:
            ShutdownError: The ps did not answer in time, or refused.
        """
        session = self._open(timeout_seconds)
        try:
            session.run(self._put, {self._number: number})
        except tf.errors.OpError as error:
            raise ShutdownError(
                f"{self._device} at {self._target} did not take the signal: {error.message}. Expected a running server "
                "there; look at the log of that ps."
            ) from error
        finally:
            _close(session)

    def take(self, timeout_seconds: float | None) -> int:
        """Wait for a number and remove it. Signals are served meanwhile.

        Raises:
            TimeoutError: None came within the time; None waits for ever.
            ShutdownError: The ps is gone.
        """
        return int(self._wait(self._take, timeout_seconds))

    def wait_until_filled(self, timeout_seconds: float | None) -> None:
        """Wait until there is a number, and leave one there. Signals are served meanwhile.

        Raises:
            TimeoutError: None came within the time.
            ShutdownError: The ps is gone.
        """
        self._wait(self._pass, timeout_seconds)

    def _open(self, timeout_seconds: float | None) -> tf.compat.v1.Session:
        timeout = 0 if timeout_seconds is None else max(1, int(timeout_seconds * 1000))  # 0 is none
        config = tf.compat.v1.ConfigProto(device_filters=[self._device], operation_timeout_in_ms=timeout)
        return tf.compat.v1.Session(self._target, graph=self._graph, config=config)

    def _wait(self, operation: Any, timeout_seconds: float | None) -> Any:
        """Run in a thread: a session that waits serves no signal, and TensorFlow's own timeout could lose an item."""
        session = self._open(None)
        result = _in_thread(lambda: session.run(operation))
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            # a signal that comes just before the main thread falls asleep is not served before it wakes up
            while not futures.wait([result], max(0.0, min(_WAKE_SECONDS, deadline - time.monotonic()))).done:
                if time.monotonic() >= deadline:
                    raise TimeoutError
            return result.result()
        except tf.errors.OpError as error:
            text = f"{self._device} at {self._target} ended the wait: {error.message}. Look at the log of that ps."
            raise ShutdownError(text) from error
        finally:  # a session that has not found its ps yet does not even close
            futures.wait([_in_thread(lambda: _close(session))], _CLOSE_SECONDS)


def make_queue(ps_index: int, name: str, capacity: int) -> tf.queue.FIFOQueue:
    """Add a queue that is shared by its name to the graph that is being built."""
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(capacity, tf.int32, shared_name=name)


def _close(session: tf.compat.v1.Session) -> None:
    with contextlib.suppress(tf.errors.OpError):  # the ps may be gone
        session.close()


def _in_thread(action: Callable[[], object]) -> futures.Future[object]:
    """Run in a thread that keeps no process from exiting, as those of an executor do."""
    result: futures.Future[object] = futures.Future()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as error:  # whoever waits for it must hear of it
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
