"""SlurmClusterResolver in the tasks of real steps: only srun and a script that prints the cluster spec."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

SCRIPT = """
import json, os
from tf4slurm import SlurmClusterResolver
resolver = SlurmClusterResolver()
spec = resolver.cluster_spec().as_dict()
print(json.dumps([int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"], spec, *resolver.get_task_info()]))
"""
SERVED = """
import os, signal
from tf4slurm import SlurmClusterResolver
resolver = SlurmClusterResolver({jobs})
resolver.serve()
print("leads", *resolver.get_task_info(), flush=True)
{end}
"""

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        (
            "-N3",
            "-w",
            "r1-n9,r1-n10,gpu-09",
        ),  # Slurm puts two tasks on the first node; TensorFlow would sort gpu-09 before it
        ("-N2", "-w", "r1-n2,r1-n10", "--ntasks-per-node=2", "-m", "cyclic"),
    ],
)
def test_every_task_of_a_step_has_the_correct_cluster_spec(
    tmp_path: Path, lab: SlurmLab, options: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = lab.run("srun", "-Q", "-n4", *options, sys.executable, script, cwd=tmp_path, timeout_seconds=120)
    found = sorted(json.loads(line) for line in result.stdout.splitlines())
    assert [(rank, task_type, index) for rank, _, _, task_type, index in found] == [(r, "worker", r) for r in range(4)]
    nodes = [node for _, node, _, _, _ in found]
    expected = [f"{node}:{8888 + nodes[:rank].count(node)}" for rank, node in enumerate(nodes)]
    assert [spec for _, _, spec, _, _ in found] == [{"worker": expected}] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("jobs", "end", "leading", "code"),
    [
        ({"chief": 1, "ps": 1, "worker": 2}, "os.kill(os.getpid(), signal.SIGKILL)", ["leads chief 0"], 137),
        ({"ps": 2, "worker": 2}, "", ["leads worker 0", "leads worker 1"], 0),
        ({"ps": 1, "worker": 3}, "resolver.task_id == 2 and 1 / 0", [f"leads worker {index}" for index in range(3)], 1),
    ],
)
def test_servers_end_with_the_tasks_that_train(
    tmp_path: Path, lab: SlurmLab, jobs: dict[str, int], end: str, leading: list[str], code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SERVED.format(jobs=jobs, end=end))
    command = ("srun", "-Q", "-K0", "-n4", "-N4", sys.executable, script)
    done = lab.run(*command, cwd=tmp_path, timeout_seconds=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == leading
