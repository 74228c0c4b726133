"""Data and models of the reference suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks, layers, losses, metrics, optimizers

__all__ = ["callbacks", "layers", "losses", "metrics", "optimizers"]

BATCH, ROWS = 12, 48
_RANDOM = np.random.default_rng(0)
INPUTS = _RANDOM.normal(size=(ROWS, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True) + 0.1
WEIGHTS = _RANDOM.uniform(0.5, 1.5, ROWS).astype("float32")
CLASSES = _RANDOM.integers(0, 3, ROWS)
IMAGES = _RANDOM.normal(size=(ROWS, 6, 6, 2)).astype("float32")
WORDS = _RANDOM.integers(1, 20, (ROWS, 6))
WORDS[np.arange(6) >= _RANDOM.integers(2, 7, ROWS)[:, None]] = 0  # lengths of 2 to 6, then the mask


def _batches(inputs: Any, targets: Any, *more: Any, size: int = BATCH) -> Any:
    return tf.data.Dataset.from_tensor_slices((inputs, targets, *more)).batch(size, drop_remainder=True)


def numbers() -> Any:
    return _batches(INPUTS, TARGETS)


def one_batch() -> Any:
    return _batches(INPUTS, TARGETS, size=ROWS)


def weighted() -> Any:
    return _batches(INPUTS, TARGETS, WEIGHTS)


def weighted_batch() -> Any:
    return _batches(INPUTS, (CLASSES > 0).astype("float32")[:, None], WEIGHTS, size=ROWS)


def classes() -> Any:
    return _batches(INPUTS, CLASSES)


def binary_batch() -> Any:
    return _batches(INPUTS, (CLASSES > 0).astype("float32")[:, None], size=ROWS)


def classes_batch() -> Any:
    return _batches(INPUTS, CLASSES, size=ROWS)


def one_hot_batch() -> Any:
    return _batches(INPUTS, np.eye(3, dtype="float32")[CLASSES], size=ROWS)


def images() -> Any:
    return _batches(IMAGES, CLASSES)


def words() -> Any:
    return _batches(WORDS, TARGETS)


def word_targets() -> Any:
    return _batches(WORDS, np.cumsum(WORDS, axis=1).astype("float32")[:, :, None] / 50)


def two_inputs() -> Any:
    return _batches({"user": WORDS[:, 0], "item": WORDS[:, 1]}, TARGETS)


def two_outputs() -> Any:
    return _batches(INPUTS, {"number": TARGETS, "kind": CLASSES})


def two_outputs_batch() -> Any:
    return _batches(INPUTS, {"number": TARGETS, "kind": CLASSES}, size=ROWS)


def strings() -> Any:
    return _batches(np.array(["a", "b", "c", "d"])[WORDS[:, :1] % 4], TARGETS)


def compiled(model: Any, optimizer: Any = None, loss: Any = "mse", **options: Any) -> Any:
    """Compile a model, by default with SGD."""
    model.compile(optimizers.SGD(0.1) if optimizer is None else optimizer, loss, **options)
    return model


def dense(optimizer: Any = None, loss: Any = "mse", outputs: Any = 1, hidden: Any = None, **options: Any) -> Any:
    """Return a functional model with one hidden layer; `hidden` are options of that layer."""
    inputs = layers.Input((4,))
    rows = layers.Dense(6, activation="tanh", **(hidden or {}))(inputs)
    last = {1: None, 2: "sigmoid", 3: "softmax"}[outputs]
    return compiled(
        keras.Model(inputs, layers.Dense(3 if outputs == 3 else 1, activation=last)(rows)), optimizer, loss, **options
    )


def classifier(*used: Any, outputs: int = 2, **options: Any) -> Any:
    """Return a model with these metrics whose weights do not change, so that metrics are exact in any order."""
    loss = "binary_crossentropy" if outputs == 2 else "categorical_crossentropy"
    return dense(optimizers.SGD(0.0), **({"loss": loss} | options), outputs=outputs, metrics=list(used))


def stack(*between: Any, shape: Any = (4,), outputs: int = 1, dtype: Any = None, **options: Any) -> Any:
    """Return a Sequential model of these layers and a Dense layer."""
    loss = "mse" if outputs == 1 else losses.SparseCategoricalCrossentropy(from_logits=True)
    inputs = layers.Input(shape, dtype=dtype)
    model = keras.Sequential([inputs, *between, layers.Dense(outputs)])
    return compiled(model, **({"loss": loss} | options))


def unbuilt() -> Any:
    return keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(1)])


def frozen() -> Any:
    first = layers.Dense(6, activation="tanh")
    first.trainable = False
    return stack(first)


def without_bias_decay() -> Any:
    optimizer = optimizers.AdamW(0.05, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return dense(optimizer)


def shared_embedding(optimizer: Any = None, kind: Any = layers.Embedding) -> Any:
    """Return a model that looks up two inputs in one table."""
    table = kind(20, 4)
    inputs = {name: layers.Input((), dtype="int64", name=name) for name in ("user", "item")}
    both = layers.Concatenate()([table(inputs["user"]), table(inputs["item"])])
    return compiled(keras.Model(inputs, layers.Dense(1)(both)), optimizer)


def embedding(*after: Any, optimizer: Any = None, mask_zero: bool = False, **options: Any) -> Any:
    table = layers.Embedding(20, 4, mask_zero=mask_zero)
    return stack(table, *after, shape=(6,), dtype="int64", optimizer=optimizer, **options)


def attention() -> Any:
    inputs = layers.Input((6,), dtype="int64")
    rows = layers.Embedding(20, 4, mask_zero=True)(inputs)
    rows = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 3)(rows, rows))
    return compiled(keras.Model(inputs, layers.Dense(1)(rows)))


def normalized() -> Any:
    layer = layers.Normalization(mean=[0.1, 0.2, 0.3, 0.4], variance=[1.0, 2.0, 3.0, 4.0])
    return stack(layer, layers.Rescaling(0.5), layers.Dense(6, activation="tanh"))


def discretized() -> Any:
    return stack(layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5]), layers.Rescaling(0.2))


def looked_up() -> Any:
    return stack(
        layers.StringLookup(vocabulary=["a", "b", "c"]), layers.Embedding(5, 3), layers.Flatten(),
        shape=(1,), dtype="string",
    )  # fmt: skip


def several(optimizer: Any = None, **options: Any) -> Any:
    """Return a model with two outputs."""
    inputs = layers.Input((4,))
    rows = layers.Dense(6, activation="tanh")(inputs)
    outputs = {
        "number": layers.Dense(1, name="number")(rows),
        "kind": layers.Dense(3, activation="softmax", name="kind")(rows),
    }
    loss = {"number": "mse", "kind": "sparse_categorical_crossentropy"}
    return compiled(keras.Model(inputs, outputs), optimizer, loss, **options)


class AddsLoss(layers.Layer):  # type: ignore[misc]
    """Adds a penalty on the activity."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        return inputs


