"""Raise clear errors for operations of Keras 3 that fail under a strategy of several processes.

Without this module, Keras 3 fails late or with misleading errors (measured with Keras 3.15 and TensorFlow 2.21). Keras
also miscounts variables on a ps: it reads a variable and assigns the sum, so workers overwrite each other's counts.
This module makes such additions atomic. Metrics and optimizers that would miscount raise KerasError. For other code, a
warning is logged if a step reads a variable, assigns it, and then assigns a sum with the value that it read before.

The classes of Keras are patched when tf4slurm creates such a strategy or trains with one. TensorFlow has imported Keras
3 by then, except with TF_USE_LEGACY_KERAS=1. If Keras 3 is imported later, it stays unpatched.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from tf4slurm.errors import KerasError

logger = logging.getLogger(__name__)

_FAILING = {
    "ParameterServerStrategy": ("fit", "evaluate", "predict"),
    # predict_on_batch returns each row once per worker, while predict is correct
    "MultiWorkerMirroredStrategy": ("fit", "evaluate", "train_on_batch", "test_on_batch", "predict_on_batch"),
}
_REPLACED = ("fit", "evaluate", "predict")  # tf4slurm.tensorflow has functions of these names
_OTHER_KERAS = (
    "or use Keras 2, where it works: pip install 'tf4slurm[tf-keras]', and set TF_USE_LEGACY_KERAS=1 "
    "before TensorFlow is imported."
)
_MISCOUNTING = {
    "gradient_accumulation_steps": "overwrite each other's sums. Either use larger batches",
    "ema_overwrite_frequency": "pass a step that is due, or take it twice. Either leave it out",
    "dynamic_growth_steps": "pass the step at which the scale grows. Either use mixed_bfloat16, which needs no scale",
    "Nadam": "overwrite each other's product of rates. Either use Adam",
}
"""For each optimizer class and attribute that miscounts: what several workers do, and the alternative."""
_FAILING_IN_STEP = {
    "gradient_accumulation_steps": "use larger batches",
    "ema_overwrite_frequency": "leave it out; `fit` uses the averages at its end",
}
"""By attribute of an optimizer that changes variables in a condition, what to do instead.

