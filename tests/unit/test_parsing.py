"""Output of `scontrol show config`, `show partition` and `show job`, recorded from Slurm 22.05.8."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import (
    SlurmResources,
    parse_accounting,
    parse_allocation,
    parse_comments,
    parse_exit_codes,
    parse_job,
    parse_job_id,
    parse_queue,
    parse_resources,
    parse_time_limit,
)
from tf4slurm.slurm.site import Partition, Reservation, SlurmSite, parse_nodes, parse_site, parse_version

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


def test_unavailable_nodes_and_maintenance() -> None:
    """Recorded from `sinfo` and `scontrol show reservation` of Slurm 22.05.8."""
    line = (
        "ReservationName={} StartTime=2026-11-24T00:04:44 EndTime=2026-11-24T01:04:44 Nodes=r1-n[2,9] Flags={} State=I"
    )
    reservations = f"{line.format('weekly', 'MAINT,SPEC_NODES')}\n{line.format('course', 'SPEC_NODES')}\n"
    nodes = "debug|0/2/1/3|gpu:a100:4(S:0-1)|icelake,ib\ndebug|0/1/0/1|(null)|(null)\nlow|0/4/0/4|gpu:4|(null)\n"
    site = parse_site(CONFIG, PARTITIONS, nodes, reservations)
    assert [(each.num_unavailable, each.num_nodes) for each in site.partitions[:3]] == [(1, 4), (0, 4), (0, 0)]
    large = parse_site(CONFIG, PARTITIONS, nodes + "debug|0/0/1K/1.50K|(null)|(null)\n").partitions[0]
    assert (large.num_unavailable, large.num_nodes) == (1 + 1024, 4 + 1536)  # sinfo rounds numbers from 1,024 on
    assert site.maintenance == (Reservation("weekly", "2026-11-24T00:04:44", "2026-11-24T01:04:44", "r1-n[2,9]"),)
    assert sorted(site.gpu_types) == ["a100"]
    assert sorted(site.features) == ["ib", "icelake"]
    assert site.settings["SelectType"] == "select/cons_tres"


def test_other_output_is_refused() -> None:
    with pytest.raises(ValueError, match="not the output of scontrol show config"):
        parse_site("Slurmctld is down\n", "")


def test_no_visible_partitions() -> None:
    site: SlurmSite = parse_site(CONFIG, "No partitions in the system\n")
    assert site.partitions == ()


ANSWER = """JobId=7 JobName=wrap
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=00:00:05 TimeLimit=1-00:10:00 TimeMin=N/A
   SubmitTime=2026-11-21T07:27:00 EligibleTime=2026-11-21T07:27:00
   StartTime=2026-11-21T07:27:59 EndTime=2026-11-22T07:37:59 Deadline=N/A
   NumNodes=4 NumCPUs=8 NumTasks=4 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   {tres}
