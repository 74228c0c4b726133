"""`fit` over four hosts of a real Slurm, with a task that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import SALLOC, make_job
from tests.tensorflow.test_keras_fit import assert_trains_after_kill

pytestmark = [pytest.mark.keras, pytest.mark.timeout(400)]


@pytest.mark.long
@pytest.mark.parametrize("task", ["worker/0", "ps/0"])
def test_training_continues_after_a_task_is_killed(tmp_path: Path, lab: SlurmLab, task: str) -> None:
    with make_job(tmp_path, lab) as job:
        assert_trains_after_kill(job, tmp_path, task, prefix=SALLOC)
