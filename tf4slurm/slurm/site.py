"""Parse the site's Slurm configuration from the output of `scontrol show config` and `show partition`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tf4slurm.slurm.job import parse_fields

_SETTING = re.compile(r"^(?P<name>\S+)\s*= ?(?P<value>.*?)\s*$", re.MULTILINE)
_PORTS = re.compile(r"\bports=([\d,-]+)")


@dataclass(frozen=True)
class Partition:
    """A partition. Times are in Slurm's format, such as "2-00:00:00", "UNLIMITED" or "NONE".

    Attributes:
        preempt_mode: Effect of preemption on its jobs: "OFF", "REQUEUE", "CANCEL" or "SUSPEND".
        grace_period_seconds: Seconds from the preemption of a job until Slurm kills it (GraceTime).
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
    """The settings of a site that affect a parameter-server job.

    Attributes:
        version: Version of the controller, such as "22.05.8".
        has_accounting: Whether a database keeps ended jobs, which sacct reads.
        reserved_ports: Range from which Slurm reserves ports for each step, in Slurm's notation; empty if none.
        requeues: Whether Slurm may requeue a batch job by default (JobRequeue).
        kill_wait_seconds: Seconds from SIGTERM to SIGKILL after a time limit or scancel (KillWait).
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
    """Parse the output of `scontrol show config` and `scontrol --oneliner show partition`.

    Raises:
        ValueError: `config` is not the output of `scontrol show config`.
    """
    values = {match["name"]: match["value"] for match in _SETTING.finditer(config)}
    if "SLURM_VERSION" not in values:
        raise ValueError(f"{config[:200]!r} is not the output of scontrol show config")
    ports = _PORTS.search(values.get("MpiParams", ""))
    return SlurmSite(
        version=values["SLURM_VERSION"],
        has_accounting=values.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        reserved_ports=ports[1] if ports else "",
        requeues=values.get("JobRequeue") == "1",
        kill_wait_seconds=_leading_number(values.get("KillWait", "")),
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
        grace_period_seconds=_leading_number(fields.get("GraceTime", "")),
    )


def _leading_number(text: str) -> int:
    """Return the number at the start of a text such as "30 sec"; 0 without one."""
    match = re.match(r"\d{1,9}", text)
    return int(match[0]) if match else 0
