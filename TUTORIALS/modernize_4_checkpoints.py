"""Tutorial 10, step 4: save checkpoints, stop when asked and resume, report loss and accuracy.

tf4slurm run --ps 1 --workers 2 -- python modernize_4_checkpoints.py
"""

import argparse

import digits
import tensorflow as tf

import tf4slurm
from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_steps

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1500, help="steps of all workers together")
parser.add_argument("--checkpoints", default="checkpoints", help="directory that chief and ps share")
FLAGS = parser.parse_args()

strategy, coordinator = parameter_server_strategy()  # on a ps or a worker: serves, and never returns
data = digits.load()
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.003)
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64, trainable=False)


def make_dataset():
    images = tf.data.Dataset.from_tensor_slices((data.train_images, data.train_labels))
    return images.shuffle(len(data.train_labels)).repeat().batch(64).prefetch(2)


def train_step(batch):
    images, labels = batch
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def test_accuracy():
    right = tf.argmax(model(data.test_images), axis=1) == data.test_labels
    return float(tf.reduce_mean(tf.cast(right, tf.float32)))


batches = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
checkpoints = Checkpoints(FLAGS.checkpoints, step=step, model=model, optimizer=optimizer)
if checkpoints.restored:
    print(f"resuming from step {int(step)}", flush=True)
for last_step in range(int(step) // 300 * 300 + 300, FLAGS.steps + 1, 300):
    done = run_steps(coordinator, train_step, last_step, dataset=batches, checkpoints=checkpoints)
    if done.is_stopped:
        print(f"asked to stop: saved at step {done.step}", flush=True)
        raise SystemExit
    accuracy = test_accuracy()
    tf4slurm.report(step=done.step, accuracy=accuracy)
    print(f"step {done.step}, loss {done.mean_loss:.3f}, test accuracy: {accuracy:.4f}", flush=True)
