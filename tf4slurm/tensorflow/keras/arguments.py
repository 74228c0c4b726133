"""Accept or refuse the arguments of Keras's `fit`, `evaluate` and `predict` that tf4slurm's functions do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

from tf4slurm.tensorflow.checkpoints import check_integer

_F = TypeVar("_F", bound=Callable[..., Any])
_BATCH_SIZE = 32  # rows per batch of arrays, as in Keras


class _Argument(NamedTuple):
    """An argument of a Keras method that tf4slurm's function of the same name does not have.

    Attributes:
        accepted: The values that mean the same as leaving the argument out.
        instead: A sentence without a full stop, for the error about any other value: what to do instead.
    """

    accepted: tuple[Any, ...]
    instead: str


_READ_IN_THREADS = _Argument((None,), "Leave it out: tf.data reads in threads of its own")
_ARGUMENTS: Mapping[str, Mapping[str, _Argument]] = {
    "fit": {
        "x": _Argument((), "Give a function that returns the dataset, as the second argument"),
        "y": _Argument((None,), "Let dataset_fn return a dataset of pairs (inputs, targets)"),
        "sample_weight": _Argument((None,), "Let dataset_fn return a dataset of (inputs, targets, weights)"),
        "batch_size": _Argument((None,), "Let dataset_fn return batches: dataset.batch(32)"),
        "shuffle": _Argument((None, False), "Let dataset_fn shuffle the rows: dataset.shuffle(10_000)"),
        "validation_split": _Argument((None, 0), "Give the rows for the validation as validation_data"),
        **dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _READ_IN_THREADS),
    },
    "evaluate": {
        "x": _Argument((), "Give the data as the second argument"),
        "y": _Argument((None,), "Give the data as a pair (inputs, targets)"),
        "sample_weight": _Argument((None,), "Give the data as (inputs, targets, weights)"),
        "return_dict": _Argument((True,), "The result is always a dict: leave it out"),
        **dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _READ_IN_THREADS),
    },
    "predict": {
        "x": _Argument((), "Give the data as the second argument"),
        "verbose": _Argument((0, "auto"), "Nothing is printed: leave it out"),
        "callbacks": _Argument((None,), "No callback is called: leave it out"),
        **dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _READ_IN_THREADS),
    },
}


def explain_keras_arguments(function: _F) -> _F:
    """Decorate `fit`, `evaluate` or `predict`: accept the arguments that only the Keras method of the same name has.

    A value that changes nothing is ignored. Other values raise a TypeError that says what to do instead.
    """
    name, known = function.__name__, _ARGUMENTS[function.__name__]

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if len(arguments) > 2 and "y" in known:
            raise TypeError(f"{name}() takes two arguments without a name. {known['y'].instead}.")
        for given in [each for each in options if each in known]:
            value = options.pop(given)
            if not any(value is each or (np.isscalar(value) and value == each) for each in known[given].accepted):
                raise TypeError(f"{name}() has no argument {given}. {known[given].instead}.")
        return function(*arguments, **options)

    return cast(_F, call)


def weight_classes(dataset_fn: Any, class_weight: Mapping[int, float]) -> Callable[[], tf.data.Dataset]:
    """Return a dataset function that gives each row the weight of its class, as `model.fit(class_weight=…)` does.

    Classes that `class_weight` does not name have the weight 1. `dataset_fn` may be a dataset.

    Raises:
        TypeError, ValueError: `class_weight` is invalid. The returned function raises ValueError if the dataset has
            several outputs, no targets, or weights already.
    """
    if not isinstance(class_weight, Mapping):
        raise TypeError(f"class_weight is {class_weight!r}: expected a dict of weights by class, such as {{0: 1.0}}.")
    if not class_weight or not all(isinstance(each, (int, np.integer)) and each >= 0 for each in class_weight):
        raise ValueError(f"class_weight is {class_weight!r}: expected the numbers of classes, from 0, as keys.")
    table = np.array([class_weight.get(each, 1.0) for each in range(max(class_weight) + 1)], np.float32)

    def weigh(inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
        classes = targets
        if targets.shape.rank != 1:
            is_one_column = targets.shape[-1] == 1
            classes = tf.squeeze(targets, -1) if is_one_column else tf.argmax(targets, -1)
        classes = tf.cast(tf.round(classes), tf.int64)
        is_named = classes < len(table)
        return inputs, targets, tf.where(is_named, tf.gather(table, tf.where(is_named, classes, 0)), 1.0)

    def make_weighted() -> tf.data.Dataset:
        dataset = dataset_fn() if callable(dataset_fn) else dataset_fn
        spec = dataset.element_spec
        if not (isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], tf.TensorSpec)):
            raise ValueError(
                "class_weight needs a dataset of pairs (inputs, targets) with one tensor of targets, and without "
                f"sample weights. This one has {spec!r}."
            )
        return dataset.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)

    return make_weighted


def make_dataset_function(data: Any, batch_size: int | None) -> Callable[[], Any]:
    """Return the function that makes the dataset of `evaluate` or `predict`, whose argument is `data`."""
    if not callable(data) and not isinstance(data, tf.data.Dataset):
        size = _BATCH_SIZE if batch_size is None else check_integer("batch_size", batch_size, at_least=1)
        return lambda: tf.data.Dataset.from_tensor_slices(data).batch(size)
    if batch_size is not None:
        raise ValueError(
            f"batch_size (in fit: validation_batch_size) is {batch_size!r}, but a dataset has batches already. Leave "
            "it out, and let the dataset have batches of that size."
        )
    return data if callable(data) else lambda: data
