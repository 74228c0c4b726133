"""LocalCluster: ps and workers that end with this process, their chief."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until, wait_until_gone

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

TRAIN = """
import asyncio, pathlib, time
import tf4slurm
from tf4slurm.jobs.schema import ResultFile

async def notebook():  # a cell runs in an event loop
    with tf4slurm.LocalCluster(ps=1, workers=2) as cluster:
        strategy = cluster.strategy()
        import tensorflow as tf
        with strategy.scope():
            total = tf.Variable(0.0)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        @tf.function
        def step():
            total.assign_add(1.0)

        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join()
        print("total", total.numpy(), "on", total.device)
        print("result", cluster.run_directory.read(ResultFile))
    print("result", cluster.run_directory.read(ResultFile))

asyncio.run(notebook())
"""
LEAD = """
import math
import tf4slurm
from tf4slurm.tensorflow import parameter_server_strategy, run_steps

with tf4slurm.LocalCluster(ps=1, workers=1) as cluster:
    import tensorflow as tf
    sharder = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    try:
        parameter_server_strategy(sharding="min-size", variable_partitioner=sharder)
    except ValueError as error:
        print(error)
    strategy, coordinator = parameter_server_strategy(variable_partitioner=sharder)
    with strategy.scope():
        table = tf.Variable(tf.zeros((4, 1)), name="table")
    outside = tf.Variable(1.0, name="outside")

    def step_fn():
        outside.assign_add(1.5)
        return tf.reduce_sum(tf.nn.embedding_lookup(table, [3])) + math.nan

    done = run_steps(coordinator, step_fn, 8)
    print("step", done.step, "parts", len(table.variables), "loss", done.mean_loss)
    with tf.summary.create_file_writer("summaries").as_default():
        tf.summary.scalar("loss", 0.5, step=8)
try:
    parameter_server_strategy()
except Exception as error:
    print(type(error).__name__)
"""
WAIT = """
import pathlib, time
import tf4slurm
with tf4slurm.LocalCluster(ps=1, workers=1):
    pathlib.Path("up").touch()
    time.sleep(600)
"""


def test_local_cluster_trains_and_ends_with_its_block(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "total 20.0 on /job:ps/replica:0/task:0" in done.stdout
    before, after = (line for line in done.stdout.splitlines() if line.startswith("result"))
    assert before == "result None"
    assert "exit_code=0" in after


def test_run_steps_on_a_local_cluster_warns_of_outside_variables_and_nan(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAD], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.stdout.splitlines() == [
        "Both sharding='min-size' and variable_partitioner are given. Give only one of them.",
        "step 8 parts 2 loss nan",
        "SlurmEnvironmentError",
    ], done.stdout + done.stderr
    assert done.stderr.count("made outside of the strategy's scope: outside:0.") == 1
    assert "AutoGraph could not transform" not in done.stderr
    assert done.stderr.count("loss is nan since step") == 1
    assert list((tmp_path / "summaries").glob("events.*"))


@pytest.mark.long
def test_local_cluster_ends_with_its_process(tmp_path: Path, process_mark: str) -> None:
    notebook = subprocess.Popen([sys.executable, "-c", WAIT], cwd=tmp_path)
    try:
        assert wait_until((tmp_path / "up").exists, 60)
    finally:
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.wait()
    assert not wait_until_gone(process_mark, 30)


def test_failed_start_shows_the_launchers_output(tmp_path: Path) -> None:
    code = "import tf4slurm\nwith tf4slurm.LocalCluster(ps=-1): pass"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "RendezvousError: The cluster could not be started (exit 2)" in done.stderr
    assert "-1 is less than 0" in done.stderr
