"""tf.distribute strategies over the tasks of this job, and each worker's share of the input files."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.completion_signal import channel_completion_signal
from tf4slurm.errors import PlacementError
from tf4slurm.script_api import barrier, sort_files
from tf4slurm.script_channel import find_script_channel
from tf4slurm.server_dictionary import (
    ServerDictionary,
    current_server_dictionary,
    get_server_dictionary,
    launched_server_dictionary,
)
from tf4slurm.tensorflow.keras_limits import install_keras_limits
from tf4slurm.tensorflow.local_cluster import running_cluster
from tf4slurm.tensorflow.servers import connect_parameter_server_strategy, current_run_directory, run_server

_REQUIRED_ROLES = ("chief", "ps", "worker")
_SHARDINGS = ("none", "min-size", "fixed-shards")
_exiting: weakref.WeakSet[Any] = weakref.WeakSet()


class StrategyAndCoordinator(NamedTuple):
    """A tf.distribute.ParameterServerStrategy, and the ClusterCoordinator over it."""

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
) -> StrategyAndCoordinator:
    """Return strategy and coordinator in the chief; run the TensorFlow server in ps and workers.

    In a ps or worker it never returns: the process ends with the job. So call it before anything that only the chief
    should do, such as loading data. In the block of a `LocalCluster`, this process is the chief of that cluster.

    Whether a server belongs to this job is checked as follows. Under "tf4slurm run", and after get_server_dictionary()
    with its exchange, each port was free when the agent took it, was checked from another host, and is held, so no
    process of another user can listen there. With a TF_CONFIG from elsewhere, or exchange=False, there is no check:
    TensorFlow trains with whatever TensorFlow server of that role answers at the address.

    Args:
        tasks: Under plain srun the role of each rank, or the number of tasks of each role, as for
            get_server_dictionary(). By default the result of the last call of get_server_dictionary() in this process,
            else the content of TF_CONFIG.
        sharding: How variables are split over the ps along their first axis: "none" (required by Keras 3 layers),
            "min-size" (variables of at least two times `min_shard_bytes`, such as embedding tables) or "fixed-shards"
            (all variables with a first axis).
        min_shard_bytes: The smallest part with "min-size".
        max_shards: The largest number of parts; by default the number of ps.
        variable_partitioner: A partitioner of tf.distribute.experimental.partitioners, or your own, in place of
            `sharding`.
        timeout_seconds: How long the servers of ps and workers may take to answer, including the import of TensorFlow.

    Returns:
        (strategy, coordinator)

    Raises:
        RendezvousTimeoutError: Servers did not answer in time; the text names them and a log. If all answer but
            TensorFlow hangs, where no exception can be raised, the process prints the reason and exits with 6.
        PlacementError: The cluster lacks a chief, ps or worker, or this process is an evaluator.
        SlurmEnvironmentError: No cluster is known in this process.
        ValueError: `sharding` is unknown, or given together with `variable_partitioner`.
    """
    if sharding not in _SHARDINGS:
        raise ValueError(f"Unknown sharding {sharding!r}: expected one of {', '.join(map(repr, _SHARDINGS))}.")
    if variable_partitioner is not None and sharding != "none":
        raise ValueError(f"Both sharding={sharding!r} and variable_partitioner are given. Give only one of them.")

    def partitioner(num_ps: int) -> Any:
        return variable_partitioner or _make_partitioner(sharding, min_shard_bytes, max_shards or num_ps)

    local = running_cluster() if tasks is None else None
    if local is not None:
        return _coordinate(local.strategy(variable_partitioner=partitioner(len(local.cluster["ps"]))))
    current = current_server_dictionary() if tasks is None else get_server_dictionary(tasks)
    _check_roles(current)
    # an agent terminates its child when training is over; a sidecar does not
    channel = None if launched_server_dictionary() is not None else find_script_channel()
    if current.task_type != "chief":
        run_server(current, channel)
    if channel is not None:
        channel_completion_signal(current.task, channel).send_at_exit()
    install_keras_limits()
    options = {"variable_partitioner": partitioner(len(current.ps_addresses))}
    return _coordinate(
        connect_parameter_server_strategy(current.cluster, current_run_directory(), timeout_seconds, **options)
    )


def multi_worker_mirrored_strategy(*, timeout_seconds: float = 300.0, **options: Any) -> Any:
    """Return a tf.distribute.MultiWorkerMirroredStrategy over the workers of this job; `options` are passed on to it.

    Call it in every worker of a job with "--ps 0 --no-chief". This strategy cannot replace a worker, and in such a job
    none is restarted alone. Keras 3's fit is refused under it, see `keras_limits.py`.

    Args:
        timeout_seconds: How long to wait for all workers, with their import of TensorFlow.
        options: Arguments of tf.distribute.MultiWorkerMirroredStrategy.

    Raises:
        PlacementError: The cluster has other roles than worker.
        SlurmEnvironmentError: No cluster is known in this process.
        BarrierError: A worker did not arrive in time, or has ended; the text names it.
        RendezvousConnectionError: This process has no agent.
    """
    current = current_server_dictionary()
    if set(current.cluster) != {"worker"} or current.task_type != "worker":
        counts = _count_tasks(current)
        raise PlacementError(
            f"MultiWorkerMirroredStrategy needs a job of workers only, but this is {current.task} of a job with "
            f"{counts}. Start it with --ps 0 --no-chief --workers 2, for example.",
            requested=counts.get("worker", 0),
            available=sum(counts.values()),
        )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(current.cluster), task_type=current.task_type, task_id=current.task_index, rpc_layer="grpc"
    )
    # TensorFlow holds Python's lock while it waits for the other workers, so no thread could end its wait
    barrier("multi_worker_mirrored_strategy", timeout_seconds=timeout_seconds, roles=("worker",))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, **options)
    install_keras_limits()
    return strategy


def worker_files(files: Iterable[str | os.PathLike[str]], workers: int | None = None) -> tf.data.Dataset:
    """Return a dataset with the paths of this worker's files, the same share as `tf4slurm.share_of`.

    Call it in the function that `ClusterCoordinator.create_per_worker_dataset` gets; there the index of the worker is a
    tensor:

        def make_dataset():
            return worker_files(paths).interleave(tf.data.TFRecordDataset).batch(32)

        rows = iter(coordinator.create_per_worker_dataset(make_dataset))

    Args:
        files: Paths of all files, in any order.
        workers: The number of workers; by default that of this process's cluster.

    Raises:
        ValueError: A file is named twice, or there are fewer files than workers.
        SlurmEnvironmentError: `workers` is not given, and no cluster is known.
        RuntimeError: From TensorFlow, if no coordinator makes the dataset.
    """
    count = len(current_server_dictionary().cluster["worker"]) if workers is None else workers
    index = tf.distribute.coordinator.experimental_get_current_worker_index()
    return tf.data.Dataset.from_tensor_slices(sort_files(files, count)).shard(count, index)


def allow_exit_without_workers(coordinator: Any) -> None:
    """Let this process exit when its script ends, also while a worker is lost. Idempotent.

    The coordinator's destructor takes a lock that a thread waiting for the lost worker holds. Python does not run that
    thread while it exits, so the chief would hang after its traceback (seen in TensorFlow 2.21). What the destructor
    stops ends with the process anyway. TensorFlow has no public switch for this, hence the private attribute.
    """
    cluster = getattr(coordinator, "_cluster", None)
    if cluster is not None and cluster not in _exiting:
        _exiting.add(cluster)
        atexit.register(_skip_stop, weakref.ref(cluster))


def _skip_stop(reference: weakref.ref[Any]) -> None:
    cluster = reference()
    if cluster is not None:
        cluster.stop = lambda: None


def _coordinate(strategy: Any) -> StrategyAndCoordinator:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    allow_exit_without_workers(coordinator)
    return StrategyAndCoordinator(strategy, coordinator)


def _count_tasks(current: ServerDictionary) -> dict[str, int]:
    return {role: len(addresses) for role, addresses in current.cluster.items()}


def _check_roles(current: ServerDictionary) -> None:
    counts = _count_tasks(current)
    missing = [role for role in _REQUIRED_ROLES if not counts.get(role)]
    if missing:
        raise PlacementError(
            f"The cluster has no {missing[0]}: ParameterServerStrategy needs one chief, ps and workers, but this job "
            f"has {counts}. Start it with --ps 1 --workers 2, for example, and without --no-chief.",
            requested=1,
            available=0,
        )
    if current.task_type not in _REQUIRED_ROLES:
        raise PlacementError(
            f"{current.task} takes no part in training. Call tf4slurm.tensorflow.evaluate_checkpoints(), which does "
            "not return there, before parameter_server_strategy().",
            requested=1,
            available=0,
        )


def _make_partitioner(sharding: str, min_shard_bytes: int, max_shards: int) -> Any:
    partitioners = tf.distribute.experimental.partitioners
    if sharding == "min-size":
        return partitioners.MinSizePartitioner(min_shard_bytes, max_shards)
    return partitioners.FixedShardsPartitioner(max_shards) if sharding == "fixed-shards" else None
