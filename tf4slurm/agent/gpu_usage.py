"""The use of NVIDIA GPUs by the processes of a task, read from nvidia-smi. Hosts without nvidia-smi report nothing."""

from __future__ import annotations

import asyncio
import contextlib
import csv
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tf4slurm.system.proc import walk_descendants
from tf4slurm.system.program import read_output
from tf4slurm.system.threads import in_thread

_PAUSE_SECONDS = 10.0
_TIMEOUT_SECONDS = 10.0
_MIB = 2**20


class GpuUsage(NamedTuple):
    """The use of GPUs by one task. Unknown values are None.

    Attributes:
        percent: Mean utilization of the GPUs that the task's processes use. Other processes may use these GPUs, too.
        memory_bytes: GPU memory of the task's processes.
    """

    percent: float | None = None
    memory_bytes: int | None = None


async def watch_gpus(process_id: int, on_usage: Callable[[GpuUsage], None]) -> None:
    """Call `on_usage` with the GPU usage of a process and its descendants, at once and then every 10 s.

    Return when nvidia-smi is missing or fails.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started
        while (usage := await in_thread(read_gpu_usage, process_id)) is not None:
            on_usage(usage)
            await asyncio.sleep(_PAUSE_SECONDS)


def read_gpu_usage(process_id: int) -> GpuUsage | None:
    """Return the GPU usage of a process and its descendants. Return None if nvidia-smi is missing or fails."""
    apps, gpus = map(_query, ("--query-compute-apps=pid,gpu_uuid,used_memory", "--query-gpu=uuid,utilization.gpu"))
    if apps is None or gpus is None:
        return None
    try:
        return summarize(apps, gpus, walk_descendants(process_id))
    except OSError:  # a process has just ended
        return GpuUsage()


def summarize(apps: str, gpus: str, process_ids: Iterable[int]) -> GpuUsage:
    """Return the GPU usage of `process_ids` from the output of two queries of nvidia-smi.

    Args:
        apps: Lines "process id, UUID of a GPU, memory in MiB".
        gpus: Lines "UUID of a GPU, utilization in percent". In both, "[N/A]" or similar stands for an unknown number.
    """
    own = {str(process_id) for process_id in process_ids}
    used = [row for row in _rows(apps) if len(row) == 3 and row[0] in own]
    memory = [int(row[2]) for row in used if row[2].isdecimal()]
    uuids = {row[1] for row in used}
    percents = [int(row[1]) for row in _rows(gpus) if len(row) == 2 and row[0] in uuids and row[1].isdecimal()]
    return GpuUsage(
        percent=round(sum(percents) / len(percents), 1) if percents else None,
        memory_bytes=sum(memory) * _MIB if memory and len(memory) == len(used) else None,
    )


def _rows(text: str) -> Iterable[list[str]]:
    return ([item.strip() for item in row] for row in csv.reader(text.splitlines()))


def _query(query: str) -> str | None:
    return read_output("nvidia-smi", query, "--format=csv,noheader,nounits", timeout_seconds=_TIMEOUT_SECONDS)
