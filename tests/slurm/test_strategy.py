"""parameter_server_strategy under plain srun: no launcher, and yet ps and workers end with their chief."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

SCRIPT = """
import os, signal, sys
import tensorflow as tf
from tf4slurm.tensorflow import parameter_server_strategy

strategy, coordinator = parameter_server_strategy({"chief": 1, "ps": 1, "worker": 2}, timeout_seconds=120)
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def step():
    total.assign_add(1.0)

for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
print("total", total.numpy(), "on", total.device, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(lab: SlurmLab, directory: Path, how: str, expected: int) -> str:
    (directory / "train.py").write_text(SCRIPT)
    command = ("srun", "-Q", "-K0", "-n4", "-N4", sys.executable, str(directory / "train.py"), how)
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = lab.run(*command, timeout_seconds=170, cwd=directory, env=environ, check=False)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


def test_it_trains_and_all_tasks_end(tmp_path: Path, lab: SlurmLab) -> None:
    assert "total 20.0 on /job:ps/replica:0/task:0" in run(lab, tmp_path, "done", 0)


@pytest.mark.long
def test_ps_and_workers_end_when_the_chief_is_killed(tmp_path: Path, lab: SlurmLab) -> None:
    assert "total 20.0" in run(lab, tmp_path, "killed", 137)
