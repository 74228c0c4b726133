"""Find out which TensorFlow servers answer, and end RPCs to servers that do not.

An RPC to a server that does not answer, such as one on a host that lost its power, waits for many minutes: TensorFlow's
RPCs have no deadline and no keepalive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tf4slurm.cluster import Address
from tf4slurm.network.reachability import is_answering

_ANSWER_SECONDS = 2.0
_CHECK_SECONDS = 1.0
_FAIL_FAST = "GRPC_FAIL_FAST"  # a variable of TensorFlow


def check_servers(servers: Mapping[int, Address]) -> dict[int, bool | None]:
    """Return by index whether each server answers: True, False after a timeout, or None if no such server is there."""

    async def check() -> list[bool | None]:
        return await asyncio.gather(*(is_answering(address, _ANSWER_SECONDS) for address in servers.values()))

    return dict(zip(servers, asyncio.run(check()) if servers else (), strict=True))


def find_answering(servers: Mapping[int, Address]) -> dict[int, Address]:
    """Return those of the servers that answer, by index."""
    return {index: servers[index] for index, answer in check_servers(servers).items() if answer}


@contextlib.contextmanager
def failing_fast(servers: Collection[Address]) -> Iterator[None]:
    """During the block, let RPCs fail instead of waiting for one of these servers.

    An RPC to a server that is gone fails at once: TensorFlow reads the variable GRPC_FAIL_FAST at each RPC. This holds
    for all RPCs of this process. The variable must have a value already (`connect_parameter_server_strategy` sets it),
    which is restored after the block.

    An RPC to one of `servers` that does not answer any more fails after some seconds: a thread checks these servers,
    and shuts down the connections. An RPC to any other server that does not answer, such as a ps, goes on waiting.
    """
    before = os.environ[_FAIL_FAST]
    os.environ[_FAIL_FAST] = "true"
    is_over = threading.Event()
    numbered = dict(enumerate(servers))

    def watch() -> None:
        while not is_over.wait(_CHECK_SECONDS):
            end_rpcs(numbered, find_answering(numbered))

    threading.Thread(target=watch, name="tf4slurm-workers-update", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        os.environ[_FAIL_FAST] = before


def end_rpcs(servers: Mapping[int, Address], alive: Collection[int]) -> None:
    """End all RPCs to the servers whose index is not in `alive`, so that closures that run there fail."""
    shut_down_connections({address for index, address in servers.items() if index not in alive})


def shut_down_connections(addresses: Collection[Address]) -> None:
    """Shut down this process's TCP connections to these addresses, so that the RPCs over them fail.

    The connections belong to gRPC in TensorFlow, which has no function for this. So they are looked up among the open
    file descriptors of this process.
    """
    peers = set()
    for address in addresses:
        with contextlib.suppress(socket.gaierror):
            peers |= {found[4][:2] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}
    for name in os.listdir("/proc/self/fd") if peers else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            duplicate = os.dup(int(name))
            if not os.readlink(f"/proc/self/fd/{duplicate}").startswith("socket:"):
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = connection.getpeername()[:2]
                    if (host.removeprefix("::ffff:"), port) in peers:
                        connection.shutdown(socket.SHUT_RDWR)


def lock_function_registration(context: Any, lock: Any) -> None:
    """Let TensorFlow's context hold the lock while it registers a function on all workers.

    Each traced function is registered: closures, datasets, `evaluate`, saves, and functions of the script. TensorFlow
    first lists the workers, and then looks each up (EagerContext::MaybeRegisterFunctionRemotely). If a worker is
    disconnected in between, the registration fails with "Client for target … not found".
    """

    def locked(register: Callable[[Any], None]) -> Callable[[Any], None]:
        def register_locked(function: Any) -> None:
            with lock:
                register(function)

        return register_locked

    for name in ("add_c_function", "add_function_def"):
        setattr(context, name, locked(getattr(context, name)))
