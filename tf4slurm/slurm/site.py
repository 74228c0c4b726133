"""How a site has set up its Slurm: `scontrol show config` and `scontrol show partition`, read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tf4slurm.slurm.job import parse_fields

_LINE = re.compile(r"^(?P<name>\S+)\s*= ?(?P<value>.*?)\s*$", re.MULTILINE)
_PORTS = re.compile(r"\bports=([\d,-]+)")


@dataclass(frozen=True)
class Partition:
    """A partition. Times are in Slurm's notation, such as "2-00:00:00", "UNLIMITED" or "NONE".

    Attributes:
        preempt_mode: What happens to its jobs when others preempt them: "OFF", "REQUEUE", "CANCEL", "SUSPEND".
        grace_period_seconds: How long a preempted job of it has before it is killed.
    """

    name: str
    is_default: bool
    state: str
    max_time: str
    default_time: str
    preempt_mode: str
    grace_period_seconds: int


@dataclass(frozen=True)
class SlurmSite:
    """What matters of it to a parameter-server job.

    Attributes:
        version: Of the controller, such as "22.05.8".
        has_accounting: Whether ended jobs are kept in a database, for sacct.
        reserved_ports: The range from which each step gets ports of its own, as Slurm writes it; empty if none.
        requeues: Whether a batch job may be put back into the queue unless it says otherwise.
        kill_wait_seconds: From SIGTERM to SIGKILL, when a job is over its time or cancelled.
        process_tracking: How Slurm finds the processes of a job, such as "cgroup" or "linuxproc".
    """

    version: str
    has_accounting: bool
    reserved_ports: str
    requeues: bool
    kill_wait_seconds: int
    process_tracking: str
    partitions: tuple[Partition, ...]


def parse_site(config: str, partitions: str) -> SlurmSite:
    """Read the answers of `scontrol show config` and `scontrol --oneliner show partition`.

    Raises:
        ValueError: The first is something else.
    """
    values = {match["name"]: match["value"] for match in _LINE.finditer(config)}
    if "SLURM_VERSION" not in values:
        raise ValueError(f"{config[:200]!r} is not what scontrol show config writes")
    ports = _PORTS.search(values.get("MpiParams", ""))
    return SlurmSite(
        version=values["SLURM_VERSION"],
        has_accounting=values.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        reserved_ports=ports[1] if ports else "",
        requeues=values.get("JobRequeue") == "1",
        kill_wait_seconds=_number(values.get("KillWait", "")),
        process_tracking=values.get("ProctrackType", "").rpartition("/")[2],
        partitions=tuple(_parse_partition(line) for line in partitions.splitlines() if "PartitionName=" in line),
    )


def _parse_partition(line: str) -> Partition:
    fields = parse_fields(line)
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", ""),
        max_time=fields.get("MaxTime", ""),
        default_time=fields.get("DefaultTime", ""),
        preempt_mode=fields.get("PreemptMode", ""),
        grace_period_seconds=_number(fields.get("GraceTime", "")),
    )


def _number(text: str) -> int:
    """Return the number that a text such as "30 sec" starts with; 0 without one."""
    match = re.match(r"\d{1,9}", text)
    return int(match[0]) if match else 0
