"""Parse the output of scontrol, squeue and sattach: jobs, the site's configuration, and the layout of a step."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tf4slurm.errors import COMPLETED, FAILED, STOPPED
from tf4slurm.slurm.environ import SlurmAllocation

SQUEUE_FORMAT = "%i|%T|%r|%M|%l|%S|%N"
NODES_FORMAT = "%R|%F|%G|%f"  # partition, numbers of allocated/idle/other/all nodes, GPUs, features
ENDED_STATES = {
    "COMPLETED": COMPLETED,
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "TIMEOUT"), STOPPED),
    **dict.fromkeys(("BOOT_FAIL", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED"), FAILED),
}
"""Slurm's states of ended jobs, each with tf4slurm's state."""
_FIELD = re.compile(r"(?:^|\s)(?P<name>[A-Z][\w/:]*)=(?P<value>\S*)")
_SETTING = re.compile(r"^(?P<name>\S+)\s*= ?(?P<value>.*?)\s*$", re.MULTILINE)
_LAYOUT_LINE = re.compile(r"^\tNode \d+ \((?P<node>.+)\), (?P<count>\d+) task\(s\):(?P<ranks>[ \d]*)$", re.MULTILINE)
_GPU_TYPE = re.compile(r"\bgpu:([A-Za-z]\w*)")
_PORTS = re.compile(r"\bports=([\d,-]+)")
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
        is_preempted: Whether the grace time of a preemption has begun.
        preempt_mode: Effect of preemption in the partition, such as "REQUEUE" or "CANCEL"; empty if unknown.
        exit_code: Exit code of the batch script, 128 + n after signal n; 0 while the script runs.
        output: Path of the batch script's output; empty if unknown.
        excluded_nodes: Nodelist of --exclude; empty for none.
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


@dataclass(frozen=True)
class SlurmResources:
    """The resources that Slurm allocated to a job. A field that `scontrol` does not show is null.

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
    nodes: str

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def explained_reason(self) -> str:
        """Slurm's reason why the job is pending, with an explanation of common ones."""
        if self.reason == "None":
            return "Slurm has not considered the job yet"
        meaning = _REASONS.get(self.reason.split(",")[0].strip("()").removesuffix("_"))
        return f"{self.reason}: {meaning}" if meaning else self.reason


@dataclass(frozen=True)
class Partition:
    """A partition. Times are in Slurm's format, such as "2-00:00:00", "UNLIMITED" or "NONE".

    Attributes:
        preempt_mode: Effect of preemption: "OFF", "REQUEUE", "CANCEL" or "SUSPEND".
        grace_period_seconds: Seconds from the preemption of a job until Slurm kills it (GraceTime).
        num_nodes: Number of nodes; 0 if unknown.
        num_unavailable: Number of nodes that are drained, down or reserved.
    """

    name: str
    is_default: bool
    state: str
    max_time: str
    default_time: str
    preempt_mode: str
    grace_period_seconds: int
    num_nodes: int = 0
    num_unavailable: int = 0


@dataclass(frozen=True)
class Reservation:
    """A reservation of nodes for maintenance; times such as "2026-11-24T00:04:44", in the time zone of this host."""

    name: str
    start: str
    end: str
    nodes: str


@dataclass(frozen=True)
class SlurmSite:
    """The settings of a site that affect a parameter-server job.

    Attributes:
        version: Version of the controller, such as "22.05.8".
        has_accounting: Whether the site has a database of ended jobs, which sacct reads.
        reserved_ports: Range from which Slurm reserves ports for each step, in Slurm's notation; empty if none.
        requeues: Whether Slurm may requeue a batch job by default (JobRequeue).
        kill_wait_seconds: Seconds from SIGTERM to SIGKILL after a time limit or scancel (KillWait).
        process_tracking: How Slurm finds the processes of a job, such as "cgroup" or "linuxproc".
        settings: All settings by their names in slurm.conf; "(null)" if not set.
        maintenance: Current and future reservations for maintenance.
        gpu_types: Such as "a100".
        features: Features of nodes, which --constraint requests.
    """

    version: str
    has_accounting: bool
    reserved_ports: str
    requeues: bool
    kill_wait_seconds: int
    process_tracking: str
    partitions: tuple[Partition, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    maintenance: tuple[Reservation, ...] = ()
    gpu_types: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()


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
        output=fields.get("StdOut", ""),
        excluded_nodes=fields.get("ExcNodeList", "").replace("(null)", ""),
    )


