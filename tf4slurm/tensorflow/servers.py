"""Wait for the TensorFlow servers of a cluster with a timeout, and run this process's server.

Wait for the servers before TensorFlow's constructors run. The constructors wait in C++, where no exception or signal
handler interrupts them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tf4slurm.cluster import Address, Task, format_tasks
from tf4slurm.errors import EXIT_NOT_FORMED, RendezvousConnectionError, RendezvousTimeoutError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.reachability import wait_for_answers
from tf4slurm.scripts.channel import ScriptChannel
from tf4slurm.server_dictionary import ServerDictionary
from tf4slurm.system.variables import ATTEMPT_VARIABLE, RUN_DIRECTORY_VARIABLE

_EXPLAIN_SECONDS = 2.0
_CONNECT_SECONDS = 20.0  # least time for TensorFlow to connect to servers that answer, which takes less than 1 s


def connect_parameter_server_strategy(
    cluster: Mapping[str, Sequence[str]], run_directory: RunDirectory | None, timeout_seconds: float, **options: Any
) -> Any:
    """Return a tf.distribute.ParameterServerStrategy with this process as chief.

    If all servers answer, but TensorFlow does not connect in the rest of the timeout (at least 20 s), the process exits
    with code 6.

    Args:
        cluster: The cluster spec.
        run_directory: The job's run directory, for errors that name a log file, or None.
        timeout_seconds: Timeout in seconds for the servers.
        options: Further arguments of the strategy.

    Raises:
        RendezvousTimeoutError: Servers, which the message names, did not answer in time.
    """
    import tensorflow as tf

    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # our failure handler of workers changes it for a time
    deadline = time.monotonic() + timeout_seconds
    if missing := wait_for_servers(cluster, timeout_seconds):
        raise RendezvousTimeoutError(describe_missing(missing, run_directory, timeout_seconds))

    def explain() -> str:
        if missing := wait_for_servers(cluster, _EXPLAIN_SECONDS):
            return describe_missing(missing, run_directory, timeout_seconds)
        return (
            f"TensorFlow did not connect to the cluster within {timeout_seconds:g} s, although every server answers: "
            "a ps or worker is not a TensorFlow server of this version. See their logs."
        )

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(dict(cluster)), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    with exit_after(max(deadline - time.monotonic(), _CONNECT_SECONDS), explain):
        return tf.distribute.ParameterServerStrategy(resolver, **options)


def run_server(current: ServerDictionary, channel: ScriptChannel | None) -> NoReturn:
    """Run this task's TensorFlow server until training is over, then exit the process.

    The exit code is 1 if training failed or the control service was lost, else 0. If `channel` is None, the server runs
    until the agent terminates the process.
    """
    import tensorflow as tf

    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # report another server's failure to the chief
    server = tf.distribute.Server(
        current.cluster, job_name=current.task_type, task_index=current.task_index, protocol="grpc"
    )
    if channel is None:
        server.join()
        raise AssertionError("server.join() returned")
    if current.task_type == "worker":
        channel.send(completion="done")  # this worker only serves: training ends with the chief
    try:
        channel.wait_until(lambda: channel.desired.is_training_over, None)
        chiefs = ["chief/0"] if "chief" in current.cluster else [str(task) for task in current.training_tasks]
        has_failed = any(task in channel.desired.failed_tasks for task in chiefs)
    except RendezvousConnectionError:  # the control service is lost
        has_failed = True
    atexit.register(gc.freeze)  # for the reason given in shutdown.wait_for_workers
    raise SystemExit(1 if has_failed else 0)


def wait_for_servers(cluster: Mapping[str, Sequence[str]], timeout_seconds: float) -> dict[Task, Address]:
    """Wait until every ps and worker answers, or until the timeout. Return the servers that did not answer."""
    missing = {
        Task(role, index): Address.from_text(address)
        for role in ("ps", "worker")
        for index, address in enumerate(cluster.get(role, ()))
    }
    thread = threading.Thread(target=lambda: asyncio.run(wait_for_answers(missing, timeout_seconds)), daemon=True)
    thread.start()  # a separate thread, because a notebook's main thread has a running event loop
    thread.join()
    return missing


def describe_missing(missing: Mapping[Task, Address], run_directory: RunDirectory | None, seconds: float) -> str:
    """Return the error text for servers that did not answer within `seconds`."""
    named = format_tasks(f"{task} at {address}" for task, address in missing.items())
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    logs = "the log of each"
    if run_directory is not None:
        logs += f", such as {run_directory.log(next(iter(missing)), attempt)}"
    return f"{named} did not answer within {seconds:g} s. See {logs}, or raise timeout_seconds."


def current_run_directory() -> RunDirectory | None:
    """Return the run directory of this process's job. Without an agent, return None."""
    path = os.environ.get(RUN_DIRECTORY_VARIABLE)
    return RunDirectory(Path(path)) if path else None


@contextlib.contextmanager
def exit_after(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """If the block takes longer than `seconds`, print the result of `explain` and exit with code 6 at once."""
    is_over = threading.Event()

    def watch() -> None:
        if is_over.wait(seconds):
            return
        text = explain()
        if not is_over.is_set():
            sys.stderr.write(f"tf4slurm: {text}\n")
            sys.stderr.flush()
            os._exit(EXIT_NOT_FORMED)

    threading.Thread(target=watch, name="tf4slurm-exit-after", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
