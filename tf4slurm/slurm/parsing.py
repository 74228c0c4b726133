"""Parse what scontrol, squeue, sacct and sattach print about jobs. Other lines, such as a wrapper's, are skipped."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tf4slurm.errors import COMPLETED, FAILED, STOPPED
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.job_id import JobId

SQUEUE_FORMAT = "%i|%T|%r|%M|%l|%S|%N"
COMMENT_FORMAT = "%i|%k"
ACCOUNTING_FORMAT = "JobID,State,ExitCode"
ENDED_STATES = {
    "COMPLETED": COMPLETED,
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "TIMEOUT"), STOPPED),
    **dict.fromkeys(("BOOT_FAIL", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED"), FAILED),
}
"""The state that tf4slurm shows for an ended job, by Slurm's state of the job."""
_STATES_OF_FLAGS = {"RESIZING": "RUNNING", "SIGNALING": "RUNNING", "STOPPED": "SUSPENDED"}
"""The state of a job, by the flag that Slurm shows in place of it (job_state_string in Slurm's slurm_protocol_defs.c).

"STOPPED", a job's processes after SIGSTOP, would otherwise be taken for tf4slurm's STOPPED. The other flags, such as
"COMPLETING", do not hide that a job runs.
"""
_FIELD = re.compile(r"(?:^|\s)(?P<name>[A-Z][\w/:]*)=(?P<value>\S*)")
_LAYOUT_LINE = re.compile(r"^\tNode \d+ \((?P<node>.+)\), (?P<count>\d+) task\(s\):(?P<ranks>[ \d]*)$", re.MULTILINE)
_STATE = re.compile(r"[A-Z_]+")
_ACCOUNTING_LINE = re.compile(
    r"^\s*(?P<job_id>[^|\s]+)\|(?P<state>[A-Z_]+)\+?( by \d+)?\|(?P<codes>\d+:\d+)\s*$", re.MULTILINE
)
_JOB_RECORD = re.compile(r"^JobId=.*(\n[ \t]+\S.*)*", re.MULTILINE)
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
    "JobLaunchFailure": "a node could not start the batch script: check that it can write the job's output file",
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
        is_preempted: Whether Slurm has begun to preempt the job, which still runs until its GraceTime is over.
        preempt_mode: Effect of preemption in the partition, such as "REQUEUE" or "CANCEL". Empty if unknown.
        exit_code: Exit code of the batch script. It is 128 + n after signal n, and 0 while the script runs.
        output: Path of the batch script's output; empty if unknown.
        excluded_nodes: Nodelist of --exclude; empty for none.
        restart_count: Number of times that Slurm has requeued the job.
    """

    state: str
    is_batch: bool
    can_requeue: bool
    is_preempted: bool
    partition: str
    preempt_mode: str = ""
    exit_code: int = 0
    output: str = ""
    excluded_nodes: str = ""
    restart_count: int = 0


@dataclass(frozen=True)
class SlurmResources:
    """The resources that Slurm allocated to a job. A field that `scontrol` does not show is None.

    Attributes:
        submitted, started: Times of submission and start, in seconds since 1970. For a pending job, `started` is when
            Slurm expects to start it.
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
    """A job, an element of a job array, or a component of a heterogeneous job, as squeue prints it.

    `elapsed` and `limit` are durations such as "1-02:30:00". `start` is a time such as "2026-11-21T10:21:07".
    """

    job_id: JobId
    state: str
    reason: str
    elapsed: str
    limit: str
    start: str
    nodes: str

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def explained_reason(self) -> str:
        """Slurm's reason why the job is pending or has failed, followed by an explanation if the reason is common."""
        if self.reason == "None":
            return "Slurm has not considered the job yet"
        meaning = _REASONS.get(self.reason.split(",")[0].strip("()").removesuffix("_"))
        return f"{self.reason}: {meaning}" if meaning else self.reason


