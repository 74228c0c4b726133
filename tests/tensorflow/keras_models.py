"""Train some of six models with `fit`, on whatever cluster this process belongs to, or with Keras's own fit.

    tf4slurm run --ps 1 --workers 2 -- python keras_models.py cnn --seeds 3 --json result.json
    python keras_models.py cnn --seeds 3 --json result.json --keras

The result has the accuracy on held-out rows, `optimizer.iterations` and Keras's History; with several models or seeds,
there is a list of results.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from tf4slurm.tensorflow import ShardedEmbedding, evaluate, evaluate_checkpoints, fit, job_strategy

BATCH_SIZE = 32
layers = keras.layers


class Rows(NamedTuple):
    """Inputs and targets, as Keras takes them."""

    inputs: Any
    targets: Any


def digits() -> tuple[Rows, Rows]:
    """Images of shape (8, 8, 1), and the digits 0 to 9."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return split(images, labels.astype("int64"))


def split(inputs: Any, targets: Any) -> tuple[Rows, Rows]:
    """Hold out a fifth of the rows, the same rows in every run."""
    count = len(tf.nest.flatten(targets)[0])
    order = np.random.default_rng(0).permutation(count)
    parts = order[count // 5 :], order[: count // 5]
    train, test = (
        Rows(*tf.nest.map_structure(lambda each, rows=rows: each[rows], (inputs, targets))) for rows in parts
    )
    return train, test


def sentences() -> tuple[Rows, Rows]:
    """Sequences of 12 words about one of four subjects; a third of the words belong to the subject."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 4, 2400)
    words = random.integers(0, 200, (2400, 12))
    own = 200 + 50 * labels[:, None] + random.integers(0, 50, (2400, 12))
    return split(np.where(random.random((2400, 12)) < 0.35, own, words).astype("int64"), labels.astype("int64"))


def ratings() -> tuple[Rows, Rows]:
    """A user, an item, and whether the user likes it: that is so if both belong to the same of three groups."""
    random = np.random.default_rng(2)
    users, items = random.integers(0, 300, 6000), random.integers(0, 200, 6000)
    liked = (users % 3 == items % 3).astype("float32")
    return split({"user": users.astype("int64"), "item": items.astype("int64")}, liked[:, None])


def both() -> tuple[Rows, Rows]:
    """The digit of an image, and whether it is even."""
    train, test = digits()
    return tuple(  # type: ignore[return-value]
        Rows(each.inputs, {"digit": each.targets, "even": (each.targets % 2 == 0).astype("float32")[:, None]})
        for each in (train, test)
    )


def make_mlp() -> Any:
    dense = layers.Dense(64, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-5))
    return keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), dense, layers.Dense(10)])


def make_cnn() -> Any:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Dropout(0.1),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def make_text() -> Any:
    return keras.Sequential(
        [
            layers.Input((12,), dtype="int64"),
            layers.Embedding(400, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(4),
        ]
    )


def make_recommender() -> Any:
    user, item = layers.Input((), dtype="int64", name="user"), layers.Input((), dtype="int64", name="item")
    vectors = [ShardedEmbedding(300, 8, name="users")(user), ShardedEmbedding(200, 8, name="items")(item)]
    output = layers.Dense(1)(layers.Dot(axes=1)(vectors))
    return keras.Model({"user": user, "item": item}, output)


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model with its own train_step: it trains on the mean loss of an image and of a noisy copy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_mlp()
        self.tracker = keras.metrics.Mean(name="both")
        self.right = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.body(inputs, training=training)

    def train_step(self, data: Any) -> Any:
        images, labels = data
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            noisy = self(images + 0.01 * tf.random.normal(tf.shape(images)), training=True)
            loss = (self.loss(labels, logits) + self.loss(labels, noisy)) / 2
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        self.right.update_state(labels, logits)
        return {"both": self.tracker.result(), "accuracy": self.right.result()}

    def test_step(self, data: Any) -> Any:
        images, labels = data
        logits = self(images)
        self.tracker.update_state(self.loss(labels, logits))
        self.right.update_state(labels, logits)
        return {"both": self.tracker.result(), "accuracy": self.right.result()}


def make_outputs() -> Any:
    images = layers.Input((8, 8, 1))
    hidden = layers.Dense(64, activation="relu")(layers.Flatten()(images))
    return keras.Model(images, {"digit": layers.Dense(10)(hidden), "even": layers.Dense(1)(hidden)})


class Setting(NamedTuple):
    """How a model is made and trained, and the name of its accuracy."""

    data: Callable[[], tuple[Rows, Rows]]
    make: Callable[[], Any]
    loss: Any
    metrics: Any
    accuracy: str = "accuracy"
    epochs: int = 12
    options: dict[str, Any] = {}  # noqa: RUF012  # of compile


def of_classes() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def of_two() -> Any:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def of_two_accuracy(name: str = "accuracy") -> Any:
    return keras.metrics.BinaryAccuracy(threshold=0.0, name=name)


SETTINGS: dict[str, Setting] = {
    "mlp": Setting(digits, make_mlp, of_classes, lambda: ["accuracy"]),
    "cnn": Setting(digits, make_cnn, of_classes, lambda: ["accuracy"]),
    "text": Setting(sentences, make_text, of_classes, lambda: ["accuracy"]),
    "recommender": Setting(
        ratings, make_recommender, of_two, lambda: [of_two_accuracy(), keras.metrics.AUC(name="auc")]
    ),
    "own-step": Setting(digits, OwnStep, of_classes, lambda: None),
    "outputs": Setting(
        both,
        make_outputs,
        lambda: {"digit": of_classes(), "even": of_two()},
        lambda: {"digit": ["accuracy"], "even": [of_two_accuracy()]},
        "digit_accuracy",
        options={"loss_weights": {"digit": 1.0, "even": 0.3}},
    ),
}


def compile_model(setting: Setting, steps: int) -> Any:
    """Make and compile the model, with a learning rate that falls to zero at the end."""
    model = setting.make()
    if isinstance(model, OwnStep):
        model.build((None, 8, 8, 1))
    rate = keras.optimizers.schedules.CosineDecay(0.01, steps)
    model.compile(keras.optimizers.Adam(rate), loss=setting.loss(), metrics=setting.metrics(), **setting.options)
    return model


def evaluate_saved(name: str, checkpoints: Path) -> None:
    """In an evaluator, evaluate each checkpoint; never returns there."""
    setting = SETTINGS[name]
    _, test_rows = setting.data()

    def test(checkpoint: str) -> dict[str, float]:
        model = compile_model(setting, 1)  # the learning rate does not matter here
        tf.train.Checkpoint(model=model).read(checkpoint).expect_partial()
        return evaluate(model, tuple(test_rows), verbose=0)

    evaluate_checkpoints(checkpoints, test)


def train(
    name: str, seed: int, epochs: int | None, strategy: Any, coordinator: Any, use_keras: bool, checkpoints: Path | None
) -> dict[str, Any]:
    """Train a model, and evaluate it on the held-out rows."""
    setting = SETTINGS[name]
    epochs = epochs or setting.epochs
    train_rows, test_rows = setting.data()
    count = len(tf.nest.flatten(train_rows.targets)[0])
    steps_per_epoch = count // BATCH_SIZE
    replicas = strategy.num_replicas_in_sync
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = compile_model(setting, steps_per_epoch * epochs)

    def dataset_fn() -> Any:
        rows = tf.data.Dataset.from_tensor_slices(tuple(train_rows))
        rows = rows.shuffle(count, seed=seed if coordinator is None and replicas == 1 else None)
        # workers in step share a batch
        return rows.repeat().batch(BATCH_SIZE // replicas, drop_remainder=True).prefetch(2)

    started = time.monotonic()
    options: dict[str, Any] = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, "verbose": 2}
    if use_keras:
        history = model.fit(dataset_fn(), **options, validation_data=tuple(test_rows))
        found = model.evaluate(*test_rows, verbose=0, return_dict=True)
    else:
        options |= {"validation_data": tuple(test_rows), "checkpoints": checkpoints}
        history = fit(model, dataset_fn, coordinator=coordinator, **options)
        found = evaluate(model, tuple(test_rows), coordinator=coordinator, verbose=0)
    return {
        "model": name,
        "seed": seed,
        "accuracy": found[setting.accuracy],
        "iterations": int(model.optimizer.iterations.numpy()),
        "steps": steps_per_epoch * epochs,
        "history": history.history,
        "epoch": history.epoch,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", choices=SETTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keras", action="store_true", help="train with model.fit in this process")
    parser.add_argument("--checkpoints", type=Path)
    arguments = parser.parse_args()
    if arguments.checkpoints is not None and os.environ.get("TF_CONFIG"):
        evaluate_saved(arguments.models[0], arguments.checkpoints)
    place = (tf.distribute.get_strategy(), None) if arguments.keras else job_strategy()
    options = (*place, arguments.keras, arguments.checkpoints)
    results = []
    for name in arguments.models:
        for seed in arguments.seeds:
            results.append(train(name, seed, arguments.epochs, *options))
            text = "{model} {seed} accuracy {accuracy:.4f} iterations {iterations} of {steps}"
            print(text.format(**results[-1]), flush=True)
    resolver = place[0].cluster_resolver
    is_first = resolver is None or not resolver.task_id  # of workers in step, each has the result
    if arguments.json is not None and is_first:
        arguments.json.write_text(json.dumps(results if len(results) > 1 else results[0]))


if __name__ == "__main__":
    main()
