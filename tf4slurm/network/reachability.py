"""Proof that an address is reached from another node, and that this job's agent answers there.

Before the children start, each agent listens on the port it holds. Another task connects, sends a nonce, and expects
HMAC-SHA256(secret, nonce + rank) back: a stale server of an earlier job cannot answer that, and TensorFlow would train
with it silently.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import os
import socket
from collections.abc import Sequence

from tf4slurm.cluster import Address, Cluster, Member

_NONCE_BYTES = 16
_MAC_BYTES = 32
_CONNECTIONS = 100  # at a time; an honest one takes a moment, so the oldest of more is no loss


class ReachabilityServer:
    """Answers on the held port, from `start` to `close`."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def start(self, listener: socket.socket, secret: str, rank: int) -> None:
        """Answer for `rank` at `listener`; once started, starting again does nothing."""
        if self._server is None:
            self._server = await asyncio.start_server(functools.partial(self._answer, secret, rank), sock=listener)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, secret: str, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection; the oldest makes room for it, so that nobody can take all places by saying nothing."""
        self._open[writer] = None
        if len(self._open) > _CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            await _answer(secret, rank, reader, writer)
        finally:
            self._open.pop(writer, None)


async def find_unreachable(members: Sequence[Member], secret: str, timeout_seconds: float) -> list[str]:
    """Ask all of these members for proof at the same time; return one sentence for each that did not give it."""
    answers = await asyncio.gather(*(_find_fault(member, secret, timeout_seconds) for member in members))
    return [answer for answer in answers if answer]


def members_to_check(cluster: Cluster, rank: int) -> tuple[Member, ...]:
    """Return the members whose address the task of `rank` is to prove.

    Each member is proved by exactly one task: the nearest one before it, round the ranks, that is on another node.
    With a single node there is nothing to prove.
    """
    members = cluster.members
    if len(cluster.nodes) == 1:
        return ()
    mine = []
    prover = next(m.rank for m in reversed(members) if m.node != members[0].node)
    for previous, member in zip((members[-1], *members[:-1]), members, strict=True):
        if previous.node != member.node:
            prover = previous.rank
        if prover == rank:
            mine.append(member)
    return tuple(mine)


async def _find_fault(member: Member, secret: str, timeout_seconds: float) -> str | None:
    name = f"{member.task} on {member.node}"
    return await find_fault(name, member.rank, member.address, secret, timeout_seconds)


async def find_fault(name: str, rank: int, address: Address, secret: str, timeout_seconds: float) -> str | None:
    """Ask whoever listens at `address` to prove that it is `rank` of this job; return a sentence on `name` if not."""
    try:
        answer = await asyncio.wait_for(_ask(address, nonce := os.urandom(_NONCE_BYTES)), timeout_seconds)
    except asyncio.TimeoutError:
        return f"{name} does not answer at {address} within {timeout_seconds:g} s"
    except (OSError, EOFError) as error:
        return f"{name} is not reached at {address}: {error}"
    if not hmac.compare_digest(answer, _answer_to(nonce, secret, rank)):
        return f"something else than {name} answers at {address}"
    return None


async def _ask(address: Address, nonce: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(nonce)
        await writer.drain()
        return await reader.readexactly(_MAC_BYTES)
    finally:
        writer.close()


def _answer_to(nonce: bytes, secret: str, rank: int) -> bytes:
    return hmac.new(secret.encode(), b"proof" + nonce + rank.to_bytes(4, "big"), hashlib.sha256).digest()


async def _answer(secret: str, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        nonce = await asyncio.wait_for(reader.readexactly(_NONCE_BYTES), timeout=5)
        writer.write(_answer_to(nonce, secret, rank))
        await writer.drain()
        await asyncio.wait_for(reader.read(1), timeout=5)  # who closes first keeps the port in TIME_WAIT: not us
    except (OSError, EOFError, asyncio.TimeoutError):
        pass  # whoever asked is told by the connection that ends
    finally:
        writer.close()
