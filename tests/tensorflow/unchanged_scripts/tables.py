# mypy: ignore-errors
"""Embeddings of any number of ids in TensorFlow's hash tables, one on each ps, with run_steps and Checkpoints."""

import argparse

import tensorflow as tf

from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_steps

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["mutable", "dense"])
parser.add_argument("directory")
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

strategy, coordinator = parameter_server_strategy()
num_ps = 2


def make_table(index):
    with tf.device(f"/job:ps/task:{index}"):
        if arguments.kind == "mutable":
            return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros(2))
        return tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, tf.zeros(2), empty_key=-1, deleted_key=-2)


tables = [make_table(index) for index in range(num_ps)]
with strategy.scope():
    step = tf.Variable(0, dtype=tf.int64)


def train_step():
    ids = tf.random.uniform((8,), 0, 10, dtype=tf.int64)
    for index, table in enumerate(tables):
        own = tf.unique(tf.boolean_mask(ids, ids % num_ps == index))[0]
        rows = table.lookup(own)
        table.insert(own, rows + 0.1 * (tf.cast(own, tf.float32)[:, None] - rows))
    return tf.constant(0.0)


checkpoints = Checkpoints(arguments.directory, step=step, every_steps=10, **{f"t{i}": t for i, t in enumerate(tables)})
print("begins with step", int(step), "rows", sum(int(table.size()) for table in tables), flush=True)
run_steps(coordinator, train_step, arguments.steps, checkpoints=checkpoints)
print("trained to step", int(step), "rows", sum(int(table.size()) for table in tables), flush=True)
