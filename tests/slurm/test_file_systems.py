"""The shared file system of a job fails on a real Slurm: it stalls for a minute, or the run directory disappears."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.faults.disk import freezable_disk, freeze, thaw
from tests.jobs import CHILD, NAMES, ROLES
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import SALLOC, make_job

PRINT_AND_RUN = """
import runpy, sys, threading, time

def count():
    for number in range(100_000):
        print("line", number, flush=True)
        time.sleep(0.1)

threading.Thread(target=count, daemon=True).start()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_stall_of_a_minute_costs_no_task_and_no_line(slurm: None, tmp_path: Path) -> None:
    with freezable_disk(tmp_path / "runs"), SlurmLab() as lab, make_job(tmp_path, lab) as job:
        job.start(*ROLES, prefix=SALLOC, command=(sys.executable, "-c", PRINT_AND_RUN, str(CHILD), str(job.children)))
        for name in NAMES:
            job.wait_for_child(name)
        freeze(tmp_path / "runs")
        time.sleep(60)  # the stall itself
        assert job.process is not None
        assert job.process.poll() is None
        thaw(tmp_path / "runs")
        job.end_child("chief-0")
        assert job.wait() == 0, job.stderr
        assert {"lost", "restarted"}.isdisjoint(event["kind"] for event in job.events)
        assert job.result["exit_code"] == 0
        for path in (job.run_directory / "logs").glob("*.log"):
            numbers = [int(number) for number in re.findall(r"^line (\d+)$", path.read_text(), re.MULTILINE)]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) > 300


def test_job_ends_as_usual_when_its_run_directory_disappears(lab: SlurmLab, tmp_path: Path) -> None:
    with make_job(tmp_path, lab) as job:
        job.start(*ROLES, prefix=SALLOC)
        for name in NAMES:
            job.wait_for_child(name)
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
        job.end_child("chief-0", 3)
        assert job.wait() == 3
        assert re.search(r"ERROR: '.*result\.json' cannot be written: No such file or directory", job.stderr)
        assert "FAILED with exit code 3" in job.stderr
        assert not (tmp_path / "runs").exists()
