"""Functions with arrays that are too large to be sent to a worker."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tf4slurm.errors import TrainingError

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

ARRAY = np.ones((300, 10), np.float32)
OTHER = np.full((300, 10), 2, np.float64)
TEXTS = np.array([b"x" * 20_000] * 2)
LIMIT = 30_000


def graph_of(make: Callable[[], Any]) -> Any:
    return tf.function(make).get_concrete_function().graph


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.tensorflow.constants.MAX_BYTES", LIMIT)


CAPTURED = tf.constant(ARRAY)
DATASET = tf.data.Dataset


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: DATASET.from_tensor_slices((ARRAY, OTHER)),
            "The dataset function uses arrays of 36 kB, but a function of TensorFlow can have at most 30 kB. The "
            "largest: 24 kB (float64 300×10), 12 kB (float32 300×10). Read files",
        ),
        (
            lambda: DATASET.range(3).map(lambda i: tf.constant(OTHER)[i] + tf.constant(2 * OTHER)[i]),
            "24 kB (float64 300×10), 24 kB (float64 300×10). Read",
        ),
        (lambda: DATASET.from_tensor_slices(TEXTS), "40 kB (string 2)"),
        (lambda: DATASET.from_tensors(tf.concat([CAPTURED] * 3, 0)), None),
        (lambda: DATASET.from_tensor_slices(ARRAY), None),
        (lambda: DATASET.range(3).map(lambda i: tf.numpy_function(lambda j: OTHER[j], [i], tf.float64)), None),
    ],
)
def test_arrays_of_a_dataset_function_are_measured(make: Callable[[], Any], words: str | None) -> None:
    from tf4slurm.tensorflow.constants import check_arrays

    graph = graph_of(make)
    if words is None:
        check_arrays("The dataset function", graph)
    else:
        with pytest.raises(TrainingError, match=re.escape(words)):
            check_arrays("The dataset function", graph)


def test_captured_tensor_above_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tf4slurm.tensorflow.constants import check_arrays

    monkeypatch.setattr("tf4slurm.tensorflow.constants.MAX_BYTES", 11_000)
    with pytest.raises(TrainingError, match=r"12 kB \(float32 300×10\)"):
        check_arrays("The dataset function", graph_of(lambda: DATASET.from_tensor_slices(CAPTURED)))


@pytest.mark.long
def test_single_array_that_tensorflow_refuses_is_named() -> None:
    from tf4slurm.tensorflow.constants import explain_large_array

    array = np.zeros((562_500, 1000), np.float32)  # no page of it is in memory
    with (
        pytest.raises(TrainingError, match=r"at most 2\.13 GB. The largest: 2\.25 GB \(float32 562500×1000\)"),
        explain_large_array("The dataset function"),
    ):
        graph_of(lambda: DATASET.from_tensor_slices(array))


@pytest.mark.usefixtures("small_limit")
def test_array_of_the_call_that_fails_is_named() -> None:
    from tf4slurm.tensorflow.constants import explain_large_array

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def make_tensor_proto(values: Any) -> None:
        """Fails as TensorFlow's function of this name."""
        raise ValueError("too large")

    def make() -> None:
        make_tensor_proto(np.concatenate([ARRAY] * 3))

    with pytest.raises(TrainingError, match=r"36 kB \(float32 900×10\)"), explain_large_array("The dataset function"):
        graph_of(make)


def test_step_with_a_large_array_is_copied_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from tf4slurm.tensorflow.constants import max_copies

    monkeypatch.setattr("tf4slurm.tensorflow.constants.MAX_BYTES", LIMIT)
    assert max_copies(graph_of(lambda: tf.reduce_sum(tf.constant(ARRAY))).get_operations()) == 2
    assert max_copies(graph_of(lambda: tf.size(tf.constant(TEXTS))).get_operations()) == 1


def test_other_error_of_a_dataset_function_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from tf4slurm.tensorflow.constants import explain_large_array

    def make() -> None:
        _ = np.concatenate([ARRAY] * 3)
        raise ValueError("other")

    monkeypatch.setattr("tf4slurm.tensorflow.constants.MAX_BYTES", LIMIT)
    with pytest.raises(ValueError, match="other"), explain_large_array("The dataset function"):
        graph_of(make)


IN_A_CLUSTER = """
import re
import keras, numpy as np, tf4slurm
from tf4slurm.errors import TrainingError
from tf4slurm.tensorflow import constants, evaluate, fit, parameter_server_strategy, run_shards, run_steps

constants.MAX_BYTES = 100_000
rows, more = np.ones((10_000, 2), "float32"), np.full((10_000, 1), 2, "float32")
with tf4slurm.LocalCluster(ps=1, workers=1):
    strategy, coordinator = parameter_server_strategy()
    import tensorflow as tf

    def data():
        return tf.data.Dataset.from_tensor_slices((rows, more)).batch(8)

    def few():
        return tf.data.Dataset.from_tensors((rows[:8], more[:8])).repeat()

    def step(batch=None):
        return tf.reduce_sum(tf.constant(rows)) + tf.reduce_sum(tf.constant(more))

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    shards = tf4slurm.data_shards(10, shard_size=5, epochs=1)
    for name, call in (
        ("dataset", lambda: coordinator.create_per_worker_dataset(data)),
        ("fit", lambda: fit(model, data, coordinator=coordinator, steps_per_epoch=2)),
        ("evaluate", lambda: evaluate(model, data, coordinator=coordinator)),
        ("chief", lambda: evaluate(model, data, coordinator=coordinator, on="chief", verbose=0)),
        ("step", lambda: run_steps(coordinator, step, 2)),
        ("shards", lambda: run_shards(coordinator, step, shards, lambda rows: rows.batch(2))),
    ):
        try:
            call()
            print(name, "works")
        except TrainingError as error:
            print(name, re.search("The [^,:]* uses arrays", str(error))[0])
"""


@pytest.mark.keras
def test_every_function_for_the_workers_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_A_CLUSTER]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    names = ("dataset", "fit", "evaluate", "chief", "step", "shards")
    lines = [line for line in ran.stdout.splitlines() if line.startswith(names)]
    assert lines == [
        "dataset The dataset function uses arrays",
        "fit The dataset function uses arrays",
        "evaluate The function of the dataset uses arrays",
        "chief works",
        "step The step uses arrays",
        "shards The function of a shard uses arrays",
    ], ran.stdout + ran.stderr
