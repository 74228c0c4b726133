"""Calls that random faults end, and that are repeated: python random_calls.py FUNCTION FIRST_SEED LAST_SEED

Each step adds 1 to variables on the ps, which each scenario checks. Each seed runs in a process of its own, which must
then end by itself.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from tests.tensorflow.elastic_cluster import ElasticCluster  # isort: skip  # sets variables of TensorFlow

import keras
import numpy as np
import tensorflow as tf

import tf4slurm
from tests.tensorflow.faults import Faults
from tf4slurm.tensorflow import Checkpoints, evaluate, fit, predict, run_shards, run_steps, shard_batches

MAX_STEPS_PER_CLOSURE = 64
BATCH = 4
LIMIT_SECONDS = 150
END_SECONDS = 20


class Scenario:
    """A cluster, and what all scenarios need."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.workers = chance.randint(1, 3)
        self.cluster = ElasticCluster(self.workers, ps=chance.randint(1, 2))
        self.strategy, self.coordinator = self.cluster.strategy, self.cluster.coordinator
        self.faults = Faults(self.cluster, chance)

    def most_repeated(self, steps_per_closure: int) -> int:
        """Return how many steps of closures in flight can have run again, or partly: two closures per worker."""
        return 2 * self.workers * steps_per_closure * self.faults.count


def steps(scenario: Scenario) -> None:
    """Train by several calls, of which some save checkpoints; compare the counter with the steps that were applied."""
    chance, faults = scenario.chance, scenario.faults
    with scenario.strategy.scope():
        applied, counter = tf.Variable(0, dtype=tf.int64), tf.Variable(0, dtype=tf.int64)
    per_call = chance.choice([None, 1, 3, 8])
    most_steps = per_call or MAX_STEPS_PER_CLOSURE
    options: dict[str, Any] = {"steps_per_call": per_call, "step": counter}
    if chance.random() < 0.5:
        every = chance.choice([None, 7, 50])
        options = {"checkpoints": Checkpoints("saved", step=counter, applied=applied, every_steps=every)} | options

    def step() -> Any:
        with tf.control_dependencies([faults.disturb()]):
            applied.assign_add(1)
            return tf.constant(2.0)

    reported = 0
    for target in sorted(chance.sample(range(1, 600), 4)):
        kills, calls, before = faults.kills, faults.calls, int(counter.numpy())

        def call(timeout: float, target: int = target) -> Any:
            return run_steps(scenario.coordinator, step, target, timeout_seconds=timeout, **options)

        done = faults.repeat(call)
        reported += done.steps
        count = int(counter.numpy())
        print(done, "counter", count, "applied", int(applied.numpy()), flush=True)
        assert done.step == count >= target
        assert done.step - done.steps >= before
        assert not done.steps or done.means == {"loss": 2.0}
        if faults.kills == 0:
            assert count == target
        if faults.kills == kills and faults.calls == calls + 1:
            assert done.steps == count - before
        assert reported <= count <= target + scenario.most_repeated(most_steps)
        assert count <= int(applied.numpy()) <= count + scenario.most_repeated(most_steps)
        if not faults.count:
            assert count == int(applied.numpy()) == reported
        if "checkpoints" in options:
            saved = tf.train.load_variable(options["checkpoints"].latest, "step/.ATTRIBUTES/VARIABLE_VALUE")
            assert saved == count
    faults.hang(lambda timeout: run_steps(scenario.coordinator, step, 10_000, step=counter, timeout_seconds=timeout))


