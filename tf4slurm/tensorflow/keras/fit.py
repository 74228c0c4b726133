"""Train a compiled Keras 3 model with `fit`, on parameter servers or without them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf4slurm.scripts.functions import report
from tf4slurm.tensorflow.checkpoints import Checkpoints, check_integer
from tf4slurm.tensorflow.keras.arguments import explain_keras_arguments, weight_classes
from tf4slurm.tensorflow.keras.checks import (
    check_callbacks,
    check_data,
    check_model,
    check_ps_options,
    make_callback_list,
)
from tf4slurm.tensorflow.keras.evaluation import Evaluation
from tf4slurm.tensorflow.keras.execution import InThisProcess, OnWorkers, make_execution
from tf4slurm.tensorflow.keras.step import KerasStep, build
from tf4slurm.tensorflow.keras.tensorboard import TensorBoardSteps

_REPORT_SECONDS = 0.5  # least time between reports of steps to the job
_READERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)
"""Callbacks that change no variable between two epochs but the learning rate. EarlyStopping may restore weights."""


@explain_keras_arguments
def fit(
    model: keras.Model,
    dataset_fn: Callable[[], tf.data.Dataset],
    *,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
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
) -> keras.callbacks.History:
    """Train a compiled Keras 3 model as `model.fit` does. Return Keras's History.

    Under ParameterServerStrategy and MultiWorkerMirroredStrategy, `model.fit` of Keras 3 fails, and this function
    works. With a coordinator, the steps run asynchronously on the workers of its ParameterServerStrategy, as in
    `run_steps`, and run again if a worker is lost. Without one, they run in this process, or with
    MultiWorkerMirroredStrategy in all workers at the same time.

    Callbacks run in this process. With a coordinator, their batch methods are called for groups of steps, about 10
    times a second. The TensorBoard callback counts steps, and profiles this process. Steps, loss and metrics are
    reported to the job (`tf4slurm.report`). After a stop request, fit saves a checkpoint, if it has `checkpoints`, and
    returns without `on_epoch_end` for the unfinished epoch.

    Args:
        model: The model, created and compiled in `with strategy.scope():`. With a coordinator, its
            `steps_per_execution`, if given, is the number of steps per closure.
        dataset_fn: Function that returns a tf.data.Dataset of batches. Every worker calls it and repeats its dataset.
            Without a seed for `shuffle`, each worker shuffles in its own order, also after set_random_seed. Without a
            coordinator, a dataset is accepted too.
        coordinator: The chief's ClusterCoordinator, or None (default) without parameter servers.
        epochs: Number of epochs after which to end, including those of a restored checkpoint and those before
            `initial_epoch` (default 1).
        steps_per_epoch: Number of steps in an epoch. With a coordinator, it is required, and counts the steps of all
            workers together. Otherwise the default is the length of the dataset.
        validation_data: Function that returns a finite dataset, a dataset, or arrays such as (inputs, targets).
        validation_steps, validation_batch_size, validation_on: As `steps`, `batch_size` and `on` of `evaluate`.
        validation_freq: Number of epochs from one validation to the next (default 1).
        class_weight: The weight of each class in the loss, by class number, as in Keras.
        checkpoints: A `Checkpoints` object, or a directory whose newest checkpoint is restored. Both save after every
            epoch and on a stop request. The object may save more often.
        initial_epoch: The number of the first epoch, from 0, if no checkpoint is restored (default 0).
        verbose: 0 (silent), 1 (progress bar), 2 (a line per epoch) or "auto" (default): 1 in a terminal or notebook,
            else 2.
        timeout_seconds: With a coordinator, the longest time in seconds in which no closure completes, including
            tracing (default 600).

    Raises:
        TypeError, ValueError: An argument is invalid, or the model does not belong to the coordinator's strategy. No
            step was run.
        KerasError: Several workers cannot train the model, for example because a metric keeps a maximum.
        ParameterServerLostError, TrainingTimeoutError, TrainingError, CheckpointError: As for `run_steps`.
    """
    epochs = check_integer("epochs", epochs, at_least=0)
    initial_epoch = check_integer("initial_epoch", initial_epoch, at_least=0)
    validation_freq = check_integer("validation_freq", validation_freq, at_least=1)
    check_model(model, coordinator)
    check_ps_options(model, coordinator)
    callbacks = check_callbacks(callbacks)
    steps = check_data(dataset_fn, coordinator, steps_per_epoch)
    if class_weight is not None:
        dataset_fn = weight_classes(dataset_fn, class_weight)
    execution = make_execution(model, coordinator, timeout_seconds)
    with execution.translate_errors():
        validate = None
        if validation_data is not None:
            validate = Evaluation(
                execution, validation_data, validation_steps, validation_on, batch_size=validation_batch_size
            )
        with execution.strategy.scope():
            build(model, execution.open(dataset_fn))
            counter = (
                checkpoints.step
                if isinstance(checkpoints, Checkpoints)
                else tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            )
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            optimizer = {} if model.optimizer is None else {"optimizer": model.optimizer}
            checkpoints = Checkpoints(checkpoints, step=counter, model=model, **optimizer)
        if checkpoints is None or checkpoints.restored is None:
            counter.assign(initial_epoch * steps)
        if not execution.is_first and verbose == "auto":
            verbose = 0
        training = _Training(execution, counter, steps, execution.select(callbacks), checkpoints, validate)
        return training.run(epochs, verbose, validation_freq)


@dataclass(eq=False)
class _Training:
    """Runs the epochs, callbacks, validation and checkpoints of one call of `fit`."""

    execution: OnWorkers | InThisProcess
    counter: tf.Variable
    steps: int  # per epoch
    callbacks: list[Any]
    checkpoints: Checkpoints | None
    validation: Evaluation | None
    reported_at: float = float("-inf")
    boards: TensorBoardSteps = field(init=False)

    def run(self, epochs: int, verbose: str | int, validation_freq: int) -> Any:
        model = self.execution.model
        listed = make_callback_list(model, self.callbacks, verbose, True, epochs=epochs, steps=self.steps)
        model.stop_training = False
        model.reset_metrics()
        step_fn = KerasStep(model, model.train_step)
        listed.on_train_begin()
        if int(self.counter.numpy()) == 0 and getattr(model, "_initial_epoch", None):  # set by BackupAndRestore
            self.counter.assign(model._initial_epoch * self.steps)
        logs: dict[str, Any] = {}
        is_stopped = False
        self.boards = TensorBoardSteps(self.callbacks, int(self.counter.numpy()))
        for epoch in range(int(self.counter.numpy()) // self.steps, epochs):
            listed.on_epoch_begin(epoch)
            is_stopped, logs = self._train_epoch(step_fn, epoch, listed, epochs * self.steps)
            if is_stopped:
                break
            if self.checkpoints is not None and any(map(_may_change_variables, self.callbacks)):
                self.checkpoints.finish_save()
            if self.validation is not None and (epoch + 1) % validation_freq == 0:
                validated = {f"val_{name}": value for name, value in self.validation.run(listed).items()}
                self._report(validated)
                logs |= validated
            listed.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if self.checkpoints is not None and self.execution.is_first and model.stop_training:
            self.checkpoints.save()
        if is_stopped:  # BackupAndRestore would delete its files, as after a complete training
            listed.callbacks = [
                each for each in listed.callbacks if not isinstance(each, keras.callbacks.BackupAndRestore)
            ]
        elif isinstance(model.optimizer, keras.optimizers.Optimizer):
            with self.execution.strategy.scope():
                model.optimizer.finalize_variable_values(model.trainable_variables)
        listed.on_train_end(logs)
        self.boards.close()
        return model.history

    def _train_epoch(
        self, step_fn: KerasStep, epoch: int, callbacks: Any, last_step: int
    ) -> tuple[bool, dict[str, Any]]:
        """Train to the end of an epoch, or until a stop. Return whether the job was asked to stop, and Keras's logs."""
        first, target = int(self.counter.numpy()), (epoch + 1) * self.steps
        seen = first - epoch * self.steps
        reported: tuple[int, dict[str, Any]] = (0, {})
        before = last = reported

        def report_latest(step: int) -> None:
            nonlocal reported
            latest = {name: total - reported[1].get(name, 0.0) for name, total in last[1].items()}
            self._report(step_fn.logs(latest, last[0] - reported[0]), step)
            self.reported_at = time.monotonic()
            reported = last

        def observe(step: int, completed: int, sums: dict[str, Any]) -> bool:
            nonlocal seen, last
            completed += before[0]
            last = completed, {name: total + before[1].get(name, 0.0) for name, total in sums.items()}
            if time.monotonic() - self.reported_at >= _REPORT_SECONDS:
                report_latest(step)
            self.boards.count(epoch * self.steps + seen, step)
            callbacks.on_train_batch_begin(seen)
            seen = first + completed - epoch * self.steps
            callbacks.on_train_batch_end(seen - 1, step_fn.logs(last[1], completed))
            self.boards.profile(step)
            return bool(self.execution.model.stop_training)

        self.boards.profile(first)
        is_stopped = False
        for pause in self.boards.pauses(first, target) if self.execution.is_alone else [target]:
            before = last
            is_stopped = self.execution.train(
                step_fn, self.counter, pause, self.checkpoints, observe, target, last_step
            )
            if is_stopped or self.execution.model.stop_training:
                break
        completed, sums = last
        if not completed:
            return is_stopped, {}
        if completed > reported[0]:
            report_latest(first + completed)
        if self.execution.is_alone:
            step_fn.assign_metrics(sums)
        return is_stopped, step_fn.logs(sums, completed)

    def _report(self, logs: dict[str, Any], step: int | None = None) -> None:
        """Report the values to the job, except arrays, which a report cannot hold.

        `step` is the step of the values (default: the step counter). With MultiWorkerMirroredStrategy, only the first
        worker reports.
        """
        if self.execution.is_first and logs:
            numbers = {name: value for name, value in logs.items() if name != "step" and not np.ndim(value)}
            report(step=int(self.counter.numpy()) if step is None else step, **numbers)


def _may_change_variables(callback: Any) -> bool:
    """Return whether a callback may change variables after an epoch. It may if it is not a class of `_READERS`."""
    return type(callback) not in _READERS or bool(getattr(callback, "restore_best_weights", False))
