"""What Slurm has given a job, and when: `scontrol show job`, read."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from tf4slurm.slurm.job import parse_fields


@dataclass(frozen=True)
class SlurmGrant:
    """What a job has of Slurm; None where that does not tell.

    Attributes:
        submitted, started: When it was taken into the queue, and when it began, in seconds since 1970.
        cpus, memory_bytes: On all its nodes together.
        limit_seconds: Its time limit.
    """

    submitted: float | None = None
    started: float | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    limit_seconds: int | None = None


def parse_grant(text: str) -> SlurmGrant:
    """Read what `scontrol show job ID` writes; what is not in it is None."""
    fields = parse_fields(text)
    return SlurmGrant(
        submitted=_parse_time(fields.get("SubmitTime", "")),
        started=_parse_time(fields.get("StartTime", "")),
        cpus=int(fields["NumCPUs"]) if fields.get("NumCPUs", "").isdigit() else None,
        memory_bytes=_parse_memory(fields.get("AllocTRES") or fields.get("TRES", "")),
        limit_seconds=_parse_limit(fields.get("TimeLimit", "")),
    )


def _parse_time(text: str) -> float | None:
    """Read "2026-11-21T10:21:07", in the time zone of this host, as scontrol writes it."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # such as "Unknown"
        return None


def _parse_memory(tres: str) -> int | None:
    """Read the memory in "cpu=4,mem=2000M,node=2,billing=4"."""
    match = re.search(r"(?:^|,)mem=([0-9.]+)([KMGTP]?)", tres)
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2] or "M")) if match else None


def _parse_limit(text: str) -> int | None:
    """Read "1-02:03:04" in seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:  # such as "UNLIMITED"
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
