"""Scripts for tf4slurm before 0.1, under plain srun with the old sbatch lines, to the end of every task."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

OLD_SCRIPTS = Path(__file__).parents[1] / "tensorflow" / "old_scripts"
WRAPPER = """#!/bin/bash
ip -4 -o address show dev ib0 | awk '{print $4}' | cut -d/ -f1
"""
BATCH = """#!/bin/bash
export TFSERVER=$(srun -n $SLURM_NNODES --ntasks-per-node=1 ./wrapper.sh)
export GRPC_POLL_STRATEGY=poll
srun -n $SLURM_NTASKS -c $SLURM_CPUS_PER_TASK --resv-ports=$SLURM_NTASKS_PER_NODE -l "$@"
"""


def check_end(output: str, ps: int, workers: int) -> None:
    """Check that every ps received the signal of every worker, and that every worker reached its last line."""
    received = re.findall(r"ps (\d) received done (\d)", output)
    assert sorted(received) == sorted((str(i), str(j)) for i in range(ps) for j in range(workers)), output
    assert sorted(re.findall(r"worker (\d) (?:made|stopped)", output)) == [str(index) for index in range(workers)]


@pytest.mark.parametrize(
    ("script", "ps", "workers", "nodes"),
    [
        pytest.param("asynchronous.py", 2, 2, 1, marks=pytest.mark.long),
        ("synchronous.py", 1, 3, 4),
    ],
)
def test_old_script_ends_under_plain_srun(
    tmp_path: Path, lab: SlurmLab, script: str, ps: int, workers: int, nodes: int
) -> None:
    command = [sys.executable, str(OLD_SCRIPTS / script), "-ps", str(ps), "-workers", str(workers)]
    options = [f"-N{nodes}", f"-n{ps + workers}"]
    result = lab.run("srun", "-Q", *options, *command, cwd=tmp_path, check=False, timeout_seconds=120)
    assert result.returncode == 0, result.stderr
    check_end(result.stdout, ps, workers)


@pytest.mark.long
@pytest.mark.parametrize(("script", "ps", "workers"), [("asynchronous.py", 1, 3)])
def test_old_script_ends_with_the_old_batch_lines(
    tmp_path: Path, lab: SlurmLab, script: str, ps: int, workers: int
) -> None:
    for name, text in (("wrapper.sh", WRAPPER), ("job.sh", BATCH)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = [sys.executable, str(OLD_SCRIPTS / script), "-ps", str(ps), "-workers", str(workers)]
    options = ["-N4", "--ntasks-per-node=1", f"-n{ps + workers}", "-c1", "-o", "output"]
    job_id = lab.run("sbatch", "--parsable", *options, "job.sh", *command, cwd=tmp_path).stdout.strip()
    state = lab.wait_for_job(job_id, timeout_seconds=120)
    output = (tmp_path / "output").read_text()
    assert state == ("COMPLETED", "0:0"), output
    check_end(output, ps, workers)


def sidecar_of(script: Path, steps: str, rank: int) -> psutil.Process | None:
    """Return the sidecar of a rank of this run of the script; None before the script has started it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {str(script), steps} <= set(process.cmdline()) and process.environ().get("SLURM_PROCID") == str(rank):
                return next((child for child in process.children() if "plain_srun" in " ".join(child.cmdline())), None)
    return None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_old_script_ends_whenever_a_worker_is_killed(tmp_path: Path, lab: SlurmLab, seed: int) -> None:
    """From the start of its sidecar on; a task that never takes part ends the step after the timeout for all tasks."""
    number, script, steps = random.Random(seed), OLD_SCRIPTS / "asynchronous.py", str(2000 + seed)
    rank, seconds = number.choice([1, 2]), number.uniform(0, 12)
    command = (sys.executable, script, "-ps", "1", "-workers", "2", "-steps", steps)
    with (tmp_path / "output").open("w+") as output:
        step = lab.popen(
            *("srun", "-Q", "-K0", "-N3", "-n3", *map(str, command)),
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            assert wait_until(lambda: sidecar_of(script, steps, rank) is not None, 60)
            sidecar = sidecar_of(script, steps, rank)
            time.sleep(seconds)
            if sidecar is not None and (victim := sidecar.parent()) is not None and step.poll() is None:
                victim.kill()
            code = step.wait(120)
        except subprocess.TimeoutExpired:
            lab.cancel_all()
            pytest.fail(f"rank {rank} was killed after {seconds:.1f} s: {(tmp_path / 'output').read_text()}")
    print(f"rank {rank} killed after {seconds:.1f} s: srun ended with {code}")
