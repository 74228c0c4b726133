"""Run one training or test step of a compiled Keras 3 model on a worker (`KerasStep`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute  # no public name

from tf4slurm.errors import TrainingError
from tf4slurm.tensorflow.keras.limits import add_if_sum, refuse_metric

_ADDED = "added to metric variable "  # and the variable's number: name of the sum of what steps add to this variable


def build(model: Any, element_spec: Any) -> None:
    """Create all variables of the model, its optimizer and its metrics in the current strategy's scope.

    Workers cannot create variables, so call this before the first step. It traces at most the forward pass, loss and
    metrics of one batch.
    """
    _forget_initialized_variables()
    scope = keras.StatelessScope(collect_losses=True)
    scope.state_mapping = {id(each): each.value for each in model.variables}
    has_own_step = type(model).train_step is not keras.Model.train_step
    if not has_own_step or not all(layer.built for layer in model.layers):
        with scope:
            tf.function(model.test_step).get_concrete_function(element_spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _forget_initialized_variables() -> None:
    """Remove the variables that have a value already from Keras's list of variables to initialize.

    A Ctrl-C during the initialization leaves them in the list, and Keras would refuse to initialize them again.
    """
    waiting = get_global_attribute("uninitialized_variables") or []
    waiting[:] = [variable for variable in waiting if variable._value is None]


class KerasStep:
    """Calls `train_step` or `test_step` of a model, and returns the sums of what the steps add to the metrics.

    Tensors on the worker, which start at zero, replace the metrics' variables. The chief adds up the sums of all
    closures. So a step needs no ps for its metrics. The model's other variables are changed in place.
    """

    def __init__(self, model: Any, method: Callable[[Any], Any]) -> None:
        """Prepare a step that calls `method` (model.train_step or model.test_step) with a batch."""
        self._model = model
        self._method = method
        self._variables = list(model.metrics_variables)
        self._initial = [np.asarray(variable.numpy(), np.float64) for variable in self._variables]
        self._added = [f"{_ADDED}{number}" for number in range(len(self._variables))]
        # a concrete function: TensorFlow would warn of each new tf.function in a loop that calls evaluate()
        specs = [tf.TensorSpec(value.shape, tf.float64) for value in self._initial]
        self._results = tf.function(self._compute_results).get_concrete_function(specs)

    def __call__(self, sums: dict[str, Any], batch: Any) -> dict[str, Any]:
        """Run a step. Return `sums`, which is empty before the first step, plus what this step adds to the metrics.

        If the step returns a dict with other names than the metrics have, the result also has the sums of its values.

        Raises:
            TrainingError: A metric created its variables in this step.
            KerasError: As for `_StepScope.check_sums`.
        """
        model = self._model
        with _StepScope(model.variables, self._variables) as scope:
            logs = self._method(batch)
            logs = _flatten(logs) if isinstance(logs, dict) else {}
        if len(model.metrics_variables) != len(self._variables):
            names = ", ".join(metric.name for metric in model.metrics)
            raise TrainingError(
                f"A metric made its variables during the first step; the metrics are {names}. Let it make them in its "
                "__init__, or call it once before training."
            )
        scope.check_sums()
        values = [scope.get_current_value(each) for each in self._variables]
        numbers = dict(zip(self._added, values, strict=True))
        if logs and set(logs) != set(self._results.structured_outputs):
            numbers |= {name: tf.cast(logs[name], tf.float64) for name in sorted(logs)}
        return {name: sums[name] + number if sums else number for name, number in numbers.items()}

    def reduce(self, strategy: Any, sums: dict[str, Any]) -> dict[str, Any]:
        """Combine the sums of the replicas. Additions to metrics are added up, and other values are averaged."""
        reduce = tf.distribute.ReduceOp
        return {
            name: strategy.reduce(reduce.SUM if name.startswith(_ADDED) else reduce.MEAN, total, axis=None)
            for name, total in sums.items()
        }

    def logs(self, sums: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return Keras's logs for the sums of `steps` steps, as floats, or as arrays for metrics such as F1Score."""
        if len(sums) > len(self._added):
            results = {name: total / steps for name, total in sums.items() if not name.startswith(_ADDED)}
        else:
            results = self._results([tf.constant(sums[name], tf.float64) for name in self._added])
        values = {name: np.asarray(value) for name, value in results.items()}
        return {name: value if value.ndim else float(value) for name, value in values.items()}

    def assign_metrics(self, sums: dict[str, Any]) -> None:
        """Assign the sums to the metrics' variables, for callbacks that read the metrics."""
        for variable, value in self._mapping([sums[name] for name in self._added]):
            variable.assign(value)

    def _compute_results(self, added: list[Any]) -> dict[str, Any]:
        with keras.StatelessScope(self._mapping(added)):
            return _flatten(self._model.get_metrics_result())

    def _mapping(self, added: list[Any]) -> list[tuple[Any, Any]]:
        """Return (variable, value) pairs of the metrics' variables, as keras.StatelessScope takes them.

        A value is the initial value of its variable, plus the entry of `added` at the same position.
        """
        return [
            (variable, tf.cast(initial + total, variable.dtype))
            for variable, initial, total in zip(self._variables, self._initial, added, strict=True)
        ]


