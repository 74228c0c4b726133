# mypy: ignore-errors
"""ParameterServerStrategy after TensorFlow's guide, with its own loop and checkpoints. It runs on TensorFlow 2.4."""

import argparse
import json
import os

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--epochs", type=int, default=4)
arguments = parser.parse_args()
STEPS = 20

config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
if task["type"] in ("ps", "worker"):
    cluster = tf.train.ClusterSpec(config["cluster"])
    tf.distribute.Server(cluster, job_name=task["type"], task_index=task["index"], protocol="grpc").join()

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = getattr(tf.distribute, "ParameterServerStrategy", tf.distribute.experimental.ParameterServerStrategy)(
    resolver
)
coordinators = getattr(tf.distribute, "coordinator", tf.distribute.experimental.coordinator)
coordinator = coordinators.ClusterCoordinator(strategy)
with strategy.scope():
    weight = tf.Variable(tf.zeros([4, 1]))
    epoch = tf.Variable(0, dtype=tf.int64)


def make_dataset():
    rows = tf.random.stateless_uniform((512, 4), seed=(1, 2))
    return tf.data.Dataset.from_tensor_slices((rows, tf.reduce_sum(rows, 1, keepdims=True))).repeat().batch(32)


@tf.function
def train_step(iterator):
    def replica_step(rows, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(rows, weight) - targets) ** 2)
        weight.assign_sub(0.3 * tape.gradient(loss, weight))
        return loss

    return strategy.run(replica_step, args=next(iterator))


manager = tf.train.CheckpointManager(tf.train.Checkpoint(weight=weight, epoch=epoch), arguments.directory, 2)
manager.checkpoint.restore(manager.latest_checkpoint)
print("begins with step", int(epoch) * STEPS, flush=True)
batches = iter(coordinator.create_per_worker_dataset(make_dataset))
first_loss = None
while int(epoch) < arguments.epochs:
    losses = [coordinator.schedule(train_step, args=(batches,)) for _ in range(STEPS)]
    coordinator.join()
    loss = float(losses[-1].fetch())
    first_loss = first_loss or loss
    epoch.assign_add(1)
    manager.save()
    print("epoch", int(epoch), "loss", loss, flush=True)
print("trained to step", int(epoch) * STEPS, flush=True)
