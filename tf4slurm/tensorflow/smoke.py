"""Run the training of `tf4slurm test`: all workers minimize a loss until the variable on the ps is about 2."""

from __future__ import annotations

import os
from typing import Any

from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.servers import exit_after

_STEPS_PER_WORKER = 10
_TARGET = 2.0


def main(timeout_seconds: float) -> None:
    """Run the task of `tf4slurm test` that TF_CONFIG names.

    A ps or worker runs its server. The chief trains until all workers have run steps and the variable on the ps is
    about 2. It prints a line about this. Importing TensorFlow, connecting and training may each take `timeout_seconds`.
    If one of them takes longer, the process exits with an error.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with exit_after(timeout_seconds, lambda: f"timed out after {timeout_seconds:g} s while importing TensorFlow"):
        import tensorflow as tf

        from tf4slurm.tensorflow import parameter_server_strategy, run_steps

    strategy, coordinator = parameter_server_strategy(timeout_seconds=timeout_seconds)
    with strategy.scope():
        weight = tf.Variable(0.0)
        counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    if "/job:ps" not in weight.device:
        raise SystemExit(f"tf4slurm test: the variable is on {weight.device}, not on a ps")

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = (weight - _TARGET) ** 2
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    num_workers = len(current_server_dictionary().cluster["worker"])
    seen: set[int] = set()
    with exit_after(timeout_seconds, lambda: f"timed out after {timeout_seconds:g} s while training"):
        while len(seen) < num_workers or abs(float(weight.numpy()) - _TARGET) > 0.1:
            steps = int(counter.numpy()) + _STEPS_PER_WORKER * num_workers
            done = run_steps(coordinator, step, steps, step=counter, steps_per_call=1)
            seen |= {worker for worker, count in enumerate(done.steps_by_worker) if count}
    workers = "the worker" if num_workers == 1 else f"all {num_workers} workers"
    summary = f"{done.step} steps of ParameterServerStrategy by {workers}, with the variable on a ps"
    print(f"{summary} (TensorFlow {tf.__version__})", flush=True)
