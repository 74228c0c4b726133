"""Keras 2 under ParameterServerStrategy, mirrored workers, and the refusals for Keras 3."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import Job

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

pytestmark = pytest.mark.keras

TF_KERAS = Path(sys.prefix) / "tf-keras"
"""Where `make test` puts it, out of the way of all other tests."""

FIT = """
import tensorflow as tf
from tf4slurm.tensorflow import parameter_server_strategy

strategy, coordinator = parameter_server_strategy(sharding="min-size", min_shard_bytes=64)
tf.keras.utils.set_random_seed(1)

def make_dataset(context):
    inputs = tf.random.stateless_uniform((512, 4), seed=(1, 2))
    outputs = tf.reduce_sum(inputs, axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((inputs, outputs)).repeat().batch(32)

for optimizer in (tf.keras.optimizers.SGD(0.05), tf.keras.optimizers.Adam(0.02)):
    with strategy.scope():
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Input((4,)), layers.Dense(16, activation="relu"), layers.Dense(1)])
        model.compile(optimizer, loss="mse")
    data = tf.keras.utils.experimental.DatasetCreator(make_dataset)
    losses = model.fit(data, epochs=3, steps_per_epoch=50, verbose=0).history["loss"]
    kernel = model.layers[0].kernel.variables
    print(optimizer.name, "steps", int(optimizer.iterations), "falls", losses[2] < losses[0] / 4, "parts", len(kernel))
"""
MIRRORED = """
import tensorflow as tf
from tf4slurm.errors import KerasError
from tf4slurm.tensorflow import multi_worker_mirrored_strategy

strategy = multi_worker_mirrored_strategy(timeout_seconds=120)
import keras

tf.keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    mean = keras.metrics.Mean()
worker = strategy.cluster_resolver.task_id
inputs = tf.random.stateless_uniform((64, 4), seed=(worker, 2))

def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs) - tf.reduce_sum(inputs, axis=1, keepdims=True)) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    mean.update_state(inputs[:, 0])
    return loss

@tf.function
def train():
    return strategy.reduce("MEAN", strategy.run(step), axis=None)

losses = [float(train()) for _ in range(100)]
weights = [round(float(tf.reduce_sum(variable)), 4) for variable in model.trainable_variables]
print("falls", losses[-1] < losses[0] / 4, "weights", weights, "of", strategy.num_replicas_in_sync, flush=True)
print("counted", int(optimizer.iterations.numpy()), float(mean.count.numpy()), flush=True)
model.compile(optimizer, loss="mse")
try:
    model.fit(inputs, inputs[:, :1])
except KerasError as error:
    print("refused", error, flush=True)
"""
COUNTING = """
import tf4slurm
from tf4slurm.errors import KerasError
from tf4slurm.tensorflow import run_steps

with tf4slurm.LocalCluster(ps=1, workers=3) as cluster:
    strategy = cluster.strategy()
    import keras
    import tensorflow as tf

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, values):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(values)))

        def result(self):
            return self.value

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = keras.Variable(1.0, name="weight")
        rows = tf.Variable(0, dtype=tf.int64)
        falling = keras.Variable(10_000.0, trainable=False)
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.PiecewiseConstantDecay([150], [0.5, 0.125]))
        optimizer.build([weight])
        metrics = accuracy, mean, auc, precision, overlap, f1 = (
            keras.metrics.BinaryAccuracy(), keras.metrics.Mean(), keras.metrics.AUC(num_thresholds=5),
            keras.metrics.Precision(thresholds=[0.25, 0.75]), keras.metrics.MeanIoU(2), keras.metrics.F1Score(),
        )
        largest = Largest()
    labels = tf.constant([[1.0], [1.0], [0.0], [0.0]])
    predictions = tf.constant([[0.9], [0.6], [0.4], [0.1]])

    def step_fn():
        with tf.GradientTape() as tape:
            loss = weight * weight
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])
        for metric in metrics:
            metric.update_state(*([predictions] if metric is mean else [labels, predictions]))
        falling.assign_sub(2.0)
        rows.assign_add(4)

    with strategy.scope():
        f1.update_state(labels, predictions)  # makes its variables
        f1.reset_state()
    done = run_steps(coordinator, step_fn, 300, steps_per_call=8)
    total = int(rows.numpy())
    counts = {
        "iterations": 4 * int(optimizer.iterations.numpy()), "falling": 2 * (10_000 - float(falling.numpy())),
        "accuracy": float(accuracy.count.numpy()), "mean": float(mean.count.numpy()),
        "auc": sum(float(variable.numpy().sum()) for variable in auc.variables) / 5,
        "precision": float(precision.true_positives.numpy()[0]) * 2,
        "overlap": float(overlap.total_cm.numpy().sum()), "f1": float(f1.intermediate_weights.numpy()[0]) * 2,
    }
    print("rows", total, "of", 4 * done.step, "by", sum(steps > 0 for steps in done.steps_by_worker))
    print("wrong", {name: count for name, count in counts.items() if count != total})
    rate = float(optimizer.learning_rate.numpy())
    print("rate", rate, "auc", float(auc.result()), "accuracy", float(accuracy.result()))

    def refused(name, use):
        try:
            use()
        except KerasError as error:
            print("refused", name, error, flush=True)

    refused("largest", lambda: run_steps(coordinator, lambda: largest.update_state(predictions), 1))
    keras_optimizers = [
        keras.optimizers.SGD(gradient_accumulation_steps=2),
        keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=10),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        keras.optimizers.Nadam(),
    ]
    for each in keras_optimizers:
        with strategy.scope():
            refused("optimizer", lambda: each.build([weight]))
