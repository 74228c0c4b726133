"""Train a model of handwritten digits in one process: python first_job.py"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import digits
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--data", choices=digits.NAMES, default="digits")
parser.add_argument("--epochs", type=int, default=10, help="passes over the images (default: %(default)s)")
arguments = parser.parse_args()

node = os.environ.get("SLURMD_NODENAME", "this computer")
print(f"{node}: {len(os.sched_getaffinity(0))} CPUs, {len(tf.config.list_physical_devices('GPU'))} GPUs")

tf.keras.utils.set_random_seed(0)
data = digits.load(arguments.data)
model = digits.make_model(data)
model.compile(
    optimizer=tf.keras.optimizers.Adam(0.003),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


class PrintEpoch(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        print(f"epoch {epoch + 1:2d}  loss {logs['loss']:.3f}  accuracy {logs['accuracy']:.3f}", flush=True)


model.fit(
    data.train_images, data.train_labels, batch_size=64, epochs=arguments.epochs, verbose=0, callbacks=[PrintEpoch()]
)
_, accuracy = model.evaluate(data.test_images, data.test_labels, verbose=0)
print(f"test accuracy: {accuracy:.4f}")
