"""Parse the state, resources and queue entry of a job from the output of `scontrol show job` and `squeue`."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

SQUEUE_FORMAT = "%i|%T|%r|%M|%l|%S|%D|%N"
ENDED_STATES = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)
_FIELD = re.compile(r"(?:^|\s)(?P<name>[A-Z][\w/:]*)=(?P<value>\S*)")
_REASONS = {
    "AssocGrpCPUMinutesLimit": "your group has used all its CPU time",
    "AssocGrpGRES": "your group uses as many GPUs as its limit allows",
    "AssocMaxJobsLimit": "you have as many running jobs as your account allows",
    "BadConstraints": "no node can satisfy the request: check -C, --mem, --gres and -N",
    "BeginTime": "the job waits for its begin time, or for some minutes after a requeue",
    "Dependency": "the job waits for the job it depends on",
    "DependencyNeverSatisfied": "the job it depends on has failed, so this job never starts: cancel it",
    "JobArrayTaskLimit": "as many elements of the array are running as its limit allows",
    "JobHeldAdmin": "an administrator has held the job",
    "JobHeldUser": "you have held the job: release it with scontrol release",
    "Licenses": "the job waits for a licence",
    "NodeDown": "a node that the job needs is down",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "the job requests more nodes than its partition allows",
    "PartitionTimeLimit": "the job requests more time than its partition allows, so it never starts",
    "Priority": "jobs with a higher priority are first",
    "QOSMaxCpuPerUserLimit": "you use as many CPUs as this QOS allows",
    "QOSMaxGRESPerUser": "you use as many GPUs as this QOS allows",
    "QOSMaxJobsPerUserLimit": "you have as many running jobs as this QOS allows",
    "ReqNodeNotAvail": "a requested node is down, reserved or drained",
    "Reservation": "the job waits for its reservation to begin",
    "Resources": "the job is next and waits for free nodes",
}


@dataclass(frozen=True)
class SlurmJob:
    """The state of a job in Slurm's controller.

    Attributes:
        state: For example "RUNNING", or "COMPLETING" while Slurm ends the job.
        is_batch: Whether the job is a batch job. Slurm requeues only batch jobs.
        can_requeue: Whether the user and the site allow a requeue.
        is_preempted: Whether Slurm has chosen the job for preemption, so that its grace time has begun.
        preempt_mode: Effect of preemption in the partition, such as "REQUEUE" or "CANCEL"; empty if unknown.
        exit_code: Exit code of the batch script, 128 + n after signal n; 0 while the script runs.
    """

    state: str
    is_batch: bool
    can_requeue: bool
    is_preempted: bool
    partition: str
    preempt_mode: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class SlurmGrant:
    """The resources that Slurm allocated to a job; null if `scontrol` does not show them.

    Attributes:
        submitted, started: Times of submission and start, in seconds since 1970.
        cpus, memory_bytes: Totals over all nodes of the job.
        limit_seconds: Time limit.
    """

    submitted: float | None = None
    started: float | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    limit_seconds: int | None = None


@dataclass(frozen=True)
class QueueEntry:
    """A job, or an element of a job array, as squeue prints it. Times are in Slurm's format."""

    job_id: str
    state: str
    reason: str
    elapsed: str
    limit: str
    start: str
    num_nodes: str
    nodes: str

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def explained_reason(self) -> str:
        """Slurm's reason why the job is pending, with an explanation of the common ones."""
        if self.reason == "None":
            return "Slurm has not considered the job yet"
        meaning = _REASONS.get(self.reason.split(",")[0].strip("()").removesuffix("_"))
        return f"{self.reason}: {meaning}" if meaning else self.reason


def parse_job(text: str) -> SlurmJob:
    """Parse the output of `scontrol show job ID`.

    Raises:
        ValueError: The text is not the output of this command.
    """
    fields = parse_fields(text)
    if "JobState" not in fields:
        raise ValueError(f"{text[:200]!r} is not the output of scontrol show job.")
    return SlurmJob(
        state=fields["JobState"],
        is_batch=fields.get("BatchFlag") == "1",
        can_requeue=fields.get("Requeue") == "1",
        is_preempted=fields.get("PreemptTime", "None") != "None",
        partition=fields.get("Partition", ""),
        exit_code=parse_exit_code(fields.get("ExitCode", "")),
    )


def parse_grant(text: str) -> SlurmGrant:
    """Parse the resources in the output of `scontrol show job ID`; missing fields are None."""
    fields = parse_fields(text)
    return SlurmGrant(
        submitted=_parse_time(fields.get("SubmitTime", "")),
        started=_parse_time(fields.get("StartTime", "")),
        cpus=int(fields["NumCPUs"]) if fields.get("NumCPUs", "").isdigit() else None,
        memory_bytes=_parse_memory(fields.get("AllocTRES") or fields.get("TRES", "")),
        limit_seconds=_parse_limit(fields.get("TimeLimit", "")),
    )


def parse_queue(text: str) -> list[QueueEntry]:
    """Parse the output of squeue in `SQUEUE_FORMAT`; lines in another format are ignored."""
    rows = (line.split("|") for line in text.splitlines())
    return [QueueEntry(*(field.strip() for field in row)) for row in rows if len(row) == 8]


def parse_fields(text: str) -> dict[str, str]:
    """Parse NAME=VALUE pairs; the first value of a repeated name is kept."""
    found: dict[str, str] = {}
    for match in _FIELD.finditer(text):
        found.setdefault(match["name"], match["value"])
    return found


def parse_exit_code(codes: str) -> int:
    """Parse Slurm's "code:signal"; the result is 128 + n after signal n, as in a shell."""
    code, _, number = codes.partition(":")
    return 128 + int(number) if number.isdecimal() and int(number) else int(code) if code.isdecimal() else 0


def _parse_time(text: str) -> float | None:
    """Parse "2026-11-21T10:21:07" in the time zone of this host, which scontrol uses too."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # such as "Unknown"
        return None


def _parse_memory(tres: str) -> int | None:
    """Return the bytes of memory in "cpu=4,mem=2000M,node=2,billing=4"."""
    match = re.search(r"(?:^|,)mem=([0-9.]+)([KMGTP]?)", tres)
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2] or "M")) if match else None


def _parse_limit(text: str) -> int | None:
    """Return the seconds of "1-02:03:04"."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:  # such as "UNLIMITED"
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