def parse_allocation(allocation: SlurmAllocation, text: str) -> SlurmAllocation:
    """Return the allocation with the numbers in the output of `scontrol show job ID`.

    Raises:
        ValueError: A number is missing.
    """
    fields = parse_fields(text)
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
    fields = parse_fields(text)
    return SlurmResources(
        submitted=_parse_time(fields.get("SubmitTime", "")),
        started=_parse_time(fields.get("StartTime", "")),
        cpus=int(fields["NumCPUs"]) if fields.get("NumCPUs", "").isdigit() else None,
        memory_bytes=_parse_memory(fields.get("AllocTRES") or fields.get("TRES", "")),
        limit_seconds=parse_time_limit(fields.get("TimeLimit", "")),
    )


def parse_queue(text: str) -> list[QueueEntry]:
    """Parse the output of squeue in `SQUEUE_FORMAT`; ignore other lines."""
    rows = (line.split("|") for line in text.splitlines())
    return [QueueEntry(*(field.strip() for field in row)) for row in rows if len(row) == 7]


def parse_site(config: str, partitions: str, nodes: str = "", reservations: str = "") -> SlurmSite:
    """Parse the configuration of a site, and the state of its nodes.

    Args:
        config: Output of `scontrol show config`.
        partitions: Output of `scontrol --oneliner show partition`.
        nodes: Output of sinfo in `NODES_FORMAT`.
        reservations: Output of `scontrol --oneliner show reservation`.

    Raises:
        ValueError: `config` is not the output of this command.
    """
    values = {match["name"]: match["value"] for match in _SETTING.finditer(config)}
    if "SLURM_VERSION" not in values:
        raise ValueError(f"{config[:200]!r} is not the output of scontrol show config")
    ports = _PORTS.search(values.get("MpiParams", ""))
    rows = [row for row in (line.split("|") for line in nodes.splitlines()) if len(row) == 4]
    return SlurmSite(
        version=values["SLURM_VERSION"],
        has_accounting=values.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        reserved_ports=ports[1] if ports else "",
        requeues=values.get("JobRequeue") == "1",
        kill_wait_seconds=_leading_number(values.get("KillWait", "")),
        process_tracking=values.get("ProctrackType", "").rpartition("/")[2],
        partitions=tuple(_parse_partition(line, rows) for line in partitions.splitlines() if "PartitionName=" in line),
        settings=values,
        maintenance=tuple(_parse_maintenance(reservations)),
        gpu_types=frozenset(match[1] for row in rows for match in _GPU_TYPE.finditer(row[2])),
        features=frozenset(name for row in rows for name in row[3].split(",") if name not in ("", "(null)")),
    )


def _parse_maintenance(text: str) -> Iterator[Reservation]:
    for fields in map(parse_fields, text.splitlines()):
        if "MAINT" in fields.get("Flags", "").split(","):
            yield Reservation(*(fields.get(name, "") for name in ("ReservationName", "StartTime", "EndTime", "Nodes")))


def parse_layout(text: str) -> list[str]:
    """Return the node of each rank of one step, from the output of `sattach --layout STEP`, such as this.

        Job step layout:
            4 tasks, 2 nodes (gpu-09,r1-n10)

            Node 0 (gpu-09), 3 task(s): 0 2 3
            Node 1 (r1-n10), 1 task(s): 1

    Raises:
        ValueError: The text does not have each rank on one node.
    """
    lines = list(_LAYOUT_LINE.finditer(text))
    nodes = {int(rank): line["node"] for line in lines for rank in line["ranks"].split()}
    num_tasks = sum(int(line["count"]) for line in lines)
    if not nodes or sorted(nodes) != list(range(num_tasks)):
        raise ValueError(f"it printed no layout: {text[-300:]!r}. Expected each rank on one node.")
    return [nodes[rank] for rank in range(num_tasks)]


def _parse_partition(line: str, nodes: Sequence[Sequence[str]]) -> Partition:
    fields = parse_fields(line)
    counts = [row[1].split("/") for row in nodes if row[0] == fields["PartitionName"]]
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", ""),
        max_time=fields.get("MaxTime", ""),
        default_time=fields.get("DefaultTime", ""),
        preempt_mode=fields.get("PreemptMode", ""),
        grace_period_seconds=_leading_number(fields.get("GraceTime", "")),
        num_nodes=sum(_leading_number(each[-1]) for each in counts),
        num_unavailable=sum(_leading_number(each[-2]) for each in counts if len(each) == 4),
    )


def _leading_number(text: str) -> int:
    """Return the number at the start of a text such as "30 sec", else 0."""
    match = re.match(r"\d{1,9}", text)
    return int(match[0]) if match else 0


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
    """Return the bytes in "cpu=4,mem=2000M,node=2,billing=4"."""
    match = re.search(r"(?:^|,)mem=([0-9.]+)([KMGTP]?)", tres)
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2] or "M")) if match else None


def parse_time_limit(limit: str) -> int | None:
    """Return the seconds of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for a text such as UNLIMITED."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
