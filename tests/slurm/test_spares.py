"""Spares take the place of tasks whose host loses its power, on a real Slurm with real training."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.cases import Form
from tests.faults.job import TrainingJob
from tests.jobs import CHILD, TF4SLURM, Job
from tests.processes import MarkedProcess, marked_processes, wait_until, wait_until_gone
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import child_id, make_job

ROOT = Path(__file__).parents[2]
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
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.keras
@pytest.mark.timeout(300)
def test_spare_becomes_a_lost_worker_without_another_attempt(lab: SlurmLab, tmp_path: Path) -> None:
    """The script trains with run_steps, whose workers can change."""
    script = ROOT / "tests" / "tensorflow" / "joining_script.py"
    steps = tmp_path / "children" / "steps"

    def lines() -> list[list[str]]:
        whole = steps.read_text().rpartition("\n")[0] if steps.exists() else ""
        return [line.split() for line in whole.splitlines()]

    with make_job(tmp_path, lab) as job:
        options = ("--ps=1", "--workers=2", "--spares=1", "--max-attempts=2", "--heartbeat-timeout=10")
        prefix = ("salloc", "-Q", "--no-kill", "-N4", "-n5")
        job.start(*options, prefix=prefix, command=[sys.executable, str(script), str(job.children)])
        assert wait_until(lambda: len(lines()) > 3, 120), job.stderr
        places = {event["task"]: event["text"].split()[2] for event in job.events if event["kind"] == "started"}
        lost = next(task for task in ("worker/0", "worker/1") if list(places.values()).count(places[task]) == 1)
        try:
            lab.crash(places[lost])
            job.wait_for_event("replaced", "spare/0", 60)
            index = int(lost[-1])
            moved_at = time.time()
            assert wait_until(
                lambda: any(float(line[0]) > moved_at and int(line[4 + index]) for line in lines()[-5:]), 120
            ), (job.events, lines()[-5:])
            (job.children / "finish").touch()
            assert job.wait(60) == 0, job.stderr
        finally:
            lab.boot(places[lost])
            lab.wait_idle(90)
    assert job.result["attempts"] == 1
    assert all(int(line[3]) >= int(line[2]) for line in lines())


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
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def kinds_of(job: Job) -> set[str]:
    return {event["kind"] for event in job.events}


def is_agent(process: MarkedProcess) -> bool:
    return "tf4slurm.agent.agent" in process.command and "srun" not in process.command


def resumed_steps(training: TrainingJob) -> list[int]:
    return [step for attempt, step, _ in training.steps() if attempt == 2]


def test_requeued_job_excludes_the_node_that_failed(lab: SlurmLab) -> None:
    job_id = lab.run(
        "sbatch", "--parsable", "--requeue", "-x", "r1-n9", "-N1", "-o/dev/null", "--wrap", "sleep 300"
    ).stdout.strip()
    try:
        assert wait_until(lambda: "JobState=RUNNING" in lab.run("scontrol", "show", "job", job_id).stdout, 60)
        code = f"from tf4slurm.launch.requeue import Requeue; print(Requeue({job_id!r}, 1).requeue(('r1-n2',)))"
        assert lab.run(sys.executable, "-c", code, cwd=ROOT).stdout == "True\n"
        shown = lab.run("scontrol", "show", "job", job_id).stdout
        assert "ExcNodeList=r1-n9,r1-n2" in shown, shown
    finally:
        lab.run("scancel", job_id)


@pytest.fixture
def job(lab: SlurmLab, tmp_path: Path) -> Iterator[Job]:
    with make_job(tmp_path, lab) as job:
        yield job


def test_tasks_of_plain_srun_have_spares(lab: SlurmLab, job: Job) -> None:
    options = ("--runs-directory", str(job.directory / "runs"), "--ps=1", "--workers=1", "--spares=1")
    command = (TF4SLURM, "task", *options, "--max-attempts=2", "--", sys.executable, str(CHILD), str(job.children))
    step = lab.popen("srun", "-Q", "-K0", "-N4", "-n4", *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    job.wait_for_child("worker-0")
    os.kill(psutil.Process(child_id("worker-0")).ppid(), signal.SIGKILL)
    job.wait_for_child("worker-0", 2)
    job.end_child("chief-0")
    assert step.wait(60) != 0  # srun counts the killed agent
    assert job.result["exit_code"] == 0
