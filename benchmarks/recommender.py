"""The tutorial's recommender at full size: 10 million rows of 16 numbers on 2 ps, with 2 workers, on this host.

Three jobs: a tiny one, for the memory of a ps without tables; a full one; and one that continues from its checkpoints
for half as many steps, during which a ps is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import uuid
from pathlib import Path

from benchmarks.measure import Figure
from tests.jobs import Job
from tests.processes import MARK_VARIABLE, child_of, kill_leftovers, wait_until

_SCRIPT = Path(__file__).parents[1] / "TUTORIALS" / "train_recommender.py"
_ROWS, _WIDTH, _FLOAT_BYTES, _BATCH = 10_000_000, 16, 4, 8_192
_HALF_OF_TABLES_MB = _ROWS * _WIDTH * _FLOAT_BYTES / 2 / 1e6
_STEPS = 2_000
_PATIENCE_SECONDS = 900.0


def measure_recommender(directory: Path) -> list[Figure]:
    os.environ[MARK_VARIABLE] = mark = uuid.uuid4().hex  # `child_of` finds a ps by it
    try:
        return _measure(directory)
    finally:
        kill_leftovers(mark, timeout_seconds=3)


def _measure(directory: Path) -> list[Figure]:
    tiny = _start(directory / "tiny", directory / "none", steps=200, save_every=200, users=600, items=400)
    _finish(tiny)
    whole = _start(directory / "whole", directory / "checkpoints", steps=_STEPS, save_every=_STEPS // 2)
    report = _finish(whole)
    own = max(_ps_memory(tiny))
    memory = tuple(_ps_memory(whole))
    disturbed = _start(
        directory / "disturbed", directory / "checkpoints", steps=_STEPS * 3 // 2, save_every=_STEPS // 4
    )
    saved = directory / "checkpoints" / f"ckpt-{_STEPS * 5 // 4}.index"
    assert wait_until(saved.exists, _PATIENCE_SECONDS), disturbed.stdout + disturbed.stderr
    os.kill(child_of("ps/1"), signal.SIGKILL)
    killed = time.monotonic()
    again = f"going on from step {_STEPS * 5 // 4}"
    assert wait_until(lambda: again in disturbed.stdout, _PATIENCE_SECONDS), disturbed.stdout + disturbed.stderr
    resumed = time.monotonic() - killed
    after = _finish(disturbed)
    return [
        Figure("recommender: memory of a ps without tables", "MB", (own,), ""),
        Figure("recommender: peak memory of each ps", "MB", memory, f"< {1.5 * _HALF_OF_TABLES_MB + own:.0f}"),
        Figure("recommender: rows that are looked up", "1/s", (2 * _BATCH * report["steps"] / report["seconds"],), ""),
        Figure(
            "recommender: AUC, undisturbed",
            "",
            (report["auc"],),
            beside=f"the rule itself: {report['possible_auc']:.3f}",
        ),
        Figure("recommender: a ps killed to training again from its checkpoint", "s", (resumed,), ""),
        Figure("recommender: AUC after that, with half as many steps more", "", (after["auc"],), ""),
    ]


def _start(directory: Path, checkpoints: Path, **options: int) -> Job:
    directory.mkdir()
    job = Job(directory)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    places = ["--checkpoints", str(checkpoints), "--report-json", str(directory / "report.json")]
    command = (sys.executable, str(_SCRIPT), *arguments, *places)
    job.start("--ps", "2", "--workers", "2", "--max-attempts", "2", command=command)
    return job


def _finish(job: Job) -> dict[str, float]:
    assert job.wait(_PATIENCE_SECONDS) == 0, job.stdout + job.stderr
    found: dict[str, float] = json.loads((job.directory / "report.json").read_text())
    return found


def _ps_memory(job: Job) -> list[float]:
    """Return the highest sampled resident memory of each ps, in MB."""
    ranks = [rank for rank, task in enumerate(job.result["tasks"]) if re.match("ps/", task["task"])]
    samples = [json.loads(line) for line in (job.run_directory / "samples.jsonl").read_text().splitlines()]
    return [max(sample["memory_bytes"][rank] or 0 for sample in samples) / 1e6 for rank in ranks]