def parse_job(text: str) -> SlurmJob:
    """Parse the output of `scontrol show job ID`.

    Raises:
        ValueError: The text is not the output of this command.
    """
    fields = parse_fields(text, "JobId")
    if "JobState" not in fields:
        raise ValueError(f"{text[:200]!r} is not the output of scontrol show job.")
    return SlurmJob(
        state=_STATES_OF_FLAGS.get(fields["JobState"], fields["JobState"]),
        is_batch=fields.get("BatchFlag") == "1",
        can_requeue=fields.get("Requeue") == "1",
        is_preempted=fields.get("PreemptTime", "None") != "None",
        partition=fields.get("Partition", ""),
        exit_code=parse_exit_code(fields.get("ExitCode", "")),
        output=fields.get("StdOut", ""),
        excluded_nodes=fields.get("ExcNodeList", "").replace("(null)", ""),
        restart_count=int(fields.get("Restarts", "0")),
    )


def parse_job_id(text: str) -> JobId:
    """Parse the id of a job, or of an element of an array, in the output of `scontrol show job NUMBER`.

    Raises:
        ValueError: The text is not the output of this command.
    """
    fields = parse_fields(text, "JobId")
    array, element = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
    if array.isdecimal() and element.isdecimal():
        return JobId(int(array), (int(element),))
    return JobId(_required_number(fields, "JobId"))


def parse_allocation(allocation: SlurmAllocation, text: str) -> SlurmAllocation:
    """Return the allocation with the numbers of tasks, nodes and CPUs per task that `scontrol show job ID` printed.

    CPUs per task are None if scontrol shows 1, because it shows 1 also for a job that did not request them.

    Raises:
        ValueError: The number of tasks or nodes is missing.
    """
    fields = parse_fields(text, "JobId")
    cpus_per_task = fields.get("CPUs/Task", "")
    return dataclasses.replace(
        allocation,
        num_tasks=_required_number(fields, "NumTasks"),
        num_nodes=_required_number(fields, "NumNodes"),
        cpus_per_task=int(cpus_per_task) if cpus_per_task.isdigit() and cpus_per_task != "1" else None,
    )


def _required_number(fields: Mapping[str, str], name: str) -> int:
    if not fields.get(name, "").isdigit():
        raise ValueError(f"scontrol show job has no number {name}: {fields.get(name)!r}.")
    return int(fields[name])


def parse_resources(text: str) -> SlurmResources:
    """Parse the resources in the output of `scontrol show job ID`."""
    fields = parse_fields(text, "JobId")
    return SlurmResources(
        submitted=_parse_time(fields.get("SubmitTime", "")),
        started=_parse_time(fields.get("StartTime", "")),
        cpus=int(fields["NumCPUs"]) if fields.get("NumCPUs", "").isdigit() else None,
        memory_bytes=_parse_memory(fields.get("AllocTRES") or fields.get("TRES", "")),
        limit_seconds=parse_time_limit(fields.get("TimeLimit", "")),
    )


def parse_queue(text: str) -> list[QueueEntry]:
    """Parse the output of squeue in `SQUEUE_FORMAT`."""
    found = []
    for line in text.splitlines():
        job_id, *fields = (field.strip() for field in line.split("|"))
        if len(fields) == 6 and _STATE.fullmatch(fields[0]):
            with contextlib.suppress(ValueError):
                fields[0] = _STATES_OF_FLAGS.get(fields[0], fields[0])
                found.append(QueueEntry(JobId.parse(job_id), *fields))
    return found


def parse_comments(text: str, comment: str) -> list[JobId]:
    """Return the ids of the jobs with this comment, from the output of squeue in `COMMENT_FORMAT`.

    An id is that of the whole job, without the element of an array or the component of a heterogeneous job.
    """
    found: dict[JobId, None] = {}
    for line in text.splitlines():
        job_id, _, own = line.strip().partition("|")
        if own == comment:
            with contextlib.suppress(ValueError):
                found[JobId.parse(job_id).whole] = None
    return list(found)


