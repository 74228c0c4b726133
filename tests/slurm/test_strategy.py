"""parameter_server_strategy under plain srun: ps and workers end with their chief without a launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

TRAIN = """
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def step():
    total.assign_add(1.0)

for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
print("total", total.numpy(), "on", total.device, flush=True)
"""
PLAIN = f"""
import tensorflow as tf
from tf4slurm.tensorflow import parameter_server_strategy

strategy, coordinator = parameter_server_strategy({{"chief": 1, "ps": 1, "worker": 2}}, timeout_seconds=120)
{TRAIN}
"""
EVALUATED = f"""
import os, signal
import tensorflow as tf
import tf4slurm
from tf4slurm.tensorflow import evaluate_checkpoints, parameter_server_strategy

tf4slurm.get_server_dictionary({{"chief": 1, "ps": 1, "worker": 1, "evaluator": 1}})
evaluate_checkpoints("checkpoints", lambda path: print("evaluated", path, flush=True))
strategy, coordinator = parameter_server_strategy(timeout_seconds=120)
{TRAIN}
tf.train.Checkpoint(total=total).save("checkpoints/ckpt")
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(lab: SlurmLab, directory: Path, code: str, expected: int) -> str:
    (directory / "train.py").write_text(code)
    command = ("srun", "-Q", "-K0", "-n4", "-N4", sys.executable, str(directory / "train.py"))
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = lab.run(*command, timeout_seconds=170, cwd=directory, env=environ, check=False)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_strategy_trains_and_all_tasks_end(tmp_path: Path, lab: SlurmLab) -> None:
    assert "total 20.0 on /job:ps/replica:0/task:0" in run(lab, tmp_path, PLAIN, 0)


@pytest.mark.long
def test_all_tasks_end_when_the_chief_is_killed_and_its_last_checkpoint_is_evaluated(
    tmp_path: Path, lab: SlurmLab
) -> None:
    output = run(lab, tmp_path, EVALUATED, 137)
    assert "total 20.0" in output
    assert "evaluated checkpoints/ckpt-1" in output
