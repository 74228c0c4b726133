"""`multi_worker_mirrored_strategy()`: workers that train in step, formed within a time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import PlacementError
from tf4slurm.script_api import barrier
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.keras_limits import tell_keras_limits


def multi_worker_mirrored_strategy(*, timeout_seconds: float = 300.0, **options: Any) -> Any:
    """Return a tf.distribute.MultiWorkerMirroredStrategy over the workers of this job; `options` are its own.

    Every worker calls it; start the job with "--ps 0 --no-chief", so that each is waited for and none is started again
    alone, which this strategy cannot do. All have to come within the timeout, their import of TensorFlow included.
    Keras 3's fit is refused under it, see `keras_limits`.

    Raises:
        PlacementError: The cluster has other tasks than workers, or this process is none.
        SlurmEnvironmentError: This process knows of no cluster.
        BarrierError: A worker did not come in time, or never will; the text names it.
        RendezvousConnectionError: This process has no agent through which to wait for the others.
    """
    own = current_server_dictionary()
    if set(own.cluster) != {"worker"} or own.task_type != "worker":
        given = {role: len(addresses) for role, addresses in own.cluster.items()}
        raise PlacementError(
            f"MultiWorkerMirroredStrategy is for workers alone, but this is {own.task} of a job with {given}. Start it "
            "with --ps 0 --no-chief --workers 2, say.",
            requested=len(own.cluster.get("worker", ())),
            available=sum(given.values()),
        )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(own.cluster), task_type=own.task_type, task_id=own.task_index, rpc_layer="grpc"
    )
    # TensorFlow's own wait for the others holds Python's lock: no thread could end it.
    barrier("multi_worker_mirrored_strategy", timeout_seconds=timeout_seconds, roles=("worker",))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, **options)
    tell_keras_limits()
    return strategy