def parse_accounting(text: str) -> dict[JobId, tuple[str, int]]:
    """Return Slurm's state and the exit code of each job in sacct's output in `ACCOUNTING_FORMAT`."""
    found = {}
    for match in _ACCOUNTING_LINE.finditer(text):
        with contextlib.suppress(ValueError):
            found[JobId.parse(match["job_id"])] = match["state"], parse_exit_code(match["codes"])
    return found


def parse_exit_codes(text: str) -> dict[JobId, int]:
    """Return the exit code of each job, element or component in the output of `scontrol show job ID`."""
    found = {}
    for record in _JOB_RECORD.finditer(text):
        fields = parse_fields(record[0])
        whole, element = fields.get("ArrayJobId", fields["JobId"]), fields.get("ArrayTaskId")
        component = fields.get("HetJobOffset")
        if component is not None:
            text = f"{fields.get('HetJobId')}+{component}"
        else:
            text = whole if element is None else f"{whole}_{element}"
        with contextlib.suppress(ValueError):  # such as 19_2-9%2, for pending elements together
            found[JobId.parse(text)] = parse_exit_code(fields.get("ExitCode", ""))
    return found


def parse_layout(text: str) -> list[str]:
    """Return the node of each rank of one step, from the output of `sattach --layout STEP`.

    For this output the result is ["gpu-09", "r1-n10", "gpu-09", "gpu-09"]:

        Job step layout:
            4 tasks, 2 nodes (gpu-09,r1-n10)

            Node 0 (gpu-09), 3 task(s): 0 2 3
            Node 1 (r1-n10), 1 task(s): 1

    Raises:
        ValueError: The text does not assign each rank to one node.
    """
    lines = list(_LAYOUT_LINE.finditer(text))
    nodes = {int(rank): line["node"] for line in lines for rank in line["ranks"].split()}
    num_tasks = sum(int(line["count"]) for line in lines)
    if not nodes or sorted(nodes) != list(range(num_tasks)):
        raise ValueError(f"it printed no layout: {text[-300:]!r}. Expected each rank on one node.")
    return [nodes[rank] for rank in range(num_tasks)]


def parse_fields(text: str, first: str = "") -> dict[str, str]:
    """Parse the NAME=VALUE pairs of scontrol's output. Of a repeated name, the first value is kept.

    `first` is the name with which each record starts, such as "JobId". With it, only the first record is parsed: its
    line, and the indented lines after it. Without such a record, the whole text is parsed.
    """
    record = re.search(rf"^{first}=.*(\n[ \t]+\S.*)*", text, re.MULTILINE) if first else None
    found: dict[str, str] = {}
    for match in _FIELD.finditer(record[0] if record is not None else text):
        found.setdefault(match["name"], match["value"])
    return found


def parse_exit_code(codes: str) -> int:
    """Parse Slurm's "code:signal". The result after signal n is 128 + n, as in a shell, and 0 for another text."""
    code, _, number = codes.partition(":")
    return 128 + int(number) if number.isdecimal() and int(number) else int(code) if code.isdecimal() else 0


def _parse_time(text: str) -> float | None:
    """Parse "2026-11-21T10:21:07" in the time zone of this host, which scontrol uses, too."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # such as "Unknown"
        return None


def _parse_memory(tres: str) -> int | None:
    """Return the memory in bytes of a text such as "cpu=4,mem=2000M,node=2", or None if it has none."""
    match = re.search(r"(?:^|,)mem=([0-9.]+)([KMGTP]?)", tres)
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2] or "M")) if match else None


def parse_time_limit(limit: str) -> int | None:
    """Return a time limit in seconds, or None for any other text, such as UNLIMITED.

    Slurm's formats are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S, with D days, H hours, M minutes and S seconds.
    """
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
