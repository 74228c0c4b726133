"""parameter_server_strategy and evaluate_checkpoints in real jobs: the script of a guide, shards, and failures."""

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

import tf4slurm.tensorflow
from tests.jobs import Job
from tests.processes import child_of, wait_until
from tests.servers import http2_server

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "your-script.md"
SHARDS = """
import tensorflow as tf
from tf4slurm.errors import KerasError
from tf4slurm.tensorflow import parameter_server_strategy

strategy, coordinator = parameter_server_strategy(sharding="min-size", min_shard_bytes=1024)
import keras

def attempt(name, action):
    try:
        action()
        print("done", name)
    except KerasError as error:
        print("refused", name, error)

with strategy.scope():
    table = tf.Variable(tf.zeros((100, 8)))
    steps = tf.Variable(0)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    attempt("layer", lambda: keras.layers.Dense(100).build((1, 100)))

def step():
    rows = tf.nn.embedding_lookup(table, [0, 99]) + 1.0
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(rows) - 1.0) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    steps.assign_add(1)
    return loss

@tf.function
def train():
    return strategy.run(step)

losses = [coordinator.schedule(train) for _ in range(50)]
coordinator.join()
print("loss falls to", f"{losses[-1].fetch():.3f}", "in", steps.numpy(), "steps")
print("parts", [part.shape[0] for part in table.variables], [part.device[:28] for part in table.variables])
model.compile(optimizer=optimizer, loss="mse")
data = tf.ones((8, 8))
attempt("fit", lambda: model.fit(data, tf.ones((8, 1))))
attempt("predict", lambda: model.predict(data))
attempt("predict_on_batch", lambda: model.predict_on_batch(data))
attempt("stateless_apply", lambda: optimizer.stateless_apply([], [], []))
"""
CANNOT_FORM = """
import json, os, sys
from tf4slurm.errors import RendezvousTimeoutError
from tf4slurm.tensorflow import parameter_server_strategy, servers
servers._CONNECT_SECONDS = 1.0
try:
    parameter_server_strategy(timeout_seconds=8)
except RendezvousTimeoutError as error:
    print(error, flush=True)
os.environ["TF_CONFIG"] = sys.argv[1]
parameter_server_strategy(timeout_seconds=8)
"""


LEAVES = """
import pathlib, sys
from tf4slurm.tensorflow import parameter_server_strategy
strategy, coordinator = parameter_server_strategy()
import tensorflow as tf
with strategy.scope():
    weight = tf.Variable(0.0)

@tf.function
def work():
    weight.assign_add(1.0)

while not pathlib.Path(sys.argv[1]).exists():
    for _ in range(20):
        coordinator.schedule(work)
    coordinator.join()
    print("works", flush=True)
sys.exit(5)
"""


