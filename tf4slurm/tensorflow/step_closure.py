"""Build the function with which a worker runs several training steps (`StepClosure`)."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf4slurm.errors import TrainingError
from tf4slurm.tensorflow.constants import check_arrays, max_copies

if TYPE_CHECKING:
    from tf4slurm.tensorflow.keras.step import KerasStep

logger = logging.getLogger(__name__)

_READS = ("ReadVariableOp", "ResourceGather")  # stateful operations that change no variable
_MAX_OPERATIONS = 5_000  # except constants and placeholders: such a graph takes 2 to 3 s to trace and send


class StepClosure:
    """A tf.function that runs several steps on a worker.

    Its result is the sums of the values that the steps return. Its graph contains the step several times, because this
    is fastest. Steps per second, measured with a 4-byte variable on a ps: 170 with one step per closure, 1,100 with 32
    copies of the step, 630 with 32 calls of a function for one step, and 620 with a TensorFlow loop, because the ps
    takes part in each iteration. With more steps than `max_copies` the graph has calls.

    Attributes:
        function: The tf.function. Its arguments are the number of steps and the iterators of the datasets.
        max_copies: The largest number of copies of the step for one graph, so that the graph stays small. It is 1 until
            a step has been traced.
        last_steps: The number of steps per closure at the end of the last call of `run_closures`, at first 1.
    """

    def __init__(self, strategy: Any, step: KerasStep | FunctionStep, counter: tf.Variable) -> None:
        self.max_copies = 1
        self.last_steps = 1
        self._shapes: dict[str, tuple[int, ...]] | None = None  # shape of each sum, in the order of the result
        self._has_warned = False
        self._strategy = strategy
        self._step = step
        self._counter = counter
        self.function = tf.function(self._trace)
        self._called_step = tf.function(self._trace_step)

    def _trace(self, count: int, *iterators: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        sums: dict[str, Any] = {}
        is_known = self._shapes is not None  # a step has been traced
        step = self._called_step if is_known and count > self.max_copies else self._trace_step
        for _ in range(count):
            sums = step(sums, iterators)
        sums = self._step.reduce(self._strategy, sums)
        _check_names(sums, self._shapes)
        self._shapes = {name: tuple(total.shape) for name, total in sums.items()}
        # AutoGraph would warn that it cannot convert the logger
        tf.autograph.experimental.do_not_convert(self._warn_of_variables_outside)(graph)
        tf.autograph.experimental.do_not_convert(check_arrays)("The step", graph)
        none = tf.zeros([0], tf.float64)
        return tf.concat([none, *(tf.reshape(tf.cast(each, tf.float64), [-1]) for each in sums.values())], axis=0)

    def split(self, result: Any) -> dict[str, Any]:
        """Split a result into the sums by name, which are floats or numpy arrays."""
        sums, rest = {}, result
        for name, shape in (self._shapes or {}).items():
            size = math.prod(shape)
            sums[name], rest = rest[:size].reshape(shape) if shape else float(rest[0]), rest[size:]
        return sums

    def _trace_step(self, sums: dict[str, Any], iterators: Any) -> dict[str, Any]:
        """Add a step and an increment of the counter to the graph, and set `max_copies` by the size of the step.

        Return `sums` plus the values that the step returns.
        """
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        batch = [next(iterator) for iterator in iterators]
        sums = self._strategy.run(self._step, args=(sums, *batch))
        operations = graph.get_operations()[before:]
        updates = [each for each in operations if each.op_def.is_stateful and each.type not in _READS]
        with tf.control_dependencies(updates):  # without it, the ps could count a step before its updates are applied
            self._counter.assign_add(1)
        size = sum(each.type not in ("Const", "Placeholder") for each in operations)
        copies = tf.autograph.experimental.do_not_convert(max_copies)(operations)
        self.max_copies = max(1, min(_MAX_OPERATIONS // max(size, 1), copies))
        return sums

    def _warn_of_variables_outside(self, graph: Any) -> None:
        """Log one warning if the traced function uses variables that are not on a ps."""
        used = getattr(graph, "_watched_variables", ())  # `graph.variables` is empty until the graph is complete
        outside = sorted({variable.name for variable in used if "/job:ps/" not in variable.device})
        if outside and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The step uses variables that were made outside of the strategy's scope: %s. They are in the chief, "
                "and every step of each worker accesses it. Make them in `with strategy.scope():`.",
                ", ".join(outside),
            )


@functools.lru_cache(maxsize=8)
def make_closure(strategy: Any, step_fn: Callable[..., Any], counter_reference: Any) -> StepClosure:
    """Return the StepClosure of a `step_fn`.

    It is cached, so that TensorFlow sends each of its graphs to the workers only once. `counter_reference` is the
    result of `ref()` of the step counter, because a variable cannot be a key of the cache.
    """
    return StepClosure(strategy, FunctionStep(step_fn), counter_reference.deref())


class FunctionStep:
    """A step that calls the user's `step_fn` and adds up the values that it returns."""

    def __init__(self, step_fn: Callable[..., Any]) -> None:
        self._step_fn = step_fn

    def __call__(self, sums: dict[str, Any], *batch: Any) -> dict[str, Any]:
        """Run one step on a replica. Return `sums`, which is empty before the first step, plus this step's values."""
        result = self._step_fn(*batch)
        numbers = result if isinstance(result, dict) else {} if result is None else {"loss": result}
        for name, number in numbers.items():
            if not isinstance(name, str) or name == "step":
                raise TrainingError(f"step_fn returned a number named {name!r}: expected a str other than 'step'.")
            if not (tf.is_tensor(number) and (number.dtype.is_floating or number.dtype.is_integer)):
                raise TrainingError(
                    f"step_fn returned {number!r} as {name}, which is not a numeric tensor: return "
                    "tf.reduce_mean(loss), a dict of such tensors by name, or None."
                )
            if number.shape.rank != 0:
                raise TrainingError(
                    f"step_fn returned a {name} of shape {number.shape}, not one number: return tf.reduce_mean(loss)."
                )
        added = {name: sums.get(name, 0.0) + tf.cast(numbers[name], tf.float64) for name in sorted(numbers)}
        _check_names(added, sums or None)
        return added

    def reduce(self, strategy: Any, sums: dict[str, Any]) -> dict[str, Any]:
        """Return the mean of each sum over the replicas."""
        return {name: strategy.reduce("MEAN", total, axis=None) for name, total in sums.items()}


def _check_names(names: Iterable[str], before: Iterable[str] | None) -> None:
    """Raise TrainingError if the names that a step returned differ from those of earlier steps (`before`)."""
    if before is not None and list(names) != list(before):
        raise TrainingError(f"step_fn returned {tuple(names)}, but {tuple(before)} before. Always return the same.")
