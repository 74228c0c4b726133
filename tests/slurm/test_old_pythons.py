"""Scripts under plain srun whose Python lacks tf4slurm, or is older than 3.10, with `tf4slurm client`."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tests.pythons import require_python
from tests.slurm.lab import SlurmLab
from tf4slurm.system.variables import SCRIPT_CLIENT

ROOT = Path(__file__).parents[2]
ROLES = ["ps", "worker", "worker", "worker"]
TENSORFLOW = ROOT / ".tensorflow-1.15" / "bin" / "python"
SCRIPTS = ROOT / "tests" / "tensorflow" / "old_scripts"
CLUSTER = """
import os, signal, sys, threading
import tf4slurm_client as tf4slurm
roles = ["ps", "worker", "worker", "worker"]
cluster, role, index = tf4slurm.get_server_dictionary(roles, timeout_seconds=60, ps_exit_seconds=1)
assert os.environ["TF_GRPC_REUSE_PORT"] == "true"
if role == "ps":
    print("ps", cluster)
    sys.stdout.flush()
    threading.Event().wait()
tf4slurm.barrier("started", roles=["worker"])
print("worker", cluster)
"""
OLD_NAMES = """
import threading
import tf4slurm.ServerDictionary
cluster, role, index = tf4slurm.ServerDictionary.GetServerDictionary(["ps", "worker", "worker", "worker"])
if role == "ps":
    threading.Event().wait()
print(role, cluster)
"""
FAIL = "if index == 1:\n    raise ValueError('no data')\n"
KILL = "if index == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"


def run(
    lab: SlurmLab, directory: Path, python: str | Path, script: str | Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as four tasks on four hosts, as a user types it. Only its sidecars have tf4slurm."""
    step = shlex.join(["srun", "-Q", "-K0", "-N4", "-n4", str(python), str(script), *arguments])
    line = f'eval "$({TF4SLURM} client)" && exec {step}'
    return lab.run("bash", "-c", line, cwd=directory, check=False, timeout_seconds=120)


def write(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("version", ["3.6", "3.9", "3.12"])
def test_tasks_have_one_cluster_spec_and_end(tmp_path: Path, lab: SlurmLab, version: str) -> None:
    done = run(lab, tmp_path, require_python(version), write(tmp_path, CLUSTER))
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition(" ") for line in done.stdout.splitlines())
    assert [role for role, _, _ in lines] == ROLES
    (spec,) = {text for _, _, text in lines}
    cluster = ast.literal_eval(spec)
    assert {role: len(addresses) for role, addresses in cluster.items()} == {"ps": 1, "worker": 3}
    assert "ps/0 ends: training was over 1 s ago" in done.stderr


@pytest.mark.parametrize(("end", "code"), [(FAIL, 1), (KILL, 137)], ids=["fails", "killed"])
@pytest.mark.parametrize("version", ["3.6", "3.12"])
def test_tasks_end_when_a_worker_has_failed(tmp_path: Path, lab: SlurmLab, version: str, end: str, code: int) -> None:
    done = run(lab, tmp_path, require_python(version), write(tmp_path, CLUSTER + end))
    assert done.returncode == code, done.stderr
    assert "ps/0 ends: training was over 1 s ago" in done.stderr


@pytest.mark.parametrize("version", ["3.6", pytest.param("3.12", marks=pytest.mark.long)])
def test_old_names_work(tmp_path: Path, lab: SlurmLab, version: str) -> None:
    done = run(lab, tmp_path, require_python(version), write(tmp_path, OLD_NAMES))
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 1
    assert done.stdout.count("worker {") == 3


def test_roles_that_do_not_fit_the_step_are_refused(tmp_path: Path, lab: SlurmLab) -> None:
    script = write(tmp_path, 'import tf4slurm_client\ntf4slurm_client.get_server_dictionary(["ps", "worker"])\n')
    done = run(lab, tmp_path, require_python("3.6"), script)
    assert done.returncode == 1
    assert done.stderr.count("PlacementError: 2 roles were given, but the step has 4 tasks.") == 4


def test_script_without_the_variables_is_told_what_to_type(tmp_path: Path) -> None:
    code = 'import tf4slurm_client\ntf4slurm_client.get_server_dictionary(["ps", "worker"])\n'
    environ = {"PYTHONPATH": str(SCRIPT_CLIENT)}
    done = subprocess.run(
        [require_python("3.6"), "-c", code], env=environ, capture_output=True, text=True, cwd=tmp_path
    )
    assert "SlurmEnvironmentError: TF4SLURM_PYTHON is not set" in done.stderr
    assert 'eval "$(tf4slurm client)"' in done.stderr


def test_tf4slurm_itself_refuses_an_older_python() -> None:
    environ = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([require_python("3.6"), "-c", "import tf4slurm"], env=environ, capture_output=True, text=True)
    assert "ImportError: tf4slurm needs Python 3.10 or newer, and this is 3.6" in done.stderr
    assert "tf4slurm_client" in done.stderr


def test_python_with_tf4slurm_imports_it_and_not_the_old_names(tmp_path: Path) -> None:
    paths = [str(SCRIPT_CLIENT), str(SCRIPT_CLIENT / "old_python"), str(ROOT)]
    code = "import tf4slurm.ServerDictionary as old; print(old.__file__); import tf4slurm; tf4slurm.Job"
    environ = {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(SCRIPT_CLIENT) not in done.stdout


@pytest.mark.long
@pytest.mark.skipif(not TENSORFLOW.exists(), reason="TensorFlow 1.15 is not installed in .tensorflow-1.15")
@pytest.mark.parametrize(
    ("script", "ps", "workers"), [("asynchronous.py", 1, 3), ("asynchronous.py", 2, 2), ("synchronous.py", 1, 3)]
)
def test_scripts_of_the_old_package_run_with_tensorflow_1_15(
    tmp_path: Path, lab: SlurmLab, script: str, ps: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF2_BEHAVIOR", raising=False)  # set by TensorFlow 2 in a process that has imported it
    text = (SCRIPTS / script).read_text(encoding="utf-8")
    old = text.replace("import tensorflow.compat.v1 as tf", "import tensorflow as tf")
    path = write(tmp_path, old.replace("tf.disable_v2_behavior()\n", ""))  # as it was written for TensorFlow 1
    done = run(lab, tmp_path, TENSORFLOW, path, "-ps", str(ps), "-workers", str(workers))
    assert done.returncode == 0, done.stderr
    received = re.findall(r"ps (\d) received done (\d)", done.stdout)
    assert sorted(received) == sorted((str(i), str(j)) for i in range(ps) for j in range(workers)), done.stdout
    assert sorted(re.findall(r"worker (\d) (?:made|stopped)", done.stdout)) == [str(i) for i in range(workers)]
