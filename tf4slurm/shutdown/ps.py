"""What a ps does: wait until every task that trains is done."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Mapping, Sequence

from tf4slurm.errors import ShutdownError
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.shutdown.choice import choose_method
from tf4slurm.shutdown.method import Ending


def wait_for_workers(
    *,
    method: str = "barrier",
    timeout_seconds: float | None = None,
    cluster: Mapping[str, Sequence[str]] | None = None,
    task_type: str | None = None,
    task_index: int | None = None,
) -> Ending:
    """Wait on a ps until every worker has signalled that it is done, or failed; a chief counts as a worker.

    To be called in the place of `server.join()`: the server works meanwhile, in threads of its own. Handlers of signals
    run at once, which they do not in `server.join()`.

    Args:
        method: "barrier": through the control service, which also sees workers that die; under "tf4slurm run", or
            after get_server_dictionary(). "queue": through TensorFlow queues on the ps, whose server must run. A worker
            that is killed puts nothing there, and only `timeout_seconds` or the control service ends the wait for it.
        timeout_seconds: How long to wait for all of them; None waits for ever.
        cluster: The addresses of each role. By default what get_server_dictionary() returned in this process, else what
            TF_CONFIG says; the same goes for the next two.
        task_type: The role of this process.
        task_index: Its index in its role.

    Returns:
        Which workers are done and which failed. The ps may exit now.

    Raises:
        ShutdownTimeoutError: `missing` are the tasks that have not signalled.
        ShutdownError: This process is not a ps of the cluster.
        SlurmEnvironmentError: No cluster is given or known.
        ValueError: There is no such method, or `cluster` is given in part.
    """
    own = current_server_dictionary(cluster, task_type, task_index)
    if own.task_type != "ps" or not own.task_index < len(own.ps_addresses):
        raise ShutdownError(f"{own.task} is not a ps of the cluster: only a ps waits for the workers.")
    ending = choose_method(method, own).wait_for_workers(timeout_seconds)
    atexit.register(gc.freeze)  # the interpreter's last collection walks through TensorFlow for 0.8 s in place of 0.1 s
    return ending


def serve_until_done(
    server: object,
    *,
    method: str = "barrier",
    timeout_seconds: float | None = None,
    cluster: Mapping[str, Sequence[str]] | None = None,
    task_type: str | None = None,
    task_index: int | None = None,
) -> Ending:
    """Keep a tf.distribute.Server until every worker has signalled; otherwise as `wait_for_workers`.

    TensorFlow's server serves in threads of its own for as long as it is referred to: `server.join()` would add nothing
    but a main thread that is deaf to signals.
    """
    ending = wait_for_workers(
        method=method, timeout_seconds=timeout_seconds, cluster=cluster, task_type=task_type, task_index=task_index
    )
    del server  # kept until here
    return ending