"""
MIRRORED_FIT = """
import tensorflow as tf
from tf4slurm.tensorflow import multi_worker_mirrored_strategy

strategy = multi_worker_mirrored_strategy(timeout_seconds=120)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), loss="mse")
inputs = tf.random.stateless_uniform((512, 4), seed=(1, 2))
data = tf.data.Dataset.from_tensor_slices((inputs, tf.reduce_sum(inputs, axis=1, keepdims=True))).batch(32)
losses = model.fit(data, epochs=5, verbose=0).history["loss"]
weights = [round(float(tf.reduce_sum(variable)), 4) for variable in model.trainable_variables]
print("falls", losses[-1] < losses[0] / 4, "weights", weights, "of", strategy.num_replicas_in_sync, flush=True)
"""
LATE = """
import os, time
from tf4slurm.tensorflow import multi_worker_mirrored_strategy

if os.environ["TF4SLURM_TASK"] == "worker/1":
    time.sleep(600)
multi_worker_mirrored_strategy(timeout_seconds=3)
"""
IN_STEP = ("--ps", "0", "--no-chief", "--workers", "2")


@pytest.fixture
def tf_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Keras 2 in jobs."""
    if TF_KERAS.is_dir():
        monkeypatch.syspath_prepend(str(TF_KERAS))
        monkeypatch.setenv("PYTHONPATH", str(TF_KERAS), prepend=":")
    elif importlib.util.find_spec("tf_keras") is None:
        pytest.skip(f"pip install --no-deps --target {TF_KERAS} tf-keras")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")


def start(job: Job, code: str, *roles: str) -> None:
    path = job.directory / "train.py"
    path.write_text(code)
    job.start(*roles, command=(sys.executable, str(path)))


def weights_of_each(job: Job) -> list[str]:
    return re.findall(r"falls True weights (.*) of 2", job.stdout)


@pytest.mark.long
@pytest.mark.usefixtures("tf_keras")
def test_keras_2_fits_with_parameter_servers(job: Job) -> None:
    start(job, FIT, "--ps", "2", "--workers", "1")
    assert job.wait(170) == 0, job.stdout + job.stderr
    assert "SGD steps 150 falls True parts 2" in job.stdout
    assert "Adam steps 150 falls True parts 2" in job.stdout


def test_counts_of_keras_3_are_exact_with_several_workers_or_refused(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", COUNTING], cwd=tmp_path, capture_output=True, text=True, timeout=170)
    lines = ran.stdout.splitlines()
    assert lines[:3] == ["rows 1200 of 1200 by 3", "wrong {}", "rate 0.125 auc 1.0 accuracy 1.0"], (
        ran.stdout + ran.stderr
    )
    assert "KerasError: The metric 'largest' assigns a value to 'value' that depends on earlier values" in ran.stdout
    assert re.findall(r"refused optimizer .* miscount with variables on a ps \((\w+)\)", ran.stdout) == [
        *("gradient_accumulation_steps", "ema_overwrite_frequency", "dynamic_growth_steps", "Nadam")
    ]


def test_mirrored_workers_train_a_keras_3_model_and_fit_is_refused(job: Job) -> None:
    start(job, MIRRORED, *IN_STEP)
    assert job.wait(170) == 0, job.stdout + job.stderr
    first, second = weights_of_each(job)
    assert first == second
    assert re.findall("counted (.*)", job.stdout) == ["100 12800.0", "100 12800.0"]
    refusals = re.findall("refused (.*)", job.stdout)
    assert len(refusals) == 2
    assert all(
        "Model.fit of Keras 3 fails under MultiWorkerMirroredStrategy. Call tf4slurm" in text for text in refusals
    )


@pytest.mark.long
@pytest.mark.usefixtures("tf_keras")
def test_mirrored_workers_fit_with_keras_2(job: Job) -> None:
    start(job, MIRRORED_FIT, *IN_STEP)
    assert job.wait(170) == 0, job.stdout + job.stderr
    first, second = weights_of_each(job)
    assert first == second


@pytest.mark.long
def test_missing_worker_is_named(job: Job) -> None:
    start(job, LATE, *IN_STEP)
    assert job.wait(170) == 1, job.stdout + job.stderr
    assert re.search(r"worker/0 \| \S*BarrierError: The barrier broke: worker/1 on \S+ did not arrive", job.stdout)
