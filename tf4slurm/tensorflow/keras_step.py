"""`KerasStep`: one training or test step of a compiled Keras 3 model, as a function for a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras  # type: ignore[import-untyped]  # it ships no types
import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import TrainingError
from tf4slurm.tensorflow.keras_limits import add_if_sum, refuse_metric

STATE = "metric variables"
"""The name under which a step returns what it adds to the metrics' variables, in one tensor."""


def build(model: Any, element_spec: Any) -> None:
    """Create all variables of the model, its optimizer and its metrics in the current strategy's scope.

    A worker can create none. Only the graphs of one batch's forward pass, loss and metrics are traced for this.
    """
    scope = keras.StatelessScope(collect_losses=True)
    scope.state_mapping = {id(each): each.value for each in model.variables}
    has_own_step = type(model).train_step is not keras.Model.train_step
    if not has_own_step or not all(layer.built for layer in model.layers):
        with scope:
            tf.function(model.test_step).get_concrete_function(element_spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


class KerasStep:
    """Calls `train_step` or `test_step` of a model, and returns what the step adds to the metrics.

    The metrics' variables are replaced by tensors on the worker, which start at zero. So a step needs no ps for its
    metrics; the chief adds up the results of all steps. The model's other variables are changed in place.
    """

    def __init__(self, model: Any, method: Callable[[Any], Any]) -> None:
        """Prepare a step that calls `method` (model.train_step or model.test_step) with a batch."""
        self._model = model
        self._method = method
        self._variables = list(model.metrics_variables)
        self._initial = [np.asarray(variable.numpy(), np.float64) for variable in self._variables]
        size = sum(math.prod(value.shape) for value in self._initial)
        # a concrete function: TensorFlow would warn of each new tf.function in a loop that calls evaluate()
        self._results = tf.function(self._compute_results).get_concrete_function(tf.TensorSpec([size], tf.float64))

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Run the step; return the additions to the metrics, and the step's own results that are not metrics."""
        model = self._model
        with _StepScope(model.variables, self._variables) as scope:
            logs = self._method(batch)
            is_of_metrics = not isinstance(logs, dict) or set(logs) == set(model.get_metrics_result())
        if len(model.metrics_variables) != len(self._variables):
            names = ", ".join(metric.name for metric in model.metrics)
            raise TrainingError(
                f"A metric made its variables during the first step; the metrics are {names}. Let it make them in its "
                "__init__, or call it once before training."
            )
        scope.check_sums()
        additions = [tf.reshape(tf.cast(scope.get_current_value(each), tf.float64), [-1]) for each in self._variables]
        results = {STATE: tf.concat([tf.zeros([0], tf.float64), *additions], axis=0)}
        return results if is_of_metrics else results | {name: tf.cast(logs[name], tf.float64) for name in sorted(logs)}

    def reduce(self, strategy: Any, results: Any) -> dict[str, Any]:
        """Combine the results of the replicas: sums for the metrics, means for other numbers."""
        reduce = tf.distribute.ReduceOp
        return {
            name: strategy.reduce(reduce.SUM if name == STATE else reduce.MEAN, results[name], axis=None)
            for name in results
        }

    def logs(self, sums: dict[str, Any], steps: int) -> dict[str, float]:
        """Return Keras's logs for the sums of the results of some steps."""
        if len(sums) > 1:
            return {name: float(total) / steps for name, total in sums.items() if name != STATE}
        return {name: float(value) for name, value in self._results(tf.constant(sums[STATE])).items()}

    def assign_metrics(self, sums: dict[str, Any]) -> None:
        """Assign the metrics' variables, for callbacks that read the metrics."""
        for variable, value in self._mapping(sums[STATE]):
            variable.assign(value)

    def _compute_results(self, state: Any) -> dict[str, Any]:
        with keras.StatelessScope(self._mapping(state)):
            return dict(self._model.get_metrics_result())

    def _mapping(self, state: Any) -> list[tuple[Any, Any]]:
        """Return each metric variable with its value after these additions."""
        parts = tf.split(state, [math.prod(value.shape) for value in self._initial])
        return [
            (variable, tf.cast(initial + tf.reshape(part, initial.shape), variable.dtype))
            for variable, initial, part in zip(self._variables, self._initial, parts, strict=True)
        ]


class _StepScope(keras.StatelessScope):  # type: ignore[misc]
    """During a step, keeps the metrics' values in tensors and assigns all other variables at once, atomically on a ps.

    A plain StatelessScope would also keep the other assignments: counters, moving averages and random seeds.
    """

    def __init__(self, variables: Sequence[Any], metric_variables: Sequence[Any]) -> None:
        super().__init__(collect_losses=True)
        self._metric_variables = metric_variables
        self._zeros = {id(each): tf.zeros(each.shape, each.dtype) for each in metric_variables}
        self.state_mapping = {id(each): each.value for each in variables} | self._zeros

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Handle an assignment `variable.assign(value)` in the scope."""
        variable, value = update
        if id(variable) in self._zeros:
            super().add_update(update)
            return
        target = self.state_mapping.get(id(variable), variable.value)
        is_on_ps = "/job:ps/" in str(target.device) and tf.is_symbolic_tensor(value)
        if not (is_on_ps and add_if_sum(target, value)):
            target.assign(tf.cast(value, target.dtype))

    def check_sums(self) -> None:
        """Raise KerasError for a metric that did something other than add to its variables."""
        for variable in self._metric_variables:
            if not _is_sum(self.get_current_value(variable), self._zeros[id(variable)]):
                refuse_metric(variable.path.rpartition("/")[0], variable.name)


def _is_sum(tensor: Any, start: Any) -> bool:
    """Return whether a tensor of the traced graph is `start`, plus or minus other tensors."""
    if tensor is start:
        return True
    if not tf.is_symbolic_tensor(tensor):
        return False
    inputs = tensor.op.inputs if tensor.op.type == "AddV2" else tensor.op.inputs[:1]
    return tensor.op.type in ("AddV2", "Sub", "Identity", "Cast") and any(_is_sum(each, start) for each in inputs)
