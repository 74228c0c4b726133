"""Provide hooks for MonitoredTrainingSession.

`StartBarrierHook` lets training start when the chief and all workers have a session. `DoneHook` lets each ps exit after
training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.errors import RendezvousTimeoutError, ShutdownError
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.server_dictionary import ClusterAndTask, ServerDictionary, current_server_dictionary
from tf4slurm.tensorflow.legacy.queues import open_session, poll, queue_completion_signal, run_when_free

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 60.0  # a finished worker waits this long for the sessions of the others, which need its server
_CLOSE_MILLISECONDS = 5000
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.1


class _StartHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Delays each session until the chief has created the variables. TensorFlow alone would check every 30 s."""

    def __init__(self, cluster: ClusterAndTask | None = None, *, start_timeout_seconds: float = 300.0) -> None:
        """Prepare the hook without connecting.

        Args:
            cluster: As in `tf4slurm.shutdown.wait_for_workers`.
            start_timeout_seconds: Timeout in seconds for the other tasks (default 300).

        Raises:
            SlurmEnvironmentError: No cluster is given or found.
            ShutdownError: The cluster has no ps.
            ValueError: `cluster` is not a tuple of three.
        """
        self._current = current_server_dictionary(cluster)
        if not self._current.ps_addresses:
            raise ShutdownError(f"The cluster {self._current.cluster} has no ps, but this hook needs one.")
        self._start_seconds = start_timeout_seconds

    def begin(self) -> None:
        """Wait for the chief's session and all ps. After a timeout, log a warning and continue."""
        current, seconds = self._current, self._start_seconds
        has_chief = current.is_chief or not _wait_for_arrivals(current, current.training_tasks[:1], seconds)
        if not (has_chief and _warm_up_connections(current, seconds)):
            logger.warning("%s: the chief, or a ps, did not answer within %g s", current.task, seconds)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Record on ps 0 that this task has a session."""
        _arrive(self._current, self._start_seconds)


class DoneHook(_StartHook):
    """Sends this worker's completion signal to every ps after the worker's session is closed.

    Add the hook in every worker and the chief. Each ps calls `tf4slurm.shutdown.serve_until_done(server)`, with either
    `method`. A worker that raises an exception is reported as failed when its process exits.

    With SyncReplicasOptimizer, the chief's session closes without the wait of `stop_grace_period_secs`. Workers that
    wait for the optimizer's tokens then end.
    """

    def __init__(self, cluster: ClusterAndTask | None = None, *, start_timeout_seconds: float = 300.0) -> None:
        """Prepare the hook without connecting. Arguments and exceptions are those of `StartBarrierHook`."""
        super().__init__(cluster, start_timeout_seconds=start_timeout_seconds)
        self._signal = queue_completion_signal(self._current)
        self._is_done = False
        self._close_tokens: list[Any] = []
        if self._current.task_type != "ps":
            self._signal.send_at_exit()

    def begin(self) -> None:
        """Wait for the chief's session and all ps.

        The chief first creates the operations that close the token queue of SyncReplicasOptimizer, because TensorFlow
        finalizes the graph after this call.
        """
        self._close_tokens = _close_token_queues() if self._current.is_chief else []
        super().begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Record on ps 0 that this task has a session. Let `coord.join`, called after all hooks, close the session."""
        super().after_create_session(session, coord)
        coord.join = functools.partial(self._close_and_join, session, coord.join)

    def end(self, session: Any) -> None:
        """Record that training ended without an error."""
        self._is_done = True

    def _close_and_join(self, session: Any, join: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Close the session, join its threads and, if training ended without an error, send the completion signal.

        Without an error, first wait at most 60 s until all training tasks have had a session. The session closes before
        the join, because with an open session a thread would wait 120 s for gradients that no worker sends.
        """
        if self._is_done:
            self._wait_for_all()
        recovers = isinstance(sys.exc_info()[1], (tf.errors.AbortedError, tf.errors.UnavailableError))
        for operation in [] if recovers else self._close_tokens:  # a recovery could not open a closed queue again
            with contextlib.suppress(tf.errors.OpError):  # the queue may be closed already, or the ps has exited
                session.run(operation, options=tf.compat.v1.RunOptions(timeout_in_ms=_CLOSE_MILLISECONDS))
        session.close()
        join(*arguments, **options)
        if self._is_done:
            self._signal.send()

    def _wait_for_all(self) -> None:
        with contextlib.suppress(ShutdownError):  # the completion signal fails with the same error
            missing = _wait_for_arrivals(self._current, self._current.training_tasks, _EXIT_SECONDS)
            if missing:
                logger.warning("%s ends although %s did not start", self._current.task, format_tasks(missing))


class StartBarrierHook(_StartHook):
    """Starts training once all training tasks have a session. Add it in every worker and the chief."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Wait until all training tasks have a session. A restarted task does not wait if all had one before.

        Raises:
            RendezvousTimeoutError: A task failed without a session, or has none after `start_timeout_seconds`.
        """
        super().after_create_session(session, coord)
        missing = _wait_for_arrivals(self._current, self._current.training_tasks, self._start_seconds)
        if missing:
            raise RendezvousTimeoutError(
                f"{format_tasks(missing)} failed, or did not reach the start barrier within {self._start_seconds:g} s. "
                "See the logs, or raise start_timeout_seconds."
            )


# The start barrier


def _arrivals_table() -> tf.Tensor:
    """Add a table on ps 0 to the current graph. Return its handle.

    The table lists the training tasks that have ever created a session, by their positions in `training_tasks`.
    """
    with tf.device("/job:ps/task:0"):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name="tf4slurm_arrivals")


def _arrive(current: ServerDictionary, timeout_seconds: float) -> None:
    with tf.Graph().as_default():
        position = tf.constant([current.training_tasks.index(current.task)], tf.int64)
        insert = tf.raw_ops.LookupTableInsertV2(table_handle=_arrivals_table(), keys=position, values=position)
        with open_session(current, 0) as session:
            run_when_free(session, current.ps_addresses[0], insert, timeout_seconds)


def _wait_for_arrivals(current: ServerDictionary, tasks: Sequence[Task], timeout_seconds: float) -> tuple[Task, ...]:
    """Wait until each of these tasks has had a session or has failed. Return the tasks that have had no session.

    After `timeout_seconds`, return them without a further wait.
    """
    missing = tuple(tasks)
    channel = find_script_channel()
    with tf.Graph().as_default():
        table = tf.raw_ops.LookupTableExportV2(table_handle=_arrivals_table(), Tkeys=tf.int64, Tvalues=tf.int64)
        with open_session(current, 0) as session:
            deadline = time.monotonic() + timeout_seconds
            for positions in poll(session, current.ps_addresses[0], table.keys, deadline):
                arrived = [current.training_tasks[position] for position in positions]
                missing = tuple(task for task in tasks if task not in arrived)
                failed = () if channel is None else channel.desired.failed_tasks
                if all(str(task) in failed for task in missing):
                    break
    return missing


def _warm_up_connections(current: ServerDictionary, timeout_seconds: float) -> bool:
    """Let every ps fetch a number from this task. Return whether this succeeded before the timeout.

    The chief also lets every ps fetch a number from every ps. Without this, the first training step could fail: after a
    ps has tried to connect to a task whose server does not run yet, gRPC's later connections fail for seconds. With
    SyncReplicasOptimizer, the session would then end without an error, because its recovery finds the token queue
    closed.
    """
    this_task = f"/job:{current.task_type}/task:{current.task_index}"
    every_ps = [f"/job:ps/task:{index}" for index in range(len(current.ps_addresses))]
    fetches = []
    with tf.Graph().as_default() as graph:
        for source in [this_task, *every_ps] if current.is_chief else [this_task]:
            with tf.device(source):
                number = tf.random.uniform(())  # random, because TensorFlow would copy a constant to the ps
            for target in every_ps:
                with tf.device(target):
                    fetches.append(tf.negative(number))
    milliseconds = int(1000 * min(_CONNECT_SECONDS, timeout_seconds))
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", this_task], operation_timeout_in_ms=milliseconds)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with tf.compat.v1.Session(f"grpc://{current.address}", graph, config) as session:
                session.run(fetches)
            return True
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError):
            if time.monotonic() >= deadline:
                return False
        time.sleep(_RETRY_SECONDS)


def _close_token_queues() -> list[Any]:
    """Return new operations that close SyncReplicasOptimizer's token queue, so that no worker waits for a token."""
    close = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type == "FIFOQueueV2" and operation.get_attr("shared_name") == b"sync_token_q":
            with tf.device(operation.device):
                close.append(tf.raw_ops.QueueCloseV2(handle=operation.outputs[0]))
    return close
