"""Parse what scontrol, sinfo and srun print about a Slurm site. Other lines, such as a wrapper's, are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tf4slurm.slurm.parsing import parse_fields

NODES_FORMAT = "%R|%F|%G|%f"  # partition, numbers of allocated/idle/other/all nodes, GPUs, features
_SETTING = re.compile(r"^(?P<name>\S+)\s*= ?(?P<value>.*?)\s*$", re.MULTILINE)
_NODE_COUNTS = re.compile(r"\d+(\.\d+)?[KMG]?(/\d+(\.\d+)?[KMG]?){3}")  # with a unit from 1,024 nodes on, such as 1.50K
_VERSION_LINE = re.compile(r"^slurm\S* (?P<version>\d\S*)\s*$", re.MULTILINE)
_GPU_TYPE = re.compile(r"\bgpu:([A-Za-z]\w*)")
_PORTS = re.compile(r"\bports=([\d,-]+)")


@dataclass(frozen=True)
class Partition:
    """A partition of a Slurm site.

    Attributes:
        max_time, default_time: Time limits in Slurm's format, such as "2-00:00:00", "UNLIMITED" or "NONE".
        preempt_mode: Effect of preemption: "OFF", "REQUEUE", "CANCEL" or "SUSPEND". Empty if unknown.
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
    """A reservation of nodes for maintenance. `start` and `end` are local times, such as "2026-11-24T00:04:44"."""

    name: str
    start: str
    end: str
    nodes: str


@dataclass(frozen=True)
class SlurmSite:
    """The settings of a site, and the state of its nodes, that affect a parameter-server job.

    Attributes:
        version: Version of the controller, such as "22.05.8".
        has_accounting: Whether the site has a database of ended jobs, which sacct reads.
        reserved_ports: Range from which Slurm reserves ports for each step, in Slurm's notation. Empty if none.
        requeues: Whether Slurm may requeue a batch job by default (JobRequeue).
        kill_wait_seconds: Seconds from SIGTERM to SIGKILL after a time limit or scancel (KillWait).
        process_tracking: How Slurm finds the processes of a job, such as "cgroup" or "linuxproc".
        settings: All settings by their names in slurm.conf. A setting without a value is "(null)".
        maintenance: Current and future reservations for maintenance.
        gpu_types: Types of the GPUs, such as "a100".
        features: Features of the nodes, which jobs request with --constraint.
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
    rows = parse_nodes(nodes)
    return SlurmSite(
        version=values["SLURM_VERSION"],
        has_accounting=values.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        reserved_ports=ports[1] if ports else "",
        requeues=values.get("JobRequeue") == "1",
        kill_wait_seconds=_leading_number(values.get("KillWait", "")),
        process_tracking=values.get("ProctrackType", "").rpartition("/")[2],
        partitions=tuple(
            _parse_partition(line, rows) for line in partitions.splitlines() if line.startswith("PartitionName=")
        ),
        settings=values,
        maintenance=tuple(_parse_maintenance(reservations)),
        gpu_types=frozenset(match[1] for row in rows for match in _GPU_TYPE.finditer(row[2])),
        features=frozenset(name for row in rows for name in row[3].split(",") if name not in ("", "(null)")),
    )


def _parse_maintenance(text: str) -> Iterator[Reservation]:
    for fields in map(parse_fields, text.splitlines()):
        if "MAINT" in fields.get("Flags", "").split(","):
            yield Reservation(*(fields.get(name, "") for name in ("ReservationName", "StartTime", "EndTime", "Nodes")))


def parse_nodes(text: str) -> list[list[str]]:
    """Return the fields of each line of sinfo's output in `NODES_FORMAT`: partition, numbers of nodes, GPUs, features.

    Each line describes a group of nodes that have the same GPUs and features.
    """
    rows = (line.strip().split("|") for line in text.splitlines())
    return [row for row in rows if len(row) == 4 and _NODE_COUNTS.fullmatch(row[1])]


def parse_version(text: str) -> str:
    """Return the version in the output of `srun --version`, such as "slurm 22.05.8" or "slurm-wlm 22.05.8".

    Raises:
        ValueError: The text has no version.
    """
    match = _VERSION_LINE.search(text)
    if match is None:
        raise ValueError(f"it printed no version: {text[-300:]!r}.")
    return match["version"]


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
        num_nodes=sum(_parse_count(each[-1]) for each in counts),
        num_unavailable=sum(_parse_count(each[-2]) for each in counts if len(each) == 4),
    )


def _parse_count(text: str) -> int:
    """Return a number of nodes that sinfo prints, such as 12. From 1,024 on it is rounded: "1.50K" is 1,536."""
    units = "KMG"
    factor = 1024 ** (units.index(text[-1]) + 1) if text[-1] in units else 1
    return round(float(text.rstrip(units)) * factor)


def _leading_number(text: str) -> int:
    """Return the number at the start of a text such as "30 sec", or 0 if there is none."""
    match = re.match(r"\d{1,9}", text)
    return int(match[0]) if match else 0
