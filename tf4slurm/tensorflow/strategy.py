"""Create tf.distribute strategies for the tasks of this job, and assign input files to workers."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tf4slurm.errors import PlacementError, SlurmEnvironmentError
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.scripts.functions import barrier, sort_files
from tf4slurm.server_dictionary import (
    ServerDictionary,
    current_server_dictionary,
    get_server_dictionary,
    launched_server_dictionary,
)
from tf4slurm.slurm.environ import SlurmStep, is_in_step
from tf4slurm.tensorflow.constants import check_datasets_of
from tf4slurm.tensorflow.elastic import let_workers_change
from tf4slurm.tensorflow.keras.limits import install_keras_limits
from tf4slurm.tensorflow.running_cluster import running_cluster
from tf4slurm.tensorflow.servers import connect_parameter_server_strategy, current_run_directory, run_server
from tf4slurm.tensorflow.variable_placement import check_placement, place_variables

_REQUIRED_ROLES = ("chief", "ps", "worker")
_exiting: weakref.WeakSet[Any] = weakref.WeakSet()


def parameter_server_strategy(
    tasks: Sequence[str] | Mapping[str, int] | None = None,
    *,
    sharding: str = "none",
    min_shard_bytes: int = 256 * 1024,
    max_shards: int | None = None,
    variable_partitioner: Any = None,
    placement: str = "bytes",
    timeout_seconds: float = 300.0,
) -> tuple[Any, Any]:
    """Return a ParameterServerStrategy and its ClusterCoordinator in the chief. In ps and workers, run the server.

    In a ps or worker this function never returns: the process exits when training is over. Call it before work that
    only the chief should do, such as loading data. After the `start()` of a `LocalCluster`, this process is its chief.

    Under "tf4slurm run", and after get_server_dictionary(exchange=True), each server belongs to this job: another host
    has checked the address, and the agent holds the port. With any other TF_CONFIG, or exchange=False, TensorFlow
    connects to whichever TensorFlow server of that role is at the address.

    The coordinator's `create_per_worker_dataset` raises TrainingError for a function with more than 2 GB of arrays.

    Args:
        tasks: Under plain srun, the argument `tasks` of get_server_dictionary(), which is then called. By default, the
            cluster spec is that of the LocalCluster, else the last result of get_server_dictionary() in this process,
            else TF_CONFIG.
        sharding: How variables are split over the ps along their first axis: "none" (default; required by Keras 3
            layers), "min-size" (variables of at least two times `min_shard_bytes`, such as embedding tables) or
            "fixed-shards" (all variables with several rows).
        min_shard_bytes: Minimum shard size in bytes with "min-size" (default 256 KiB).
        max_shards: Maximum number of shards of a variable (default: the number of ps).
        variable_partitioner: Replaces `sharding`: one of tf.distribute.experimental.partitioners, or your own.
        placement: Where each new variable is placed: "bytes" (default; on the ps with the fewest bytes) or
            "round-robin" (on the ps in turns, as TensorFlow does). Parts of a split variable are on different ps.
        timeout_seconds: In the chief, timeout in seconds for the servers of the ps and workers, including their import
            of TensorFlow (default 300). With a LocalCluster, its `start_timeout_seconds` is used instead.

    Raises:
        RendezvousTimeoutError: Servers, which the message names, did not answer in time. If all answer but TensorFlow
            hangs, the process prints the reason and exits with code 6.
        RendezvousError: With `tasks`, as for get_server_dictionary().
        PlacementError: The cluster lacks a chief, ps or worker, or this process is an evaluator.
        SlurmEnvironmentError: This process has no cluster spec.
        ValueError: `sharding` or `placement` is unknown, or `sharding` is combined with `variable_partitioner`.
    """
    partitioners = tf.distribute.experimental.partitioners
    partitioner_of: dict[str, Callable[[int], Any]] = {
        "none": lambda num_ps: variable_partitioner,
        "min-size": lambda num_ps: partitioners.MinSizePartitioner(min_shard_bytes, max_shards or num_ps),
        "fixed-shards": lambda num_ps: partitioners.FixedShardsPartitioner(max_shards or num_ps),
    }
    if sharding not in partitioner_of:
        raise ValueError(f"Unknown sharding {sharding!r}: expected one of {', '.join(map(repr, partitioner_of))}.")
    if variable_partitioner is not None and sharding != "none":
        raise ValueError(f"Both sharding={sharding!r} and variable_partitioner are given. Give only one of them.")
    check_placement(placement)
    local = running_cluster() if tasks is None else None
    if local is not None:
        cluster: Mapping[str, Sequence[str]] = local.cluster
        partitioner = partitioner_of[sharding](len(local.cluster["ps"]))
        strategy = local.strategy(placement=placement, variable_partitioner=partitioner)
    else:
        current = current_server_dictionary() if tasks is None else get_server_dictionary(tasks)
        _check_roles(current)
        # an agent terminates its child when training is over; a sidecar does not
        channel = None if launched_server_dictionary() is not None else find_script_channel()
        if current.task_type != "chief":
            run_server(current, channel)
        if channel is not None:
            channel.completion_signal.send_at_exit()
        install_keras_limits()
        options = {"variable_partitioner": partitioner_of[sharding](len(current.ps_addresses))}
        cluster = current.cluster
        strategy = connect_parameter_server_strategy(cluster, current_run_directory(), timeout_seconds, **options)
        place_variables(strategy, placement, len(current.ps_addresses), find_script_channel())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    allow_exit_without_workers(coordinator)
    _capture_tables_in_loops()
    check_datasets_of(coordinator)
    let_workers_change(coordinator, cluster, find_script_channel())
    return strategy, coordinator


def job_strategy(*, timeout_seconds: float = 300.0) -> tuple[Any, Any]:
    """Return the strategy that fits this job, and its coordinator or None. So one script trains with and without ps.

    * In a job with ps, and after the `start()` of a LocalCluster: the results of `parameter_server_strategy`.
    * In a job of several workers and no other role: the result of `multi_worker_mirrored_strategy`, and None.
    * In a job of one task, and outside of a job: TensorFlow's default strategy, and None.

    `timeout_seconds` and the exceptions are those of these functions.

    Raises:
        SlurmEnvironmentError: A step of several tasks has no cluster spec, so that each would train alone.
    """
    if running_cluster() is None:
        try:
            counts = _count_tasks(current_server_dictionary())
        except SlurmEnvironmentError:
            if is_in_step(os.environ) and SlurmStep.from_environ(os.environ).num_tasks > 1:
                raise
            counts = {}
        if sum(counts.values()) <= 1:
            return tf.distribute.get_strategy(), None
        if set(counts) == {"worker"}:
            return multi_worker_mirrored_strategy(timeout_seconds=timeout_seconds), None
    return parameter_server_strategy(timeout_seconds=timeout_seconds)


def multi_worker_mirrored_strategy(*, timeout_seconds: float = 300.0, **options: Any) -> Any:
    """Return a tf.distribute.MultiWorkerMirroredStrategy for the workers of this job.

    Call it in every worker of a job with "--ps 0 --no-chief". The strategy cannot replace a worker, so such a job never
    restarts a single worker. With this strategy, Model.fit of Keras 3 raises KerasError: train with
    `tf4slurm.tensorflow.fit`, or in a loop of your own.

    Args:
        timeout_seconds: Timeout in seconds until all workers have called this function, including their import of
            TensorFlow (default 300).
        options: Further arguments of the strategy, such as `communication_options`.

    Raises:
        PlacementError: The cluster has roles other than worker, or this process is an evaluator.
        SlurmEnvironmentError: This process has no cluster spec.
        BarrierError, RendezvousConnectionError: As for `tf4slurm.barrier`.
    """
    current = current_server_dictionary()
    if set(current.cluster) != {"worker"} or current.task_type != "worker":
        raise PlacementError(
            f"MultiWorkerMirroredStrategy needs a job of workers only, but this is {current.task} of a job with "
            f"{_count_tasks(current)}. Start it with --ps 0 --no-chief --workers 2, for example."
        )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(current.cluster), task_type=current.task_type, task_id=current.task_index, rpc_layer="grpc"
    )
    # TensorFlow holds the GIL while it waits for the other workers, so no thread could end the wait
    barrier("multi_worker_mirrored_strategy", timeout_seconds=timeout_seconds, roles=("worker",))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, **options)
    install_keras_limits()
    return strategy


def worker_files(files: Iterable[str | os.PathLike[str]], workers: int | None = None) -> tf.data.Dataset:
    """Return a dataset with the paths of this worker's files, selected as in `tf4slurm.share_of`.

    Outside of a job, the dataset has the paths of all files.

    Call this function in the dataset function of `fit` or of `ClusterCoordinator.create_per_worker_dataset`, such as
    `lambda: worker_files(paths).interleave(tf.data.TFRecordDataset).batch(32)`. A worker that joins later reads the
    same files as one of the first workers. With `tf4slurm.data_shards`, it gets data of its own.

    Args:
        files: The paths of the files of all workers, in any order.
        workers: Number of workers of the coordinator (default: all workers in the cluster spec of this process).

    Raises:
        ValueError: A file is named twice, or there are fewer files than workers.
        RuntimeError: In a job with ps, or with `workers`, the call is not in a dataset function (raised by TensorFlow).
    """
    count, index = (workers, None) if workers is not None else _workers_and_index()
    if index is None:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
    return tf.data.Dataset.from_tensor_slices(sort_files(files, count)).shard(count, index % count)


def _workers_and_index() -> tuple[int, int | None]:
    """Return the number of workers, and this worker's index.

    In a job with ps, the index is None: the chief's coordinator gives it to each dataset function.
    """
    local = running_cluster()
    if local is not None:
        return len(local.cluster["worker"]), None
    try:
        current = current_server_dictionary()
    except SlurmEnvironmentError:
        return 1, 0
    return len(current.cluster["worker"]), None if current.ps_addresses else current.task_index


def allow_exit_without_workers(coordinator: Any) -> None:
    """Let this process exit when its script ends, even while a worker is lost. Idempotent.

    The coordinator's destructor waits for a lock. The thread that waits for the lost worker holds the lock, and Python
    stops this thread at exit (seen in TensorFlow 2.21). TensorFlow has no public option for this.
    """
    cluster = getattr(coordinator, "_cluster", None)
    if cluster is None or cluster in _exiting:
        return
    if not _exiting:
        atexit.register(_skip_stops)
    _exiting.add(cluster)


def _skip_stops() -> None:
    for cluster in _exiting:
        cluster.stop = lambda: None


def _check_roles(current: ServerDictionary) -> None:
    counts = _count_tasks(current)
    missing = [role for role in _REQUIRED_ROLES if not counts.get(role)]
    if missing:
        raise PlacementError(
            f"The cluster has no {missing[0]}: ParameterServerStrategy needs one chief, ps and workers, but this job "
            f"has {counts}. Start it with --ps 1 --workers 2, for example, and without --no-chief."
        )
    if current.task_type not in _REQUIRED_ROLES:
        raise PlacementError(
            f"{current.task} takes no part in training. Call tf4slurm.tensorflow.evaluate_checkpoints(), which does "
            "not return there, before parameter_server_strategy()."
        )


def _count_tasks(current: ServerDictionary) -> dict[str, int]:
    return {role: len(addresses) for role, addresses in current.cluster.items()}


def _capture_tables_in_loops() -> None:
    """Let functions for workers use lookup tables in loops and conditions. Idempotent.

    A table has a copy on each worker, and a function gets the handle of the worker's copy when it is called. TensorFlow
    forgets to pass this handle into the body of a `while` or `cond`, and the function fails with "You must feed a value
    for placeholder tensor".
    """

    def capture_call_time_value(graph: Any, *arguments: Any, **options: Any) -> Any:
        return graph.capture(graph.outer_graph.capture_call_time_value(*arguments, **options))

    ControlFlowFuncGraph.capture_call_time_value = capture_call_time_value
