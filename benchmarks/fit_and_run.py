"""A small Keras model on a ps: trained by fit, by run_steps with a step of one's own, or step by step.

    python fit_and_run.py SECONDS ROUNDS REPORT.json

The chief writes the steps per second of each round, {"fit": […], "run_steps": […], "one by one": […]}. The methods take
turns in one cluster, with the same model and dataset. Tracing is not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from tf4slurm.tensorflow import fit, parameter_server_strategy, run_steps

_GROUP = 16


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """The duration of the last epoch in seconds."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.started = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.monotonic() - self.started


def main(seconds: float, rounds: int, report: Path) -> None:
    strategy, coordinator = parameter_server_strategy()
    with strategy.scope():
        layers = [keras.layers.Input((32,)), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss_function, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
        counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(4096, 32)).astype("float32"), random.integers(0, 10, 4096)

    def dataset_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(4096).repeat().batch(32).prefetch(2)

    def step_fn(batch: Any) -> Any:
        rows, targets = batch
        with tf.GradientTape() as tape:
            loss = loss_function(targets, model(rows, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = iter(coordinator.create_per_worker_dataset(dataset_fn))
    one_step = tf.function(lambda iterator: strategy.run(step_fn, args=(next(iterator),)))

    def one_by_one(steps: int) -> float:
        """As in TensorFlow's documentation: schedule, schedule, …, join."""
        started = time.monotonic()
        for _ in range(0, steps, _GROUP):
            for _ in range(_GROUP):
                coordinator.schedule(one_step, args=(batches,))
            coordinator.join()
        return time.monotonic() - started

    def together(steps: int) -> float:
        started = time.monotonic()
        run_steps(coordinator, step_fn, int(counter.numpy()) + steps, step=counter, dataset=batches)
        return time.monotonic() - started

    def by_fit(steps: int) -> float:
        clock = _Clock()  # the first epoch traces
        options: dict[str, Any] = {"epochs": 2, "steps_per_epoch": steps, "callbacks": [clock], "verbose": 0}
        fit(model, dataset_fn, coordinator=coordinator, **options)
        return clock.seconds

    ways: dict[str, Callable[[int], float]] = {"fit": by_fit, "run_steps": together, "one by one": one_by_one}
    steps = dict.fromkeys(ways, 4 * _GROUP)
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-3, rounds):  # three rounds trace all sizes, connect the workers and find the speed
        for name in names[number % 3 :] + names[: number % 3]:
            rate = steps[name] / ways[name](steps[name])
            steps[name] = max(32 * _GROUP, int(rate * seconds) // _GROUP * _GROUP)
            if number >= 0:
                found[name].append(rate)
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
