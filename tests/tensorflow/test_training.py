"""run_steps with real TensorFlow processes on this host, with and without failures."""

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

from tests.faults.disk import fill, small_disk
from tests.jobs import Job
from tests.processes import child_of, wait_until

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

TRAINING = Path(__file__).with_name("training.py")
ROLES = ("--ps", "1", "--workers", "2")
FULL = "Make room on its file system: it, or this user's quota of it, is full."
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
    def task_index():
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    endless = iterate(None)
    ready = set()
    while len(ready) < 2:  # a worker whose dataset is not there yet would leave all steps to the other
        ready.update(map(int, coordinator.fetch([coordinator.schedule(task_index) for _ in range(4)])))
    first = run_steps(coordinator, step_fn, 300, dataset=endless, step=step)
    print("first", first.step, first.steps, first.mean_loss, weight.numpy())
    times = len(traced)
    again = run_steps(coordinator, step_fn, 300 + 64, dataset=endless, step=step, steps_per_call=1)
    print("again", again.step, again.steps, len(traced) - times, weight.numpy())
    by_worker = first.steps_by_worker
    while min(by_worker) == 0:  # for ever if a worker takes no part; one may only be late
        done = run_steps(coordinator, step_fn, int(step.numpy()) + 300, dataset=endless, step=step)
        by_worker = [sum(counts) for counts in zip(by_worker, done.steps_by_worker)]
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
        run_steps(coordinator, step_fn, 10_000_000, dataset=endless, step=step)
    except ParameterServerLostError as error:
        print("lost", error)
"""

ENDED = """
import os, signal, sys, threading, time
import numpy as np
import tf4slurm
from tf4slurm.errors import TrainingError
from tf4slurm.tensorflow import Checkpoints, run_steps

with tf4slurm.LocalCluster(ps=1, workers=2) as cluster:
    strategy = cluster.strategy()
    import tensorflow as tf
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
        step = tf.Variable(0, dtype=tf.int64)

    def step_fn():
        weight.assign_add(1.0)
        return {"loss": tf.constant(3.0), "error": tf.constant(0.5)}

    done = run_steps(coordinator, step_fn, np.int64(21), step=step, steps_per_call=np.int32(4))
    print("done", done.step, done.means, done.mean_loss)

    wrong = [
        {"steps": 30.0}, {"steps": -1}, {"steps_per_call": 2.0}, {"steps_per_call": 0}, {"timeout_seconds": "1"},
        {"timeout_seconds": 0}, {"step": tf.Variable(0.0)}, {"checkpoints": "directory"}, {"step_fn": None},
        {"dataset": tf.data.Dataset.range(3)}, {"coordinator": strategy},
    ]
    right = {"coordinator": coordinator, "step_fn": step_fn, "steps": 30, "step": step}
    for options in wrong:
        try:
            run_steps(**{**right, **options})
        except (TypeError, ValueError) as error:
            print("refused", *options, str(error).startswith(f"{next(iter(options))} is "))
    for options in ({"every_steps": 2.5}, {"every_steps": 0}, {"every_minutes": 0}, {"keep": 0.5}):
        try:
            Checkpoints("checkpoints", step=step, weight=weight, **options)
        except (TypeError, ValueError) as error:
            print("refused", *options, str(error).startswith(f"{next(iter(options))} is "))

    def of(result):
        def returning():
            weight.assign_add(0.0)
            return result()
        return returning

    for name, result in {
        "tuple": lambda: (tf.constant(1.0), tf.constant(2.0)), "float": lambda: 0.5, "operation": tf.no_op,
        "text": lambda: tf.constant("a"), "name": lambda: {"step": tf.constant(1)}, "value": lambda: {"loss": 0.5},
    }.items():
        try:
            run_steps(coordinator, of(result), 30, step=step)
        except TrainingError as error:
            print("returned", name)
    try:
        run_steps(coordinator, of(lambda: sys.exit(5)), 30, step=step)
    except SystemExit as error:
        print("exit", error.code)

    def interrupt(first):
        while int(step.numpy()) < first:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(4):
        first = int(step.numpy()) + 500
        threading.Thread(target=interrupt, args=(first,)).start()
        try:
            run_steps(coordinator, step_fn, 10_000_000, step=step)
        except KeyboardInterrupt:
            at, until = int(step.numpy()), time.monotonic() + 2
            while time.monotonic() < until and int(step.numpy()) == at:
                time.sleep(0.01)
            print("interrupted", at >= first, int(step.numpy()) == at == weight.numpy())
    again = run_steps(coordinator, step_fn, at + 100, step=step)
    print("again", again.steps, again.step - at, weight.numpy() - at)
