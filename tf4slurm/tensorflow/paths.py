"""`prove_paths`: before training, let every ps fetch something over each path that training will use."""

from __future__ import annotations

import time

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.server_dictionary import ServerDictionary

_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.1


def prove_paths(own: ServerDictionary, timeout_seconds: float) -> None:
    """Let every ps fetch a number from this task, and if this task leads from every other ps; try until it works.

    A ps that looked for a task before that was up fails for seconds after, while its connection backs off. The first
    step of training then fails, and the session of a SyncReplicasOptimizer ends without a step and without an error:
    its recovery finds the queue of tokens closed. This task's own server must be up.

    Raises:
        TimeoutError: A path did not work within the time.
    """
    here = f"/job:{own.task_type}/task:{own.task_index}"
    every_ps = [f"/job:ps/task:{index}" for index in range(len(own.ps_addresses))]
    graph = tf.Graph()
    fetched = []
    with graph.as_default():
        for source in [here, *every_ps] if own.leads else [here]:
            with tf.device(source):
                number = tf.random.uniform(())  # a constant would be moved to where it is used
            for target in every_ps:
                with tf.device(target):
                    fetched.append(tf.negative(number))
    deadline = time.monotonic() + timeout_seconds
    milliseconds = int(1000 * min(_ATTEMPT_SECONDS, timeout_seconds))
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", here], operation_timeout_in_ms=milliseconds)
    while True:
        try:
            with tf.compat.v1.Session(f"grpc://{own.cluster[own.task_type][own.task_index]}", graph, config) as session:
                session.run(fetched)
            return
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError):
            if time.monotonic() >= deadline:
                raise TimeoutError from None
        time.sleep(_PAUSE_SECONDS)
