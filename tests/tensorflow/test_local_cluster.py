"""LocalCluster: ps and workers that end with this process, their chief."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook import Notebook, kernel
from tests.processes import wait_until, wait_until_gone
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.spec.job_spec import JobSpec

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
    cluster.close()  # again
    print("result", cluster.run_directory.read(ResultFile))
    for start in (cluster.strategy, tf4slurm.LocalCluster().start):
        try:
            start()
        except tf4slurm.errors.RendezvousError as error:
            print("refused", error)

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
CELL = """
import tensorflow as tf
from tf4slurm.tensorflow import parameter_server_strategy, run_steps
strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    total = tf.Variable(0.0)

def step_fn():
    return total.assign_add(1.0)

def train(steps):
    return run_steps(coordinator, step_fn, steps)
"""
MODEL = """
import keras
from tf4slurm.tensorflow import evaluate, fit
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

def rows():
    return tf.data.Dataset.from_tensors((tf.zeros(1), tf.zeros(1))).batch(1)
"""
FIT = "fit(model, rows, coordinator=coordinator, steps_per_epoch=1, verbose=0)"
EVALUATE = "evaluate(model, rows, coordinator=coordinator, verbose=0)"
RESUMED_CELL = """
import tensorflow as tf
from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_steps
strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    total = tf.Variable(0.0)
    step = tf.Variable(0, dtype=tf.int64)
checkpoints = Checkpoints("checkpoints", step=step, total=total)
restored = int(step)

def step_fn():
    total.assign_add(1.0)

def train(steps):
    run_steps(coordinator, step_fn, steps, checkpoints=checkpoints)
    return float(total) == float(step) >= steps
"""
KILL_PS = """
import psutil
for process in psutil.process_iter(["environ"]):
    if (process.info["environ"] or {}).get("TF4SLURM_TASK") == "ps/0" and (
        process.info["environ"]["TF4SLURM_RUN_DIRECTORY"] == str(cluster.run_directory.path)
    ):
        process.kill()
"""
ATTACH = """
import tf4slurm
job = tf4slurm.Job("true", chief=True, workers=0, name="train")
job.run(local=True)
tf4slurm.LocalCluster.attach(job.status().run_directory)
"""
KILLED_EARLY = """
import os, signal
import tf4slurm
from tf4slurm.clusters.base import NotebookCluster
NotebookCluster._join = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tf4slurm.LocalCluster(ps=1, workers=1).start()
"""
RAISE = """
import tf4slurm
cluster = tf4slurm.LocalCluster(ps=1, workers=1)
try:
    with cluster:
        try:
            tf4slurm.LocalCluster().start()
        except tf4slurm.errors.RendezvousError as error:
            print(error)
        tf4slurm.report(step=7, loss=0.5)
        raise ValueError("bad rate")
except ValueError:
    pass
status = cluster.status()
print(status.state, status.exit_code, status.headline, status.furthest_step)
try:
    cluster.start()
except tf4slurm.errors.RendezvousError as error:
    print(error)
