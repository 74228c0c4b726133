"""Detect a killed slurmstepd, the process of Slurm that starts the tasks of a step on a node."""

from __future__ import annotations

import asyncio
import contextlib
import os

from tf4slurm.system.proc import ProcessStat, is_running, is_stopped, read_stat

_POLL_SECONDS = 1.0


async def wait_for_slurmstepd_loss() -> int:
    """Wait until the slurmstepd above this process has ended, and return its process id.

    slurmstepd exits after its tasks. So if it ends while this task runs, it was killed. Its end is noticed within 1 s.
    If /proc shows no slurmstepd above this process, this coroutine waits until it is cancelled.
    """
    slurmstepd = find_slurmstepd()
    if slurmstepd is None:
        never: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        return await never
    while is_running(slurmstepd.process_id, slurmstepd.start_ticks):
        await asyncio.sleep(_POLL_SECONDS)
    return slurmstepd.process_id


def is_slurmstepd_stopped(slurmstepd: ProcessStat | None) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a slurmstepd, so that Slurm does not notice its tasks' end.

    Return False if `slurmstepd` is None.
    """
    return slurmstepd is not None and is_stopped(slurmstepd.process_id)


def find_slurmstepd() -> ProcessStat | None:
    """Return the nearest ancestor of this process that is a slurmstepd, or None if /proc shows none."""
    process_id = os.getppid()
    with contextlib.suppress(OSError):  # /proc does not show the process
        while process_id > 1:
            stat = read_stat(process_id)
            if stat.name == "slurmstepd":
                return stat
            process_id = stat.parent_id
    return None
