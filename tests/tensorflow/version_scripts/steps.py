# mypy: ignore-errors
"""Training with run_steps and Checkpoints."""

import argparse

import tensorflow as tf

from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_steps

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--steps", type=int, default=300)
arguments = parser.parse_args()

strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    weight = tf.Variable(tf.zeros([4, 1]))
    step = tf.Variable(0, dtype=tf.int64)


def make_dataset():
    rows = tf.random.stateless_uniform((512, 4), seed=(1, 2))
    return tf.data.Dataset.from_tensor_slices((rows, tf.reduce_sum(rows, 1, keepdims=True))).repeat().batch(32)


def train_step(batch):
    rows, targets = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.matmul(rows, weight) - targets) ** 2)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss


checkpoints = Checkpoints(arguments.directory, step=step, every_steps=100, weight=weight)
print("begins with step", int(step), flush=True)
batches = iter(coordinator.create_per_worker_dataset(make_dataset))
done = run_steps(coordinator, train_step, arguments.steps, dataset=batches, checkpoints=checkpoints, steps_per_call=5)
print("trained to step" if not done.is_stopped else "stopped at step", done.step, flush=True)