def _flatten(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the results by name.

    If the result of a metric is a dict, each of its values has a name of its own, as in Keras's logs.
    """
    nested = [value if isinstance(value, dict) else {name: value} for name, value in results.items()]
    return {name: tf.convert_to_tensor(value) for each in nested for name, value in each.items()}


class _StepScope(keras.StatelessScope):  # type: ignore[misc]
    """Keeps the values of metric variables in tensors while a step runs.

    Other variables, such as moving averages, are assigned at once. Additions to these variables are atomic.
    """

    def __init__(self, variables: Sequence[Any], metric_variables: Sequence[Any]) -> None:
        super().__init__(collect_losses=True)
        self._metric_variables = metric_variables
        self._zeros = {id(each): tf.zeros(each.shape, each.dtype) for each in metric_variables}
        self.state_mapping = {id(each): each.value for each in variables} | self._zeros

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Handle an assignment `variable.assign(value)` in the scope. Keras calls this method."""
        variable, value = update
        if id(variable) in self._zeros:
            super().add_update(update)
            return
        target = self.state_mapping.get(id(variable), variable.value)
        is_on_ps = "/job:ps/" in str(target.device) and tf.is_symbolic_tensor(value)
        if not (is_on_ps and add_if_sum(target, value)):
            target.assign(tf.cast(value, target.dtype))

    def check_sums(self) -> None:
        """Raise KerasError for a metric that did something other than add to its variables.

        What the metric adds must not depend on its variables, because these start at zero in each closure. With
        run_eagerly, nothing is checked.
        """
        if not self._zeros or not tf.is_symbolic_tensor(next(iter(self._zeros.values()))):
            return  # with run_eagerly, no graph shows which operation made a value
        dependent = _find_dependent(self._zeros.values())
        for variable in self._metric_variables:
            if not _is_sum(self.get_current_value(variable), self._zeros[id(variable)], dependent):
                refuse_metric(variable.path.rpartition("/")[0], variable.name)


def _find_dependent(tensors: Iterable[Any]) -> set[Any]:
    """Return the operations that make these tensors, and all operations whose results depend on them."""
    found: set[Any] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [reader for output in operation.outputs for reader in output.consumers()]
    return found


def _is_sum(tensor: Any, start: Any, dependent: Collection[Any]) -> bool:
    """Return whether a tensor is `start` plus or minus tensors whose operations are not in `dependent`.

    `dependent` has the operations that depend on a metric variable.
    """
    if tensor is start:
        return True
    if not tf.is_symbolic_tensor(tensor) or tensor.op.type not in ("AddV2", "Sub", "Identity", "Cast"):
        return False
    first, *others = tensor.op.inputs
    if tensor.op.type == "AddV2" and first.op not in dependent:
        first, others = others[0], [first]
    return all(each.op not in dependent for each in others) and _is_sum(first, start, dependent)
