"""Check the arguments of `fit`, `evaluate` and `predict` before anything is started."""

from __future__ import annotations

import difflib
import sys
from typing import Any

import keras
import tensorflow as tf

from tf4slurm.tensorflow.checkpoints import check_integer


def check_model(model: Any, coordinator: Any, needs_compile: bool = True) -> None:
    """Raise TypeError or ValueError if the model cannot run on the workers of this coordinator.

    If `coordinator` is None, check whether the model can run in this process. `needs_compile` says whether the model
    must be compiled.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model is {model!r}: expected a keras.Model of Keras 3. For models of Keras 2, call model.fit."
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"Keras uses the backend {keras.backend.backend()}: set KERAS_BACKEND=tensorflow.")
    if coordinator is not None and not isinstance(coordinator, tf.distribute.coordinator.ClusterCoordinator):
        raise TypeError(f"coordinator is {coordinator!r}: expected a ClusterCoordinator, or None.")
    if needs_compile and not model.compiled:
        raise ValueError("The model is not compiled: call model.compile(optimizer, loss, metrics) in the scope first.")
    if coordinator is None:
        if isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError("The model belongs to a ParameterServerStrategy: give its coordinator too.")
        return
    optimizer = model.optimizer.variables if needs_compile and model.optimizer is not None else []
    outside = [each.path for each in [*model.variables, *optimizer] if "/job:ps/" not in str(each.value.device)]
    if outside or model.distribute_strategy is not coordinator.strategy:
        what = f"These variables are: {', '.join(outside[:3])}. " if outside else ""
        raise ValueError(
            f"The model was created or compiled outside of the coordinator's strategy. {what}Create and compile it in "
            "`with strategy.scope():`, with the strategy of this coordinator."
        )


def check_ps_options(model: Any, coordinator: Any) -> None:
    """Raise ValueError for options of `compile` that cannot be used with a coordinator. Without one, do nothing."""
    for name in ("jit_compile", "run_eagerly"):
        if coordinator is not None and getattr(model, name) is True:
            raise ValueError(
                f"{name}=True cannot be used with parameter servers: each step is a TensorFlow graph on a worker, with "
                f"variables on the ps. Call model.compile(…, {name}=False)."
            )


def check_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks as a list.

    Raises:
        TypeError: An object is no Keras callback.
        ValueError: A callback has a method `on_…` that Keras never calls, such as one with a spelling mistake.
    """
    known = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
    own = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks or ())
    for each in own:
        if not isinstance(each, keras.callbacks.Callback):
            raise TypeError(f"The callback {each!r} is no keras.callbacks.Callback: give an instance of one.")
        for name in dir(each):
            if name.startswith("on_") and name not in known and callable(getattr(each, name)):
                nearest = difflib.get_close_matches(name, known, 1, 0)[0]
                raise ValueError(
                    f"Keras never calls {type(each).__name__}.{name}. Did you mean {nearest}? "
                    f"Otherwise give the method a name that does not begin with on_."
                )
    return own


def check_data(dataset_fn: Any, coordinator: Any, steps_per_epoch: int | None) -> int:
    """Return `steps_per_epoch`, or by default the length of the dataset.

    Raises:
        TypeError: `dataset_fn` is no function. Without a coordinator, it may be a dataset.
        ValueError: `steps_per_epoch` is less than 1. Or it is missing, although there is a coordinator, or the dataset
            has no known length.
    """
    is_dataset = isinstance(dataset_fn, tf.data.Dataset)
    if not callable(dataset_fn) and not (is_dataset and coordinator is None):
        raise TypeError(
            f"dataset_fn is {describe_data(dataset_fn)}: expected a function that returns a dataset, because "
            "every worker needs its own. Write: def dataset_fn(): return tf.data.Dataset…"
        )
    if steps_per_epoch is not None:
        return check_integer("steps_per_epoch", steps_per_epoch, at_least=1)
    if coordinator is not None:
        raise ValueError(
            "steps_per_epoch is missing: the workers repeat their datasets, so it says when an epoch ends. For one "
            "pass over all rows give: number of rows // batch size."
        )
    length = int((dataset_fn if is_dataset else dataset_fn()).cardinality())
    if length <= 0:
        reason = "never ends" if length == tf.data.INFINITE_CARDINALITY else "has an unknown length"
        raise ValueError(f"steps_per_epoch is missing, and the dataset {reason}. Give the number of steps in an epoch.")
    return length


def make_callback_list(model: Any, callbacks: list[Any], verbose: str | int, add_history: bool, **params: Any) -> Any:
    """Return a keras.callbacks.CallbackList of these callbacks, and of one that prints progress as `verbose` says.

    `verbose` is that of `fit`. `add_history` adds a keras.callbacks.History. `params` are further arguments of the
    CallbackList.
    """
    if verbose == "auto":
        verbose = 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2
    return keras.callbacks.CallbackList(
        callbacks, add_history=add_history, add_progbar=verbose != 0, model=model, verbose=verbose, **params
    )


def describe_data(data: Any) -> str:
    """Return a short description of the data for an error."""
    return "a dataset" if isinstance(data, tf.data.Dataset) else f"of type {type(data).__name__}"
