"""Check that agents reach each other before their children start, and that a child's server answers.

Before the children start, each agent listens on its held port. The agent of a task on another node connects and sends a
random nonce. It expects an HMAC-SHA256 of the nonce and the listener's rank, with the job's secret as the key, which a
server of an earlier job cannot compute. Without this check, TensorFlow would silently train with that server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tf4slurm.cluster import Address, Cluster, Member, Task

_NONCE_BYTES = 16
_MAC_BYTES = 32
_MAX_CONNECTIONS = 100  # checks are short, so a connection older than 100 others is idle
_ANSWER_SECONDS = 5.0
_SERVER_SECONDS = 1.0
_POLL_SECONDS = 0.05
_CHECKS_PER_SECOND = 1000  # limit for all servers together
_EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_SETTINGS  # RFC 9113, section 3.4
_FRAME_HEADER_BYTES = 9
_TURNS = 8
_T = TypeVar("_T")
_SETTINGS_FRAME = 4  # the fourth byte of a frame is its type
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that make gRPC use a proxy.

Measured with TensorFlow 2.21: the cluster never forms if one of them is set; all_proxy and HTTP_PROXY have no effect.
gRPC skips the proxy for addresses and networks in no_grpc_proxy, or if it is not set, in no_proxy. NO_PROXY, "*" and a
suffix without a dot have no effect.
"""


async def answer_checks(listener: socket.socket, secret: str, rank: int) -> asyncio.Server:
    """Answer reachability checks for the task of `rank` on `listener`, until the caller closes the returned server.

    `secret` is the job's token.
    """
    connections: dict[asyncio.StreamWriter, None] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[writer] = None
        if len(connections) > _MAX_CONNECTIONS:  # idle clients must not block the server
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.transport.abort()
        try:
            nonce = await asyncio.wait_for(reader.readexactly(_NONCE_BYTES), _ANSWER_SECONDS)
            writer.write(_mac(nonce, secret, rank))
            await writer.drain()
            await asyncio.wait_for(reader.read(1), _ANSWER_SECONDS)  # the client closes first and so has the TIME_WAIT
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # the client notices that the connection is closed
        finally:
            writer.close()
            connections.pop(writer, None)

    return await asyncio.start_server(answer, sock=listener)


def members_to_check(cluster: Cluster, rank: int) -> tuple[Member, ...]:
    """Return the members of the cluster whose addresses the task of `rank` must check.

    One task checks each member: of the tasks on other nodes, the one with the nearest lower rank, or if no rank is
    lower, the one with the highest rank. Lost members are neither checked nor check others. In a cluster on a single
    node nothing is checked.
    """
    members = [member for member in cluster.members if not member.is_lost]
    if len({member.node for member in members}) == 1:
        return ()
    result = []
    checker = next(m.rank for m in reversed(members) if m.node != members[0].node)
    for previous, member in zip((members[-1], *members[:-1]), members, strict=True):
        if previous.node != member.node:
            checker = previous.rank
        if checker == rank:
            result.append(member)
    return tuple(result)


async def find_unreachable(members: Sequence[Member], secret: str, timeout_seconds: float) -> list[str]:
    """Check the addresses of `members` concurrently. Return the clause of `find_fault` for each fault.

    `secret` is the job's token.
    """
    checks = (
        find_fault(f"{member.task} on {member.node}", member.rank, member.address, secret, timeout_seconds)
        for member in members
    )
    return [fault for fault in await asyncio.gather(*checks) if fault]


async def wait_for_answers(missing: dict[Task, Address], timeout_seconds: float) -> None:
    """Poll the servers in `missing` with `is_answering`, and delete each one that answers from `missing`.

    Return when `missing` is empty or the timeout has expired. The pause between two checks of a server is max(0.05 s,
    number of servers x 0.001 s). A check that has begun is not cut short, and takes at most 2 s.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = max(_POLL_SECONDS, len(missing) / _CHECKS_PER_SECOND)

    async def check(task: Task, address: Address) -> None:
        while await is_answering(address, _SERVER_SECONDS) is not True:
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(pause)
        del missing[task]

    await asyncio.gather(*(check(*server) for server in tuple(missing.items())))


async def find_fault(name: str, rank: int, address: Address, secret: str, timeout_seconds: float) -> str | None:
    """Check that the task of `rank` of this job answers at `address`.

    Return None if it does, otherwise the fault as a clause.

    Args:
        name: The name of the task in the clause, such as "worker/1 on n002".
        secret: The job's token.
        timeout_seconds: Time limit for the answer.
    """
    nonce = os.urandom(_NONCE_BYTES)
    try:
        answer = await asyncio.wait_for(_request_mac(address, nonce), timeout_seconds)
    except asyncio.TimeoutError:
        return f"{name} does not answer at {address} within {timeout_seconds:g} s"
    except (OSError, EOFError) as error:
        return f"{name} is not reachable at {address}: {error}"
    if not hmac.compare_digest(answer, _mac(nonce, secret, rank)):
        return f"another process than {name} answers at {address}"
    return None


async def is_answering(address: Address, timeout_seconds: float) -> bool | None:
    """Check on a new connection whether a server answers the first bytes of HTTP/2, as TensorFlow's server does.

    grpcio's keepalive pings cannot be used: TensorFlow's server closes connections that send them ("too_many_pings").
    The timeout is for the connection, and again for the answer. It is at least 8 turns of the event loop long: the
    threads of hundreds of workers delay the loop of a chief for seconds.

    Returns:
        True if an HTTP/2 server answers. False after a timeout. None if the connection fails or ends, or if the answer
        is of another protocol.
    """
    writer = None
    try:
        opening = asyncio.open_connection(address.host, address.port)
        reader, writer = await _wait_for(opening, timeout_seconds)
        writer.write(_PREFACE)
        header = await _wait_for(reader.readexactly(_FRAME_HEADER_BYTES), timeout_seconds)
        return True if header[3] == _SETTINGS_FRAME else None
    except asyncio.TimeoutError:
        return False
    except (OSError, EOFError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()


async def _wait_for(coroutine: Coroutine[Any, Any, _T], timeout_seconds: float) -> _T:
    """Return the result of a coroutine, or raise TimeoutError after `_TURNS` waits of the event loop in a row.

    A delay of the event loop counts as one of them, however long it is. An answer that has come meanwhile is seen.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        for _ in range(_TURNS):
            done, _ = await asyncio.wait({task}, timeout=timeout_seconds / _TURNS)
            if done:
                return task.result()
        raise asyncio.TimeoutError
    finally:
        task.cancel()


def bypass_proxies(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return variables with which gRPC connects to `hosts` without a proxy: no_proxy and, if it is set, no_grpc_proxy.

    Their values are those in `environ` and `hosts`. The result is empty if `environ` sets no proxy.
    """
    if not any(environ.get(name) for name in PROXY_VARIABLES):
        return {}
    names = list(dict.fromkeys(hosts))
    variables = ("no_proxy", "no_grpc_proxy") if environ.get("no_grpc_proxy") else ("no_proxy",)
    return {variable: ",".join(filter(None, (environ.get(variable), *names))) for variable in variables}


async def _request_mac(address: Address, nonce: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(nonce)
        await writer.drain()
        return await reader.readexactly(_MAC_BYTES)
    finally:
        writer.close()


def _mac(nonce: bytes, secret: str, rank: int) -> bytes:
    return hmac.new(secret.encode(), b"proof" + nonce + rank.to_bytes(4, "big"), hashlib.sha256).digest()
