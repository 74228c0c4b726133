"""The cluster whose chief is this process, such as a notebook: `tf4slurm.clusters` starts it and registers it here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.reachability import bypass_proxies
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.system.variables import set_tf_defaults
from tf4slurm.tensorflow.servers import connect_parameter_server_strategy

_running: list[RunningCluster] = []
_connected: list[RunningCluster] = []


class RunningCluster(Protocol):
    """What the strategies need of a cluster of `tf4slurm.clusters`."""

    cluster: dict[str, list[str]]

    def strategy(self, *, placement: str = "bytes", **options: Any) -> Any:
        """Return a tf.distribute.ParameterServerStrategy. See `tf4slurm.LocalCluster.strategy`."""

    def find_end(self, timeout_seconds: float) -> str:
        """Return why the variables are lost, and what to do. Return "" if they are not lost within the timeout."""


def running_cluster() -> RunningCluster | None:
    """Return the cluster whose chief is this process, from its `start()` to its `close()`. Return None without one."""
    return _running[-1] if _running else None


def set_running_cluster(cluster: RunningCluster | None) -> None:
    """Let `running_cluster` return `cluster` from now on."""
    _running[:] = [] if cluster is None else [cluster]


def connected_cluster() -> RunningCluster | None:
    """Return the cluster to whose servers TensorFlow has connected this process. It may be closed. None without one."""
    return _connected[-1] if _connected else None


def set_connected_cluster(cluster: RunningCluster) -> None:
    """Let `connected_cluster` return `cluster` from now on."""
    _connected[:] = [cluster]


def make_strategy(
    cluster: Mapping[str, Sequence[str]],
    run_directory: RunDirectory,
    timeout_seconds: float,
    placement: str,
    options: Mapping[str, Any],
) -> Any:
    """Connect this process, the chief, to the servers. Return a tf.distribute.ParameterServerStrategy.

    Args:
        cluster: The cluster spec.
        run_directory: The run directory of the job, for errors that name a log file.
        timeout_seconds: Timeout in seconds for the servers.
        placement: See `tf4slurm.tensorflow.parameter_server_strategy`.
        options: Further arguments of the strategy.

    Raises:
        ValueError: `placement` is unknown.
        RendezvousTimeoutError: Servers, which the message names, did not answer in time.
    """
    from tf4slurm.tensorflow.keras.limits import install_keras_limits  # these import TensorFlow
    from tf4slurm.tensorflow.variable_placement import check_placement, place_variables

    check_placement(placement)
    hosts = {address.rpartition(":")[0] for addresses in cluster.values() for address in addresses}
    os.environ["TF_GRPC_REUSE_PORT"] = "true"  # the sidecar holds the chief's port
    set_tf_defaults(os.environ)
    os.environ.update(bypass_proxies(os.environ, sorted(hosts)))
    install_keras_limits()
    strategy = connect_parameter_server_strategy(cluster, run_directory, timeout_seconds, **options)
    place_variables(strategy, placement, len(cluster["ps"]), find_script_channel())
    return strategy
