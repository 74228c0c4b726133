"""A job whose script makes TensorFlow's own ParameterServerStrategy: no worker can join it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import wait_until

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

SCRIPT = """
import pathlib, sys, time
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("ps", "worker"):
    tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()
coordinator = tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))
while not pathlib.Path(sys.argv[1], "end").exists():
    coordinator.schedule(tf.function(lambda: tf.constant(1)))
    coordinator.join()
    time.sleep(0.1)
"""


@pytest.mark.long
def test_worker_is_refused_by_a_job_with_tensorflows_own_strategy(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    (job.directory / "own.py").write_text(SCRIPT)
    command = (sys.executable, str(job.directory / "own.py"), str(job.children))
    job.start("--ps", "1", "--workers", "1", command=command)
    assert wait_until(lambda: bool(list(job.directory.glob("runs/*/events.jsonl"))), 60), job.stderr
    job.wait_for_event("serving", "chief/0", 120)

    def error() -> str:
        return str(json.loads((job.run_directory / "status.json").read_text())["workers_error"])

    assert wait_until(lambda: bool(error()), 60), job.stderr
    joining = subprocess.run([TF4SLURM, "join", job.run_directory], capture_output=True, text=True)
    (job.children / "end").touch()
    assert joining.returncode == 2
    assert "cannot use more workers: the script of the chief has started its TensorFlow server" in joining.stderr
    assert job.wait() == 0
