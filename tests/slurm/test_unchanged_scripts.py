"""A script without tf4slurm, with Keras' fit on parameter servers, in each way to start a job on Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab
from tests.tensorflow.test_keras import tf_keras

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

__all__ = ["tf_keras"]
SCRIPT = Path(__file__).parents[1] / "tensorflow" / "unchanged_scripts" / "parameter_server_training.py"
TF4SLURM = str(Path(sys.executable).with_name("tf4slurm"))
PROGRAM = ("--ps", "1", "--workers", "2", "--", sys.executable, str(SCRIPT), "fit", "checkpoints")


@pytest.mark.long
@pytest.mark.usefixtures("tf_keras")
def test_script_trains_under_srun_task(tmp_path: Path, lab: SlurmLab) -> None:
    srun = ("srun", "-Q", "-n4", "-N4", TF4SLURM, "task", *PROGRAM)
    done = lab.run(*srun, cwd=tmp_path, timeout_seconds=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained, iterations 80" in done.stdout


@pytest.mark.long
@pytest.mark.usefixtures("tf_keras")
def test_script_trains_in_a_batch_job(tmp_path: Path, lab: SlurmLab) -> None:
    submit = (TF4SLURM, "submit", "-N", "4", "-c", "1", "-o", "output", *PROGRAM)
    job_id = lab.run(*submit, cwd=tmp_path).stdout.strip()
    state = lab.wait_for_job(job_id, timeout_seconds=170)
    output = (tmp_path / "output").read_text()
    assert state == ("COMPLETED", "0:0"), output
    assert "trained, iterations 80" in output
