"""What `tf4slurm run` writes down for those who watch: status.json, samples.jsonl, and where the job is found."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.jobs import ROLES, TF4SLURM, Job
from tests.processes import wait_until
from tf4slurm.job import Job as FoundJob
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.run_directory import RunDirectory

REPORTS = """
import os, sys, time, pathlib, tf4slurm
held = bytearray(30_000_000)
for step in range(10**6):
    if os.environ["TF4SLURM_TASK"] == "chief/0":
        tf4slurm.report(step=step, loss=1 / (step + 1))
    time.sleep(0.05)
    if pathlib.Path(sys.argv[1]).exists():
        break
"""


def test_where_a_job_stands_can_be_read_while_it_runs_and_after(job: Job, tmp_path: Path) -> None:
    script, end = tmp_path / "reports.py", tmp_path / "end"
    script.write_text(REPORTS)
    job.start(*ROLES, command=(sys.executable, str(script), str(end)))
    assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 20)
    run = RunDirectory(job.run_directory)

    def chief() -> dict[str, Any]:
        return (run.read_status() or {"tasks": [{}]})["tasks"][0]  # type: ignore[no-any-return]

    def is_told() -> bool:  # memory may have been measured before it held anything, and the first steps be told late
        return (chief().get("memory_bytes") or 0) > 30_000_000 and 1 < (chief().get("steps_per_second") or 0) <= 20

    assert wait_until(is_told, 40), run.read_status()
    status = run.read_status()
    assert status is not None
    assert (status["phase"], status["attempt"]) == ("training", 1)
    assert [task["task"] for task in status["tasks"]] == ["chief/0", "ps/0", "worker/0", "worker/1"]
    assert {task["state"] for task in status["tasks"]} == {"running"}
    assert chief()["metrics"]["loss"] > 0
    assert 1 < chief()["steps_per_second"] <= 20
    assert find_job(None, os.environ).run_directories == [run]
    end.touch()
    assert job.wait() == 0
    status = run.read_status()
    assert status is not None
    assert (status["phase"], status["reason"]) == ("ended", (run.read_result() or {})["reason"])
    steps = [sample["step"][0] for sample in run.read_samples()]
    reported = [step for step in steps if step is not None]
    assert reported == sorted(reported)
    assert run.read_samples()[-1]["metrics"]["0"]["loss"] > 0


def read_strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_metrics_that_are_no_finite_numbers_are_valid_json(job: Job) -> None:
    code = "import sys, tf4slurm; tf4slurm.report(step=1, loss=float('nan'), high=float('inf'), low=float('-inf'))"
    job.start("--ps", "0", "--workers", "0", command=(sys.executable, "-c", code))
    assert job.wait() == 0
    written = {"loss": "NaN", "high": "Infinity", "low": "-Infinity"}
    status = read_strictly((job.run_directory / "status.json").read_text())
    assert status["tasks"][0]["metrics"] == written
    samples = (job.run_directory / "samples.jsonl").read_text().splitlines()
    assert read_strictly(samples[-1])["metrics"] == {"0": written}
    shown = subprocess.run(
        [TF4SLURM, "status", "--json", job.run_directory], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert read_strictly(shown)[0]["tasks"][0]["metrics"] == written
    metrics = FoundJob.find(str(job.run_directory)).status().tasks[0].metrics
    assert math.isnan(metrics["loss"])
    assert (metrics["high"], metrics["low"]) == (math.inf, -math.inf)


def test_files_that_are_cut_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "cut")
    assert (run.read_job(), run.read_result(), run.read_events()) == (None, None, [])
    run.write_status({"phase": "training"})
    (run.path / "status.json").write_text('{"phase": "trai')
    run.events.write_text('{"kind": "registered"}\n[1]\n{"kind": "exi')
    assert run.read_status() is None
    assert run.read_events() == [{"kind": "registered"}]