"""


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


@pytest.mark.parametrize(
    ("tres", "memory"),
    [
        ("TRES=cpu=8,mem=2000M,node=4,billing=8", 2000 * 1024**2),
        ("ReqTRES=cpu=4,mem=1M\n   AllocTRES=cpu=8,mem=1.50G,node=4", 3 * 2**29),
        ("TRES=cpu=8,node=4,billing=8", None),
        ("", None),
    ],
)
def test_resources_are_parsed(tres: str, memory: int | None) -> None:
    started = at("2026-11-21 07:27:59")
    expected = SlurmResources(at("2026-11-21 07:27:00"), started, 8, memory, 86400 + 600)
    assert parse_resources(ANSWER.replace("{tres}", tres)) == expected


@pytest.mark.parametrize(("text", "cpus_per_task"), [("2", 2), ("1", None), ("N/A", None)])
def test_tasks_of_job_replace_those_of_a_step(text: str, cpus_per_task: int | None) -> None:
    answer = f"JobId=7 NumNodes=2 NumCPUs=8 NumTasks=4 CPUs/Task={text} ReqB:S:C:T=0:0:*:*"
    expected = SlurmAllocation(JobId(7), 4, cpus_per_task, num_nodes=2)
    assert parse_allocation(SlurmAllocation(JobId(7), 1, 1, num_nodes=2), answer) == expected


def test_job_without_number_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="no number NumTasks"):
        parse_allocation(SlurmAllocation(JobId(7), 1, None), "JobId=7 NumNodes=2")


@pytest.mark.parametrize(
    ("first_line", "job_id"),
    [
        ("JobId=7 JobName=a ArrayJobId=3", JobId(7)),
        ("JobId=7 ArrayJobId=3 ArrayTaskId=5 JobName=a", JobId(3, (5,))),
        ("JobId=3 ArrayJobId=3 ArrayTaskId=0-1,4%2 JobName=a", JobId(3)),
        ("JobId=7 HetJobId=6 HetJobOffset=1 JobName=a", JobId(7)),
    ],
)
def test_job_shown_by_its_number_may_be_an_element(first_line: str, job_id: JobId) -> None:
    assert parse_job_id(f"{first_line}\n   UserId=root(0)\n") == job_id


def test_missing_fields_are_none() -> None:
    assert parse_resources("JobId=7 StartTime=Unknown TimeLimit=UNLIMITED NumCPUs=4-8") == SlurmResources()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("10", 600),
        ("1:30", 90),
        ("1:00:01", 3601),
        ("1-2", 93600),
        ("1-00:10:00", 87000),
        ("UNLIMITED", None),
        ("-1", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limit_is_parsed_as_sbatch_does(limit: str, seconds: int | None) -> None:
    assert parse_time_limit(limit) == seconds


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("RUNNING", "RUNNING"),
        ("SIGNALING", "RUNNING"),  # seen in a job array that was cancelled
        ("RESIZING", "RUNNING"),
        ("STOPPED", "SUSPENDED"),
        ("COMPLETING", "COMPLETING"),
    ],
)
def test_flag_that_slurm_shows_does_not_hide_the_state(shown: str, state: str) -> None:
    (entry,) = parse_queue(f"17_3|{shown}|None|1:00|2:00|2026-11-21T10:00:00|n1")
    assert entry.state == state
    assert parse_job(f"JobId=17 JobName=train\n   JobState={shown} Reason=None\n").state == state


def test_each_notation_of_an_id_is_read() -> None:
    ids = ["38", "38_2", "38_[3-9%2]", "38+1", "7_[0-98:2%4]"]
    text = "".join(f"{job_id}|PENDING|None|0:00|2:00|N/A|\n" for job_id in ids)
    expected = [JobId(38), JobId(38, (2,)), JobId(38, tuple(range(3, 10))), JobId(38, component=1)]
    assert [entry.job_id for entry in parse_queue(text)] == [*expected, JobId(7, tuple(range(0, 99, 2)))]


GREETING = """
*** Welcome | to | the | cluster ***
| Maintenance | Monday | Nodes=all JobState=NEVER SubmitTime=noon NumTasks=99 Partition=none | SLURM_VERSION |
2 | nodes | down | ask
a|b|c|d|e|f|g
CLUSTER: fat
"""


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_queue, "17|RUNNING|None|1:00|2:00|2026-11-21T10:00:00|n[1-2]\n18_[1-3]|PENDING|None|0:00|2:00|N/A|\n"),
        (lambda text: parse_comments(text, "mark"), "17|(null)\n38_2|mark\n38_3|mark\n40+1|mark\n41_[0-98:2]|mark\n"),
        (parse_nodes, "debug|0/2/1/3|gpu:a100:4(S:0-1)|icelake,ib\nlow|1K/4/0/1.50K|gpu:4|(null)\n"),
        (parse_accounting, "17|CANCELLED by 0|0:15\n18_3|FAILED|1:0\n18_[4-9]|PENDING|0:0\n40+1|COMPLETED|0:0\n"),
        (parse_exit_codes, ANSWER),
        (parse_version, "slurm-wlm 22.05.8\n"),
        (parse_job, ANSWER),
        (parse_resources, ANSWER),
        (lambda text: parse_allocation(SlurmAllocation(JobId(7), 1, 1, num_nodes=2), text), ANSWER),
        (lambda text: parse_site(text, PARTITIONS), CONFIG),
        (lambda text: parse_site(CONFIG, text).partitions, PARTITIONS),
        (lambda text: parse_site(CONFIG, PARTITIONS, text).features, "debug|0/2/1/3|gpu:4|icelake\n"),
    ],
)
def test_lines_of_others_are_left_out(parse: Callable[[str], object], text: str) -> None:
    expected = parse(text)
    assert expected
    assert parse(GREETING + text) == expected
    assert parse(text + GREETING) == expected


@pytest.mark.parametrize("text", ["", "Welcome\n"])
def test_output_without_an_own_line_has_no_value(text: str) -> None:
    assert (parse_queue(text), parse_comments(text, "x"), parse_nodes(text), parse_accounting(text)) == (
        [],
        [],
        [],
        {},
    )
    with pytest.raises(ValueError, match="printed no version"):
        parse_version(text)
