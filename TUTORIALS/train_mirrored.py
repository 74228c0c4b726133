"""Train synchronously, without a ps: every worker has all variables, and they stay equal.

    tf4slurm run --no-chief --ps 0 --workers 2 -- python train_mirrored.py

The workers add up their gradients directly with each other, in every step (MultiWorkerMirroredStrategy).
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import digits
import tensorflow as tf

import tf4slurm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300, help="each with a batch from every worker (default: %(default)s)")
arguments = parser.parse_args()

tf.get_logger().setLevel("ERROR")
strategy = tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG, and waits for the other workers
workers = strategy.num_replicas_in_sync
is_leader = strategy.cluster_resolver.task_id == 0
data = digits.load()

tf.keras.utils.set_random_seed(0)  # all workers start with the same variables
with strategy.scope():
    model = digits.make_model(data)
    optimizer = tf.keras.optimizers.Adam(0.003)
    optimizer.build(model.trainable_variables)


def make_dataset(context):
    """Give each worker a share of the images: of three workers the first has images 0, 3, 6, …"""
    images = tf.data.Dataset.from_tensor_slices((data.train_images, data.train_labels))
    share = images.shard(context.num_input_pipelines, context.input_pipeline_id)
    return share.shuffle(len(data.train_labels)).repeat().batch(64, drop_remainder=True).prefetch(2)


def train_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        share = loss / workers  # the optimizer adds up the gradients of all workers
    gradients = tape.gradient(share, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def step_together(images, labels):
    losses = strategy.run(train_step, args=(images, labels))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)


started = time.monotonic()
batches = iter(strategy.distribute_datasets_from_function(make_dataset))
for step in range(1, arguments.steps + 1):
    loss = step_together(*next(batches))
    if step % 25 == 0:
        tf4slurm.report(step=step, loss=float(loss))
        if is_leader:
            print(f"second {time.monotonic() - started:.2f} step {step} loss {float(loss):.4f}", flush=True)

# All workers have the same variables, so all print the same accuracy. Their sum shows that they are equal.
total = sum(float(tf.reduce_sum(variable)) for variable in model.trainable_variables)
right = float(tf.reduce_mean(tf.cast(tf.argmax(model(data.test_images), axis=1) == data.test_labels, tf.float32)))
print(f"sum of the variables {total:.4f}, test accuracy: {right:.4f}", flush=True)
tf4slurm.barrier("trained")  # all exit together: TensorFlow would connect to those that have exited
os._exit(0)
