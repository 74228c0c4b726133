# mypy: ignore-errors
"""Training, evaluation and prediction with the Keras of TensorFlow."""

import argparse

import numpy as np
import tensorflow as tf

from tf4slurm.tensorflow import evaluate, fit, job_strategy, predict

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--in-step", action="store_true")
arguments = parser.parse_args()

strategy, coordinator = job_strategy()
keras = tf.keras
inputs = np.random.default_rng(0).normal(size=(1000, 4)).astype("float32")
targets = inputs.sum(axis=1, keepdims=True)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])


def dataset_fn():
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(1000).batch(32)


class PrintEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, "begins with step", int(self.model.optimizer.iterations.numpy()), flush=True)


history = fit(
    model,
    dataset_fn,
    coordinator=coordinator,
    epochs=arguments.epochs,
    steps_per_epoch=50,
    callbacks=[PrintEpoch(), *([keras.callbacks.BackupAndRestore(arguments.directory)] if arguments.in_step else [])],
    validation_data=(inputs, targets),
    checkpoints=None if arguments.in_step else arguments.directory,
    verbose=2,
)
names = sorted(history.history)
print("names", *names, "epochs", len(history.epoch), flush=True)
print("trained to step", int(model.optimizer.iterations.numpy()), flush=True)
found = evaluate(model, (inputs, targets), coordinator=coordinator, verbose=0)
outputs = predict(model, inputs, coordinator=coordinator)
error = float(np.abs(outputs - targets).mean())
print("rows", *outputs.shape, "same error", bool(np.isclose(found["mae"], error, rtol=0.01)), flush=True)
