"""Send completion signals through TensorFlow queues on the ps: method="queue" of `tf4slurm.shutdown`.

Only graph sessions reach these queues. An eager operation on the same device uses a different queue. See
https://www.tensorflow.org/api_docs/python/tf/queue/FIFOQueue.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf4slurm.cluster import Address, Task, format_tasks
from tf4slurm.errors import ShutdownError, ShutdownTimeoutError
from tf4slurm.scripts.channel import CompletionSignal, find_script_channel
from tf4slurm.server_dictionary import ServerDictionary

_DONE_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0  # an idle ps answers within milliseconds, and one that has exited never does
_TAKE_SECONDS = 600.0
_SIGNAL_SECONDS = 60.0
_REPLY_SECONDS = 0.2
"""Time in seconds that a ps runs after it has taken the last signal.

If it exits at once, its reply, which takes 0.01 s, is often lost (6 of 8 times). The sender then waits 5 s.
"""

_signals: dict[Task, CompletionSignal] = {}


def make_done_queue(ps_index: int, capacity: int) -> tf.queue.FIFOQueue:
    """Add the queue of a ps for `capacity` completion signals to the current graph. Return the queue.

    Scripts that call `create_done_queue` rely on the queue's name.
    """
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(capacity, tf.int32, shared_name=f"done_queue{ps_index}")


@contextlib.contextmanager
def open_session(current: ServerDictionary, ps_index: int) -> Iterator[tf.compat.v1.Session]:
    """Open a session of the current graph that uses only one ps, because all other tasks may have exited.

    Raises:
        ShutdownError: An operation in the block failed, for example because the ps did not answer within 5 s.
    """
    device, target = f"/job:ps/task:{ps_index}", f"grpc://{current.ps_addresses[ps_index]}"
    milliseconds = int(1000 * _ANSWER_SECONDS)
    config = tf.compat.v1.ConfigProto(device_filters=[device], operation_timeout_in_ms=milliseconds)
    session = tf.compat.v1.Session(target, config=config)
    try:
        yield session
    except tf.errors.OpError as error:
        raise ShutdownError(
            f"{device} at {target} does not answer: {error.message}. Expected a running TensorFlow server there. See "
            "the log of that ps."
        ) from error
    finally:  # `with session` would start a thread, which fails while the interpreter exits
        with contextlib.suppress(tf.errors.OpError):  # the ps may have exited
            session.close()


def poll(
    session: tf.compat.v1.Session, address: str, fetch: Any, deadline: float, *, interval_seconds: float = 0.1
) -> Iterator[Any]:
    """Yield the value of `fetch` at intervals until the deadline. Wait for a ps that starts later, or is busy.

    `deadline` is a time of the monotonic clock. After it, the iterator ends, without an error and perhaps without a
    value. With one CPU, one operation such as a save can keep a ps busy for minutes. TensorFlow's error is the same for
    a ps that has exited, but only the busy one still accepts connections at `address`.

    The reason to poll: a single operation that waits on the ps would delay signal handlers. If it took an item from a
    queue, it could lose the item at its timeout.

    Raises:
        tf.errors.DeadlineExceededError: The ps has answered before, and has exited.
    """
    has_answered = False
    while True:
        try:
            yield session.run(fetch)
            has_answered = True
        except tf.errors.DeadlineExceededError:
            if has_answered and _refuses_connections(address):
                raise
        if time.monotonic() >= deadline:
            return
        time.sleep(interval_seconds)


def run_when_free(session: tf.compat.v1.Session, address: str, operation: Any, timeout_seconds: float) -> None:
    """Run an idempotent operation on a ps whose server has started. Repeat it while the ps is busy.

    Raises:
        tf.errors.DeadlineExceededError: The ps is busy for longer than `timeout_seconds`, or has exited.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            session.run(operation)
            return
        except tf.errors.DeadlineExceededError:
            if time.monotonic() >= deadline or _refuses_connections(address):
                raise


