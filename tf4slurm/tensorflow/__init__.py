"""Training with TensorFlow. No other package imports TensorFlow, and this one only when a public name is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf4slurm.tensorflow.checkpoints import Checkpoints as Checkpoints
    from tf4slurm.tensorflow.checkpoints import evaluate_checkpoints as evaluate_checkpoints
    from tf4slurm.tensorflow.hooks import DoneHook as DoneHook
    from tf4slurm.tensorflow.hooks import StartBarrierHook as StartBarrierHook
    from tf4slurm.tensorflow.local_cluster import LocalCluster as LocalCluster
    from tf4slurm.tensorflow.resolver import SlurmClusterResolver as SlurmClusterResolver
    from tf4slurm.tensorflow.strategy import multi_worker_mirrored_strategy as multi_worker_mirrored_strategy
    from tf4slurm.tensorflow.strategy import parameter_server_strategy as parameter_server_strategy
    from tf4slurm.tensorflow.strategy import worker_files as worker_files
    from tf4slurm.tensorflow.training import StepsDone as StepsDone
    from tf4slurm.tensorflow.training import run_steps as run_steps

_LAZY = {
    "Checkpoints": "tf4slurm.tensorflow.checkpoints",
    "DoneHook": "tf4slurm.tensorflow.hooks",
    "LocalCluster": "tf4slurm.tensorflow.local_cluster",
    "SlurmClusterResolver": "tf4slurm.tensorflow.resolver",
    "StartBarrierHook": "tf4slurm.tensorflow.hooks",
    "StepsDone": "tf4slurm.tensorflow.training",
    "evaluate_checkpoints": "tf4slurm.tensorflow.checkpoints",
    "multi_worker_mirrored_strategy": "tf4slurm.tensorflow.strategy",
    "parameter_server_strategy": "tf4slurm.tensorflow.strategy",
    "run_steps": "tf4slurm.tensorflow.training",
    "worker_files": "tf4slurm.tensorflow.strategy",
}
"""The module of each public name. No module may be named like a public name: its import would replace the name."""

if not TYPE_CHECKING:  # hidden from type checkers, so that an unknown attribute is an error

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
