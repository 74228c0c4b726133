"""What Keras 3 cannot do under a strategy of several processes, told when it is tried, with the ways that work.

Keras 3 fails there with an error about something else, or after a while (measured with Keras 3.15 and TensorFlow 2.21).
Its own classes are told to look at the strategy first, once a process has one of these: there is no other place that
every model, made by whatever function, goes through. Importing TensorFlow has imported Keras 3 by then; but not with
TF_USE_LEGACY_KERAS=1, and who then imports Keras 3 all the same gets its own errors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import KerasError

_FAILING = {
    "ParameterServerStrategy": ("fit", "evaluate", "predict"),
    # the last returns as many times too many rows as there are workers; predict is right
    "MultiWorkerMirroredStrategy": ("fit", "evaluate", "train_on_batch", "test_on_batch", "predict_on_batch"),
}
_OTHER_KERAS = (
    "or take the Keras before 3, where it works: pip install 'tf4slurm[tf-keras]', and set TF_USE_LEGACY_KERAS=1 "
    "before TensorFlow is imported."
)
_OWN_LOOP = {
    "ParameterServerStrategy": "Either write the loop yourself, with strategy.run in what is scheduled "
    "(tf4slurm.tensorflow.run_steps does the scheduling), ",
    "MultiWorkerMirroredStrategy": "Either write the loop yourself, with strategy.run in a tf.function, ",
}
_told: set[int] = set()


def tell_keras_limits() -> None:
    """From now on Keras 3 refuses what it cannot do under the strategy that a model was made for."""
    keras = sys.modules.get("keras")
    if keras is None or id(keras) in _told or not keras.__version__.startswith("3."):
        return
    if keras.backend.backend() != "tensorflow":  # its models know of no strategy
        return
    _told.add(id(keras))
    for name in sorted({name for names in _FAILING.values() for name in names}):
        setattr(keras.Model, name, _refused_method(name, getattr(keras.Model, name)))
    keras.Variable._initialize = _refused_shards(keras.Variable._initialize)
    keras.optimizers.Optimizer.stateless_apply = _refused_stateless(keras.optimizers.Optimizer.stateless_apply)


def _refused_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        strategy = _limiting(self.distribute_strategy)
        if strategy is not None and name in _FAILING[strategy]:
            raise KerasError(f"Model.{name} of Keras 3 fails under {strategy}. {_OWN_LOOP[strategy]}{_OTHER_KERAS}")
        return method(self, *arguments, **named)

    return checked


def _refused_shards(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def checked(self: Any, value: Any) -> None:
        initialize(self, value)
        if hasattr(self._value, "variables"):  # of the kinds of variables only a ShardedVariable has them
            raise KerasError(
                f"A Keras 3 layer cannot use a variable that is split over several ps, as {self.name!r} of shape "
                f"{tuple(self._value.shape)} is. Either use sharding='none' (or a larger min_shard_bytes, and a "
                f"tf.Variable of your own for what is to be split), {_OTHER_KERAS}"
            )

    return checked


def _refused_stateless(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
        raise KerasError(
            "stateless_apply of Keras 3 is not there with TensorFlow, least of all with variables on a ps. Either call "
            f"optimizer.apply inside strategy.run, in a loop of your own, {_OTHER_KERAS}"
        )

    return refuse


def _limiting(strategy: Any) -> str | None:
    """Return the name of a strategy of several processes; None for any other."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "ParameterServerStrategy"
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.num_replicas_in_sync > 1:
        return "MultiWorkerMirroredStrategy"
    return None