def guide_script(directory: Path) -> Path:
    """Write the script of the guide's section "A new script"."""
    (code,) = re.findall(r"<!-- file: train.py -->\n```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    path = directory / "train.py"
    path.write_text(code.replace('"checkpoints"', repr(str(directory / "checkpoints"))))
    return path


def run_guide_script(job: Job, directory: Path) -> None:
    script = guide_script(directory)
    job.start("--ps", "1", "--workers", "1", "--evaluators", "1", command=(sys.executable, str(script)))


def last_evaluation(job: Job) -> str:
    found: list[str] = re.findall(r"evaluator/0 \| .*/(ckpt-\d+)", job.stdout)
    return found[-1]


def test_guide_script_trains_and_evaluates_the_last_checkpoint(job: Job, tmp_path: Path) -> None:
    run_guide_script(job, tmp_path)
    assert job.wait(170) == 0, job.stdout + job.stderr
    assert last_evaluation(job) == "ckpt-300"
    ends = {task["task"]: task["state"] for task in job.result["tasks"]}
    assert ends == dict.fromkeys(("chief/0", "ps/0", "worker/0", "evaluator/0"), "terminated")


def test_chief_exits_while_a_worker_is_lost(job: Job, tmp_path: Path) -> None:
    job.start("--ps", "1", "--workers", "2", command=(sys.executable, "-c", LEAVES, str(tmp_path / "leave")))
    assert wait_until(lambda: "works" in job.stdout, 120), job.stdout + job.stderr
    os.kill(child_of("worker/1"), signal.SIGKILL)
    assert wait_until(lambda: "failed with UnavailableError" in job.stdout, 60), job.stdout + job.stderr
    (tmp_path / "leave").touch()
    assert job.wait(60) == 5, job.stdout + job.stderr


@pytest.mark.long
def test_killed_evaluator_restarts_and_evaluates_the_last_checkpoint(job: Job, tmp_path: Path) -> None:
    run_guide_script(job, tmp_path)
    assert wait_until(lambda: "evaluator/0 | " in job.stdout, 120), job.stdout + job.stderr
    os.kill(child_of("evaluator/0"), signal.SIGKILL)
    assert job.wait(170) == 0, job.stdout + job.stderr
    assert last_evaluation(job) == "ckpt-300"
    assert {task["task"]: task["starts"] for task in job.result["tasks"]}["evaluator/0"] == 2


@pytest.mark.long
@pytest.mark.keras
def test_split_variables_train_and_keras_3_limits_are_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDS)
    job.start("--ps", "2", "--workers", "1", command=(sys.executable, str(tmp_path / "train.py")))
    assert job.wait(170) == 0, job.stdout + job.stderr
    output = job.stdout
    assert "loss falls to 0.000 in 50 steps" in output
    assert "parts [50, 50] ['/job:ps/replica:0/task:0/dev', '/job:ps/replica:0/task:1/dev']" in output
    assert "done predict_on_batch" in output
    for name in ("layer", "fit", "predict", "stateless_apply"):
        (refusal,) = re.findall(f"refused {name} (.*)", output)
        advice = f"Call tf4slurm.tensorflow.{name}(model, dataset_fn" if name in ("fit", "predict") else "=1 before"
        assert advice in refusal


@pytest.mark.parametrize(
    ("cluster", "task", "options", "words"),
    [
        ({"ps": 1, "worker": 2}, "worker", {}, "The cluster has no chief.*without --no-chief"),
        ({"chief": 1, "worker": 1}, "worker", {}, "The cluster has no ps.*Start it with --ps 1"),
        ({"chief": 1, "ps": 1, "worker": 1}, "evaluator", {}, "evaluator/0 takes no part.*evaluate_checkpoints"),
        ({}, "chief", {"sharding": "thin"}, "Unknown sharding 'thin': expected one of 'none', 'min-size'"),
    ],
)
def test_invalid_cluster_or_option_is_refused(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, int], task: str, options: dict[str, Any], words: str
) -> None:
    addresses = {role: ["127.0.0.1:1"] * count for role, count in cluster.items()}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": addresses, "task": {"type": task, "index": 0}}))
    with pytest.raises(ValueError, match=words):
        tf4slurm.tensorflow.parameter_server_strategy(**options)


def test_missing_server_is_named_and_a_hang_exits_with_6(tmp_path: Path) -> None:
    with http2_server() as port:
        absent = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": [f"127.0.0.1:{port}"]}
        not_tensorflow = {**absent, "ps": [f"127.0.0.1:{port}"], "chief": ["127.0.0.1:0"]}
        first, second = (
            json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
            for cluster in (absent, not_tensorflow)
        )
        done = subprocess.run(
            [sys.executable, "-c", CANNOT_FORM, second],
            env={**os.environ, "TF_CONFIG": first, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    assert done.stdout.startswith("ps/0 at 127.0.0.1:2 did not answer within 8 s. See the log")
    assert done.returncode == 6, done.stderr
    assert "TensorFlow did not connect to the cluster within 8 s, although every server answers" in done.stderr
