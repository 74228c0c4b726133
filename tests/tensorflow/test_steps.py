"""run_steps with real TensorFlow processes on this host, undisturbed and disturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

TRAINING = Path(__file__).with_name("training.py")
ROLES = ("--ps", "1", "--workers", "2")
NOTEBOOK = """
import os, pathlib, signal
import tf4slurm
from tf4slurm.errors import ParameterServerLostError, TrainingError
from tf4slurm.tensorflow import run_steps

with tf4slurm.LocalCluster(ps=1, workers=2) as cluster:
    strategy = cluster.strategy()
    import tensorflow as tf
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
        step = tf.Variable(0, dtype=tf.int64)
    traced = []

    def step_fn(batch):
        traced.append(1)
        images, labels = batch
        weight.assign_add(1.0)
        return tf.reduce_mean(images) + tf.cast(labels[0], tf.float32)

    def data(rows):
        return lambda: tf.data.Dataset.from_tensors((tf.constant([1.0, 2.0]), tf.constant([3]))).repeat(rows)

    def iterate(rows):
        return iter(coordinator.create_per_worker_dataset(data(rows)))

    @tf.function
    def who():
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    endless = iterate(None)
    ready = set()
    while len(ready) < 2:  # a worker whose dataset is not there yet would leave all steps to the other
        ready.update(map(int, coordinator.fetch([coordinator.schedule(who) for _ in range(4)])))
    first = run_steps(coordinator, step_fn, 300, dataset=endless, step=step)
    print("first", first.step, first.steps, min(first.steps_by_worker) > 0, first.mean_loss, weight.numpy())
    times = len(traced)
    again = run_steps(coordinator, step_fn, 300 + 64, dataset=endless, step=step, steps_per_call=1)
    print("again", again.step, again.steps, len(traced) - times, weight.numpy())
    for number, (rows, loss) in enumerate([(3, tf.reduce_mean), (None, tf.identity)]):
        try:
            run_steps(coordinator, lambda batch: loss(batch[0]), 50, dataset=iterate(rows))
        except TrainingError as error:
            print("refused", number, error)
    mine = {b"TF4SLURM_TASK=ps/0", b"TF4SLURM_TEST_MARK=" + os.environ["TF4SLURM_TEST_MARK"].encode()}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mine <= set((path / "environ").read_bytes().split(bytes(1))):
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:
            pass
    try:
        run_steps(coordinator, step_fn, 10_000, dataset=endless, step=step)
    except ParameterServerLostError as error:
        print("lost", error)
"""


def start(job: Job, steps: int, every_steps: int) -> None:
    checkpoints = str(job.directory.parent / "checkpoints")
    job.start(*ROLES, command=(sys.executable, str(TRAINING), checkpoints, str(steps), str(every_steps)))


def wait_for_checkpoint(job: Job, number: int) -> None:
    index = job.directory.parent / "checkpoints" / f"ckpt-{number}.index"
    assert wait_until(index.exists, 90), job.stdout + job.stderr


def saved_steps(job: Job) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in (job.directory.parent / "checkpoints").glob("*.index")]


def weight_of(job: Job, step: int) -> float:
    reader = tf.train.load_checkpoint(str(job.directory.parent / "checkpoints" / f"ckpt-{step}"))
    return float(reader.get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE"))


def result_of(job: Job) -> dict[str, Any]:
    (line,) = re.findall(r"chief/0 \| done (.*)", job.stdout)
    found: dict[str, Any] = json.loads(line)
    return found


def test_steps_are_exact_and_errors_are_clear(tmp_path: Path) -> None:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=170
    )
    said = ran.stdout.splitlines()
    assert said[:2] == ["first 300 300 True 4.5 300.0", "again 364 64 0 364.0"], ran.stdout + ran.stderr
    assert said[2].startswith("refused 0 The dataset of a worker has ended")
    assert "refused 1" in ran.stdout
    assert "step_fn returned a loss of shape (2,), not one number" in ran.stdout
    assert said[-1].startswith("lost A ps is gone")


def test_a_killed_workers_steps_run_again_and_the_counter_tells(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job")
    start(job, 3000, 300)
    wait_for_checkpoint(job, 300)
    os.kill(child_of("worker/1"), signal.SIGKILL)
    assert job.wait(120) == 0, job.stdout + job.stderr
    done = result_of(job)
    assert 3000 - 2 * 64 <= done["steps"] <= 3000  # those of two closures perhaps again
    assert 3000 <= done["step"] <= 3000 + 2 * 64
    saved = {step: weight_of(job, step) for step in saved_steps(job)}
    assert all(step % 300 == 0 or step == done["step"] for step in saved)
    applied = saved | {done["step"]: done["weight"]}
    assert all(abs(step - weight) <= 1 for step, weight in applied.items())  # the worker may have been between the two
    assert [task["starts"] for task in job.result["tasks"]] == [1, 1, 1, 2]


@pytest.mark.long
def test_a_stop_saves_and_the_next_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job")
    start(job, 1_000_000, 300)
    wait_for_checkpoint(job, 300)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    stopped = result_of(job)
    assert stopped["is_stopped"]
    assert 300 <= stopped["step"] == stopped["weight"] == stopped["steps"]
    (tmp_path / "again").mkdir()
    again = Job(tmp_path / "again")
    start(again, stopped["step"] + 100, 1_000_000)
    assert again.wait(120) == 0, again.stdout + again.stderr
    assert f"ckpt-{stopped['step']} {stopped['step']} {stopped['weight']}" in again.stdout
    done = result_of(again)
    assert done["steps"] == 100
    assert done["step"] == done["weight"] == stopped["step"] + 100
    assert (tmp_path / "checkpoints" / f"ckpt-{done['step']}.index").exists()
