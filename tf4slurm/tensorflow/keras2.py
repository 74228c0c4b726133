"""Train, evaluate and use models of Keras 2, the Keras of TensorFlow 2.11 to 2.15, by Keras's own methods.

`fit`, `evaluate` and `predict` have the arguments and results of the functions for Keras 3. docs/guides/keras.md lists
what differs. Keras 2's `fit` supports ParameterServerStrategy; its `evaluate` counts some batches twice or never there,
and its `predict` fails. So with a coordinator, evaluations and predictions run in the chief.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf4slurm.errors import TrainingError
from tf4slurm.scripts.functions import report, should_stop
from tf4slurm.tensorflow.checkpoints import Checkpoints, check_integer
from tf4slurm.tensorflow.closures import count_tasks, wait_for_closures
from tf4slurm.tensorflow.keras.arguments import explain_keras_arguments, make_dataset_function, weight_classes
from tf4slurm.tensorflow.keras.checks import check_callbacks, check_data, make_callback_list
from tf4slurm.tensorflow.training import translate_errors

_REPORT_SECONDS = 0.5  # least time between reports of steps to the job


@explain_keras_arguments
def fit(
    model: Any,
    dataset_fn: Callable[[], tf.data.Dataset],
    *,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    callbacks: Sequence[Any] = (),
    validation_data: Any = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int = 1,
    validation_on: str | None = None,
    class_weight: Mapping[int, float] | None = None,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    initial_epoch: int = 0,
    verbose: str | int = "auto",
    timeout_seconds: float = 600.0,
) -> Any:
    """Train a compiled Keras 2 model with its `fit`. Return Keras's History. See `keras/fit.py` for the arguments."""
    epochs = check_integer("epochs", epochs, at_least=0)
    initial_epoch = check_integer("initial_epoch", initial_epoch, at_least=0)
    validation_freq = check_integer("validation_freq", validation_freq, at_least=1)
    _check_model(model, coordinator)
    _check_place(validation_on, coordinator)
    steps = check_data(dataset_fn, coordinator, steps_per_epoch)
    callbacks = check_callbacks(callbacks)
    if class_weight is not None:
        dataset_fn = weight_classes(dataset_fn, class_weight)
    strategy = model.distribute_strategy
    is_in_step = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if is_in_step and checkpoints is not None:
        raise ValueError(
            "checkpoints cannot be used with Keras 2 and MultiWorkerMirroredStrategy, whose workers save together: "
            "give callbacks=[tf.keras.callbacks.BackupAndRestore(DIRECTORY)]."
        )
    with _translating(coordinator):
        if coordinator is not None:
            wait_for_closures(coordinator, timeout_seconds)
        with strategy.scope():
            counter = (
                checkpoints.step
                if isinstance(checkpoints, Checkpoints)
                else tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            )
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints, step=counter, model=model, optimizer=model.optimizer)
        if checkpoints is None or checkpoints.restored is None:
            counter.assign(initial_epoch * steps)
        validate = None
        if validation_data is not None:
            make_dataset = make_dataset_function(validation_data, validation_batch_size)
            test = tf.function(model.test_step, reduce_retracing=True)

            def validate() -> dict[str, Any]:
                if coordinator is None:
                    found = model.evaluate(make_dataset(), steps=validation_steps, verbose=0, return_dict=True)
                    return dict(found)
                return _evaluate(model, test, make_dataset(), validation_steps)

        job = _Job(counter, steps, checkpoints, validate, validation_freq)
        if verbose == "auto" and coordinator is not None:
            verbose = 2  # Keras 2 has no progress bar there
        with strategy.scope():
            listed = make_callback_list(model, [job, *callbacks], verbose, True, epochs=epochs, steps=steps)
        job.listed = listed
        listed._check_timing = coordinator is None  # the steps run elsewhere, so no method is slow beside them
        data = tf.keras.utils.experimental.DatasetCreator(_repeat(dataset_fn))
        for first_epoch, last_epoch, count in _split(int(counter.numpy()), steps, epochs):
            if not job.is_over:
                options = {"initial_epoch": first_epoch, "epochs": last_epoch, "steps_per_epoch": count}
                model.fit(data, **options, callbacks=listed, verbose=0)
        return model.history


