"""LocalCluster: this process leads ps and workers that end with it."""

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
        print("result", cluster.run_directory.read_result())
    print("result", cluster.run_directory.read_result())

asyncio.run(notebook())
"""
WAIT = """
import pathlib, time
import tf4slurm
with tf4slurm.LocalCluster(ps=1, workers=1):
    pathlib.Path("up").touch()
    time.sleep(600)
"""


def test_it_trains_and_ends_with_its_block(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "total 20.0 on /job:ps/replica:0/task:0" in done.stdout
    before, after = (line for line in done.stdout.splitlines() if line.startswith("result"))
    assert before == "result None"
    assert "'exit_code': 0" in after


@pytest.mark.long
def test_it_ends_with_the_process_that_made_it(tmp_path: Path, process_mark: str) -> None:
    notebook = subprocess.Popen([sys.executable, "-c", WAIT], cwd=tmp_path)
    try:
        assert wait_until((tmp_path / "up").exists, 60)
    finally:
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.wait()
    assert not wait_until_gone(process_mark, 10)


def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    code = "import tf4slurm\nwith tf4slurm.LocalCluster(ps=-1): pass"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "RendezvousError: The cluster could not be started (exit 2)" in done.stderr
    assert "-1 is not in the range x>=0" in done.stderr