"""


def test_local_cluster_trains_and_ends_with_its_block(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "total 20.0 on /job:ps/replica:0/task:0" in done.stdout
    before, after = (line for line in done.stdout.splitlines() if line.startswith("result"))
    assert before == "result None"
    assert "state='COMPLETED', exit_code=0" in after
    closed, other = (line for line in done.stdout.splitlines() if line.startswith("refused"))
    assert "The cluster is closed" in closed
    assert "TensorFlow has connected this process to notebook-" in other


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
@pytest.mark.parametrize("kills_group", [False, True], ids=["process", "process-group"])
def test_killed_kernel_ends_the_cluster(tmp_path: Path, process_mark: str, *, kills_group: bool) -> None:
    with kernel(tmp_path) as notebook:
        notebook.run("import os, tf4slurm; cluster = tf4slurm.LocalCluster(ps=1, workers=1).start()")
        directory = RunDirectory(Path(notebook.run("print(cluster.run_directory.path)").strip()))
        process_id = int(notebook.run("print(os.getpid())"))
        if kills_group:  # as Jupyter does
            os.killpg(process_id, signal.SIGKILL)
        else:
            os.kill(process_id, signal.SIGKILL)
        assert not wait_until_gone(process_mark, JobSpec.heartbeat_timeout_seconds)
    result = directory.read(ResultFile)
    assert result is not None
    assert (result.state, result.exit_code, result.cause) == ("FAILED", 7, "chief/0")
    assert "ended without closing the cluster" in result.reason


def test_process_that_is_killed_before_it_joins_ends_the_job(tmp_path: Path, process_mark: str) -> None:
    done = run_script(KILLED_EARLY, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert not wait_until_gone(process_mark, JobSpec.heartbeat_timeout_seconds)
    result = RunDirectory(next((tmp_path / "runs").glob("notebook-*"))).read(ResultFile)
    assert result is not None
    assert (result.state, result.exit_code, result.cause) == ("FAILED", 7, "chief/0")
    assert "has ended before it was the chief" in result.reason


@pytest.mark.long
def test_cells_share_a_cluster_until_a_ps_is_lost(tmp_path: Path, process_mark: str) -> None:
    with kernel(tmp_path) as notebook:
        notebook.run("import tf4slurm\ncluster = tf4slurm.LocalCluster(ps=1, workers=1).start()")
        notebook.run(CELL)
        assert notebook.run("print(train(10).step, float(total))") == "10 10.0\n"
        assert (
            notebook.interrupt("open('trains', 'w').close(); train(10**9)", tmp_path / "trains") == "KeyboardInterrupt"
        )
        notebook.run("before = float(total)")
        assert notebook.run("print(train(10).steps, float(total) >= before + 10)") == "10 True\n"
        assert notebook.run("print(cluster.start() is cluster, cluster.status().state)") == "True RUNNING\n"
        notebook.run(f"{MODEL}\n{FIT}\n{EVALUATE}")
        notebook.run("import os, signal\nps = cluster.status().tasks[0]\n" + KILL_PS)
        error = notebook.fail("train(10)")
        assert error.startswith("ParameterServerLostError")
        assert re.search(r"ps/0 on \S+ was killed by signal 9 \(SIGKILL\)\. Call restart\(\) on the cluster", error)
        assert "restart the kernel, and call tf4slurm.LocalCluster.attach('notebook-" in error
        assert "ps/0 on " in notebook.fail("cluster.strategy()")
        assert notebook.fail(FIT).startswith(
            "ParameterServerLostError: The variables of the cluster are lost. ps/0 on "
        )
        notebook.run("cluster.close()")
        assert re.fullmatch(
            r"FAILED LocalCluster\(\S+: closed\)\n", notebook.run("print(cluster.status().state, cluster)")
        )
        for call in ("train(10)", FIT, EVALUATE):
            error = notebook.fail(call)
            assert error.startswith(
                "ParameterServerLostError: The variables of the cluster are lost. The cluster is closed"
            )
    assert not wait_until_gone(process_mark, 30)


@pytest.mark.long
def test_exit_of_the_kernel_closes_the_cluster(tmp_path: Path, process_mark: str) -> None:
    with kernel(tmp_path) as notebook:
        notebook.run("import tf4slurm; cluster = tf4slurm.LocalCluster(ps=1, workers=1).start()")
        directory = RunDirectory(Path(notebook.run("print(cluster.run_directory.path)").strip()))
        assert "ZeroDivisionError" in notebook.fail("1 / 0")  # this does not make the job fail
    assert not wait_until_gone(process_mark, 30)
    result = directory.read(ResultFile)
    assert result is not None
    assert (result.state, result.exit_code) == ("COMPLETED", 0)


def start_and_restart(notebook: Notebook, timeout_seconds: float = 100.0) -> RunDirectory:
    """Start a cluster in a kernel, and let it wait for another chief."""
    notebook.run("import tf4slurm; cluster = tf4slurm.LocalCluster(ps=1, workers=1).start()")
    directory = RunDirectory(Path(notebook.run("print(cluster.run_directory.path)").strip()))
    notebook.run(f"cluster.restart(timeout_seconds={timeout_seconds})")
    return directory


@pytest.mark.long
@pytest.mark.timeout(400)
def test_restarted_kernel_attaches_and_resumes_after_the_loss_of_a_ps(tmp_path: Path, process_mark: str) -> None:
    with kernel(tmp_path) as notebook:
        notebook.run("import tf4slurm\ncluster = tf4slurm.LocalCluster(ps=1, workers=1).start()")
        notebook.run(RESUMED_CELL)
        assert notebook.run("print(train(10))") == "True\n"
        notebook.run(KILL_PS)
        error = notebook.fail("train(10**9)")
        assert error.startswith("ParameterServerLostError")
        (attach,) = re.findall(r"call (tf4slurm\.LocalCluster\.attach\('\S+'\)) there", error)
        assert attach in notebook.run("cluster.restart(timeout_seconds=100)")
        assert "waits 100 s for another chief" in notebook.fail("cluster.strategy()")
        assert "waits 100 s for another chief" in notebook.fail("cluster.restart()")
        assert "can connect to one cluster only" in notebook.fail(attach)
        notebook.restart(now=False)
        notebook.run(f"import os, tf4slurm\ncluster = {attach}")
        assert notebook.run("print(len(cluster.cluster['ps']), cluster.status().state)") == "1 RUNNING\n"
        process_id = int(notebook.run("print(os.getpid())"))
        done = run_script(f"import tf4slurm\n{attach}", tmp_path)
        assert re.search(rf"JobStateError: notebook-\S+ waits for no other chief: .*{process_id}\)", done.stderr)
        notebook.run(RESUMED_CELL)
        assert notebook.run("print(restored >= 10, train(restored + 10))") == "True True\n"
        notebook.run("cluster.close()")
        assert notebook.run("print(cluster.status().state)") == "COMPLETED\n"
        assert "has ended (COMPLETED). Start a new cluster" in run_script(f"import tf4slurm\n{attach}", tmp_path).stderr
    assert not wait_until_gone(process_mark, 30)


@pytest.mark.long
@pytest.mark.parametrize("now", [False, True], ids=["shutdown", "kill"])
def test_kernel_killed_after_attach_ends_the_cluster(tmp_path: Path, process_mark: str, *, now: bool) -> None:
    with kernel(tmp_path) as notebook:
        directory = start_and_restart(notebook)
        notebook.restart(now=now)
        notebook.run(f"import os, tf4slurm\ncluster = tf4slurm.LocalCluster.attach({directory.path.name!r})")
        os.kill(int(notebook.run("print(os.getpid())")), signal.SIGKILL)
        assert not wait_until_gone(process_mark, JobSpec.heartbeat_timeout_seconds)
    result = directory.read(ResultFile)
    assert result is not None
    assert (result.state, result.exit_code, result.cause) == ("FAILED", 7, "chief/0")


@pytest.mark.long
def test_cluster_to_which_nobody_attaches_ends(tmp_path: Path, process_mark: str) -> None:
    with kernel(tmp_path) as notebook:
        directory = start_and_restart(notebook, 2)
        assert wait_until(lambda: directory.read(ResultFile) is not None, 30)
        attach = f"tf4slurm.LocalCluster.attach({str(directory.path)!r})"
        assert "has ended (FAILED). Start a new cluster" in notebook.fail(attach)
    assert not wait_until_gone(process_mark, 30)
    result = directory.read(ResultFile)
    assert result is not None
    assert (result.state, result.exit_code) == ("FAILED", 6)
    assert result.reason == "No other chief has attached within 2 s after restart()."


def test_attach_refuses_jobs_without_an_external_chief(tmp_path: Path) -> None:
    done = run_script(ATTACH, tmp_path)
    assert "JobStateError: train-" in done.stderr, done.stderr
    assert "is no cluster of a notebook" in done.stderr


def run_script(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, timeout=100, check=False
    )


def test_exception_in_the_block_is_the_cause_of_the_failed_job(tmp_path: Path, process_mark: str) -> None:
    done = run_script(RAISE, tmp_path)
    name = next((tmp_path / "runs").glob("notebook-*")).name
    assert done.stdout.splitlines() == [
        f"This process is the chief of {name} already. Close that cluster first.",
        "FAILED 1 ValueError: bad rate (chief/0) 7",
        "The cluster is closed: make a new LocalCluster.",
    ], done.stdout + done.stderr
    assert not wait_until_gone(process_mark, 10)


def test_failed_start_shows_the_launchers_output(tmp_path: Path, process_mark: str) -> None:
    done = run_script("import tf4slurm\nwith tf4slurm.LocalCluster(ps=-1): pass", tmp_path)
    assert "RendezvousError: The cluster could not be started" in done.stderr
    assert "-1 is less than 0" in done.stderr
    assert not wait_until_gone(process_mark, 10)


STOPPED = """
import os, signal, time
import tf4slurm
cluster = tf4slurm.LocalCluster(ps=1, workers=1).start()
saved = []
tf4slurm.on_stop(lambda: saved.append(1) or time.sleep(1))
os.kill(cluster.run_directory.read_trusted_job().process.id, signal.SIGTERM)
while cluster.status().state == "RUNNING":
    time.sleep(0.1)
