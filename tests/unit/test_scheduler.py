"""Checks of a site's settings, recorded and varied."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.test_parsing import CONFIG, PARTITIONS
from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.scheduler import check_site, check_slurm, check_version
from tf4slurm.slurm.site import Partition, Reservation, SlurmSite, parse_site

SITE = parse_site(CONFIG, PARTITIONS)
GOOD = Partition("work", True, "UP", "2-00:00:00", "01:00:00", "OFF", 0)


def judge(topic: str, site: SlurmSite, grace_period_seconds: float = 25.0) -> Finding:
    (found,) = (finding for finding in check_site(site, grace_period_seconds) if finding.topic == topic)
    return found


@pytest.mark.parametrize(
    ("changes", "topic", "level", "words"),
    [
        ({}, "step ports", "ok", "23000-23999"),
        ({"reserved_ports": ""}, "step ports", "ok", "reserves no ports"),
        ({}, "kill wait", "warn", "5 s after SIGTERM"),
        ({"kill_wait_seconds": 30}, "kill wait", "ok", "30 s"),
        ({}, "requeue", "ok", "JobRequeue=1"),
        ({"requeues": False}, "requeue", "warn", "JobRequeue=0"),
        ({}, "processes", "warn", "linuxproc"),
        ({"process_tracking": "cgroup"}, "processes", "ok", "cgroup"),
        (
            {"settings": {"TaskPlugin": "task/none", "LaunchParameters": "(null)"}},
            "settings",
            "ok",
            "task/none: tested",
        ),
        ({"settings": {"MpiDefault": "cray_shasta"}}, "settings", "ok", "not tested: MpiDefault=cray_shasta"),
        (
            {"maintenance": (Reservation("m", "2026-12-01T08:00:00", "2026-12-01T18:00:00", "n[1-4]"),)},
            "maintenance",
            "warn",
            "m reserves n[1-4] from 2026-12-01T08:00:00",
        ),
    ],
)
def test_setting(changes: dict[str, object], topic: str, level: str, words: str) -> None:
    found = judge(topic, dataclasses.replace(SITE, **changes))  # type: ignore[arg-type]
    assert found.level == level
    assert words in found.text
    assert found.advice or level == "ok"


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "work (default): at most 2-00:00:00, 01:00:00 without --time"),
        ({"state": "DOWN"}, "warn", "is DOWN"),
        ({"preempt_mode": "REQUEUE", "grace_period_seconds": 60}, "ok", "REQUEUE after 60 s"),
        ({"preempt_mode": "REQUEUE", "grace_period_seconds": 8}, "warn", "REQUEUE after 8 s"),
        ({"preempt_mode": "CANCEL", "grace_period_seconds": 60}, "warn", "CANCEL after 60 s"),
        ({"num_nodes": 4, "num_unavailable": 1}, "ok", "1 of 4 nodes are drained, down or reserved"),
        ({"num_nodes": 4, "num_unavailable": 4}, "warn", "4 of 4 nodes are drained, down or reserved"),
    ],
)
def test_partition(changes: dict[str, object], level: str, words: str) -> None:
    partition = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    found = judge("partition", dataclasses.replace(SITE, partitions=(partition,)))
    assert found.level == level
    assert words in found.text


@pytest.mark.parametrize(
    ("client", "controller", "level"),
    [
        ("22.05.8", "22.05.8", "ok"),
        ("23.11.1", "22.05.8", "ok"),
        ("20.11.0", "20.11.0", "ok"),
        ("19.05.5", "22.05", "fail"),
    ],
)
def test_versions(client: str, controller: str, level: str) -> None:
    found = check_version(client, controller)
    assert found.level == level
    assert (client in found.text) == (client != controller) or client == controller


def test_version_of_a_tested_series_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.doctor.scheduler.read_tests", lambda: {"22.05.8": {}, "24.11.5": {}})
    assert check_version("24.11.1", "24.11.1").text == "Slurm 24.11.1; tf4slurm was tested with 24.11.5"
    assert check_version("23.02.7", "23.02.7").text.endswith("; tf4slurm was tested with 22.05.8, 24.11.5")


def test_job_without_its_nodelist_is_recognized_after_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = check_slurm({"SLURM_JOB_ID": "7"})[0]
    assert (found.level, found.topic) == ("warn", "slurm variables")
    assert "srun --jobid=7 --overlap" in found.advice
    assert check_slurm({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"})[0].topic == "slurm"
