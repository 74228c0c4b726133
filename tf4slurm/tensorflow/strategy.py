"""`parameter_server_strategy()`: the chief gets strategy and coordinator, and ps and workers serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import PlacementError
from tf4slurm.script_api import find_script_channel
from tf4slurm.server_dictionary import (
    ServerDictionary,
    current_server_dictionary,
    get_server_dictionary,
    launched_server_dictionary,
)
from tf4slurm.tensorflow.forming import lead_servers, own_run_directory
from tf4slurm.tensorflow.keras_limits import tell_keras_limits
from tf4slurm.tensorflow.leaving import let_leave
from tf4slurm.tensorflow.local_cluster import running_cluster
from tf4slurm.tensorflow.serving import serve, signal_end_at_exit

_NEEDED = ("chief", "ps", "worker")
SHARDINGS = ("none", "min-size", "fixed-shards")


class Lead(NamedTuple):
    """What a chief leads with: a tf.distribute.ParameterServerStrategy, and the ClusterCoordinator over it."""

    strategy: Any
    coordinator: Any


def parameter_server_strategy(
    tasks: Sequence[str] | Mapping[str, int] | None = None,
    *,
    sharding: str = "none",
    min_shard_bytes: int = 256 * 1024,
    max_shards: int | None = None,
    variable_partitioner: Any = None,
    timeout_seconds: float = 300.0,
) -> Lead:
    """Form the cluster of this job: return strategy and coordinator in its chief, and serve in its ps and workers.

    In a ps or worker it never returns: the process is ended with the job. Call it before anything that only the chief
    should do, such as loading data. In the block of a `LocalCluster` it leads that one.

    That a server belongs to this job is proved as follows. Under "tf4slurm run", and after get_server_dictionary() with
    its exchange: each port was free when it was taken for this job, was proved from another host, and is held, so that
    no process of another user can listen there. With a TF_CONFIG from elsewhere, or exchange=False, nothing proves it:
    TensorFlow trains with whatever TensorFlow server of that role answers at the address.

    Args:
        tasks: Under plain srun: the role of each rank, or the number of tasks of each role; handed on to
            get_server_dictionary(). None: what that has returned before, else what TF_CONFIG says.
        sharding: How variables are split over the ps, by their first axis: "none" (what Keras 3 layers need),
            "min-size" (those of two times `min_shard_bytes` and more, as embedding tables) or "fixed-shards" (all that
            have a first axis).
        min_shard_bytes: The least size of a part with "min-size".
        max_shards: The largest number of parts; by default the number of ps.
        variable_partitioner: One of tf.distribute.experimental.partitioners or of your own, in place of `sharding`.
        timeout_seconds: How long the servers of ps and workers may take to answer, their import of TensorFlow included.

    Returns:
        (strategy, coordinator)

    Raises:
        RendezvousTimeoutError: A server does not answer in time; the text names each, and its log. If TensorFlow then
            hangs although all answer, where no exception can be raised, the process exits with 6 and says so.
        PlacementError: The cluster lacks a chief, ps or worker, or this process is an evaluator.
        SlurmEnvironmentError: This process knows of no cluster.
        ValueError: There is no such sharding, or there is a partitioner, too.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"{sharding!r} is no sharding: expected one of {', '.join(map(repr, SHARDINGS))}.")
    if variable_partitioner is not None and sharding != "none":
        raise ValueError(f"sharding={sharding!r} and variable_partitioner both say how to split variables: give one.")

    def partitioner(num_ps: int) -> Any:
        return variable_partitioner or _partitioner(sharding, min_shard_bytes, max_shards or num_ps)

    local = running_cluster() if tasks is None else None
    if local is not None:
        return _lead(local.strategy(variable_partitioner=partitioner(len(local.cluster["ps"]))))
    own = current_server_dictionary() if tasks is None else get_server_dictionary(tasks)
    _check(own)
    line = (
        None if launched_server_dictionary() is not None else find_script_channel()
    )  # an agent ends its child; a sidecar does not
    if own.task_type != "chief":
        serve(own, line)
    if line is not None:
        signal_end_at_exit(own, line)
    tell_keras_limits()
    options = {"variable_partitioner": partitioner(len(own.ps_addresses))}
    return _lead(lead_servers(own.cluster, own_run_directory(), timeout_seconds, **options))


def _lead(strategy: Any) -> Lead:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    let_leave(coordinator)
    return Lead(strategy, coordinator)


def _check(own: ServerDictionary) -> None:
    given = {role: len(addresses) for role, addresses in own.cluster.items()}
    lacking = [role for role in _NEEDED if not given.get(role)]
    if lacking:
        raise PlacementError(
            f"The cluster has no {lacking[0]}: ParameterServerStrategy needs one chief, ps and workers, but this job "
            f"has {given}. Start it with --ps 1 --workers 2, say, and without --no-chief.",
            requested=1,
            available=0,
        )
    if own.task_type not in _NEEDED:
        raise PlacementError(
            f"{own.task} takes no part in training. Call tf4slurm.tensorflow.evaluate_checkpoints(), which does not "
            "return there, before parameter_server_strategy().",
            requested=1,
            available=0,
        )


def _partitioner(sharding: str, min_shard_bytes: int, max_shards: int) -> Any:
    partitioners = tf.distribute.experimental.partitioners
    if sharding == "min-size":
        return partitioners.MinSizePartitioner(min_shard_bytes, max_shards)
    return partitioners.FixedShardsPartitioner(max_shards) if sharding == "fixed-shards" else None
