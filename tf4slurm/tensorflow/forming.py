"""Forming a cluster of TensorFlow servers within a time: who does not answer is named, whatever TensorFlow waits for.

TensorFlow's constructors wait in C++, where no exception and no handler of a signal arrives; a thread still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf4slurm.cluster import Address, Task, format_tasks
from tf4slurm.errors import EXIT_NOT_FORMED, RendezvousTimeoutError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.reachability import is_answering
from tf4slurm.system.variables import ATTEMPT_VARIABLE, RUN_DIRECTORY_VARIABLE

_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_LOOKS_PER_SECOND = 1000  # at most, at all servers together
_CONNECT_SECONDS = 20.0  # what TensorFlow has at least to connect to servers that answer; it takes less than one


def lead_servers(
    cluster: Mapping[str, Sequence[str]], run_directory: RunDirectory | None, timeout_seconds: float, **options: Any
) -> Any:
    """Return a tf.distribute.ParameterServerStrategy over these servers, led by this process; `options` are its own.

    If TensorFlow hangs although all have answered, this process exits with EXIT_NOT_FORMED and says so.

    Raises:
        RendezvousTimeoutError: A server does not answer in time; the text names each, and its log.
    """
    import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

    deadline = time.monotonic() + timeout_seconds
    servers = servers_of(cluster, ("ps", "worker"))
    missing = find_silent(servers, timeout_seconds)
    if missing:
        raise RendezvousTimeoutError(describe_silent(missing, run_directory, timeout_seconds))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(dict(cluster)), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    seconds = max(deadline - time.monotonic(), _CONNECT_SECONDS)
    with given_up_after(seconds, lambda: _describe_hang(servers, run_directory, timeout_seconds)):
        return tf.distribute.ParameterServerStrategy(resolver, **options)


def servers_of(cluster: Mapping[str, Sequence[str]], roles: Sequence[str]) -> dict[Task, Address]:
    """Return where each task of these roles listens."""
    return {
        Task(role, index): Address.from_text(address)
        for role in roles
        for index, address in enumerate(cluster.get(role, ()))
    }


def find_silent(servers: Mapping[Task, Address], timeout_seconds: float) -> dict[Task, Address]:
    """Wait until all of these servers have answered, or the time is over; return those that have not."""
    missing = dict(servers)
    asking = threading.Thread(target=lambda: asyncio.run(_ask(missing, timeout_seconds)), daemon=True)
    asking.start()  # a notebook has a running event loop in its own thread
    asking.join()
    return missing


def describe_silent(missing: Mapping[Task, Address], run_directory: RunDirectory | None, seconds: float) -> str:
    """Say who does not answer and where to look."""
    named = format_tasks(f"{task} at {address}" for task, address in missing.items())
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    first = next(iter(missing))
    where = (
        "the log of each" if run_directory is None else f"the log of each, such as {run_directory.log(first, attempt)}"
    )
    return f"{named} did not answer within {seconds:g} s. Look at {where}, or raise timeout_seconds."


def own_run_directory() -> RunDirectory | None:
    """Return the run directory of the job whose agent started this process."""
    path = os.environ.get(RUN_DIRECTORY_VARIABLE)
    return RunDirectory(Path(path)) if path else None


@contextlib.contextmanager
def given_up_after(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """End this process with EXIT_NOT_FORMED, and what `explain` says, if the block takes longer."""
    is_over = threading.Event()

    def watch() -> None:
        if is_over.wait(seconds):
            return
        text = explain()
        if not is_over.is_set():
            sys.stderr.write(f"tf4slurm: {text}\n")
            sys.stderr.flush()
            os._exit(EXIT_NOT_FORMED)

    threading.Thread(target=watch, name="tf4slurm-forming", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _describe_hang(servers: Mapping[Task, Address], run_directory: RunDirectory | None, seconds: float) -> str:
    missing = find_silent(servers, 2 * _ANSWER_SECONDS)
    if missing:
        return describe_silent(missing, run_directory, seconds)
    return (
        f"TensorFlow did not connect to the cluster within {seconds:g} s, although every server answers: one of "
        f"{format_tasks(servers)} is no TensorFlow server of this version. Look at the logs of them all."
    )


async def _ask(missing: dict[Task, Address], timeout_seconds: float) -> None:
    """Remove those that answer until none is left, or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    pause = max(_LOOK_SECONDS, len(missing) / _LOOKS_PER_SECOND)

    async def wait_for(task: Task, address: Address) -> None:
        while await is_answering(address, _ANSWER_SECONDS) is not True:
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(pause)
        del missing[task]

    await asyncio.gather(*(wait_for(*server) for server in tuple(missing.items())))
