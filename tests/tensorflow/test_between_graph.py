"""TF1-style training with the hooks under `tf4slurm run`, without waits of 30 s at the start and 120 s at the end."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until
from tests.tensorflow.tasks import Tasks

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

SCRIPT = Path(__file__).with_name("between_graph.py")
BY_HAND = """
import pathlib, sys, time
import tensorflow.compat.v1 as tf
from tf4slurm import DistributedTFQueueHook
from tf4slurm.server_dictionary import current_server_dictionary

tf.disable_v2_behavior()
cluster, job_name, task_index = current_server_dictionary()
server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)
signalled = pathlib.Path(sys.argv[1])
if job_name == "ps":
    queue = DistributedTFQueueHook.create_done_queue(i=task_index, WorkersNumber=1)
    own = tf.ConfigProto(device_filters=["/job:ps/task:%d" % task_index])  # the worker may exit before
    tf.Session(server.target, config=own).run(queue.dequeue())
    deadline = time.monotonic() + 60
    while not signalled.exists() and time.monotonic() < deadline:  # an immediate exit may lose the reply
        time.sleep(0.05)
else:
    queues = DistributedTFQueueHook.create_done_queues(PSNumber=2, WorkersNumber=1)
    tf.Session(server.target).run([queue.enqueue(1) for queue in queues])
    signalled.touch()
"""


@pytest.mark.parametrize(
    ("roles", "mode", "trains"),
    [
        (("--no-chief", "--ps", "1", "--workers", "2"), ("--no-chief", "--sync"), ("worker/0", "worker/1")),
        pytest.param(
            *(("--ps", "1", "--workers", "1"), (), ("chief/0",)),  # its worker is terminated with the job, at any step
            marks=pytest.mark.long,
        ),
    ],
    ids=["synchronous, worker 0 is chief", "asynchronous, with a chief"],
)
def test_tasks_start_and_end_without_tensorflows_waits(
    job: Job, roles: tuple[str, ...], mode: tuple[str, ...], trains: tuple[str, ...]
) -> None:
    job.start(*roles, command=(sys.executable, str(SCRIPT), *mode))
    assert job.wait(150) == 0, job.stdout + job.stderr
    assert {task["starts"] for task in job.result["tasks"]} == {1}
    assert "Graph was finalized" in job.stdout  # TensorFlow would log that it waits, and then sleep for 30 s
    assert "Waiting for model to be ready" not in job.stdout
    for task in trains:
        found = re.search(rf"^{task} \| loss (\S+) after (\d+) steps; closed in (\S+) s$", job.stdout, re.MULTILINE)
        assert found is not None, job.stdout
        assert float(found[1]) < 0.1
        assert int(found[2]) > 50
        assert float(found[3]) < 60
    if "--no-chief" in mode:
        assert "ps/0 | done: worker/0 worker/1 failed:" in job.stdout


@pytest.mark.long
def test_killed_ps_starts_an_attempt_that_resumes_from_the_checkpoint(job: Job, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    roles = ("--no-chief", "--ps", "1", "--workers", "2", "--max-attempts", "2")
    job.start(*roles, command=(sys.executable, str(SCRIPT), "--no-chief", "--resume", str(checkpoints)))
    saved = 100
    assert wait_until(lambda: last_checkpoint(checkpoints) >= saved, timeout_seconds=120), job.stdout + job.stderr
    os.kill(child_of("ps/0"), signal.SIGKILL)
    assert job.wait(200) == 0, job.stdout + job.stderr
    assert job.result["attempts"] == 2
    log = (job.run_directory / "logs" / "worker-0.2.log").read_text()
    (begun,) = re.findall(r"begins at step (\d+)", log)
    assert int(begun) >= saved


def last_checkpoint(directory: Path) -> int:
    """Return the step of the checkpoint to resume from, which TensorFlow names when all its files exist."""
    path = directory / "checkpoint"
    found = re.search(r'^model_checkpoint_path: ".*-(\d+)"', path.read_text(), re.MULTILINE) if path.exists() else None
    return int(found[1]) if found else 0


@pytest.mark.long
def test_scripts_may_fill_the_old_done_queues_themselves(tmp_path: Path) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    tasks = Tasks(tmp_path, ps=2, workers=1)
    try:
        for name in ("ps/0", "ps/1", "worker/0"):
            tasks.start(name, script, str(tmp_path / "signalled"))
        assert tasks.wait_all(["ps/0", "ps/1", "worker/0"]) == [0, 0, 0]
    finally:
        tasks.end()
