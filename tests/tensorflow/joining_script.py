"""Train in short calls of run_steps until DIRECTORY/finish exists; the argument is DIRECTORY.

Each call appends a line to DIRECTORY/steps: time, attempt, steps requested so far, step counter, and the steps of each
worker in this call.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import tensorflow as tf

from tf4slurm.tensorflow import parameter_server_strategy, run_steps

STEPS_PER_CALL = 5
STEPS = 40

directory = Path(sys.argv[1])
strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    variable = tf.Variable(0.0)
    counter = tf.Variable(0, dtype=tf.int64)


def train_step(batch: tf.Tensor) -> tf.Tensor:
    variable.assign_add(tf.reduce_mean(tf.cast(batch, tf.float32)))
    return tf.reduce_mean(tf.cast(batch, tf.float32))


dataset = iter(coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(1000).repeat().batch(4)))
requested = 0
with (directory / "steps").open("a", buffering=1) as log:
    while not (directory / "finish").exists():
        requested = int(counter.numpy()) + STEPS
        done = run_steps(
            coordinator, train_step, requested, dataset=dataset, step=counter, steps_per_call=STEPS_PER_CALL
        )
        by_worker = " ".join(map(str, done.steps_by_worker))
        print(time.time(), os.environ["TF4SLURM_ATTEMPT"], requested, done.step, by_worker, file=log)
        time.sleep(0.05)
