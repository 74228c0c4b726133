"""Which versions of TensorFlow each part of `tf4slurm.tensorflow` needs, as one table.

`tests/tensorflow/test_versions.py` runs the parts on each version. Nothing else compares versions of TensorFlow.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_OWN_STRATEGY = "a script that creates its own ParameterServerStrategy from TF_CONFIG"
_MODEL_FIT = "Model.fit under its own ParameterServerStrategy, with a DatasetCreator"


class Capability(NamedTuple):
    """The versions of TensorFlow with which a part of `tf4slurm.tensorflow` works.

    Attributes:
        first: The first version, such as "2.11". With older ones, the part is refused.
        instead: What the user of an older version can use.
        last: The last version, or "" if newer ones are not refused.
        keras_2: The module of the part for Keras 2, which TensorFlow has before 2.16. By default, the part is the same.
    """

    first: str
    instead: str
    last: str = ""
    keras_2: str = ""

    def includes(self, version: str) -> bool:
        """Return whether the part works with a version of TensorFlow."""
        return _numbers(self.first) <= _numbers(version) <= _numbers(self.last or version)


_STRATEGY = Capability("2.11", _OWN_STRATEGY)
_KERAS = Capability("2.11", _MODEL_FIT, keras_2="tf4slurm.tensorflow.keras2")
_SESSIONS = Capability("2.8", "the hooks of tf4slurm before 0.1")

CAPABILITIES: Mapping[str, Capability] = {
    "Checkpoints": Capability("2.11", "tf.train.CheckpointManager"),
    "DoneHook": _SESSIONS,
    "ShardedEmbedding": Capability("2.16", "Keras 2's Embedding with parameter_server_strategy(sharding='min-size')"),
    "SlurmClusterResolver": Capability("2.8", "TFConfigClusterResolver"),
    "StartBarrierHook": _SESSIONS,
    "StepsDone": _STRATEGY,
    "evaluate": _KERAS,
    "evaluate_checkpoints": Capability("2.11", "tf.train.checkpoints_iterator"),
    "fit": _KERAS,
    "job_strategy": _STRATEGY,
    "multi_worker_mirrored_strategy": Capability(
        "2.11", "a script that creates its own MultiWorkerMirroredStrategy from TF_CONFIG"
    ),
    "parameter_server_strategy": _STRATEGY,
    "predict": _KERAS,
    "run_shards": _STRATEGY,
    "run_steps": _STRATEGY,
    "shard_batches": _STRATEGY,
    "worker_files": Capability("2.13", "tf4slurm.share_of"),
}
"""The parts by their public names. Names that do not need TensorFlow are not in the table."""

ELASTIC_WORKERS = Capability("2.16", "TensorFlow's own recovery of the first workers", last="2.21")
"""Workers that join and leave (`elastic.py`). Tested: 2.16, 2.18 and 2.21, whose coordinators are the same."""

_KERAS_3 = "2.16"


def import_part(name: str, module: str) -> Any:
    """Import a part of `tf4slurm.tensorflow` by its public name from `module`, or from its module for Keras 2.

    Raises:
        ImportError: The part needs a newer TensorFlow, or TensorFlow is not installed.
    """
    capability = CAPABILITIES.get(name)
    if capability is not None:
        import tensorflow as tf

        if not capability.includes(tf.__version__):
            raise ImportError(
                f"tf4slurm.tensorflow.{name} needs TensorFlow {capability.first} or newer, but this is TensorFlow "
                f"{tf.__version__}, with which you can use {capability.instead}.",
                name=module,
            )
        if capability.keras_2 and _numbers(tf.__version__) < _numbers(_KERAS_3):
            module = capability.keras_2
    return getattr(importlib.import_module(module), name)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as (2, 21)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