def shards(scenario: Scenario) -> None:
    """Train shards; count the rows on the ps."""
    chance, faults = scenario.chance, scenario.faults
    num_rows = chance.randint(1, 500)
    with scenario.strategy.scope():
        counts, step = tf.Variable(tf.zeros([num_rows], tf.int32)), tf.Variable(0, dtype=tf.int64)
    epochs = chance.randint(1, 2)

    def train(rows: Any) -> None:
        with tf.control_dependencies([faults.disturb()]):
            counts.scatter_add(tf.IndexedSlices(tf.ones_like(rows, tf.int32), rows))

    def read(rows: tf.data.Dataset) -> tf.data.Dataset:
        return rows.batch(BATCH)

    data = tf4slurm.data_shards(num_rows, shard_size=chance.randint(1, 30), epochs=epochs)
    options: dict[str, Any] = {"step": step}
    if chance.random() < 0.5:
        options["checkpoints"] = Checkpoints("saved", step=step, every_steps=chance.choice([None, 20]), shards=data)
    done = faults.repeat(
        lambda timeout: run_shards(scenario.coordinator, train, data, read, timeout_seconds=timeout, **options)
    )
    seen = counts.numpy()
    print(done, "rows", num_rows, "seen", seen.min(), seen.max(), flush=True)
    assert data.is_over
    assert epochs <= seen.min()
    assert seen.max() <= epochs + faults.count
    assert done.step == int(step.numpy()) >= done.steps
    more = tf4slurm.data_shards(num_rows, shard_size=10, epochs=1, name="more")
    faults.hang(lambda timeout: run_shards(scenario.coordinator, train, more, read, step=step, timeout_seconds=timeout))


def batches(scenario: Scenario) -> None:
    """Read the batches of shards in this process, in loops that end at random."""
    chance, faults = scenario.chance, scenario.faults
    num_rows, epochs = chance.randint(1, 3000), chance.randint(1, 2)
    seen: Counter[int] = Counter()
    data = tf4slurm.data_shards(num_rows, shard_size=chance.randint(1, 300), epochs=epochs)
    breaks = 0

    def loop(_: float) -> bool:
        nonlocal breaks
        for batch in shard_batches(data, lambda rows: rows.batch(BATCH)):
            seen.update(batch.numpy().tolist())
            if breaks < 5 and chance.random() < 0.01:
                breaks += 1
                return False
        return True

    while not faults.repeat(loop):
        pass
    assert data.is_over
    assert sorted(seen) == list(range(num_rows))
    assert epochs <= min(seen.values())
    assert max(seen.values()) <= epochs + faults.count + breaks, (faults.count, breaks)


class Rows(keras.layers.Layer):  # type: ignore[misc]
    """Counts the rows of training steps, and doubles its input."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._disturb = faults.disturb

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any, training: bool = False) -> Any:
        with tf.control_dependencies([self._disturb()]):
            if training:
                self.rows.assign_add(tf.shape(inputs, tf.int64)[0])
            return 2.0 * self.factor * inputs


def make_model(scenario: Scenario) -> Any:
    with scenario.strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Rows(scenario.faults)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    return model


def numbers(count: int) -> np.ndarray[Any, Any]:
    """Return inputs with which all sums are exact."""
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2) % 7


class Calls(keras.callbacks.Callback):  # type: ignore[misc]
    """Checks the order of the calls in one call of `fit`, and remembers them."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.last = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert epoch == (self.begun[-1] + 1 if self.begun else epoch)
        assert self.begun == [] or self.begun == list(range(self.begun[0], epoch))
        assert len(self.ended) == len(self.begun)
        self.begun.append(epoch)
        self.last = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert batch >= self.last
        self.last = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert epoch == self.begun[-1]
        self.ended.append(epoch)
        assert self.last == self.steps - 1, (self.last, self.steps)
        assert logs == {"loss": 0.0, "mae": 0.0}, logs