With MultiWorkerMirroredStrategy, such a condition fails.
"""
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp")
_patched: set[int] = set()


def install_keras_limits() -> None:
    """Patch the classes of Keras 3 for strategies of several processes, as the module's docstring describes.

    What would fail or miscount then raises KerasError, or is made correct. Do nothing if Keras 3 is not imported, or
    does not use TensorFlow. Idempotent.
    """
    keras = sys.modules.get("keras")
    if keras is None or id(keras) in _patched or not keras.__version__.startswith("3."):
        return
    if keras.backend.backend() != "tensorflow":  # models of other backends use no strategy
        return
    _patched.add(id(keras))
    for name in sorted({name for names in _FAILING.values() for name in names}):
        _wrap(keras.Model, name, _refuse_method)
    _wrap(keras.Variable, "_initialize", _refuse_shards)
    _wrap(keras.Variable, "_direct_assign", _add_atomically)
    _wrap(keras.Metric, "add_variable", _note_metric)
    _wrap(keras.optimizers.Optimizer, "build", _refuse_optimizer)
    _wrap(keras.optimizers.Optimizer, "_clip_gradients", _clip_in_one_process)
    _wrap(keras.optimizers.Optimizer, "_all_reduce_sum_gradients", _clip_sum)
    _wrap(keras.optimizers.Optimizer, "stateless_apply", _refuse_stateless)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of a Keras class by `wrapper`, which gets the method and its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(method, *arguments, **options)

    setattr(owner, name, wrapped)


def _refuse_method(method: Callable[..., Any], model: Any, *arguments: Any, **options: Any) -> Any:
    name, strategy = method.__name__, _limiting_strategy(model.distribute_strategy)
    if strategy is not None and name in _FAILING[strategy]:
        coordinator = ", coordinator=coordinator" if strategy == "ParameterServerStrategy" else ""
        call = f"{name}(model, dataset_fn{coordinator}, …)" if name in _REPLACED else "fit(model, dataset_fn, …)"
        raise KerasError(
            f"Model.{name} of Keras 3 fails under {strategy}. Call tf4slurm.tensorflow.{call} instead, where "
            "dataset_fn is a function that returns your dataset. It takes the same compiled model and callbacks."
        )
    return method(model, *arguments, **options)


def _refuse_shards(initialize: Callable[..., Any], variable: Any, value: Any) -> None:
    initialize(variable, value)
    if hasattr(variable._value, "variables"):  # only a ShardedVariable has this attribute
        raise KerasError(
            f"A Keras 3 layer cannot use a variable that is split over several ps, as {variable.name!r} of shape "
            f"{tuple(variable._value.shape)} is. Either use sharding='none' (or a larger min_shard_bytes), and "
            "tf4slurm.tensorflow.ShardedEmbedding or a tf.Variable of your own for what must be split, "
            f"{_OTHER_KERAS}"
        )


def _add_atomically(assign: Callable[..., Any], variable: Any, value: Any) -> None:
    """Assign `value` to a Keras variable. If the variable v is on a ps, make `v = v + x` and `v = v - x` atomic.

    Raises:
        KerasError: The variable of a metric gets a value that is neither such a sum nor a constant.
    """
    if "/job:ps/" not in str(variable._value.device) or not tf.is_symbolic_tensor(value):
        assign(variable, value)
    elif add_if_sum(variable._value, value):
        return
    elif hasattr(variable, "_tf4slurm_metric") and tf.get_static_value(value) is None:
        refuse_metric(variable._tf4slurm_metric, variable.name)
    else:
        assign(variable, value)


def add_if_sum(variable: tf.Variable, value: Any) -> bool:
    """Add or subtract x atomically if the tensor `value` is `variable + x` or `variable - x`.

    Return whether this was done. If this step has assigned the variable after reading it for `value`, log a warning and
    return False.
    """
    kind, terms = value.op.type, list(value.op.inputs)
    if kind == "AddV2" and _reads(terms[1], variable):
        terms.reverse()
    if kind not in ("AddV2", "Sub") or not _reads(terms[0], variable):
        return False
    if _is_changed_since(terms[0].op, variable):
        _warn_of_old_value(variable.name)
        return False
    change = tf.broadcast_to(terms[1], variable.shape)
    (variable.assign_add if kind == "AddV2" else variable.assign_sub)(change)
    return True


def refuse_metric(metric: str, variable: str) -> NoReturn:
    """Raise the error for a metric whose values from several closures cannot be added up.

    The arguments are the names of the metric and of its variable.
    """
    raise KerasError(
        f"The metric {metric!r} assigns a value to {variable!r} that depends on earlier values, which cannot be added "
        "up over the closures of all workers. Let it only add to its variables (assign_add) what does not depend on "
        "them."
    )


def _reads(tensor: Any, variable: tf.Variable) -> bool:
    """Return whether a tensor of the traced graph is the value read from the variable."""
    handle = tensor.graph.capture(variable.handle)
    return bool(tensor.op.type == "ReadVariableOp" and tensor.op.inputs[0] is handle)


def _is_changed_since(read: Any, variable: tf.Variable) -> bool:
    """Return whether the traced graph may change the variable after the operation `read`.

    Operations of a graph have increasing ids.
    """
    users = read.graph.capture(variable.handle).consumers()
    return any(user.type not in _READS and user._id > read._id for user in users)


@functools.cache
def _warn_of_old_value(variable: str) -> None:
    logger.warning(
        "The step assigns to %s a sum with a value that it read before another assignment. The steps of several "
        "workers overlap, so that they overwrite each other's values.",
        variable,
    )


def _note_metric(add_variable: Callable[..., Any], metric: Any, *arguments: Any, **options: Any) -> Any:
    """Create a variable of a metric with Keras's method `add_variable`, and return it.

    Store the metric's name in the variable. By this, `_add_atomically` recognizes variables of metrics.
    """
    variable = add_variable(metric, *arguments, **options)
    variable._tf4slurm_metric = metric.name
    return variable


def _refuse_optimizer(build: Callable[..., Any], optimizer: Any, *arguments: Any, **options: Any) -> Any:
    kind, strategy = type(optimizer).__name__, _limiting_strategy(tf.distribute.get_strategy())
    used = [name for name in _MISCOUNTING if name == kind or getattr(optimizer, name, None) is not None]
    if used and strategy == "ParameterServerStrategy":
        raise KerasError(
            f"{kind} of Keras 3 would miscount with variables on a ps ({used[0]}): several workers "
            f"{_MISCOUNTING[used[0]]}, {_OTHER_KERAS}"
        )
    failing = [name for name in used if name in _FAILING_IN_STEP]
    if failing and strategy == "MultiWorkerMirroredStrategy":
        raise KerasError(
            f"{kind}({failing[0]}=…) of Keras 3 fails with workers in step (MultiWorkerMirroredStrategy), where no "
            f"condition can change variables: {_FAILING_IN_STEP[failing[0]]}."
        )
    return build(optimizer, *arguments, **options)


def _clip_in_one_process(clip: Callable[..., Any], optimizer: Any, gradients: Any) -> Any:
    """Return the gradients, clipped by Keras's method `clip` if there is one replica.

    With several replicas, return the gradients unchanged: `_clip_sum` clips the sum of all replicas.
    """
    return gradients if _is_one_of_several() else clip(optimizer, gradients)


def _clip_sum(add_up: Callable[..., Any], optimizer: Any, gradients_and_variables: Any) -> Any:
    """Return (gradient, variable) pairs, with the clipped sum of the gradients of all replicas.

    `add_up` is Keras's method, which adds up the gradients of the replicas. Keras clips them before, but one process
    would clip the sum. `add_up` is called once per dtype, because TensorFlow adds up gradients of one dtype at a time.
    If there is one replica, return the result of `add_up`.
    """
    pairs = list(gradients_and_variables)
    if not pairs or not _is_one_of_several():
        return add_up(optimizer, pairs)
    gradients, variables = map(list, zip(*pairs, strict=True))
    for dtype in dict.fromkeys(each.dtype for each in gradients if each is not None):  # same order in all workers
        places = [place for place, each in enumerate(gradients) if each is not None and each.dtype == dtype]
        sums = add_up(optimizer, [(gradients[place], variables[place]) for place in places])
        for place, (total, _) in zip(places, sums, strict=True):
            gradients[place] = total
    clip = sys.modules["keras"].optimizers.Optimizer._clip_gradients.__wrapped__
    return list(zip(clip(optimizer, gradients), variables, strict=True))


def _is_one_of_several() -> bool:
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def _refuse_stateless(*_: Any, **__: Any) -> None:
    raise KerasError(
        "stateless_apply of Keras 3 is not available with TensorFlow. Either call optimizer.apply inside "
        f"strategy.run, in a loop of your own, {_OTHER_KERAS}"
    )


def _limiting_strategy(strategy: Any) -> str | None:
    """Return the name of the class of a strategy under which Keras has limits. Return None for any other strategy.

    The name is "ParameterServerStrategy", or "MultiWorkerMirroredStrategy" if it has several replicas.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "ParameterServerStrategy"
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.num_replicas_in_sync > 1:
        return "MultiWorkerMirroredStrategy"
    return None
