"""When a child that still runs counts as dead: it is stopped, or its server is silent, or never came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tf4slurm.cluster import Address
from tf4slurm.network.reachability import is_answering
from tf4slurm.system.proc import read_stat

_CHECKS = 8  # in the dead time
_FIRST_ANSWER_SECONDS = 0.25  # a server that was never seen would be reported as missing


async def wait_for_silence(
    process_id: int,
    address: Address | None,
    heartbeat_timeout_seconds: float,
    serve_seconds: float | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> str:
    """Return, in a clause, why the child counts as dead; a healthy child is watched for ever: cancel this.

    `serve_seconds` is how long it may take until its server answers for the first time; None for no limit.
    `on_answer()` is told when it does, up to a quarter of a second later.
    Time in which this process did not run itself (the whole job was suspended) does not count.
    """
    pause = heartbeat_timeout_seconds / _CHECKS
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
                on_answer()
            is_alive = answers is not False or not has_answered
            why = "did not answer at its port"
        now = time.monotonic()
        lag = now - checked_at - nap - pause  # the sleep, and an answer that did not come
        if lag > 0:
            alive_at += lag
            started_at += lag
        checked_at = now
        if is_alive:
            alive_at = now
        if now - alive_at >= heartbeat_timeout_seconds:
            return f"{why} for {heartbeat_timeout_seconds:g} s"
        if serve_seconds is not None and not has_answered and now - started_at >= serve_seconds:
            return f"had no server at its port {serve_seconds:g} s after its start"


def _is_stopped(process_id: int) -> bool:
    """Return whether a signal has stopped the process; False where /proc does not show it."""
    try:
        return read_stat(process_id).state == "T"
    except OSError:
        return False