"""


SLOW_SAVES = """
import time
import tf4slurm
from tf4slurm.tensorflow import Checkpoints, fit, run_steps

with tf4slurm.LocalCluster(ps=2, workers=2) as cluster:
    strategy = cluster.strategy()
    import keras
    import tensorflow as tf
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
        step = tf.Variable(0, dtype=tf.int64)

    def step_fn():
        weight.assign_add(1.0)

    class SlowSaves:
        def __init__(self, checkpoints, counter):
            self._manager, self._counter, self.made = checkpoints._manager, counter, []

        def save(self, checkpoint_number):
            time.sleep(1)
            self.made.append(int(self._counter) - checkpoint_number)
            return self._manager.save(checkpoint_number=checkpoint_number)

    for consistent in (False, True):
        options = {"every_steps": 200, "keep": 99, "consistent": consistent}
        checkpoints = Checkpoints(str(consistent), step=step, **options, weight=weight)
        slow = checkpoints._manager = SlowSaves(checkpoints, step)
        run_steps(coordinator, step_fn, int(step) + 1000, checkpoints=checkpoints, steps_per_call=5)
        print(consistent, slow.made[0] > 0, slow.made[-1], max(slow.made) > 0, int(step), float(weight), flush=True)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        epochs = tf.Variable(0, dtype=tf.int64)

    def dataset_fn():
        return tf.data.Dataset.from_tensors((tf.zeros((1, 1)), tf.zeros((1, 1)))).repeat(1000)

    options = {"coordinator": coordinator, "steps_per_epoch": 300, "verbose": 0}
    checkpoints = Checkpoints("fit", step=epochs, keep=99, model=model)
    slow = checkpoints._manager = SlowSaves(checkpoints, epochs)
    fit(model, dataset_fn, epochs=9, checkpoints=checkpoints, **options)
    print("fit", slow.made[0] > 0, slow.made[-1], int(epochs))

    def is_saving(*_):
        saving.append(checkpoints._saving is not None)

    saving = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=is_saving)
    look.on_test_begin = is_saving
    data = (tf.zeros((1, 1)), tf.zeros((1, 1)))
    checkpoints = Checkpoints("callbacks", step=epochs, model=model)
    checkpoints._manager = SlowSaves(checkpoints, epochs)
    fit(model, dataset_fn, epochs=3, callbacks=[look], validation_data=data, checkpoints=checkpoints, **options)
    print("callbacks", saving)
