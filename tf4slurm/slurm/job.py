"""What Slurm's controller says of a job: `scontrol show job`, read."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELD = re.compile(r"(?:^|\s)(?P<name>[A-Z][\w/:]*)=(?P<value>\S*)")


@dataclass(frozen=True)
class SlurmJob:
    """A job as its controller sees it now.

    Attributes:
        state: Such as "RUNNING"; "COMPLETING" once it is being ended.
        is_batch: A batch job: only such a job can be started again.
        can_requeue: Whether the user and the site allow that.
        is_preempted: Slurm has chosen it for preemption, and its grace time has begun.
        exit_code: Of the batch script, as a shell would tell it; 0 while it runs.
        preempt_mode: What preemption does to jobs of its partition, such as "REQUEUE" or "CANCEL"; empty if not known.
    """

    state: str
    is_batch: bool
    can_requeue: bool
    is_preempted: bool
    partition: str
    preempt_mode: str = ""
    exit_code: int = 0


def parse_job(text: str) -> SlurmJob:
    """Read what `scontrol show job ID` writes.

    Raises:
        ValueError: It is something else.
    """
    fields = parse_fields(text)
    if "JobState" not in fields:
        raise ValueError(f"{text[:200]!r} is not what scontrol show job writes.")
    return SlurmJob(
        state=fields["JobState"],
        is_batch=fields.get("BatchFlag") == "1",
        can_requeue=fields.get("Requeue") == "1",
        is_preempted=fields.get("PreemptTime", "None") != "None",
        partition=fields.get("Partition", ""),
        exit_code=parse_exit_code(fields.get("ExitCode", "")),
    )


def parse_exit_code(codes: str) -> int:
    """Read Slurm's "code:signal" as a shell would tell it."""
    code, _, number = codes.partition(":")
    return 128 + int(number) if number.isdecimal() and int(number) else int(code) if code.isdecimal() else 0


def parse_fields(text: str) -> dict[str, str]:
    """Read NAME=VALUE pairs; of a name that comes twice the first counts."""
    found: dict[str, str] = {}
    for match in _FIELD.finditer(text):
        found.setdefault(match["name"], match["value"])
    return found
