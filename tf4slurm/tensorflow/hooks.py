"""Hooks for MonitoredTrainingSession: `StartBarrierHook` starts all workers together, `DoneHook` lets the ps exit.

See https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/MonitoredTrainingSession.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.cluster import format_tasks
from tf4slurm.errors import RendezvousTimeoutError, ShutdownError
from tf4slurm.server_dictionary import ServerDictionary, current_server_dictionary
from tf4slurm.tensorflow.queues import get_start_barrier, queue_completion_signal

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 60.0
"""Seconds that a finished worker waits for others to create a session, which requires this worker."""

_CLOSE_MILLISECONDS = 5000
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.1


class _StartHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Delays each task's session until the chief has created the variables and every ps is connected.

    Otherwise MonitoredTrainingSession finds no variables, and checks again only after 30 s.
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str]] | None = None,
        task_type: str | None = None,
        task_index: int | None = None,
        *,
        start_timeout_seconds: float = 300.0,
    ) -> None:
        """Prepare the hook without connecting.

        Args:
            cluster: The addresses of each role. The last result of get_server_dictionary(), else TF_CONFIG, is the
                default of cluster, task_type and task_index.
            task_type: The role of this process.
            task_index: The index of this process in its role.
            start_timeout_seconds: Timeout in seconds for the other tasks (default 300).

        Raises:
            SlurmEnvironmentError: No cluster is given or found.
            ShutdownError: The cluster has no ps.
        """
        self._current = current_server_dictionary(cluster, task_type, task_index)
        if not self._current.ps_addresses:
            raise ShutdownError(f"The cluster {self._current.cluster} has no ps, but this hook needs one.")
        self._barrier = get_start_barrier(self._current)
        self._start_seconds = start_timeout_seconds
        self._set_up()

    def _set_up(self) -> None:
        """Initialize the attributes of a subclass."""

    def begin(self) -> None:
        """Wait for the chief's session and all ps; on timeout log a warning and continue."""
        try:
            self._barrier.wait_for_chief(self._start_seconds)
            _warm_up_connections(self._current, self._start_seconds)
        except TimeoutError:
            task, seconds = self._current.task, self._start_seconds
            logger.warning("%s: the chief, or a ps, did not answer within %g s", task, seconds)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Register this task at the start barrier."""
        self._barrier.arrive()


class DoneHook(_StartHook):
    """Sends this worker's completion signal to every ps after the worker's session is closed.

    Add the hook in every worker and the chief; each ps calls `tf4slurm.shutdown.wait_for_workers(method="queue")`. A
    worker that raises is reported as failed when its process exits. With SyncReplicasOptimizer, the chief's session
    closes at once, not after `stop_grace_period_secs`, and workers that wait for the chief's tokens end.
    """

    def _set_up(self) -> None:
        self._signal = queue_completion_signal(self._current)
        self._is_done = False
        self._close_tokens: list[Any] = []
        if self._current.task_type != "ps":
            self._signal.send_at_exit()

    def begin(self) -> None:
        """In the chief, find the token queue of SyncReplicasOptimizer. Then wait for the chief's session and all ps."""
        self._close_tokens = _close_token_queues() if self._current.is_chief else []
        super().begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Register at the start barrier, and arrange that the session closes before its threads are joined.

        `end` is too early to close the session, because later hooks may still use it.
        """
        super().after_create_session(session, coord)
        coord.join = functools.partial(self._close_and_join, session, coord.join)

    def end(self, session: Any) -> None:
        """Record that training ended without an error."""
        self._is_done = True

    def _close_and_join(self, session: Any, join: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Close the session, which cancels its pending operations, then join its threads.

        Otherwise TensorFlow waits 120 s for the chief's token thread, which waits for gradients that no worker sends.
        """
        if self._is_done:
            self._wait_for_all()
        recovers = isinstance(sys.exc_info()[1], (tf.errors.AbortedError, tf.errors.UnavailableError))
        for operation in [] if recovers else self._close_tokens:  # a closed queue cannot be opened again
            with contextlib.suppress(tf.errors.OpError):  # the queue may be closed already, or the ps has exited
                session.run(operation, options=tf.compat.v1.RunOptions(timeout_in_ms=_CLOSE_MILLISECONDS))
        session.close()
        join(*arguments, **options)
        if self._is_done:
            self._signal.send()

    def _wait_for_all(self) -> None:
        try:
            self._barrier.wait_for_all(_EXIT_SECONDS)
        except (TimeoutError, ShutdownError) as error:
            logger.warning("%s ends although not all workers have started: %r", self._current.task, error)


class StartBarrierHook(_StartHook):
    """Starts training once all training tasks have a session. Add it in every worker and the chief."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Wait at the start barrier; a restarted task passes at once.

        Raises:
            RendezvousTimeoutError: Not all tasks arrived within start_timeout_seconds.
        """
        super().after_create_session(session, coord)
        try:
            self._barrier.wait_for_all(self._start_seconds)
        except TimeoutError:
            missing = format_tasks(self._barrier.missing) if self._current.is_chief else "another worker"
            raise RendezvousTimeoutError(
                f"{missing} did not reach the start barrier within {self._start_seconds:g} s. See the logs, or raise "
                "start_timeout_seconds."
            ) from None


def _warm_up_connections(current: ServerDictionary, timeout_seconds: float) -> None:
    """Make every ps fetch a number from this task, and in the chief also from every ps; retry until all succeed.

    If a ps connects to a task whose server is not up yet, gRPC backs off, and later connections fail for seconds. The
    first training step then fails. With SyncReplicasOptimizer, the session ends without a step or an error: its
    recovery finds the token queue closed. The server of this task must be running. Raises TimeoutError.
    """
    this_task = f"/job:{current.task_type}/task:{current.task_index}"
    graph, fetches = _build_fetches(this_task, len(current.ps_addresses), current.is_chief)
    deadline = time.monotonic() + timeout_seconds
    milliseconds = int(1000 * min(_CONNECT_SECONDS, timeout_seconds))
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", this_task], operation_timeout_in_ms=milliseconds)
    target = f"grpc://{current.cluster[current.task_type][current.task_index]}"
    while True:
        try:
            with tf.compat.v1.Session(target, graph, config) as session:
                session.run(fetches)
            return
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError):
            if time.monotonic() >= deadline:
                raise TimeoutError from None
        time.sleep(_RETRY_SECONDS)


def _build_fetches(this_task: str, num_ps: int, is_chief: bool) -> tuple[tf.Graph, list[Any]]:
    """Build operations in which every ps uses a number from this task, and in the chief also from every ps."""
    every_ps = [f"/job:ps/task:{index}" for index in range(num_ps)]
    graph = tf.Graph()
    fetches = []
    with graph.as_default():
        for source in [this_task, *every_ps] if is_chief else [this_task]:
            with tf.device(source):
                number = tf.random.uniform(())  # TensorFlow would copy a constant to the ps
            for target in every_ps:
                with tf.device(target):
                    fetches.append(tf.negative(number))
    return graph, fetches


def _close_token_queues() -> list[Any]:
    """Add operations to the graph that close the token queue of SyncReplicasOptimizer, if any; return them.

    Workers then take the remaining tokens and get an end-of-input error instead of waiting forever.
    """
    close = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type == "FIFOQueueV2" and operation.get_attr("shared_name") == b"sync_token_q":
            with tf.device(operation.device):
                close.append(tf.raw_ops.QueueCloseV2(handle=operation.outputs[0]))
    return close
