"""Spares take the place of tasks whose host loses its power, on a real Slurm with real training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import Form
from tests.faults.job import TrainingJob
from tests.processes import wait_until_gone
from tests.slurm.lab import SlurmLab

OPTIONS = ("--workers", "1", "--spares", "1", "--max-attempts", "2")


@pytest.fixture
def training(slurm: None, tmp_path: Path, process_mark: str) -> Iterator[TrainingJob]:
    with SlurmLab() as lab:
        job = TrainingJob(tmp_path, lab, process_mark)
        yield job
        job.close()


@pytest.mark.keras
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "target",
    ["worker/0", pytest.param("ps/0", marks=pytest.mark.long), pytest.param("chief/0", marks=pytest.mark.long)],
)
def test_training_goes_on_after_the_loss_of_a_host(training: TrainingJob, process_mark: str, target: str) -> None:
    training.start(Form.SALLOC, OPTIONS, {}, None)
    training.wait_for((training.directory / "saved").exists, 120, "no checkpoint was saved")
    training.lab.crash(training.node_of(target))
    training.wait_for(lambda: len(resumed_steps(training)) > 5, 120, "training does not go on")
    training.finish()
    assert training.wait_for_exit_code(60) == 0, training.output
    assert resumed_steps(training)[0] > 10, "it continues from the checkpoint"
    (replaced,) = [event for event in training.events if event["kind"] == "replaced"]
    assert target in replaced["text"]
    assert wait_until_gone(process_mark, timeout_seconds=10) == []


def resumed_steps(training: TrainingJob) -> list[int]:
    return [step for attempt, step, _ in training.steps() if attempt == 2]