def training(scenario: Scenario) -> None:
    """Train a model by several calls of `fit`, with a directory of checkpoints or without."""
    chance, faults = scenario.chance, scenario.faults
    model, per_epoch, epochs = make_model(scenario), chance.randint(1, 60), chance.randint(1, 4)
    inputs = numbers(BATCH * 3)
    saved = chance.choice([None, "saved", "object"])
    options: dict[str, Any] = {"checkpoints": saved}
    if saved == "object":
        with scenario.strategy.scope():
            step = tf.Variable(0, dtype=tf.int64)
        options = {"checkpoints": Checkpoints("saved", step=step, model=model, every_steps=chance.choice([None, 5]))}
    counted: list[Calls] = []
    rows_before: list[int] = []

    def call(timeout: float) -> Any:
        counted.append(Calls(per_epoch))
        rows_before.append(int(model.layers[0].rows.numpy()))
        return fit(
            model,
            lambda: tf.data.Dataset.from_tensor_slices((inputs, 2 * inputs)).batch(BATCH),
            coordinator=scenario.coordinator,
            epochs=epochs,
            steps_per_epoch=per_epoch,
            callbacks=[counted[-1]],
            verbose=0,
            timeout_seconds=timeout,
            **options,
        )

    history = faults.repeat(call)
    rows = int(model.layers[0].rows.numpy())
    print("epochs", [(each.begun, each.ended) for each in counted], "rows", rows, rows_before, flush=True)
    calls = counted[-1]
    assert calls.ended == calls.begun == history.epoch == list(range(epochs))[-len(history.epoch) or epochs :]
    assert history.history == ({name: [0.0] * len(calls.ended) for name in ("loss", "mae")} if calls.ended else {})
    trained = per_epoch * BATCH * (epochs if saved == "saved" else len(calls.ended))
    assert rows - (0 if saved == "saved" else rows_before[-1]) >= trained
    if saved == "saved":
        for before, after in itertools.pairwise(counted):
            assert not after.begun or after.begun[0] in (
                len(calls.ended),
                *before.begun,
                (before.ended or [-1])[-1] + 1,
            )
        assert rows <= trained + BATCH * scenario.most_repeated(MAX_STEPS_PER_CLOSURE)
    else:
        assert calls.begun == list(range(epochs))
    options, epochs, per_epoch = {}, 1, 10_000
    faults.hang(call)


def data_of(scenario: Scenario) -> tuple[Any, Any, dict[str, Any]]:
    """Return inputs, a function of the dataset, and options of `evaluate` and `predict`."""
    inputs = numbers(scenario.chance.randint(1, 200))

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices((inputs, np.zeros_like(inputs))).batch(BATCH)

    return inputs, data, {"coordinator": scenario.coordinator, "on": scenario.chance.choice([None, None, "chief"])}


def evaluation(scenario: Scenario) -> None:
    """Evaluate a model; compare the results with those of numpy."""
    model = make_model(scenario)
    inputs, data, options = data_of(scenario)
    expected = {"loss": np.mean((2 * inputs) ** 2), "mae": np.mean(2 * inputs)}
    for _ in range(3):
        logs = scenario.faults.repeat(
            lambda timeout: evaluate(model, data, verbose=0, timeout_seconds=timeout, **options)
        )
        print(logs, flush=True)
        assert logs == {name: float(value) for name, value in expected.items()} or np.allclose(
            list(logs.values()), list(expected.values()), rtol=1e-6
        ), (logs, expected)
    options["on"] = "workers"
    scenario.faults.hang(lambda timeout: evaluate(model, data, verbose=0, timeout_seconds=timeout, **options))


def prediction(scenario: Scenario) -> None:
    """Predict; compare the results with those of numpy."""
    model = make_model(scenario)
    inputs, data, options = data_of(scenario)
    for _ in range(3):
        outputs = scenario.faults.repeat(lambda timeout: predict(model, data, timeout_seconds=timeout, **options))
        assert np.array_equal(outputs, 2 * inputs), outputs
    options["on"] = "workers"
    scenario.faults.hang(lambda timeout: predict(model, data, timeout_seconds=timeout, **options))


def run(function: str, seed: int) -> bool:
    """Run a scenario in another process; return whether it has passed, and has ended by itself."""
    started = time.monotonic()
    process_id = os.fork()
    if not process_id:
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)  # of the ps, too
            scenario = Scenario(random.Random(f"{function} {seed}"))
            print(f"{function} {seed}: {scenario.cluster.spec}", flush=True)
            globals()[function](scenario)
            os.chdir("/")
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
        sys.exit(0)  # as a script ends
    _, status = os.waitpid(process_id, 0)
    print(f"{function} {seed}: exit {status}, {time.monotonic() - started:.1f} s", flush=True)
    return status == 0


if __name__ == "__main__":
    name, first, last = sys.argv[1:]
    failed = [seed for seed in range(int(first), int(last) + 1) if not run(name, seed)]
    sys.exit(f"failed: {failed}" if failed else 0)
