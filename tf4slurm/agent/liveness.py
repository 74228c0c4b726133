"""Liveness probe of a child process: no signal has stopped the child, and its server answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tf4slurm.cluster import Address
from tf4slurm.network.reachability import is_answering
from tf4slurm.system.proc import read_stat

_CHECKS = 8  # checks per timeout
_FIRST_ANSWER_SECONDS = 0.25  # short, so that a short-lived server is not reported as missing


async def wait_until_unresponsive(
    process_id: int,
    address: Address | None,
    timeout_seconds: float,
    server_timeout_seconds: float | None = None,
    on_server: Callable[[], None] = lambda: None,
) -> str:
    """Wait until the child fails its liveness probe; return the reason, as a clause. Cancel this when the child exits.

    Time in which the whole job was suspended does not count.

    Args:
        address: The address of the child's server; None if the child has no server.
        timeout_seconds: How long the child may be stopped, or its server may fail to answer.
        server_timeout_seconds: Time limit for the server's first answer; None (default) for no limit.
        on_server: Called when the server answers for the first time.
    """
    pause = timeout_seconds / _CHECKS
    started_at = alive_at = checked_at = time.monotonic()
    has_answered = False
    why = ""
    while True:
        nap = pause if has_answered else min(pause, _FIRST_ANSWER_SECONDS)
        await asyncio.sleep(nap)
        is_alive = False
        if _is_stopped(process_id):
            why = "was stopped"
        else:
            answers = await is_answering(address, pause) if address is not None else None
            if answers is True and not has_answered:
                has_answered = True
                on_server()
            is_alive = answers is not False or not has_answered
            why = "did not answer at its port"
        now = time.monotonic()
        lag = now - checked_at - nap - pause  # `nap` for the sleep, `pause` for a missing answer
        if lag > 0:
            alive_at += lag
            started_at += lag
        checked_at = now
        if is_alive:
            alive_at = now
        if now - alive_at >= timeout_seconds:
            return f"{why} for {timeout_seconds:g} s"
        if server_timeout_seconds is not None and not has_answered and now - started_at >= server_timeout_seconds:
            return f"had no server at its port {server_timeout_seconds:g} s after its start"


def _is_stopped(process_id: int) -> bool:
    """Return whether a signal has stopped the process; False where /proc does not show the process."""
    try:
        return read_stat(process_id).state == "T"
    except OSError:
        return False