class Subclassed(keras.Model):  # type: ignore[misc]
    """A model with `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(6, activation="tanh"), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))


class OwnLoss(Subclassed):
    """A model with `compute_loss`."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return keras.ops.mean(keras.ops.abs(y - y_pred)) + 0.01 * keras.ops.mean(y_pred**2)


class OwnStep(Subclassed):
    """A model with a train_step that returns a constant too."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {"loss": logs["loss"], "constant": tf.constant(3.0)}


class OwnTape(Subclassed):
    """A model with a train_step that applies the gradients itself, as Keras's guide shows it."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class TwoOptimizers(Subclassed):
    """A model whose two layers are trained by two optimizers, in turn, as a GAN is."""

    def compile(self, *arguments: Any, **options: Any) -> None:
        super().compile(*arguments, **options)
        self.second = optimizers.Adam(0.05)
        self.first.build((None, 4))
        self.last.build((None, 6))
        self.optimizer.build(self.first.trainable_variables)
        self.second.build(self.last.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        for optimizer, layer in ((self.optimizer, self.first), (self.second, self.last)):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply(gradients, layer.trainable_variables)
        return {"loss": loss}


class Rows(metrics.Metric):  # type: ignore[misc]
    """Counts rows; its result is a dict."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return {"rows": self.total, "half": self.total / 2}


class Largest(Rows):
    """Keeps a maximum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(keras.ops.maximum(self.total, keras.ops.max(y_pred)))


def linear_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(y_true * y_pred, axis=-1)


def absolute_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def best_weights() -> Any:
    return keras.saving.load_model("best.keras").get_weights()


def log_file() -> Any:
    """Return the columns of the log of CSVLogger, and its numbers."""
    head, *lines = Path("log.csv").read_text().splitlines()
    numbers = [[float(cell.replace("NA", "nan")) for cell in line.split(",")] for line in lines]
    return {"columns": head.split(","), "numbers": numbers}
