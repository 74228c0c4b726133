"""Parts of `fit`, `evaluate` and `predict` in a LocalCluster, compared with Keras in this process.

    python keras_features.py callbacks evaluation

Each part prints lines "NAME: WHAT".
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tf4slurm
from tf4slurm.errors import KerasError
from tf4slurm.tensorflow import ShardedEmbedding, evaluate, fit, job_strategy, predict, run_shards, run_steps

ROWS = np.random.default_rng(0)
INPUTS = ROWS.normal(size=(48, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True).astype("float32")


def main() -> None:
    functions = (callbacks, evaluation, mistakes, embedding, counts, tables, metrics, assignments)
    parts: dict[str, Callable[[Any, Any], None]] = {each.__name__: each for each in functions}
    workers = 1 if sys.argv[1] == "callbacks" else 2
    with tf4slurm.LocalCluster(ps=2, workers=workers):
        strategy, coordinator = job_strategy()
        for name in sys.argv[1:]:
            parts[name](strategy, coordinator)
            print(f"{name}: done", flush=True)


def whole_batch(*more: Any) -> Callable[[], Any]:
    """Return a function for a dataset of one batch, so that every step has the same one."""
    import tensorflow as tf

    return lambda: tf.data.Dataset.from_tensors((INPUTS, TARGETS, *more))


def dense(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(8, activation="tanh", **options)
    return keras.Sequential([keras.layers.Input((4,)), hidden, keras.layers.Dense(1)])


def callbacks(strategy: Any, coordinator: Any) -> None:  # noqa: PLR0915  # one after the other
    """See the effect of each of Keras's callbacks."""
    import keras

    def train(epochs: int, *given: Any, rate: float = 0.05, **options: Any) -> tuple[Any, dict[str, list[float]]]:
        with strategy.scope():
            model = dense()
            model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
        options = {"steps_per_epoch": 10, "verbose": 0} | options
        history = fit(model, whole_batch(), coordinator=coordinator, epochs=epochs, callbacks=given, **options)
        return model, history.history

    def tell(name: str, is_right: Any, *found: Any) -> None:
        print(f"{name}: {'works' if is_right else found}", flush=True)

    each = keras.callbacks
    model, history = train(3, each.ModelCheckpoint("best-{epoch}.keras", monitor="loss", save_best_only=True))
    loaded = keras.saving.load_model("best-3.keras")
    tell(
        "ModelCheckpoint",
        np.allclose(loaded.predict(INPUTS, verbose=0), predict(model, INPUTS, coordinator=coordinator)),
    )

    _, history = train(9, each.EarlyStopping("loss", min_delta=100.0, patience=2))
    tell("EarlyStopping", len(history["loss"]) == 3, history)

    model, history = train(4, each.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0))
    tell("ReduceLROnPlateau", np.isclose(float(model.optimizer.learning_rate), 0.05 / 8), history)

    model, history = train(3, each.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch else rate))
    tell("LearningRateScheduler", history["learning_rate"] == [np.float32(0.05), 0.0, 0.0], history)
    tell("rate of workers", np.isclose(history["loss"][1], history["loss"][2], rtol=1e-6), history)

    train(2, each.TensorBoard("board"), validation_data=whole_batch())
    written = {path.parent.name for path in Path("board").rglob("events*")}
    tell("TensorBoard", written == {"train", "validation"}, written)

    train(3, each.CSVLogger("log.csv"))
    lines = Path("log.csv").read_text().splitlines()
    tell("CSVLogger", lines[0].startswith("epoch,loss,mae") and len(lines) == 4, lines)

    seen: list[Any] = []
    train(
        2,
        each.LambdaCallback(
            on_train_begin=lambda logs: seen.append("begin"),
            on_epoch_begin=lambda epoch, logs: seen.append(epoch),
            on_train_batch_begin=lambda batch, logs: seen.append(("from", batch)),
            on_train_batch_end=lambda batch, logs: seen.append(("to", batch, sorted(logs))),
            on_epoch_end=lambda epoch, logs: seen.append(sorted(logs)),
            on_train_end=lambda logs: seen.append("end"),
        ),
        validation_data=whole_batch(),
    )
    ends = [what for what in seen if isinstance(what, tuple) and what[0] == "to"]
    starts = [what[1] for what in seen if isinstance(what, tuple) and what[0] == "from"]
    both = ["loss", "mae", "val_loss", "val_mae"]
    is_whole = [what for what in seen if not isinstance(what, tuple)] == ["begin", 0, both, 1, both, "end"]
    follows = starts[0] == 0 and all(start in (0, last[1] + 1) for start, last in zip(starts[1:], ends, strict=False))
    is_last = ends[-1] == ("to", 9, ["loss", "mae"])
    tell("LambdaCallback", is_whole and follows and is_last, seen)

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("as in a crash")

    with contextlib.suppress(RuntimeError):
        train(4, each.BackupAndRestore("backup"), Fail())
    epochs: list[int] = []
    model, _ = train(
        4, each.BackupAndRestore("backup"), each.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    )
    tell(
        "BackupAndRestore",
        epochs == [2, 3] and int(model.optimizer.iterations) == 40,
        epochs,
        model.optimizer.iterations,
    )

    _, history = train(9, each.TerminateOnNaN(), rate=1e30)
    tell("TerminateOnNaN", len(history["loss"]) < 9, history)

    class StopInEpoch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    model, history = train(5, StopInEpoch(), steps_per_epoch=100_000)
    tell("stop_training", len(history["loss"]) == 1 and int(model.optimizer.iterations) < 100_000, history)

    given = each.CallbackList([each.History()])
    history_callback = next(iter(given.callbacks))
    train(2, history_callback)
    tell("own History", len(history_callback.history["loss"]) == 2)


