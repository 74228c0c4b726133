"""Linux's counters of processes killed because memory ran out, in the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf4slurm.system import oom_kills
from tf4slurm.system.oom_kills import OomKills, describe_kill, read_oom_kills

VERSION_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
VERSION_2 = "low 0\nhigh 0\nmax 41\noom 2\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("group", "name", "text", "number"),
    [
        ("4:memory:/job_7/step_0\n0::/\n", "memory/job_7/step_0/memory.oom_control", VERSION_1, 3),
        ("0::/system.slice/job_7/step_0\n", "system.slice/job_7/step_0/memory.events", VERSION_2, 2),
    ],
)
def test_counter_of_control_group(
    group: str, name: str, text: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    (tmp_path / "cgroup").write_text(group)
    monkeypatch.setattr(oom_kills, "_CGROUPS", tmp_path)
    monkeypatch.setattr(oom_kills, "_OWN_CGROUP", tmp_path / "cgroup")
    assert read_oom_kills() == OomKills(number, "its control group")
    assert "killed it, or memory" in describe_kill(None)
    assert describe_kill(OomKills(number, "its control group")) == "another process killed it"
    assert describe_kill(OomKills(number - 1, "its control group")) == (
        "out of memory: Linux killed it, because its control group has no more"
    )
    assert "or memory ran out" in describe_kill(OomKills(number - 1, "this host"))


def test_counter_of_host_without_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom_kills, "_CGROUPS", tmp_path)
    found = read_oom_kills()
    assert found is None or found.limit == "this host"
