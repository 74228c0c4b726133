"""Hooks for MonitoredTrainingSession: `DoneHook` lets the ps leave, `StartBarrierHook` lets all workers start together.

Read beside https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/MonitoredTrainingSession.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.cluster import format_tasks
from tf4slurm.errors import RendezvousTimeoutError, ShutdownError
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.done import done_word
from tf4slurm.tensorflow.muster import own_muster
from tf4slurm.tensorflow.paths import prove_paths

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 60.0
"""How long a worker that is done stays for one that has no session yet, and would never get one without it."""

_CLOSE_MILLISECONDS = 5000


class _MusterHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """What both hooks do: nobody asks for a session before the leader has made the variables and every ps is connected.

    MonitoredTrainingSession would look, not find them, and look again 30 s later.
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str]] | None = None,
        task_type: str | None = None,
        task_index: int | None = None,
        *,
        start_timeout_seconds: float = 300.0,
    ) -> None:
        """Make no connection yet.

        Args:
            cluster: The addresses of each role. By default what get_server_dictionary() returned in this process, else
                what TF_CONFIG says; the same goes for the next two.
            task_type: The role of this process.
            task_index: Its index in its role.
            start_timeout_seconds: How long to wait for the others.

        Raises:
            SlurmEnvironmentError: No cluster is given or known.
            ShutdownError: The cluster has no ps.
        """
        self._own = current_server_dictionary(cluster, task_type, task_index)
        if not self._own.ps_addresses:
            raise ShutdownError(f"The cluster {self._own.cluster} has no ps: this hook is for jobs that have one.")
        self._muster = own_muster(self._own)
        self._start_seconds = start_timeout_seconds

    def begin(self) -> None:
        """Wait for the leader's session and all ps; after the timeout let TensorFlow wait in its own way."""
        try:
            self._muster.wait_for_leader(self._start_seconds)
            prove_paths(self._own, self._start_seconds)
        except TimeoutError:
            logger.warning("%s: no leader, or not every ps, in %g s", self._own.task, self._start_seconds)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Arrive."""
        self._muster.arrive()


class DoneHook(_MusterHook):
    """Tells every ps that this worker is done, when its session is closed and it needs the ps no more.

    For every worker and the chief. A worker that raises tells that it failed, when the process exits. The session of a
    chief with SyncReplicasOptimizer closes at once, in place of after `stop_grace_period_secs`, and workers that wait
    for its tokens end. A ps waits with `tf4slurm.shutdown.wait_for_workers(method="queue")`.
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str]] | None = None,
        task_type: str | None = None,
        task_index: int | None = None,
        *,
        start_timeout_seconds: float = 300.0,
    ) -> None:
        """Make no connection yet, but signal when the process exits. The arguments are those of all hooks here."""
        super().__init__(cluster, task_type, task_index, start_timeout_seconds=start_timeout_seconds)
        self._word = done_word(self._own)
        self._is_done = False
        self._close_tokens: list[Any] = []
        if self._own.task_type != "ps":
            self._word.say_at_exit()

    def begin(self) -> None:
        """Find the tokens of SyncReplicasOptimizer in the graph; wait for the leader's session."""
        self._close_tokens = _close_token_queues() if self._own.leads else []
        super().begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Arrive; arrange that the session is closed before its threads are waited for.

        `end` would be too early: the hooks after this one may still need the session.
        """
        super().after_create_session(session, coord)
        coord.join = functools.partial(self._close_and_join, session, coord.join)

    def end(self, session: Any) -> None:
        """Note that the training ended without an error."""
        self._is_done = True

    def _close_and_join(self, session: Any, join: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Close the session, which cancels what its threads wait for, then join them.

        The chief's token thread waits for gradients that nobody sends any more. TensorFlow waits 120 s for it.
        """
        if self._is_done:
            self._wait_for_all()
        recovers = isinstance(sys.exc_info()[1], (tf.errors.AbortedError, tf.errors.UnavailableError))
        for operation in [] if recovers else self._close_tokens:  # a closed queue does not open again
            with contextlib.suppress(tf.errors.OpError):  # its own runner may have closed it, or the ps is gone
                session.run(operation, options=tf.compat.v1.RunOptions(timeout_in_ms=_CLOSE_MILLISECONDS))
        session.close()
        join(*arguments, **options)
        if self._is_done:
            self._word.say()

    def _wait_for_all(self) -> None:
        try:
            self._muster.wait_for_all(_LEAVE_SECONDS)
        except (TimeoutError, ShutdownError) as error:
            logger.warning("%s leaves, though not all workers have come: %r", self._own.task, error)


class StartBarrierHook(_MusterHook):
    """No worker trains before all have come. For every worker and the chief."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Arrive and wait for all; one that comes again, after a restart, goes on at once.

        Raises:
            RendezvousTimeoutError: Not all came within start_timeout_seconds.
        """
        super().after_create_session(session, coord)
        try:
            self._muster.wait_for_all(self._start_seconds)
        except TimeoutError:
            missing = format_tasks(self._muster.missing) if self._own.leads else "another worker"
            raise RendezvousTimeoutError(
                f"{missing} did not come to the start within {self._start_seconds:g} s. Look at the logs, or raise "
                "start_timeout_seconds."
            ) from None


def _close_token_queues() -> list[Any]:
    """Add the closing of the queue from which SyncReplicasOptimizer gives its tokens to the graph, if it has one.

    Workers then get what is in it, and after that the end of the input, where they would wait for ever.
    """
    close = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type == "FIFOQueueV2" and operation.get_attr("shared_name") == b"sync_token_q":
            with tf.device(operation.device):
                close.append(tf.raw_ops.QueueCloseV2(handle=operation.outputs[0]))
    return close
