"""Train on a ps and workers; save when asked to stop, and resume from there when started again.

tf4slurm run --ps 1 --workers 2 -- python train_and_save.py
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import digits
import tensorflow as tf

import tf4slurm

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=40, help="of 24 steps each (default: %(default)s)")
parser.add_argument("--checkpoints", default="checkpoints", help="where to save (default: %(default)s)")
arguments = parser.parse_args()

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":  # a ps or a worker serves until tf4slurm terminates it
    tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()

tf.get_logger().setLevel("ERROR")
tf.keras.utils.set_random_seed(0)
data = digits.load()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    model = digits.make_model(data)
    optimizer = tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.CosineDecay(0.003, 24 * arguments.rounds))
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64, trainable=False)


def train_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    step.assign_add(1)
    return loss


@tf.function
def train_steps(batches):
    total = 0.0
    for _ in tf.range(6):
        total += strategy.run(train_step, args=next(batches))
    return total / 6


def make_dataset():
    images = tf.data.Dataset.from_tensor_slices((data.train_images, data.train_labels))
    return images.shuffle(len(data.train_labels)).repeat().batch(64, drop_remainder=True).prefetch(2)


batches = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
checkpoints = tf.train.CheckpointManager(checkpoint, arguments.checkpoints, max_to_keep=2, step_counter=step)
if checkpoints.restore_or_initialize():
    print(f"going on from step {int(step)}", flush=True)

while int(step) < 24 * arguments.rounds:
    losses = [coordinator.schedule(train_steps, args=(batches,)) for _ in range(4)]
    coordinator.join()
    loss = sum(float(each.fetch()) for each in losses) / len(losses)
    tf4slurm.report(step=int(step), loss=loss)
    print(f"step {int(step)} loss {loss:.4f}", flush=True)
    if tf4slurm.should_stop():
        checkpoints.save(checkpoint_number=step)
        print(f"asked to stop: saved at step {int(step)}", flush=True)
        raise SystemExit

checkpoints.save(checkpoint_number=step)
right = tf.argmax(model(data.test_images, training=False), axis=1) == data.test_labels
print(f"test accuracy: {float(tf.reduce_mean(tf.cast(right, tf.float32))):.4f}", flush=True)
