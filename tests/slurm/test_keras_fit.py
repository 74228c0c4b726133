"""`fit` over four hosts of a real Slurm, with a task that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Job
from tests.slurm.lab import SlurmLab
from tests.tensorflow.test_keras_fit import assert_trains_after_kill

pytestmark = [pytest.mark.keras, pytest.mark.timeout(400)]


@pytest.mark.long
@pytest.mark.parametrize("task", ["worker/0", "ps/0"])
def test_training_continues_after_a_task_is_killed(tmp_path: Path, lab: SlurmLab, task: str) -> None:
    job = Job(
        tmp_path, lambda command, **options: lab.popen(*command, stdout=options["stdout"], stderr=options["stderr"])
    )
    assert_trains_after_kill(job, tmp_path, task, prefix=("salloc", "-Q", "-N4", "-n4"))