def evaluation(strategy: Any, coordinator: Any) -> None:
    """Compare evaluate and predict with Keras's own, on datasets that do not divide evenly."""
    import keras
    import tensorflow as tf

    def make() -> Any:
        model = dense()
        model.compile("sgd", "mse", metrics=["mae", keras.metrics.AUC(name="auc")])
        return model

    with strategy.scope():
        model = make()
    alone = make()
    alone.set_weights(model.get_weights())
    targets = (TARGETS > 0).astype("float32")
    for batch_size in (5, 48, 100):

        def data_fn(size: int = batch_size) -> Any:
            return tf.data.Dataset.from_tensor_slices((INPUTS, targets)).batch(size)

        wanted = alone.evaluate(data_fn(), verbose=0, return_dict=True)
        rows = alone.predict(INPUTS, verbose=0)
        for what, data, on in (("function", data_fn, None), ("chief", data_fn, "chief"), ("dataset", data_fn(), None)):
            found = evaluate(model, data, coordinator=coordinator, on=on, verbose=0)
            outputs = predict(model, data, coordinator=coordinator, on=on)
            same = found.keys() == wanted.keys() and all(np.isclose(found[name], wanted[name]) for name in wanted)
            print(f"{what} in {batch_size}: {'equal' if same and np.allclose(outputs, rows) else (found, wanted)}")
    some = evaluate(model, data_fn, coordinator=coordinator, steps=1, verbose=0)
    print(f"steps: {'equal' if np.isclose(some['loss'], wanted['loss']) else some}")
    for name, steps in (("endless", None), ("empty", None)):

        def bad(kind: str = name) -> Any:
            rows = tf.data.Dataset.from_tensor_slices((INPUTS, targets)).batch(8)
            return rows.repeat() if kind == "endless" else rows.take(0)

        for function in (evaluate, predict):
            try:
                function(model, bad, coordinator=coordinator, steps=steps)
            except Exception as error:
                print(f"{name} {function.__name__}: {type(error).__name__}: {error}")

    with strategy.scope():
        inputs = keras.layers.Input((4,))
        several = keras.Model(inputs, {"one": keras.layers.Dense(2)(inputs), "two": keras.layers.Dense(1)(inputs)})
    found = predict(several, data_fn, coordinator=coordinator)
    print(f"outputs: { ({name: rows.shape for name, rows in found.items()}) }")


