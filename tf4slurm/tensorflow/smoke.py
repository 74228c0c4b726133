"""The script of `tf4slurm test`: the smallest training there is, by a real ParameterServerStrategy.

A variable on the ps goes to 2 by gradients that the workers compute, until each worker has computed some. The last line
that the chief prints says what was proved.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, NoReturn

_STEPS_PER_WORKER = 10
_TARGET = 2.0


def main(timeout_seconds: float) -> None:
    """Be the task that TF_CONFIG says; the chief gives up after `timeout_seconds` and says where it was."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    where = _Where("importing TensorFlow")
    threading.Thread(target=where.give_up_after, args=(timeout_seconds,), daemon=True).start()
    import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    if resolver.task_type != "chief":
        where.cancel()  # the chief gives up, and then this is ended
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        tf.distribute.Server(spec, resolver.task_type, resolver.task_id, protocol="grpc").join()
    where.text = "waiting for the servers of ps and workers"
    coordinator = tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))
    where.text = "training"
    steps = _train(tf, coordinator, num_workers=spec.num_tasks("worker"))
    where.cancel()
    count = spec.num_tasks("worker")
    workers = "the worker" if count == 1 else f"all {count} workers"
    what = f"{steps} steps of ParameterServerStrategy by {workers}, with the variable on a ps"
    print(f"{what} (TensorFlow {tf.__version__})", flush=True)


class _Where:
    """How far this task is, for the sentence with which it gives up."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._is_done = threading.Event()

    def cancel(self) -> None:
        self._is_done.set()

    def give_up_after(self, seconds: float) -> None:
        """End the process: TensorFlow waits in C++, where no exception and no signal's handler reaches it."""
        if not self._is_done.wait(seconds):
            print(f"after {seconds:g} s still {self.text}: given up", flush=True)
            os._exit(1)


def _train(tf: Any, coordinator: Any, num_workers: int) -> int:
    """Train until every worker has computed a step; return the number of steps."""
    with coordinator.strategy.scope():
        weight = tf.Variable(0.0)
    if "/job:ps" not in weight.device:
        _fail(f"the variable is on {weight.device}, not on a ps")

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = (weight - _TARGET) ** 2
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    seen: set[int] = set()
    steps = 0
    while len(seen) < num_workers or abs(float(weight.numpy()) - _TARGET) > 0.1:
        answers = [coordinator.schedule(step) for _ in range(_STEPS_PER_WORKER * num_workers)]
        coordinator.join()
        seen |= {int(answer.fetch()) for answer in answers}
        steps += len(answers)
        time.sleep(0.0 if len(seen) == num_workers else 0.05)
    return steps


def _fail(text: str) -> NoReturn:
    raise SystemExit(f"tf4slurm test: {text}")
