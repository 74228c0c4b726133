"""A training by `run_shards` for tests: python shard_training.py CHECKPOINTS

Each step adds 1, on the worker, to the counts of its rows, so that the counts tell how often each row was seen. From
step 30 on, the workers wait until CHECKPOINTS/go exists, so that a kill finds shards in hand. The chief prints the
restored step, and the lowest and the highest count at the end.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import tf4slurm
from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_shards

ROWS = 300

strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    counts = tf.Variable(tf.zeros([ROWS]))
    step = tf.Variable(0, dtype=tf.int64, trainable=False)
go = os.path.join(sys.argv[1], "go")
shards = tf4slurm.data_shards(ROWS, shard_size=10, epochs=3)
checkpoints = Checkpoints(sys.argv[1], step=step, every_steps=10, shards=shards, counts=counts)
print("restored", int(step.numpy()), flush=True)


def slow(rows: tf.Tensor) -> tf.Tensor:
    """Take some milliseconds, so that a kill before step 30 finds shards in hand, too."""
    with tf.control_dependencies([tf.linalg.svd(tf.random.uniform((120, 120)), compute_uv=False)]):
        return tf.identity(rows)


def is_held(turn: tf.Tensor) -> tf.Tensor:
    path = tf.where(turn < 0, "", go)  # depends on the turn, else TensorFlow would look for the file only once
    return tf.logical_and(step >= 30, tf.equal(tf.size(tf.io.matching_files(path)), 0))


def train_step(rows: tf.Tensor) -> tf.Tensor:
    tf.while_loop(is_held, lambda turns: [turns + 1], [tf.constant(0)])
    counts.scatter_add(tf.IndexedSlices(tf.ones_like(rows, tf.float32), rows))
    return tf.reduce_mean(tf.cast(rows, tf.float32))


done = run_shards(coordinator, train_step, shards, lambda rows: rows.batch(5).map(slow), checkpoints=checkpoints)
print("counts", *map(int, (tf.reduce_min(counts), tf.reduce_max(counts), tf.reduce_sum(counts))), flush=True)
print("steps", done.step, min(done.steps_by_worker) > 0, sorted(done.means), flush=True)
