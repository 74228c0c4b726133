"""The failing scripts as batch jobs: result.json and `status` name the failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.failing.scripts import SCRIPTS, TENSORFLOW
from tests.failing.test_failing_scripts import cases, check
from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab


@pytest.mark.parametrize("name", cases([*SCRIPTS], quick=("exception", "closure")))
def test_batch_job_names_failure_of_script(name: str, tmp_path: Path, lab: SlurmLab) -> None:
    if name in TENSORFLOW:
        pytest.importorskip("tensorflow")
    script = SCRIPTS[name]
    command = script.write(tmp_path, sys.executable)
    options = ("--name", "failing", "--cpus-per-task", "1", *script.options)
    job_id = lab.run(TF4SLURM, "submit", *options, "--", *command, cwd=tmp_path).stdout.strip()
    state, _ = lab.wait_for_job(job_id, 170)
    assert state == "FAILED"
    result = json.loads((tmp_path / "runs" / f"failing-{job_id}" / "result.json").read_text())
    check(result["failure"], script)
    shown = lab.run(TF4SLURM, "status", job_id, cwd=tmp_path).stdout
    assert (f"{script.type}: {script.message[:60]}" if script.message else script.type) in shown
