"""The resources that Slurm gave to a job are recorded while it runs, and shown in the report."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab


def test_report_shows_the_resources_of_a_batch_job(lab: SlurmLab, tmp_path: Path) -> None:
    end = tmp_path / "end"
    script = tmp_path / "train.py"
    script.write_text(f"import pathlib, time\nwhile not pathlib.Path({str(end)!r}).exists():\n    time.sleep(0.05)\n")
    line = shlex.join([TF4SLURM, "run", "--runs-directory", str(tmp_path / "runs"), "--", sys.executable, str(script)])
    batch = tmp_path / "job.sh"
    batch.write_text(f"#!/bin/bash\nexec {line}\n")
    options = ("-N4", "-n4", "--time=00:10:00", "-o", str(tmp_path / "slurm.out"))
    job_id = lab.run("sbatch", "--parsable", *options, str(batch)).stdout.strip()
    run = tmp_path / "runs" / f"train-{job_id}"
    assert wait_until((run / "slurm.json").exists, 60), (tmp_path / "slurm.out").read_text()
    resources = json.loads((run / "slurm.json").read_text())
    assert 0 < resources["submitted"] <= resources["started"]
    assert (resources["cpus"], resources["limit_seconds"]) == (4, 600)
    assert wait_until((run / "samples.jsonl").exists, 60)
    end.touch()
    assert lab.wait_for_job(job_id, timeout_seconds=60) == ("COMPLETED", "0:0")
    report = (run / "report.html").read_text()
    assert f"job {job_id}" in report
    assert "<td>allocated by Slurm</td><td></td><td>4</td>" in report
