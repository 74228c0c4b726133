"""The public names: typed for a user's type checker, listed by help(), imported at their first use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf4slurm

pytestmark = pytest.mark.timeout(600)  # the first test of types runs mypy without a cache

SCRIPT = """
import tf4slurm
from tf4slurm.tensorflow import Checkpoints


def save() -> None:
    print("saved")


def train(path: str) -> None:
    reveal_type(tf4slurm.get_server_dictionary(["ps", "worker", "worker"]))
    tf4slurm.on_stop(save)
    for step in range(10):
        tf4slurm.report(step=step, loss=0.5)
        reveal_type(tf4slurm.should_stop())
    tf4slurm.barrier("trained", timeout_seconds=10)
    reveal_type(tf4slurm.shutdown.wait_for_workers)
    reveal_type(Checkpoints)


job = tf4slurm.Job("python train.py", ps=1, workers=3, mem="2G", chief=False).submit()
reveal_type(job)
reveal_type(job.wait())
reveal_type(tf4slurm.status("4711").tasks[0].step)
reveal_type([line.text for line in tf4slurm.logs(None, "chief/0")])
reveal_type(tf4slurm.wait(timeout_seconds=3))
reveal_type(tf4slurm.list_jobs())
reveal_type(tf4slurm.make_report())
reveal_type(tf4slurm.cancel("4711"))
reveal_type(tf4slurm.LocalCluster)
reveal_type(tf4slurm.SlurmCluster)
cluster = tf4slurm.SlurmCluster(1, 4, nodes=2, mem="32G", module=("tensorflow",), pending_timeout_seconds=60)
reveal_type(cluster.start())
reveal_type(cluster.script())
reveal_type(cluster.status().state)
reveal_type(cluster.job)


def train_on(cluster: tf4slurm.LocalCluster | tf4slurm.SlurmCluster) -> None:
    with cluster:
        cluster.wait_until_ready(10)
        reveal_type([task.node for task in cluster.status().tasks])
        reveal_type(cluster.logs("ps/0"))
        reveal_type(cluster.cluster)
        reveal_type(cluster.job.report())
        reveal_type(cluster.run_directory)
        reveal_type(cluster.scale(workers=3))
    reveal_type(cluster.restart())


train_on(tf4slurm.LocalCluster(ps=1, workers=2))
train_on(cluster)
reveal_type(tf4slurm.LocalCluster.attach("4711"))
reveal_type(tf4slurm.errors.UnknownJobError)
reveal_type(tf4slurm.tensorflow.run_steps)
"""
MISTAKES = """
import tf4slurm

tf4slurm.no_such_thing
tf4slurm.tensorflow.no_such_thing
tf4slurm.Job("true", worker=3)
tf4slurm.Job("true", workers="many")
tf4slurm.SlurmCluster(worker=3)
tf4slurm.SlurmCluster(workers="many")
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return mypy's messages for both scripts."""
    pytest.importorskip("mypy", reason="pip install mypy")
    directory = tmp_path_factory.mktemp("typed")
    (directory / "script.py").write_text(SCRIPT)
    (directory / "mistakes.py").write_text(MISTAKES)
    options = ["--strict", "--no-error-summary", "--show-error-codes", "--follow-imports=silent", "--cache-dir=cache"]
    command = [sys.executable, "-m", "mypy", *options, "script.py", "mistakes.py"]
    environ = {**os.environ, "MYPYPATH": str(Path(tf4slurm.__file__).parent.parent)}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}.py")] for name in ("script", "mistakes")}


def test_types_of_a_users_script_are_known(messages: dict[str, list[str]]) -> None:
    lines = messages["script"]
    assert len(lines) == SCRIPT.count("reveal_type"), lines
    assert all("note: Revealed type is" in line for line in lines)
    assert not [line for line in lines if re.search(r"\bAny\b", line) and "def (" not in line]


def test_mistakes_of_a_users_script_are_type_errors(messages: dict[str, list[str]]) -> None:
    kinds = re.findall(r"error: .*\[([\w-]+)\]$", "\n".join(messages["mistakes"]), re.MULTILINE)
    assert kinds == ["attr-defined", "attr-defined", "call-arg", "arg-type", "call-arg", "arg-type"]


def test_help_lists_the_public_names_and_imports_no_tensorflow() -> None:
    code = "import pydoc, sys, tf4slurm; print(pydoc.render_doc(tf4slurm)); assert 'tensorflow' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not [
        name for name in (*set(tf4slurm.__all__) - {"__version__"}, "SlurmClusterResolver") if name not in done.stdout
    ]


def test_modules_are_attributes_of_the_package() -> None:
    code = "import tf4slurm as t; print(t.errors.Tf4SlurmError, t.tensorflow.__name__, t.shutdown.wait_for_workers)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).returncode == 0


def test_every_public_name_exists_and_an_unknown_one_does_not() -> None:
    assert all(getattr(tf4slurm, name) is not None for name in tf4slurm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = tf4slurm.no_such_thing  # type: ignore[attr-defined]