print("end", cluster.status().state, saved)
try:
    cluster.strategy()
except tf4slurm.errors.RendezvousError as error:
    print("refused", error)
"""


def test_stop_request_is_shown_in_the_notebook(tmp_path: Path, process_mark: str) -> None:
    """Slurm sends such a signal before the time limit, and perhaps no cell runs."""
    done = run_script(STOPPED, tmp_path)
    (name,) = (path.name for path in (tmp_path / "runs").glob("notebook-*/"))
    reason = "The job was stopped: the launcher received SIGTERM."
    assert f"{name} stops. {reason} Its ps and workers end in at most 25 s: save now.\n" in done.stderr
    assert done.stdout.startswith(f"end STOPPED [1]\nrefused The cluster has ended. {reason}"), done.stderr
    assert not wait_until_gone(process_mark, 10)


def test_notebook_with_another_tensorflow_than_its_tasks_is_warned(tmp_path: Path) -> None:
    code = """
import time
import tf4slurm
from tf4slurm.clusters import base
with tf4slurm.LocalCluster(ps=1, workers=1) as cluster:
    while "tensorflow" not in (versions := cluster.run_directory.read_trusted_job().versions):
        time.sleep(0.1)
    base.read_versions = lambda python: {"tensorflow": "2.10.0", "python": versions["python"]}
    cluster.wait_until_ready()
    cluster.wait_until_ready()
    print(versions["tensorflow"])
"""
    done = run_script(code, tmp_path)
    words = f"TensorFlow 2.10.0 here and {done.stdout.strip()} in the tasks: training may fail or hang."
    assert done.stderr.count(words) == 1, done.stderr
