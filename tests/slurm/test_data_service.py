"""tf.data's service over four hosts of a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).parents[1] / "tensorflow" / "read_on.py"
PLACEMENT = "data-worker,data-dispatcher,chief,data-worker"
pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


@pytest.mark.long
def test_chief_in_a_shell_reads_from_data_service_of_another_python_on_other_hosts(
    tmp_path: Path, lab: SlurmLab
) -> None:
    (tmp_path / "go").touch()
    options = ("--ps", "0", "--workers", "0", "--data-workers", "2", "--data-python", sys.executable)
    command = ("sh", "-c", f"exec {sys.executable} {SCRIPT} go")
    run = (TF4SLURM, "run", *options, "--placement", PLACEMENT, "--name", "read", "--", *command)
    output = lab.run("salloc", "-Q", "-N4", "-n4", *run, cwd=tmp_path, timeout_seconds=150).stdout
    assert "read 2000, 2000 of them different" in output
    (result,) = (tmp_path / "runs").glob("*/result.json")
    tasks = json.loads(result.read_text())["tasks"]
    assert [task["task"].partition("/")[0] for task in tasks] == PLACEMENT.split(",")
    assert len({task["node"] for task in tasks}) == 4
    assert {(task["state"], task["starts"]) for task in tasks} == {("terminated", 1)}
