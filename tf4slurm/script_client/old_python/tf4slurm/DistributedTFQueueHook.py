# ruff: noqa: N803, N999
"""The old hook and queues, for a Python that lacks tf4slurm, and TensorFlow 1.15 or 2.

The workers send their completion signals through the control service (`tf4slurm_client.signal_done`). At the end of
training each ps fills its own queue, for which its script waits. So a killed worker holds up no ps.
"""

import atexit
import contextlib
import functools
import gc
import sys
import warnings
from typing import Any, Callable, List, Optional, Sequence

import tensorflow.compat.v1 as tf
from tf4slurm_client import PlacementError, RendezvousError, barrier, current_server_dictionary, signal_done
from tf4slurm_sidecar import call_after_training

_MILLISECONDS = 5000  # an idle ps answers within milliseconds, and one that has exited never does
_START_SECONDS = 300.0


def create_done_queue(i: int, WorkersNumber: int) -> Any:
    """Add a queue to the current graph and return it: ps `i` receives one item for each worker."""
    if hasattr(gc, "freeze"):  # Python 3.7; it shortens the end of a process with TensorFlow
        atexit.register(gc.freeze)
    current = current_server_dictionary()
    if (current.task_type, current.task_index) == ("ps", i):
        address = current.cluster["ps"][i]
        call_after_training(functools.partial(_fill_done_queue, i, WorkersNumber, address))
    return _make_done_queue(i, WorkersNumber)


def create_done_queues(PSNumber: int, WorkersNumber: int) -> List[Any]:
    """Add the queue of each ps to the current graph. Return the queues."""
    return [_make_done_queue(index, WorkersNumber) for index in range(PSNumber)]


def _make_done_queue(index: int, capacity: int) -> Any:
    with tf.device(f"/job:ps/task:{index}"):
        return tf.FIFOQueue(capacity, tf.int32, shared_name=f"done_queue{index}")


def _fill_done_queue(index: int, capacity: int, address: str) -> None:
    """Put `capacity` items into the queue of this ps, or fewer if the queue is full or the server has ended."""
    config = tf.ConfigProto(device_filters=[f"/job:ps/task:{index}"], operation_timeout_in_ms=_MILLISECONDS)
    with tf.Graph().as_default(), contextlib.suppress(tf.errors.OpError):
        put = _make_done_queue(index, capacity).enqueue(1)
        with tf.Session(f"grpc://{address}", config=config) as session:
            for _ in range(capacity):
                session.run(put)


class QueueManagementHook(tf.train.SessionRunHook):  # type: ignore[misc]
    """Lets the workers start together, and each ps end when all have ended. Each worker's session has it."""

    def __init__(self, NumberOfPS: Optional[int] = None, NumberOfWorkers: Optional[int] = None) -> None:
        """Check that the numbers are those of the cluster."""
        self._current = current_server_dictionary()
        self._roles = sorted(set(self._current.cluster) - {"ps"})
        self._has_started = False
        self._is_done = False
        self._close_tokens: List[Any] = []
        given = (len(self._current.cluster.get("ps", ())), len(self._current.training_tasks))
        if NumberOfPS not in (None, given[0]) or NumberOfWorkers not in (None, given[1]):
            raise PlacementError(
                f"QueueManagementHook got {NumberOfPS} ps and {NumberOfWorkers} workers, but the cluster has "
                f"{given[0]} ps and {given[1]} workers. Pass the cluster's numbers."
            )

    def begin(self) -> None:
        """Let the workers wait for the chief's session. TensorFlow alone would check every 30 s."""
        if self._current.is_chief:
            self._close_tokens = _close_token_queues()
        elif not self._has_started:
            self._wait("tf4slurm-chief")

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Wait until all have a session: one without device_filters needs the servers of all. Do so once."""
        if not self._has_started:
            self._has_started = True
            if self._current.is_chief:
                self._wait("tf4slurm-chief")
            self._wait("tf4slurm-sessions")
        coord.join = functools.partial(self._close_and_join, session, coord.join)

    def end(self, session: Any) -> None:
        """Record that training ended without an error."""
        self._is_done = True

    def _wait(self, name: str) -> None:
        try:
            barrier(name, timeout_seconds=_START_SECONDS, roles=self._roles)
        except RendezvousError as error:  # a worker has failed, and the others go on
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _close_and_join(self, session: Any, join: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Close the session and join its threads. If training ended without an error, send the completion signal.

        With SyncReplicasOptimizer, the chief lets workers end that wait for a token. The session closes before the
        join, because with an open session a thread would wait for gradients that no worker sends.
        """
        recovers = isinstance(sys.exc_info()[1], (tf.errors.AbortedError, tf.errors.UnavailableError))
        for operation in [] if recovers else self._close_tokens:  # a recovery could not open a closed queue again
            with contextlib.suppress(tf.errors.OpError):  # the queue may be closed already, or the ps has exited
                session.run(operation, options=tf.RunOptions(timeout_in_ms=_MILLISECONDS))
        session.close()
        join(*arguments, **options)
        if self._is_done:
            signal_done()


def _close_token_queues() -> Sequence[Any]:
    """Return new operations that close SyncReplicasOptimizer's token queue."""
    close = []
    for operation in tf.get_default_graph().get_operations():
        if operation.type == "FIFOQueueV2" and operation.get_attr("shared_name") == b"sync_token_q":
            with tf.device(operation.device):
                close.append(tf.raw_ops.QueueCloseV2(handle=operation.outputs[0]))
    return close