def _refuses_connections(address: str) -> bool:
    try:
        socket.create_connection(Address.from_text(address), _ANSWER_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def wait_for_done_queue(current: ServerDictionary, timeout_seconds: float | None) -> set[Task]:
    """Wait in a ps until every training task has sent its completion signal. Return the tasks that failed.

    With an agent, the end of training also ends the wait. The tasks that sent no signal then count as failed.

    Raises:
        ShutdownTimeoutError: Some tasks sent no signal within `timeout_seconds`. None waits without a limit.
        ShutdownError: The ps does not answer, or the tasks have different cluster specs.
    """
    tasks = current.training_tasks
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    has_failed: dict[Task, bool] = {}
    channel = find_script_channel()
    is_over = False
    # A signal that is taken after the time limit would be lost, so a busy ps gets more time.
    patient = tf.compat.v1.RunOptions(timeout_in_ms=int(1000 * _TAKE_SECONDS))
    with tf.Graph().as_default():
        queue = make_done_queue(current.task_index, len(tasks))
        size, take = queue.size(), queue.dequeue()
        with open_session(current, current.task_index) as session:
            address = current.ps_addresses[current.task_index]
            for num_signals in poll(session, address, size, deadline, interval_seconds=_DONE_POLL_SECONDS):
                for _ in range(num_signals):
                    task, failed = _decode(session.run(take, options=patient), tasks)
                    has_failed[task] = failed
                if len(has_failed) == len(tasks) or is_over:
                    break
                # When training is over, the queue is read once more, because signals may still arrive.
                is_over = channel is not None and channel.desired.is_training_over
    missing = [task for task in tasks if task not in has_failed]
    if is_over:
        has_failed.update(dict.fromkeys(missing, True))  # these were killed, or have ended without a signal
    elif missing:
        raise ShutdownTimeoutError(
            f"{format_tasks(missing)} sent no completion signal within {timeout_seconds} s. See their logs, or raise "
            "timeout_seconds.",
            missing=[str(task) for task in missing],
        )
    time.sleep(_REPLY_SECONDS)
    return {task for task, failed in has_failed.items() if failed}


def fill_done_queue(current: ServerDictionary, capacity: int) -> None:
    """Put `capacity` items into the queue of this ps, or fewer if the queue is full or the ps has ended.

    The script of the ps waits until it has taken `capacity` items. Call this function after the end of training: a
    worker that was killed has put no item.
    """
    with contextlib.suppress(ShutdownError), tf.Graph().as_default():  # the queue is full, or the ps has ended
        put = make_done_queue(current.task_index, capacity).enqueue(0)
        with open_session(current, current.task_index) as session:
            for _ in range(capacity):
                session.run(put)


def queue_completion_signal(current: ServerDictionary) -> CompletionSignal:
    """Return the object that sends this process's completion signal to the queues of all ps, and to its agent.

    Hooks and `tf4slurm.shutdown` share the object, so that only one signal is sent.
    """
    is_sent = False

    def send(failed: bool) -> None:
        nonlocal is_sent
        try:
            if not is_sent:  # a ps may exit after the first signal, and would not answer a second one
                is_sent = True
                _put_in_queues(current, failed)
        finally:  # comes last, because a ps that waits on the control service then exits without reading its queue
            channel = find_script_channel()
            if channel is not None:
                channel.completion_signal.send(failed)

    return _signals.setdefault(current.task, CompletionSignal(send))


def _put_in_queues(current: ServerDictionary, failed: bool) -> None:
    """Put this task's completion signal into the queue of every ps. Then raise the first ShutdownError, if any."""
    tasks = current.training_tasks
    if current.task not in tasks:  # an evaluator is outside the cluster, and no ps waits for it
        return
    number = tasks.index(current.task) + 1
    errors = []
    for index in range(len(current.ps_addresses)):
        with tf.Graph().as_default():
            put = make_done_queue(index, len(tasks)).enqueue(-number if failed else number)
            try:
                with open_session(current, index) as session:
                    run_when_free(session, current.ps_addresses[index], put, _SIGNAL_SECONDS)
            except ShutdownError as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _decode(number: int, tasks: Sequence[Task]) -> tuple[Task, bool]:
    """Return the task of a queue's item, and whether the task failed.

    The absolute value of `number` is the 1-based position in `tasks`. A negative number reports a failure.
    """
    if not 0 < abs(number) <= len(tasks):
        raise ShutdownError(
            f"The done queue holds {number}, but the cluster has {len(tasks)} training tasks. Give every process the "
            "same cluster."
        )
    return tasks[abs(number) - 1], number < 0