"""


def start(job: Job, steps: int, every_steps: int) -> None:
    checkpoints = str(job.directory.parent / "checkpoints")
    job.start(*ROLES, command=(sys.executable, str(TRAINING), checkpoints, str(steps), str(every_steps)))


def wait_for_checkpoint(job: Job) -> None:
    assert wait_until(lambda: bool(saved_steps(job)), 90), job.stdout + job.stderr


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
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["first 300 300 4.5 300.0", "again 364 64 0 364.0"], ran.stdout + ran.stderr
    assert lines[2].startswith("refused 0 The dataset of a worker has ended")
    assert "refused 1" in ran.stdout
    assert "step_fn returned a loss of shape (2,), not one number" in ran.stdout
    assert lines[-1].startswith("lost The variables of the cluster are lost. ps/0 on ")


def test_workers_train_on_during_a_save(tmp_path: Path) -> None:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", SLOW_SAVES], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=170
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("False", "True", "fit", "callbacks"))]
    expected = ["False True 0 True 1000 1000.0", "True False 0 False 2000 2000.0", "fit True 0 2700"]
    expected.append(f"callbacks {[False] * 6}")
    assert lines == expected, ran.stdout + ran.stderr
    for path in [*(tmp_path / "False").glob("*.index"), *(tmp_path / "True").glob("*.index")]:
        number = int(path.stem.partition("-")[2])
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        step, weight = (reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE") for name in ("step", "weight"))
        assert step == number <= weight, "the counter is never ahead of the variables"
        assert number == weight or path.parent.name == "False"


def test_run_steps_checks_arguments_and_stops_training_on_any_exit(tmp_path: Path) -> None:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", ENDED], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=170
    )
    lines = ran.stdout.splitlines()
    assert lines[:1] == ["done 21 {'error': 0.5, 'loss': 3.0} 3.0"], ran.stdout + ran.stderr
    names = ["steps", "steps", "steps_per_call", "steps_per_call", "timeout_seconds", "timeout_seconds", "step"]
    names += ["checkpoints", "step_fn", "dataset", "coordinator", "every_steps", "every_steps", "every_minutes", "keep"]
    assert [line for line in lines if line.startswith("refused")] == [f"refused {name} True" for name in names]
    returned = ["tuple", "float", "operation", "text", "name", "value"]
    assert [line for line in lines if line.startswith("returned")] == [f"returned {name}" for name in returned]
    assert lines[-6:] == ["exit 5", *["interrupted True True"] * 4, "again 100 100 100.0"], ran.stdout + ran.stderr


def test_steps_of_a_killed_worker_run_again_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job")
    start(job, 3000, 300)
    wait_for_checkpoint(job)
    os.kill(child_of("worker/1"), signal.SIGKILL)
    assert job.wait(120) == 0, job.stdout + job.stderr
    done = result_of(job)
    assert 3000 - 2 * 64 <= done["steps"] <= 3000  # the steps of two closures may run again
    assert 3000 <= done["step"] <= 3000 + 2 * 64
    saved = {step: weight_of(job, step) for step in saved_steps(job)}
    assert len(saved) == len({step // 300 for step in saved}) > 3
    assert all(step <= weight for step, weight in saved.items())
    assert 0 <= done["weight"] - done["step"] <= 1  # the worker may have been between the two
    assert [task["starts"] for task in job.result["tasks"]] == [1, 1, 1, 2]
    newest = job.result["tasks"][0]["checkpoint"]
    assert newest["newest"] == f"{tmp_path}/checkpoints/ckpt-{done['step']}"
    assert (newest["step"], newest["num_saves"], newest["error"]) == (done["step"], len(saved), "")
    assert len([event for event in job.events if event["kind"] == "saved"]) == len(saved)


def test_training_goes_on_while_due_saves_fail_on_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job")
    with small_disk(tmp_path / "checkpoints"):
        start(job, 1_000_000, 300)
        wait_for_checkpoint(job)

        def fill_until_saves_fail() -> bool:
            fill(tmp_path / "checkpoints")
            return len(failed_saves(job)) >= 3

        assert wait_until(fill_until_saves_fail, 60), job.stdout + job.stderr
        (tmp_path / "checkpoints" / "filling").unlink()
        num_saved = len(saves(job))
        assert wait_until(lambda: len(saves(job)) > num_saved, 60), job.stdout + job.stderr
        assert job.process is not None
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM
        done = result_of(job)
        assert done["is_stopped"]
        assert max(saved_steps(job)) == done["step"] <= weight_of(job, done["step"])
    text = re.sub(r"step \d+", "step N", failed_saves(job)[0])
    where = f"chief/0 on {job.result['tasks'][0]['node']}"
    cause = f"The checkpoint of step N could not be written to {tmp_path}/checkpoints: No space left on device."
    assert text == f"{where} could not save: {cause} {FULL}"
    assert [task["starts"] for task in job.result["tasks"]] == [1, 1, 1, 1]


def saves(job: Job) -> list[str]:
    return [event["text"] for event in job.events if event["kind"] == "saved"]


def failed_saves(job: Job) -> list[str]:
    return [event["text"] for event in job.events if event["kind"] == "not_saved"]


@pytest.mark.long
def test_stopped_training_saves_and_the_next_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job")
    start(job, 1_000_000, 300)
    wait_for_checkpoint(job)
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
