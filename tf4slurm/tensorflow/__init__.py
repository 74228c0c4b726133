"""What works inside TensorFlow. The only room that imports it, and only when something of it is used."""

import importlib
from typing import Any

_LAZY = {
    "Checkpoints": "tf4slurm.tensorflow.checkpoints",
    "DoneHook": "tf4slurm.tensorflow.hooks",
    "LocalCluster": "tf4slurm.tensorflow.local_cluster",
    "SlurmClusterResolver": "tf4slurm.tensorflow.resolver",
    "StartBarrierHook": "tf4slurm.tensorflow.hooks",
    "StepsDone": "tf4slurm.tensorflow.steps",
    "evaluate_checkpoints": "tf4slurm.tensorflow.evaluator",
    "multi_worker_mirrored_strategy": "tf4slurm.tensorflow.mirrored",
    "parameter_server_strategy": "tf4slurm.tensorflow.strategy",
    "run_steps": "tf4slurm.tensorflow.steps",
}


def __getattr__(name: str) -> Any:
    """Import what is public when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