def mistakes(strategy: Any, coordinator: Any) -> None:
    """Call fit with invalid arguments."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = dense()
        model.compile("sgd", "mse")
        uncompiled = dense()
        of_chief = dense()
    of_chief.compile(keras.optimizers.SGD(), "mse")
    outside = dense()
    outside.compile("sgd", "mse")
    data_fn = whole_batch()

    class Typo(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_ends(self, epoch: int, logs: Any = None) -> None:
            pass

    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "uncompiled": (uncompiled, data_fn, {}),
        "outside": (outside, data_fn, {}),
        "optimizer outside": (of_chief, data_fn, {}),
        "dataset": (model, data_fn(), {}),
        "arrays": (model, (INPUTS, TARGETS), {}),
        "no steps": (model, data_fn, {"steps_per_epoch": None}),
        "callback": (model, data_fn, {"callbacks": [Typo()]}),
        "lambda": (model, data_fn, {"callbacks": [keras.callbacks.LambdaCallback(on_batch_ends=print)]}),
        "class": (model, data_fn, {"callbacks": [keras.callbacks.TerminateOnNaN]}),
        "epochs": (model, data_fn, {"epochs": -1}),
        "no model": ("model", data_fn, {}),
        "no coordinator": (model, data_fn, {"coordinator": None}),
        "strategy": (model, data_fn, {"coordinator": strategy}),
        "validation": (model, data_fn, {"validation_data": data_fn(), "validation_on": "workers"}),
        "place": (model, data_fn, {"validation_data": data_fn(), "validation_on": "ps"}),
        "endless validation": (model, data_fn, {"validation_data": lambda: data_fn().repeat()}),
    }
    for name, (given, data, options) in cases.items():
        try:
            fit(given, data, **({"coordinator": coordinator, "steps_per_epoch": 4, "verbose": 0} | options))
            print(f"{name}: nothing")
        except (TypeError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    print(f"iterations: {int(model.optimizer.iterations)}")
    for function in (model.fit, model.evaluate, model.predict):
        try:
            function(tf.data.Dataset.from_tensors((INPUTS, TARGETS)))
        except KerasError as error:
            print(f"refused: {error}")


def embedding(strategy: Any, coordinator: Any) -> None:
    """Train and save a model with a split table, and load it without ps."""
    import keras
    import tensorflow as tf

    ids = np.arange(40, dtype="int64") % 10
    values = (ids % 3).astype("float32")[:, None]

    def data_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices((ids, values)).repeat().batch(20)

    with strategy.scope():
        inputs = keras.layers.Input((), dtype="int64")
        table = ShardedEmbedding(10, 4, name="table", embeddings_initializer="zeros")
        model = keras.Model(inputs, keras.layers.Dense(1)(table(inputs)))
        model.compile(keras.optimizers.Adam(0.02), "mse")
    devices = sorted(part.value.device for part in table.weights)
    print(
        "slices:", [tuple(part.shape) for part in table.weights], ["ps" in each for each in devices], len(set(devices))
    )
    losses = fit(model, data_fn, coordinator=coordinator, epochs=3, steps_per_epoch=100, verbose=0).history["loss"]
    print("loss:", "falls" if losses[2] < losses[0] / 4 else losses)
    rows = predict(model, ids, coordinator=coordinator)
    model.save("model.keras")
    model.save_weights("model.weights.h5")
    model.export("exported", verbose=False)
    loaded = keras.saving.load_model("model.keras")
    print("keras:", np.allclose(loaded.predict(ids, verbose=0), rows, atol=1e-6), len(loaded.layers[1].weights))
    print("devices:", {"ps" in part.value.device for part in loaded.layers[1].weights})
    exported = tf.saved_model.load("exported")
    print("exported:", np.allclose(exported.serve(tf.constant(ids)), rows, atol=1e-6))
    again = keras.layers.Input((), dtype="int64")
    one = keras.Model(again, keras.layers.Dense(1)(ShardedEmbedding(10, 4, slices=1, name="table")(again)))
    one.load_weights("model.weights.h5")
    print("one slice:", np.allclose(one.predict(ids, verbose=0), rows, atol=1e-6), len(one.layers[1].weights))
    wrong = keras.Model(again, keras.layers.Dense(1)(ShardedEmbedding(11, 4, name="table")(again)))
    for name, use in (
        ("shape", lambda: wrong.load_weights("model.weights.h5")),
        ("slices", lambda: ShardedEmbedding(2, 4, slices=3)),
    ):
        try:
            use()
        except ValueError as error:
            print(f"{name}: {' '.join(str(error).split())}")


def counts(strategy: Any, coordinator: Any) -> None:
    """Count steps, rows and learning rates with two workers."""
    import keras
    import tensorflow as tf

    rate = keras.optimizers.schedules.PiecewiseConstantDecay([500], [0.5, 0.125])
    with strategy.scope():
        model = dense()
        model.compile(
            keras.optimizers.SGD(rate), loss=lambda y, p: 0.0 * p, metrics=[keras.metrics.MeanAbsoluteError()]
        )
    seen: list[int] = []

    class Rows(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(int(self.model.metrics[0].variables[1].numpy()))

    def data_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(16)

    fit(model, data_fn, coordinator=coordinator, epochs=2, steps_per_epoch=500, callbacks=[Rows()], verbose=0)
    print("iterations:", int(model.optimizer.iterations), "rate:", float(model.optimizer.learning_rate), "rows:", seen)


def tables(strategy: Any, coordinator: Any) -> None:
    """Use lookup tables in all functions that workers run."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        content = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        table = tf.lookup.StaticHashTable(content, default_value=0)
        total = tf.Variable(0, dtype=tf.int64)
        inputs = keras.layers.Input((1,), dtype="string")
        numbers = keras.layers.StringLookup(vocabulary=["a", "b"])(inputs)
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(keras.ops.cast(numbers, "float32"))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mae")
    words = np.array([["a"], ["b"]] * 12)

    def data_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices((words, np.zeros((24, 1), "float32"))).batch(5)

    print("loss:", evaluate(model, data_fn, coordinator=coordinator, verbose=0)["loss"])
    for data in (data_fn, data_fn()):
        print("sum:", predict(model, data, coordinator=coordinator).sum())
    options: dict[str, Any] = {"coordinator": coordinator, "steps_per_epoch": 2, "verbose": 0}
    print("logs:", sorted(fit(model, data_fn, validation_data=data_fn, **options).history))

    def add(numbers: Any) -> None:
        total.assign_add(tf.reduce_sum(numbers))

    def read(rows: Any) -> Any:
        return rows.map(lambda row: tf.gather(["a", "b"], row % 2)).batch(2)

    def look_up(rows: Any) -> Any:
        return read(rows).map(table.lookup)

    shards = tf4slurm.data_shards(10, shard_size=3, epochs=1, name="looked up in the step")
    run_shards(coordinator, lambda words: add(table.lookup(words)), shards, read)
    shards = tf4slurm.data_shards(10, shard_size=3, epochs=1, name="looked up in the dataset")
    run_shards(coordinator, add, shards, look_up)
    print("total:", int(total.numpy()))


