"""The layout that each task computes, compared with the output of `srun -l` in the same step."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.lab import SlurmLab

ROOT = Path(__file__).parents[2]
TASK = Path(__file__).with_name("write_layout.py")


@dataclasses.dataclass
class StepLayouts:
    """One step: the real node of each rank, and the layouts that each task computed."""

    nodes: dict[int, str] = dataclasses.field(default_factory=dict)
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def check(self, *, is_in_environ: bool | None) -> None:
        """Check all layouts; the environments determine the layout (True), do not (False), or some do (None)."""
        expected = [self.nodes[rank] for rank in range(len(self.nodes))]
        for answer in self.answers:
            assert answer["sattach"] == answer["layout"] == expected
            if is_in_environ is not None:
                assert (answer["environ"] is not None) == is_in_environ
            assert answer["environ"] in (expected, None)


class LayoutRunner:
    """Runs command lines in which TASK stands for the command of the tasks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.command = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, str(TASK), str(directory)])

    def run(self, lab: SlurmLab, line: str) -> list[StepLayouts]:
        """Run a command line and return the layouts of its steps."""
        done = lab.run("bash", "-c", line.replace("TASK", self.command), timeout_seconds=120)
        steps: defaultdict[str, StepLayouts] = defaultdict(StepLayouts)
        for output in done.stdout.splitlines():
            label, name, host = output.split()
            rank, step = int(label.removesuffix(":")), steps[name]
            step.nodes[rank] = host.removesuffix(".lab.example")
            step.answers.append(json.loads((self._directory / f"{name}-{rank}").read_text()))
        assert steps, done.stderr
        return list(steps.values())


@pytest.fixture
def runner(tmp_path: Path) -> LayoutRunner:
    return LayoutRunner(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "srun -l -N3 -n5 TASK",
        "srun -l -N3 -n6 -m block,nopack -w r1-n2,r1-n9,r1-n10 TASK",  # unpadded names over a power of ten
        "srun -l -N3 -n7 -m cyclic TASK",
        "srun -l -N2 -n5 -m plane=2 TASK",
        "srun -l -N2 -n5 -m cyclic:block -w r1-n10,r1-n9 TASK",
        "salloc -Q -N4 -n8 --ntasks-per-node=2 srun -l -N2 -n3 -r1 -m cyclic TASK",
        "salloc -Q -N2 -n4 -m plane=2 srun -l -n1 --overlap srun -l --overlap -N2 -n4 -m block TASK | sed 's/^0: //'",
        "salloc -Q -N1 -n2 -w r1-n2 : -N2 -n4 -w r1-n10,gpu-09 srun -l --het-group=1 -m cyclic TASK",
        "srun -l -N1 -n2 -w r1-n10 TASK : -N1 -n1 -w r1-n2 TASK",
    ],
)
def test_layout_from_the_environment(lab: SlurmLab, runner: LayoutRunner, line: str) -> None:
    (step,) = runner.run(lab, line)
    step.check(is_in_environ=True)


@pytest.mark.parametrize(
    "line",
    [
        "srun -l -n4 -m arbitrary -w r1-n10,gpu-09,r1-n10,r1-n2 TASK",
        "srun -l -N2 -n4 -m cyclic -w r1-n2,r1-n9 TASK : -N2 -n3 -m block -w r1-n10,gpu-09 TASK",
    ],
)
def test_layout_from_sattach(lab: SlurmLab, runner: LayoutRunner, line: str) -> None:
    (step,) = runner.run(lab, line)
    step.check(is_in_environ=False)


@pytest.mark.parametrize(
    "line",
    [
        "srun -l -N1 -n2 -w r1-n10 TASK : -N2 -n3 -m cyclic -w r1-n2,r1-n9 TASK",
        "srun -l -n3 -m arbitrary -w r1-n10,gpu-09,r1-n10 TASK : -N1 -n2 -w r1-n2 TASK",
        "salloc -Q -N1 -n1 -w r1-n2 : -N2 -n4 -w r1-n10,gpu-09 srun -l -n3 --het-group=1 TASK : -n1 --het-group=0 TASK",
    ],
)
def test_layout_from_the_environment_of_some_tasks(lab: SlurmLab, runner: LayoutRunner, line: str) -> None:
    (step,) = runner.run(lab, line)
    step.check(is_in_environ=None)
    assert len({answer["environ"] is None for answer in step.answers}) == 2


def test_two_steps_at_the_same_time(lab: SlurmLab, runner: LayoutRunner) -> None:
    line = "srun -l --exact -N2 -n4 -m cyclic -r0 TASK & srun -l --exact -N2 -n3 -r2 TASK & wait"
    steps = runner.run(lab, f"salloc -Q -N4 -n8 --ntasks-per-node=2 bash -c {shlex.quote(line)}")
    assert sorted(len(step.nodes) for step in steps) == [3, 4]
    for step in steps:
        step.check(is_in_environ=True)


def test_uneven_step_beside_another_job(lab: SlurmLab, runner: LayoutRunner) -> None:
    line = "srun -N1 -n6 -w r1-n9 sh -c 'echo >&2; sleep 2' 2>&1 | (read; srun -l -N3 -n9 -w r1-n2,r1-n9,r1-n10 TASK)"
    (step,) = runner.run(lab, line)
    step.check(is_in_environ=True)


def test_host_names_that_differ_from_node_names(slurm: None, runner: LayoutRunner) -> None:
    with SlurmLab(["x9", "x10", "x11"], host_suffix=".lab.example", resolve_names=False) as lab:
        (step,) = runner.run(lab, "srun -l -N3 -n5 -m cyclic TASK")
        step.check(is_in_environ=True)
        (step,) = runner.run(lab, "srun -l -n3 -m arbitrary -w x11,x10,x9 TASK")
        step.check(is_in_environ=False)


def test_layout_of_many_tasks_from_sattach(lab: SlurmLab, runner: LayoutRunner, tmp_path: Path) -> None:
    touch = f"touch {tmp_path}/$SLURM_JOB_ID.0-$SLURM_PROCID; exec hostname"
    script = f"[ $SLURM_PROCID = 0 ] || {{ {touch}; }}; exec {runner.command}"
    lines = lab.run("srun", "-O", "-l", "-N4", "-n200", "-m", "cyclic", "sh", "-c", script).stdout.splitlines()
    hosts = {int(label): words.split()[-1] for label, _, words in (line.partition(": ") for line in lines)}
    (step,) = tmp_path.glob("*.0-0")
    answer = json.loads(step.read_text())
    assert answer["sattach"] == answer["environ"] == [hosts[rank] for rank in range(200)]
