"""Notify each ps that training is over, in scripts that start their own TensorFlow servers.

A ps calls `serve_until_done` or `wait_for_workers`. Every worker and the chief sends a completion signal, with
`done_at_end`, `signal_at_exit` or `signal_done`. All tasks must use the same method:

* method="barrier": The signals go through the control service, which also detects killed workers. This method needs
  "tf4slurm run", or an earlier call of get_server_dictionary().
* method="queue": The signals go through a TensorFlow queue on each ps. This method needs only TensorFlow's servers. A
  killed worker sends no signal. An agent or sidecar notices that, as with "barrier". Without an agent or sidecar, only
  `timeout_seconds` ends the wait.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.errors import RendezvousConnectionError, ShutdownError, ShutdownTimeoutError
from tf4slurm.script_client.tf4slurm_sidecar import keep_running
from tf4slurm.scripts.channel import CompletionSignal, ScriptChannel, find_script_channel
from tf4slurm.server_dictionary import ClusterAndTask, ServerDictionary, current_server_dictionary

__all__ = ["Ending", "done_at_end", "serve_until_done", "signal_at_exit", "signal_done", "wait_for_workers"]


@dataclass(frozen=True)
class Ending:
    """The workers and the chief that have finished, and those that failed or were killed."""

    done: tuple[Task, ...]
    failed: tuple[Task, ...]


def wait_for_workers(
    *, method: str = "barrier", timeout_seconds: float | None = None, cluster: ClusterAndTask | None = None
) -> Ending:
    """Wait in a ps until the chief and every worker are done or have failed.

    Call it instead of `server.join()`, which delays signal handlers. The server runs in its own threads.

    Args:
        method: "barrier" (default) or "queue". For "queue", the server of this ps must be running.
        timeout_seconds: Timeout in seconds for all signals; None (default) waits without a limit.
        cluster: (cluster, task_type, task_index), where `cluster` has the addresses of each role. Default: the last
            result of get_server_dictionary(), else TF_CONFIG.

    Returns:
        The tasks that are done, and the tasks that have failed or were killed.

    Raises:
        ShutdownTimeoutError: Not all signals arrived in time. `missing` lists the tasks that sent none. With "barrier"
            it lists all training tasks, because a ps does not know which of them still train.
        ShutdownError: This process is not a ps of the cluster, method="barrier" finds no agent or loses it, or with
            method="queue" the server of this ps does not answer.
        SlurmEnvironmentError: No cluster is given or found.
        ValueError: The method is unknown, or `cluster` is not a tuple of three.
    """
    current = _current_cluster(method, cluster)
    if current.task_type != "ps" or not current.task_index < len(current.ps_addresses):
        raise ShutdownError(f"{current.task} is not a ps of the cluster: only a ps waits for the workers.")
    if method == "barrier":
        failed = _wait_for_barrier(current, timeout_seconds)
    else:
        from tf4slurm.tensorflow.legacy.queues import wait_for_done_queue

        failed = wait_for_done_queue(current, timeout_seconds)
    keep_running()
    atexit.register(gc.freeze)  # shortens the interpreter's last garbage collection from 0.8 s to 0.1 s
    tasks = current.training_tasks
    return Ending(
        done=tuple(task for task in tasks if task not in failed), failed=tuple(task for task in tasks if task in failed)
    )


def serve_until_done(
    server: object,
    *,
    method: str = "barrier",
    timeout_seconds: float | None = None,
    cluster: ClusterAndTask | None = None,
) -> Ending:
    """Call `wait_for_workers`, and keep the tf.distribute.Server `server` running until it returns. Return its result.

    A TensorFlow server runs as long as a Python reference to it exists, such as this argument. The other arguments and
    the exceptions are those of `wait_for_workers`.
    """
    ending = wait_for_workers(method=method, timeout_seconds=timeout_seconds, cluster=cluster)
    del server  # the reference must exist until here
    return ending


def signal_done(failed: bool = False, *, method: str = "barrier", cluster: ClusterAndTask | None = None) -> None:
    """Send the completion signal of this worker or chief to every ps.

    Only the first signal of a process is sent. With method="barrier", a later failure is sent, too. With "barrier", the
    signal of a fork or of a process of multiprocessing counts only after all other processes of the script have closed
    their connections to the agent without a signal. So a helper process does not end the training of its task.

    Args:
        failed: The signal reports that this task has failed.
        method: The method with which the ps waits. With "queue", an evaluator sends nothing to the ps.
        cluster: As in `wait_for_workers`.

    Raises:
        ShutdownError: This process is a ps, method="barrier" finds no agent, or with "queue" a ps does not answer.
        SlurmEnvironmentError, ValueError: As `wait_for_workers`.
    """
    _completion_signal(method, cluster).send(failed)


@contextmanager
def done_at_end(*, method: str = "barrier", cluster: ClusterAndTask | None = None) -> Iterator[None]:
    """Send the completion signal at the end of the `with` block. Arguments and exceptions are those of `signal_done`.

    The signal reports a failure if the block raises an exception other than SystemExit with code 0 or None.
    """
    signal = _completion_signal(method, cluster)
    try:
        yield
    except SystemExit as exit_:
        signal.send(failed=exit_.code not in (None, 0))
        raise
    except BaseException:
        signal.send(failed=True)
        raise
    signal.send()


def signal_at_exit(*, method: str = "barrier", cluster: ClusterAndTask | None = None) -> None:
    """Send the completion signal when this process exits. Arguments and exceptions are those of `signal_done`.

    The signal reports a failure if an uncaught exception ends the process. After sys.exit() it reports none, whatever
    the code. A killed process sends no signal.
    """
    _completion_signal(method, cluster).send_at_exit()


def _current_cluster(method: str, cluster: ClusterAndTask | None) -> ServerDictionary:
    if method not in ("barrier", "queue"):
        raise ValueError(f"Unknown method {method!r}: expected 'barrier' or 'queue'.")
    return current_server_dictionary(cluster)


def _completion_signal(method: str, cluster: ClusterAndTask | None) -> CompletionSignal:
    current = _current_cluster(method, cluster)
    if current.task_type == "ps":
        raise ShutdownError(f"{current.task} is a ps: it receives signals and sends none. Call wait_for_workers().")
    if method == "barrier":
        return _connected_channel().completion_signal
    from tf4slurm.tensorflow.legacy.queues import queue_completion_signal

    return queue_completion_signal(current)


def _wait_for_barrier(current: ServerDictionary, timeout_seconds: float | None) -> set[Task]:
    """Wait until the control service reports that training is over. Return the training tasks that failed."""
    tasks, channel = current.training_tasks, _connected_channel()
    try:
        is_over = channel.wait_until(lambda: channel.desired.is_training_over, timeout_seconds)
    except RendezvousConnectionError as error:
        reason = channel.desired.terminate_reason or f"{error} Under plain srun the whole step ends."
        raise ShutdownError(f"How {format_tasks(tasks)} end stays unknown. {reason}") from error
    if not is_over:
        raise ShutdownTimeoutError(
            f"Training was not over within {timeout_seconds} s: some of {format_tasks(tasks)} still run. See their "
            "logs, or raise timeout_seconds.",
            missing=[str(task) for task in tasks],
        )
    return {task for task in tasks if str(task) in channel.desired.failed_tasks}


def _connected_channel() -> ScriptChannel:
    channel = find_script_channel()
    if channel is None:
        raise ShutdownError(
            'method="barrier" needs the control service, and this process has no agent. Call get_server_dictionary() '
            'first, start the script with "tf4slurm run", or use method="queue".'
        )
    return channel