def metrics(strategy: Any, coordinator: Any) -> None:
    """Use metrics with vectors and dicts as results, and refuse those that are no sums."""
    import keras

    class Rows(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="rows")
            self.total = self.add_variable((), initializer="zeros", name="total")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

        def result(self) -> Any:
            return {"rows": self.total, "half": self.total / 2}

    class RunningMean(Rows):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(0.1 * (keras.ops.mean(y_true) - self.total))

    class ByOther(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.count = self.add_variable((), initializer="zeros", name="count")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.count.assign_add(1.0)
            self.total.assign_add(keras.ops.mean(y_true) / self.count)

    labels = np.eye(3, dtype="float32")[np.arange(48) % 3]

    def data_fn() -> Any:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((INPUTS, labels)).batch(16)

    def make(*used: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=list(used))
        return model

    standard: tuple[Callable[[], Any], ...] = (
        keras.metrics.F1Score,
        lambda: keras.metrics.Precision(thresholds=[0.2, 0.4], name="precision"),
        Rows,
    )
    alone = make(*(each() for each in standard)).evaluate(data_fn(), return_dict=True, verbose=0)
    with strategy.scope():
        model = make(*(each() for each in standard))
    ours = evaluate(model, data_fn, coordinator=coordinator, verbose=0)
    different = [name for name in ours.keys() | alone.keys() if not np.allclose(ours[name], alone[name])]
    print("different:", different, {name: (ours[name], alone[name]) for name in different})
    history = fit(model, data_fn, coordinator=coordinator, steps_per_epoch=3, verbose=2).history
    print("shapes:", {name: np.shape(values[0]) for name, values in history.items() if np.ndim(values[0])})
    for kind in (RunningMean, ByOther):
        with strategy.scope():
            model = make(kind())
        for function in (functools.partial(fit, steps_per_epoch=3), evaluate):
            try:
                function(model, data_fn, coordinator=coordinator, verbose=0)
            except KerasError as error:
                print(f"refused {kind.__name__}:", " ".join(str(error).split()))


def assignments(strategy: Any, coordinator: Any) -> None:
    """Assign to variables what was computed from their earlier values."""
    import keras

    with strategy.scope():
        moved, added = keras.Variable(1.0, name="moved"), keras.Variable(1.0, name="added")

    def step() -> None:
        before = moved + 0.0
        read = keras.ops.convert_to_tensor(moved)
        moved.assign(moved + 10.0)
        moved.assign(read - 0.5)  # not moved - 0.5
        moved.assign(before - 0.75)
        added.assign(added + 1.0)
        added.assign(added + 1.0)

    run_steps(coordinator, step, 1)
    print("moved:", float(moved.numpy()), "added:", float(added.numpy()))


if __name__ == "__main__":
    main()
