"""Refuse functions whose arrays are too large to send to a worker.

An array that a traced function uses becomes a constant of its graph, which is sent in one message of at most 2 GiB.
Beyond this limit, TensorFlow's errors name neither array nor limit. One array above the limit makes tracing fail. With
several smaller arrays, all calls of the function fail on all workers with NotFoundError, and are repeated without end
(seen in TensorFlow 2.21).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from tf4slurm.errors import TrainingError
from tf4slurm.jobs.formatting import format_bytes, format_list

MAX_BYTES = 2**31 - 2**24
"""The largest size in bytes of a function's arrays.

It is protobuf's limit of 2 GiB for a message, less 16 MiB for the rest of the graph.
"""

_REFUSES = "make_tensor_proto"  # the function of TensorFlow that raises the error for one large array
_MOST_ARRAYS = 5  # that an error names
_LARGE_SHARE = 0.01  # an error names no array that is smaller than this share of the total


class _Array(NamedTuple):
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)} ({self.dtype} {'×'.join(map(str, self.shape)) or 'scalar'})"


@contextlib.contextmanager
def explain_large_array(subject: str) -> Iterator[None]:
    """Raise TrainingError if the block fails to trace a function because of one array above the limit.

    `subject` names the function in the error, such as "The dataset function".
    """
    try:
        yield
    except ValueError as error:
        array = _find_refused_array(error)
        if array is None or array.nbytes <= MAX_BYTES:
            raise
        _refuse(subject, [_Array(array.nbytes, array.dtype.name, array.shape)], error)


def check_arrays(subject: str, graph: Any) -> None:
    """Raise TrainingError if the traced function with this graph uses arrays that are too large to send.

    All constants of the function, and of the functions that it calls, are sent in one message. Each tensor that the
    function captures is sent in a message of its own. `subject` names the function in the error, such as "The step".
    """
    called = [function.graph for function in graph._functions.values() if hasattr(function, "graph")]
    constants = [array for each in (graph, *called) for array in _constants_of(each.get_operations())]
    captured = [_describe(tensor) for tensor, _ in graph.captures if isinstance(tensor, tf.Tensor)]
    for arrays in (constants, *([array] for array in captured)):
        if sum(array.num_bytes for array in arrays) > MAX_BYTES:
            _refuse(subject, arrays)


def create_per_worker_dataset(coordinator: Any, dataset_fn: Any) -> Any:
    """Return `coordinator.create_per_worker_dataset(dataset_fn)`, and check the size of its arrays.

    Raises:
        TrainingError: The arrays that `dataset_fn` uses are too large to send.
    """
    subject = "The dataset function"
    with explain_large_array(subject):
        datasets = type(coordinator).create_per_worker_dataset(coordinator, dataset_fn)
    check_arrays(subject, datasets._dataset_fn.graph)
    return datasets


def check_datasets_of(coordinator: Any) -> None:
    """Let `coordinator.create_per_worker_dataset` raise TrainingError if its function uses arrays that are too large.

    The method of this coordinator is replaced by `create_per_worker_dataset` of this module.
    """
    coordinator.create_per_worker_dataset = lambda dataset_fn: create_per_worker_dataset(coordinator, dataset_fn)


def max_copies(operations: Iterable[Any]) -> int:
    """Return how many copies of these operations fit into the 2 GB of a TensorFlow function, but at least 1.

    Only operations that are constants count.
    """
    num_bytes = sum(array.num_bytes for array in _constants_of(operations))
    return max(1, MAX_BYTES // max(num_bytes, 1))


def _constants_of(operations: Iterable[Any]) -> Iterator[_Array]:
    for operation in operations:
        if operation.type == "Const":
            array = _describe(operation.outputs[0])
            is_text = array.dtype == "string"
            yield array._replace(num_bytes=operation.get_attr("value").ByteSize()) if is_text else array


def _describe(tensor: Any) -> _Array:
    return _Array((tensor.shape.num_elements() or 0) * tensor.dtype.size, tensor.dtype.name, tuple(tensor.shape))


def _find_refused_array(error: BaseException) -> Any:
    """Return the array whose size TensorFlow has refused with `error`. Return None if the error has another cause."""
    while error.__context__ is not None:  # AutoGraph raises a copy of TensorFlow's error, which is its context
        error = error.__context__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_code.co_name != _REFUSES:
        return None  # an error of the user's function
    arrays = [value for value in frames[-1].f_locals.values() if isinstance(value, np.ndarray)]
    return max(arrays, key=lambda array: array.nbytes, default=None)


def _refuse(subject: str, arrays: Sequence[_Array], cause: Exception | None = None) -> NoReturn:
    total = sum(array.num_bytes for array in arrays)
    largest = [str(array) for array in sorted(arrays, reverse=True) if array.num_bytes >= _LARGE_SHARE * total]
    raise TrainingError(
        f"{subject} uses arrays of {format_bytes(total)}, but a function of TensorFlow can have "
        f"at most {format_bytes(MAX_BYTES)}. The largest: {format_list(largest, _MOST_ARRAYS)}. Read "
        "files in the function (tf4slurm.tensorflow.worker_files), or use the tf.data service (tf4slurm.data_service). "
        "Or call tf.numpy_function in the dataset: it runs in the chief, which then sends every element."
    ) from cause
