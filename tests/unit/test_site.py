"""Output of `scontrol show config` and `show partition`, recorded from Slurm 22.05.8."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf4slurm.slurm.site import Partition, SlurmSite, parse_site

DATA = Path(__file__).parent.parent / "data"
CONFIG = (DATA / "scontrol-show-config.txt").read_text()
PARTITIONS = (DATA / "scontrol-show-partition.txt").read_text()


def test_recorded_site() -> None:
    site = parse_site(CONFIG, PARTITIONS)
    assert (site.version, site.has_accounting, site.reserved_ports) == ("22.05.8", False, "23000-23999")
    assert (site.requeues, site.kill_wait_seconds, site.process_tracking) == (True, 5, "linuxproc")
    assert [partition.name for partition in site.partitions] == ["debug", "low", "lowc", "high"]
    assert site.partitions[0] == Partition("debug", True, "UP", "UNLIMITED", "NONE", "OFF", 0)
    assert site.partitions[2] == Partition("lowc", False, "UP", "UNLIMITED", "NONE", "CANCEL", 8)


@pytest.mark.parametrize(
    ("line", "other", "field", "value"),
    [
        ("MpiParams               = ports=23000-23999", "MpiParams               = (null)", "reserved_ports", ""),
        ("accounting_storage/none", "accounting_storage/slurmdbd", "has_accounting", True),
        ("JobRequeue              = 1", "JobRequeue              = 0", "requeues", False),
        ("KillWait                = 5 sec", "KillWait                = 30 sec", "kill_wait_seconds", 30),
        ("proctrack/linuxproc", "proctrack/cgroup", "process_tracking", "cgroup"),
    ],
)
def test_changed_setting(line: str, other: str, field: str, value: object) -> None:
    assert CONFIG.count(line) == 1
    assert getattr(parse_site(CONFIG.replace(line, other), PARTITIONS), field) == value


def test_other_output_is_refused() -> None:
    with pytest.raises(ValueError, match="not the output of scontrol show config"):
        parse_site("Slurmctld is down\n", "")


def test_no_visible_partitions() -> None:
    site: SlurmSite = parse_site(CONFIG, "No partitions in the system\n")
    assert site.partitions == ()
