"""Train with TensorFlow: strategies, training loops, checkpoints, Keras models and sessions.

No other package imports TensorFlow. This one imports it when a public name that needs it is first used.
"""

from typing import TYPE_CHECKING, Any

from tf4slurm.tensorflow.versions import import_part

if TYPE_CHECKING:
    from tf4slurm.clusters.local import LocalCluster as LocalCluster
    from tf4slurm.clusters.slurm import SlurmCluster as SlurmCluster
    from tf4slurm.tensorflow.checkpoints import Checkpoints as Checkpoints
    from tf4slurm.tensorflow.checkpoints import evaluate_checkpoints as evaluate_checkpoints
    from tf4slurm.tensorflow.keras.evaluation import evaluate as evaluate
    from tf4slurm.tensorflow.keras.evaluation import predict as predict
    from tf4slurm.tensorflow.keras.fit import fit as fit
    from tf4slurm.tensorflow.keras.sharded_embedding import ShardedEmbedding as ShardedEmbedding
    from tf4slurm.tensorflow.legacy.hooks import DoneHook as DoneHook
    from tf4slurm.tensorflow.legacy.hooks import StartBarrierHook as StartBarrierHook
    from tf4slurm.tensorflow.resolver import SlurmClusterResolver as SlurmClusterResolver
    from tf4slurm.tensorflow.shard_training import run_shards as run_shards
    from tf4slurm.tensorflow.shard_training import shard_batches as shard_batches
    from tf4slurm.tensorflow.strategy import job_strategy as job_strategy
    from tf4slurm.tensorflow.strategy import multi_worker_mirrored_strategy as multi_worker_mirrored_strategy
    from tf4slurm.tensorflow.strategy import parameter_server_strategy as parameter_server_strategy
    from tf4slurm.tensorflow.strategy import worker_files as worker_files
    from tf4slurm.tensorflow.training import StepsDone as StepsDone
    from tf4slurm.tensorflow.training import run_steps as run_steps

_NAMES = {
    "tf4slurm.tensorflow.checkpoints": "Checkpoints evaluate_checkpoints",
    "tf4slurm.tensorflow.legacy.hooks": "DoneHook StartBarrierHook",
    "tf4slurm.tensorflow.keras.evaluation": "evaluate predict",
    "tf4slurm.tensorflow.keras.fit": "fit",
    "tf4slurm.clusters.local": "LocalCluster",
    "tf4slurm.clusters.slurm": "SlurmCluster",
    "tf4slurm.tensorflow.resolver": "SlurmClusterResolver",
    "tf4slurm.tensorflow.keras.sharded_embedding": "ShardedEmbedding",
    "tf4slurm.tensorflow.shard_training": "run_shards shard_batches",
    "tf4slurm.tensorflow.strategy": (
        "job_strategy multi_worker_mirrored_strategy parameter_server_strategy worker_files"
    ),
    "tf4slurm.tensorflow.training": "StepsDone run_steps",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown attributes

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used. With a TensorFlow that is too old for it, raise ImportError."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_part(name, _MODULE_OF[name])

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF})
