"""Evaluate Keras 3 models, and predict with them, on parameter servers or without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf4slurm.errors import TrainingError
from tf4slurm.tensorflow.checkpoints import check_integer
from tf4slurm.tensorflow.constants import check_arrays, explain_large_array
from tf4slurm.tensorflow.keras.arguments import explain_keras_arguments, make_dataset_function
from tf4slurm.tensorflow.keras.checks import check_callbacks, check_model, describe_data, make_callback_list
from tf4slurm.tensorflow.keras.execution import InThisProcess, OnWorkers, make_execution
from tf4slurm.tensorflow.keras.step import KerasStep, build


@explain_keras_arguments
def evaluate(
    model: keras.Model,
    data: Any,
    *,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    on: str | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: str | int = "auto",
    timeout_seconds: float = 600.0,
) -> dict[str, Any]:
    """Return the loss and metrics of a compiled Keras 3 model over a dataset, by name.

    The values are floats, or arrays for metrics such as F1Score. Every batch counts once, even if a worker is lost. For
    this, each of n workers calls the function `data` and takes every n-th batch. So all calls must return the same
    batches in the same order.

    Args:
        model, coordinator, callbacks, verbose: As for `fit`.
        data: Function that returns a finite dataset, a dataset, or arrays such as (inputs, targets).
        steps: Number of batches (default: the whole dataset).
        batch_size: Rows of each batch of arrays (default 32). A dataset has batches already.
        on: With a coordinator, where the model is evaluated: "workers" (default for a function) or "chief" (default for
            a dataset or arrays). Without one, all workers take part.
        timeout_seconds: On workers, the longest time in seconds in which none finishes its part of the dataset (default
            600).

    Raises:
        TypeError, ValueError: An argument is invalid.
        TrainingError: The dataset has no batch, or its function uses more than 2 GB of arrays.
        KerasError: As for `fit`.
        ParameterServerLostError, TrainingTimeoutError: As for `run_steps`.
    """
    check_model(model, coordinator)
    execution = make_execution(model, coordinator, timeout_seconds)
    own = check_callbacks(callbacks)
    with execution.translate_errors():
        evaluation = Evaluation(execution, data, steps, on, batch_size)
        return evaluation.run(make_callback_list(model, own, verbose, add_history=False, epochs=1, steps=None))


@explain_keras_arguments
def predict(
    model: keras.Model,
    data: Any,
    *,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    on: str | None = None,
    timeout_seconds: float = 600.0,
) -> Any:
    """Return the model's outputs for all batches of a dataset, in the order of the dataset.

    The result is a numpy array or, if the model has several outputs, the model's list, tuple or dict with arrays.
    Arguments and exceptions are those of `evaluate`. The model need not be compiled. With MultiWorkerMirroredStrategy,
    every worker returns all outputs.
    """
    check_model(model, coordinator, needs_compile=False)
    execution = make_execution(model, coordinator, timeout_seconds)
    with execution.translate_errors():
        return _Prediction(execution, data, steps, on, batch_size).run()


class _SplitDataset:
    """A dataset that `evaluate` or `predict` reads in parts: one part per worker, or only one on the chief."""

    def __init__(
        self,
        execution: OnWorkers | InThisProcess,
        data: Any,
        steps: int | None,
        on: str | None,
        batch_size: int | None = None,
    ) -> None:
        if on not in (None, "workers", "chief"):
            raise ValueError(f'The place of the evaluation is {on!r}: expected "workers" or "chief".')
        if isinstance(execution, InThisProcess):
            on = "workers"  # whose results are combined: with "chief", rows would count once per worker
        self._on = on or ("workers" if callable(data) else "chief")
        if self._on == "workers" and isinstance(execution, OnWorkers) and not callable(data):
            raise TypeError(
                f"data is {describe_data(data)}, which workers cannot read: give a function that returns a dataset, "
                'or evaluate on="chief" (in fit: validation_on="chief").'
            )
        self._execution = execution
        self._make_dataset = make_dataset_function(data, batch_size)
        self._steps = None if steps is None else check_integer("steps", steps, at_least=1)
        dataset = self._make_dataset()
        if self._steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise ValueError("The dataset never ends: give the number of steps (in fit: validation_steps).")
        self._spec = dataset.element_spec

    def _part(self, index: Any) -> Any:
        dataset = self._make_dataset()
        dataset = dataset if self._steps is None else dataset.take(self._steps)
        return iter(dataset.shard(self._execution.count_parts(self._on), index))

    def _trace(self, function: Callable[[Any], Any]) -> Any:
        """Return the concrete function of `function(index)`. Raise TrainingError if its arrays are too large.

        `index` is the number of a part of the dataset.
        """
        subject = "The function of the dataset"
        with explain_large_array(subject):
            traced = tf.function(function).get_concrete_function(tf.TensorSpec([], tf.int64))
        if self._on == "workers" and isinstance(self._execution, OnWorkers):
            check_arrays(subject, traced.graph)
        return traced


class Evaluation(_SplitDataset):
    """Evaluates a model on a dataset, once in `evaluate`, or repeatedly in `fit`."""

    _function: Any = None

    def run(self, callbacks: Any) -> dict[str, Any]:
        callbacks.on_test_begin()
        callbacks.on_test_batch_begin(0)
        if self._function is None:
            with self._execution.strategy.scope():
                build(self._execution.model, self._spec)
            self._execution.model.reset_metrics()
            self._function = self._make_function()
        sums = self._execution.total(self._execution.run_parts(self._function, self._on))
        steps = int(sums.pop("batches"))
        if not steps:
            raise TrainingError("The dataset of the evaluation has no batch.")
        logs = self._step_fn.logs(sums, steps)
        callbacks.on_test_batch_end(steps - 1, logs)
        callbacks.on_test_end(logs)
        return logs

    def _make_function(self) -> Any:
        step_fn = self._step_fn = KerasStep(self._execution.model, self._execution.model.test_step)
        results = tf.function(step_fn).get_concrete_function({}, self._spec).structured_outputs

        def evaluate_part(index: Any) -> dict[str, Any]:
            sums = {name: tf.zeros(result.shape, result.dtype) for name, result in results.items()}
            batches = tf.constant(0.0, tf.float64)
            for batch in self._part(index):
                sums = step_fn(sums, batch)
                batches += 1.0
            return sums | {"batches": batches}

        return self._trace(evaluate_part)


class _Prediction(_SplitDataset):
    """Computes a model's outputs for a dataset."""

    def run(self) -> Any:
        found = self._execution.gather(self._execution.run_parts(self._make_function(), self._on))
        batches = [[np.split(rows, np.cumsum(each["sizes"])[:-1]) for rows in each["outputs"]] for each in found]
        count = sum(len(each["sizes"]) for each in found)
        if not count:
            raise TrainingError("The dataset of the prediction has no batch.")
        order = [(position % len(found), position // len(found)) for position in range(count)]
        outputs = range(len(found[0]["outputs"]))
        flat = [np.concatenate([batches[part][output][batch] for part, batch in order]) for output in outputs]
        return tf.nest.pack_sequence_as(self._structure, flat)

    def _make_function(self) -> Any:
        step = self._execution.model.predict_step
        with self._execution.strategy.scope():
            self._structure = tf.function(step).get_concrete_function(self._spec).structured_outputs
        results = tf.nest.flatten(self._structure)

        def predict_part(index: Any) -> dict[str, Any]:
            sizes = tf.TensorArray(tf.int64, 0, dynamic_size=True, element_shape=())
            outputs = [
                tf.TensorArray(
                    each.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=[None, *each.shape[1:]]
                )
                for each in results
            ]
            for batch in self._part(index):
                latest = tf.nest.flatten(step(batch))
                position = sizes.size()
                outputs = [array.write(position, each) for array, each in zip(outputs, latest, strict=True)]
                sizes = sizes.write(position, tf.shape(latest[0], tf.int64)[0])
            return {"outputs": [array.concat() for array in outputs], "sizes": sizes.stack()}

        return self._trace(predict_part)
