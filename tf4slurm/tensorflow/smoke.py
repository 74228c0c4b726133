"""The script of `tf4slurm test`: a minimal training with a real ParameterServerStrategy.

The workers' gradients move a variable on the ps to 2; each worker must compute some. The chief's last line of output
describes the result.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

_STEPS_PER_WORKER = 10
_TARGET = 2.0


def main(timeout_seconds: float) -> None:
    """Run the task that TF_CONFIG names; on timeout the chief prints its current stage and exits with 1."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    watchdog = _Watchdog("importing TensorFlow")
    threading.Thread(target=watchdog.exit_after, args=(timeout_seconds,), daemon=True).start()
    import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    if resolver.task_type != "chief":
        watchdog.cancel()  # this task ends with the chief
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        tf.distribute.Server(spec, resolver.task_type, resolver.task_id, protocol="grpc").join()
    watchdog.stage = "waiting for the servers of ps and workers"
    coordinator = tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))
    watchdog.stage = "training"
    count = spec.num_tasks("worker")
    steps = _train(tf, coordinator, count)
    watchdog.cancel()
    workers = "the worker" if count == 1 else f"all {count} workers"
    summary = f"{steps} steps of ParameterServerStrategy by {workers}, with the variable on a ps"
    print(f"{summary} (TensorFlow {tf.__version__})", flush=True)


class _Watchdog:
    """Ends this process on timeout: TensorFlow waits in C++, where no exception or signal handler interrupts it."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        self._is_cancelled.set()

    def exit_after(self, seconds: float) -> None:
        if not self._is_cancelled.wait(seconds):
            print(f"timed out after {seconds:g} s while {self.stage}", flush=True)
            os._exit(1)


def _train(tf: Any, coordinator: Any, num_workers: int) -> int:
    """Train until the target is reached and every worker has computed a step; return the number of steps."""
    with coordinator.strategy.scope():
        weight = tf.Variable(0.0)
    if "/job:ps" not in weight.device:
        raise SystemExit(f"tf4slurm test: the variable is on {weight.device}, not on a ps")

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = (weight - _TARGET) ** 2
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    seen: set[int] = set()
    steps = 0
    while len(seen) < num_workers or abs(float(weight.numpy()) - _TARGET) > 0.1:
        results = [coordinator.schedule(step) for _ in range(_STEPS_PER_WORKER * num_workers)]
        coordinator.join()
        seen |= {int(result.fetch()) for result in results}
        steps += len(results)
        time.sleep(0.0 if len(seen) == num_workers else 0.05)
    return steps
