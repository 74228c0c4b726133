"""The loss of a host of a job with a spare, on a real Slurm with real training: time until it trains again."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.measure import Figure
from tests.faults.cases import Form
from tests.faults.job import TrainingJob
from tests.slurm.lab import SlurmLab

OPTIONS = ("--workers", "1", "--spares", "1", "--max-attempts", "2")
_SECONDS = 120.0


def measure_spares(directory: Path, rounds: int) -> list[Figure]:
    """Cut the power of the host of a worker, a ps and the chief; measure the seconds until the next training step."""
    return [
        Figure(
            f"the host of {target} loses its power, until training goes on from the checkpoint on a spare",
            "s",
            tuple(_measure(directory / f"{target.replace('/', '-')}-{number}", target) for number in range(rounds)),
            "< 30",
        )
        for target in ("worker/0", "ps/0", "chief/0")
    ]


def _measure(directory: Path, target: str) -> float:
    directory.mkdir()
    with SlurmLab() as lab:
        job = TrainingJob(directory, lab, "")
        try:
            job.start(Form.SALLOC, OPTIONS, {}, None)
            job.wait_for((directory / "saved").exists, _SECONDS, "no checkpoint was saved")
            lost_at = time.time()
            lab.crash(job.node_of(target))
            job.wait_for(lambda: any(attempt == 2 for attempt, _, _ in job.steps()), _SECONDS, "no step followed")
            job.finish()
            assert job.wait_for_exit_code(_SECONDS) == 0, job.output
            return next(at for attempt, _, at in job.steps() if attempt == 2) - lost_at
        finally:
            job.close()
