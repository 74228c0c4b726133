"""Resources of a job in the output of `scontrol show job`, recorded and abridged."""

from __future__ import annotations

import time

import pytest

from tf4slurm.slurm.job import SlurmGrant, parse_grant

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
def test_grant_is_parsed(tres: str, memory: int | None) -> None:
    started = at("2026-11-21 07:27:59")
    expected = SlurmGrant(at("2026-11-21 07:27:00"), started, 8, memory, 86400 + 600)
    assert parse_grant(ANSWER.replace("{tres}", tres)) == expected


def test_missing_fields_are_none() -> None:
    assert parse_grant("JobId=7 StartTime=Unknown TimeLimit=UNLIMITED NumCPUs=4-8") == SlurmGrant()
