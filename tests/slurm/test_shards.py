"""Data shards on a real Slurm: a lost ps or chief, and a requeue, lose no shard and repeat only leased ones."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM, Job
from tests.local.test_shards import LEASED, MOST_REPEATED, SCRIPT, SHARDS, TASKS, check, go, logged, wait_for
from tests.processes import child_of, wait_until
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import make_job

SALLOC = ("salloc", "-Q", "-N4", "-n4")
ROLES = ("--ps", "1", "--workers", "2")


@pytest.fixture
def job(lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("SAVES", "1")
    with make_job(tmp_path, lab) as job:
        yield job


@pytest.mark.parametrize("victim", ["ps/0", "chief/0"])
def test_next_attempt_continues_after_a_killed_task(job: Job, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLD_AT", "6")
    command = (sys.executable, str(SCRIPT), str(job.children), "0.05", "300")
    job.start(*ROLES, "--max-attempts", "2", command=command, prefix=SALLOC)
    for task in TASKS:
        wait_for(job, 6, tasks=(task,))
    os.kill(child_of(victim), signal.SIGKILL)  # the script knows its id in its host's namespace only
    assert job.wait(60) == 0, job.stderr
    check(job, MOST_REPEATED)
    (shards,) = job.result["shards"]
    assert (job.result["attempts"], shards["done"], shards["total"]) == (2, SHARDS, SHARDS)
    assert sum(Counter(logged(job, "seen")).values()) - SHARDS <= shards["repeated"] <= MOST_REPEATED


def test_requeued_job_repeats_only_leased_shards(job: Job, lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLD_AT", "4")
    runs, output = job.directory / "runs", job.directory / "slurm.out"
    options = ("--runs-directory", str(runs), *ROLES, "--requeue", "1")
    command = [TF4SLURM, "run", *options, "--", sys.executable, str(SCRIPT), str(job.children), "0.3", "300"]
    batch = job.directory / "job.sh"
    batch.write_text(f"#!/bin/bash\nexec {shlex.join(command)}\n")
    slurm_options = ("-N4", "-n4", "--requeue", "-o", str(output), "--open-mode=append")
    job_id = lab.run("sbatch", "--parsable", *slurm_options, batch).stdout.strip()
    wait_for(job, 4, tasks=("chief-0",))
    lab.run("scancel", "--signal=USR1", "--batch", job_id)  # the signal that Slurm sends before the time limit
    job.wait_for_event("stopping")
    go(job)
    assert wait_until(lambda: any(runs.glob("*/result.json")), 60)
    lab.release(job_id)
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0"), output.read_text()
    first, second = [json.loads(path.read_text()) for path in sorted(runs.glob("*/result.json"))]
    assert (first["state"], second["state"]) == ("REQUEUED", "COMPLETED")
    assert first["shards"][0]["done"] < second["shards"][0]["done"] == SHARDS
    seen = Counter(logged(job, "seen"))
    assert set(seen) == set(logged(job, "done")) == set(range(SHARDS))
    leased = 2 * LEASED + 1  # by the workers and the chief
    assert sum(seen.values()) - SHARDS <= second["shards"][0]["repeated"] <= leased


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["ps/0", "chief/0", "worker/0"])
def test_training_loses_no_row_with_a_killed_task(job: Job, victim: str) -> None:
    pytest.importorskip("tensorflow")
    from tests.tensorflow.test_shards import EPOCHS, ROWS, TRAINING, counts, go, wait_for_checkpoint

    command = (sys.executable, str(TRAINING), str(job.directory / "checkpoints"))
    job.start(*ROLES, "--max-attempts", "2", command=command, prefix=SALLOC)
    wait_for_checkpoint(job)
    os.kill(child_of(victim), signal.SIGKILL)
    go(job)
    assert job.wait(200) == 0, job.stderr
    lowest, _, total = counts(job)
    assert lowest >= EPOCHS
    assert total <= EPOCHS * ROWS + 2 * 4 * 10  # four shards of 10 rows in hand, each possibly repeated twice
    (shards,) = job.result["shards"]
    assert shards["done"] == shards["total"] == EPOCHS * ROWS // 10
    assert shards["repeated"] <= 4 + 2 * 5  # in hand, and done since the save, which is due after 5
