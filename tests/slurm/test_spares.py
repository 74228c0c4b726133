"""Spares take the place of tasks whose host loses its power, on a real Slurm with real training."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import Form
from tests.faults.job import TrainingJob
from tests.jobs import Job
from tests.processes import MarkedProcess, marked_processes, wait_until_gone
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import make_job

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


@pytest.fixture(scope="module")
def shared_lab(slurm: None) -> Iterator[SlurmLab]:
    with SlurmLab() as lab:
        yield lab


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(50))
def test_job_survives_a_random_loss(shared_lab: SlurmLab, tmp_path: Path, process_mark: str, seed: int) -> None:
    """A host loses its power, or an agent is killed, at any time; the children are no TensorFlow."""
    choose = random.Random(seed)
    lab, node, is_host = shared_lab, choose.choice(shared_lab.nodes), choose.random() < 0.6
    options = ("--ps=1", "--workers=1", "--spares=3", "--max-attempts=3", "--heartbeat-timeout=2", "--start-timeout=20")
    try:
        with make_job(tmp_path, lab) as job:
            job.start(*options, "--heartbeat-interval=0.3", prefix=("salloc", "-Q", "--no-kill", "-N4", "-n6"))
            time.sleep(choose.uniform(0.0, 3.0))
            has_formed = bool(list(tmp_path.glob("runs/*/events.jsonl"))) and "checking" in kinds_of(job)
            if is_host:
                lab.crash(node)
            else:
                agents = [process for process in marked_processes(process_mark) if is_agent(process)]
                os.kill(choose.choice(agents).pid, signal.SIGKILL) if agents else None
            time.sleep(choose.uniform(0.0, 4.0))
            job.end_child("chief-0")
            code = job.wait(90)
            # Before the cluster has formed, srun may fail, or a task may never register.
            assert code == 0 or (not has_formed and code in (3, 6, 7)), job.stderr
            assert job.result["exit_code"] == code
    finally:
        if is_host:
            lab.boot(node)
        lab.wait_idle(60)
    assert wait_until_gone(process_mark, timeout_seconds=10) == []


def kinds_of(job: Job) -> set[str]:
    return {event["kind"] for event in job.events}


def is_agent(process: MarkedProcess) -> bool:
    return "tf4slurm.agent.agent" in process.command and "srun" not in process.command


def resumed_steps(training: TrainingJob) -> list[int]:
    return [step for attempt, step, _ in training.steps() if attempt == 2]
