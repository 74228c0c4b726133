"""Detect a killed slurmstepd, the process of Slurm that starts the tasks of a step on a node."""

from __future__ import annotations

import asyncio
import os

from tf4slurm.system.proc import identity_of, is_alive, read_stat

_POLL_SECONDS = 1.0


async def wait_for_slurmstepd_loss() -> int:
    """Wait until the slurmstepd above this process has been killed; return its process id.

    slurmstepd exits before its tasks only if it is killed; the tasks continue to run. Without a slurmstepd, or if /proc
    hides it (hidepid), this coroutine never returns: cancel it.
    """
    process_id = _find_slurmstepd()
    if process_id is None:
        never: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        return await never
    identity = identity_of(process_id)
    while is_alive(identity):
        await asyncio.sleep(_POLL_SECONDS)
    return process_id


def _find_slurmstepd() -> int | None:
    """Return the process id of the nearest ancestor named slurmstepd; None if there is none."""
    process_id = os.getppid()
    while process_id > 1:
        try:
            stat = read_stat(process_id)
        except OSError:
            return None
        if stat.name == "slurmstepd":
            return process_id
        process_id = stat.parent_id
    return None
