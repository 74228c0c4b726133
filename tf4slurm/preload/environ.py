"""The environment variables of a preloader and of the processes that it forks."""

from __future__ import annotations

import os
from collections.abc import Mapping

PER_TASK = (
    *("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("no_proxy", "no_grpc_proxy", "TMPDIR", "TEMP", "TMP"),
)
"""Variables that differ between the tasks of a job, and that no import reads."""

PER_TASK_PREFIXES = ("TF4SLURM_", "SLURM_", "SLURMD_", "PMI_", "PMIX_")


def read_initial() -> dict[str, str]:
    """Return the environment variables that this process was given. Python may have added some (LC_CTYPE)."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def compared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be equal in the preloader and in a child."""
    return {
        name: value
        for name, value in environ.items()
        if name not in PER_TASK and not name.startswith(PER_TASK_PREFIXES)
    }


def find_differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the sorted names whose values differ between two mappings."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def find_changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes that make `after` from `before`, for `apply_changes`. None stands for a removed variable."""
    return {name: after.get(name) for name in find_differing(before, after)}


def apply_changes(changes: Mapping[str, str | None]) -> None:
    """Change os.environ."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def name_some(names: list[str]) -> str:
    """Return at most three of the names as text."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