def _split(step: int, steps: int, epochs: int) -> list[tuple[int, int, int]]:
    """Return (initial_epoch, epochs, steps_per_epoch) of each call of Keras's `fit`, for a training that is at `step`.

    After a stop in an epoch, the first call trains what is left of it.
    """
    epoch, done = divmod(step, steps)
    rest = [(epoch, epoch + 1, steps - done)] if done and epoch < epochs else []
    return [*rest, (epoch + len(rest), epochs, steps)] if epoch + len(rest) < epochs else rest


def _repeat(dataset_fn: Any) -> Callable[[Any], Any]:
    def make_dataset(_: Any) -> Any:
        if count_tasks("worker") > 1:  # with the seed of keras.utils.set_random_seed, all would shuffle alike
            tf.compat.v1.set_random_seed(None)
        return (dataset_fn() if callable(dataset_fn) else dataset_fn).repeat()

    return make_dataset


class _Job(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Connects the training with the job: steps, reports, stop requests, checkpoints and validations."""

    def __init__(
        self, counter: Any, steps: int, checkpoints: Checkpoints | None, validate: Any, validation_freq: int
    ) -> None:
        super().__init__()
        self._supports_tf_logs = True  # else Keras allows no methods for batches with ParameterServerStrategy
        self.listed: Any = None
        self.is_over = False  # at a stop request, or because a callback ends the training
        self._counter = counter
        self._steps = steps
        self._checkpoints = checkpoints
        self._validate = validate
        self._validation_freq = validation_freq
        self._is_stopped = False
        self._began_at = 0  # the step at which Keras's `fit` was called
        self._reported_at = float("-inf")

    def on_train_begin(self, logs: Any = None) -> None:
        self._began_at = int(self._counter.numpy())
        strategy = self.model.distribute_strategy
        self._is_alone = not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self._is_first = self._is_alone or not strategy.cluster_resolver.task_id

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_alone and should_stop():
            self._is_stopped = self.model.stop_training = True
        if time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            step = self._count()
            if self._is_first:
                report(step=step)
            if self._checkpoints is not None and self._is_due(step):
                self._checkpoints.begin_save()
            self._reported_at = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_alone:
            self._is_stopped = self._is_any_stopped()
            self.model.stop_training = self.model.stop_training or self._is_stopped
        step = (epoch + 1) * self._steps
        if self._is_alone and self._is_stopped:
            step = min(self._count(), step)
        self._counter.assign(step)
        if self._checkpoints is not None:
            self._checkpoints.save()
        if self._validate is not None and not self._is_stopped and (epoch + 1) % self._validation_freq == 0:
            logs.update({f"val_{name}": value for name, value in self._validate().items()})
        if self._is_first:
            report(step=step, **{name: value for name, value in logs.items() if name != "step" and not np.ndim(value)})

    def on_train_end(self, logs: Any = None) -> None:
        self.is_over = self.model.stop_training
        if self._is_stopped:  # BackupAndRestore would delete its files, as after a complete training
            backup = tf.keras.callbacks.BackupAndRestore
            self.listed.callbacks = [each for each in self.listed.callbacks if not isinstance(each, backup)]
        if self._checkpoints is not None and self.is_over:
            self._checkpoints.save()

    def _count(self) -> int:
        """Set the step counter to the number of complete steps, and return it. Keras counts those of its `fit`."""
        self._counter.assign(self._began_at + int(self.model._train_counter.numpy()))
        return int(self._counter.numpy())

    def _is_due(self, step: int) -> bool:
        assert self._checkpoints is not None
        due = self._checkpoints.next_due(step - 1)
        return self._checkpoints.is_due() or (due is not None and step >= due)

    def _is_any_stopped(self) -> bool:
        """Return whether a worker in step has got a stop request. All workers must call this method."""
        strategy = self.model.distribute_strategy
        is_stopped = tf.constant(float(should_stop()))
        return bool(strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda: is_stopped), axis=None) > 0)


@explain_keras_arguments
def evaluate(
    model: Any,
    data: Any,
    *,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    on: str | None = None,
    callbacks: Sequence[Any] = (),
    verbose: str | int = "auto",
    timeout_seconds: float = 600.0,
) -> dict[str, Any]:
    """Return the loss and metrics of a compiled Keras 2 model. See `keras/evaluation.py` for the arguments."""
    _check_model(model, coordinator)
    _check_place(on, coordinator)
    dataset, own = make_dataset_function(data, batch_size)(), check_callbacks(callbacks)
    with _translating(coordinator):
        if coordinator is None:
            return dict(model.evaluate(dataset, steps=steps, callbacks=own, verbose=verbose, return_dict=True))
        wait_for_closures(coordinator, timeout_seconds)
        with model.distribute_strategy.scope():
            listed = make_callback_list(model, own, 0, False)
        listed.on_test_begin()
        logs = _evaluate(model, tf.function(model.test_step, reduce_retracing=True), dataset, steps)
        listed.on_test_end(logs)
        return logs


@explain_keras_arguments
def predict(
    model: Any,
    data: Any,
    *,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    on: str | None = None,
    timeout_seconds: float = 600.0,
) -> Any:
    """Return the outputs of a Keras 2 model for all batches. See `keras/evaluation.py` for the arguments."""
    _check_model(model, coordinator)
    _check_place(on, coordinator)
    dataset = make_dataset_function(data, batch_size)()
    with _translating(coordinator):
        if coordinator is None:
            return model.predict(dataset, steps=steps, verbose=0)
        wait_for_closures(coordinator, timeout_seconds)
        function = tf.function(model.predict_step, reduce_retracing=True)
        outputs = [tf.nest.map_structure(np.asarray, each) for each in _run(function, dataset, steps)]
    if not outputs:
        raise TrainingError("The dataset of the prediction has no batch.")
    return tf.nest.map_structure(lambda *each: np.concatenate(each), *outputs)


def _evaluate(model: Any, test: Any, dataset: Any, steps: int | None) -> dict[str, Any]:
    """Evaluate a model in this process. `test` is a function for one batch, made of the model's `test_step`."""
    model.reset_metrics()
    logs: dict[str, Any] = {}
    for latest in _run(test, dataset, steps):
        logs = latest
    if not logs:
        raise TrainingError("The dataset of the evaluation has no batch.")
    return {name: value.numpy() if np.ndim(value) else float(value) for name, value in logs.items()}


def _run(function: Any, dataset: Any, steps: int | None) -> Iterator[Any]:
    """Call `function` for each batch of the dataset, in this process, and yield the results."""
    if steps is not None:
        dataset = dataset.take(check_integer("steps", steps, at_least=1))
    elif int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset never ends: give the number of steps (in fit: validation_steps).")
    for batch in dataset:
        yield function(batch)


def _translating(coordinator: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if coordinator is None else translate_errors()


def _check_model(model: Any, coordinator: Any) -> None:
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"model is {model!r}: expected a tf.keras.Model, which is of Keras 2 here.")
    if coordinator is not None and not isinstance(coordinator, tf.distribute.coordinator.ClusterCoordinator):
        raise TypeError(f"coordinator is {coordinator!r}: expected a ClusterCoordinator, or None.")
    needs_coordinator = isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy)
    if coordinator is None and needs_coordinator:
        raise ValueError("The model belongs to a ParameterServerStrategy: give its coordinator too.")
    if coordinator is not None and model.distribute_strategy is not coordinator.strategy:
        raise ValueError(
            "The model was created outside of the coordinator's strategy. Create and compile it in "
            "`with strategy.scope():`, with the strategy of this coordinator."
        )


def _check_place(on: str | None, coordinator: Any) -> None:
    if on not in (None, "workers", "chief"):
        raise ValueError(f'The place of the evaluation is {on!r}: expected "workers" or "chief".')
    if on == "workers" and coordinator is not None:
        raise ValueError('Keras 2 models are evaluated in the chief: leave on="workers" out (in fit: validation_on).')
