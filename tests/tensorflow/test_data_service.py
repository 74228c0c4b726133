"""tf.data's service as roles of a job, and the shares of the files, with real TensorFlow processes on this host."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until
from tf4slurm import share_of

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


def script(name: str) -> tuple[str, str]:
    return sys.executable, str(Path(__file__).with_name(name))


def test_chief_continues_to_read_after_data_worker_and_dispatcher_are_killed(job: Job, tmp_path: Path) -> None:
    go = tmp_path / "go"
    roles = ("--ps", "0", "--workers", "0", "--data-workers", "2")
    job.start(*roles, command=(*script("read_on.py"), str(go)))
    assert wait_until(lambda: "has read 1\n" in job.stdout, timeout_seconds=120), job.stdout + job.stderr
    job.wait_for_event("serving", "data-worker/1", timeout_seconds=120)
    os.kill(child_of("data-worker/1"), signal.SIGKILL)

    def has_two_lives() -> bool:
        return [(e["kind"], e["task"]) for e in job.events].count(("serving", "data-worker/1")) == 2

    assert wait_until(has_two_lives, timeout_seconds=120), job.events
    assert wait_until(lambda: "has read 1000\n" in job.stdout, timeout_seconds=60), job.stdout
    os.kill(child_of("data-dispatcher/0"), signal.SIGKILL)
    go.touch()
    assert job.wait(150) == 0
    assert {task["task"]: (task["starts"], task["state"]) for task in job.result["tasks"]} == {
        "chief/0": (1, "terminated"),
        "data-dispatcher/0": (2, "terminated"),
        "data-worker/0": (1, "terminated"),
        "data-worker/1": (2, "terminated"),
    }
    found = re.search(r"read (\d+), (\d+) of them different", job.stdout)
    assert found is not None
    assert found[1] == found[2]  # nothing twice; the elements of the killed worker are lost, as TensorFlow documents
    assert 1900 <= int(found[1]) <= 2000


@pytest.mark.long
def test_workers_of_a_coordinator_read_disjoint_shares(job: Job) -> None:
    job.start("--ps", "1", "--workers", "2", "--data-workers", "1", command=script("read_shares.py"))
    assert job.wait(200) == 0, job.stdout + job.stderr
    result = json.loads(job.stdout.partition('chief/0 | {"files"')[2].partition("\n")[0].join(('{"files"', "")))
    for index in (0, 1):
        names = [name for worker, names, _ in result["read"] if worker == index for name in names]
        share = share_of(result["files"], index, 2)
        assert len(names) >= len(share)
        assert names == list(itertools.islice(itertools.cycle(share), len(names)))
    numbers = [number for _, _, numbers in result["read"] for number in numbers]
    assert len(set(numbers)) == len(numbers) >= 30
