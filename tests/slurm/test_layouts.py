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
TELL = Path(__file__).with_name("write_layout.py")


@dataclasses.dataclass
class Told:
    """One step: the true node of each rank, and what each task said about it."""

    truth: dict[int, str] = dataclasses.field(default_factory=dict)
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def check(self, *, is_in_environ: bool | None) -> None:
        """Every task has answered right; its environment told it (True), told it not (False), or either (None)."""
        nodes = [self.truth[rank] for rank in range(len(self.truth))]
        for answer in self.answers:
            assert answer["asked"] == answer["layout"] == nodes
            if is_in_environ is not None:
                assert (answer["environ"] is not None) == is_in_environ
            assert answer["environ"] in (nodes, None)


class Tell:
    """Runs command lines in which tasks run TELL."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.command = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, str(TELL), str(directory)])

    def run(self, lab: SlurmLab, line: str) -> list[Told]:
        """Run a command line and return what its steps told."""
        done = lab.run("bash", "-c", line.replace("TELL", self.command), timeout_seconds=60)
        steps: defaultdict[str, Told] = defaultdict(Told)
        for output in done.stdout.splitlines():
            label, name, host = output.split()
            rank, step = int(label.removesuffix(":")), steps[name]
            step.truth[rank] = host.removesuffix(".lab.example")
            step.answers.append(json.loads((self._directory / f"{name}-{rank}").read_text()))
        assert steps, done.stderr
        return list(steps.values())


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    return Tell(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "srun -l -N3 -n5 TELL",
        "srun -l -N3 -n6 -m block,nopack -w r1-n2,r1-n9,r1-n10 TELL",  # unpadded names over a power of ten
        "srun -l -N3 -n7 -m cyclic TELL",
        "srun -l -N2 -n5 -m plane=2 TELL",
        "srun -l -N2 -n5 -m cyclic:block -w r1-n10,r1-n9 TELL",
        "salloc -Q -N4 -n8 --ntasks-per-node=2 srun -l -N2 -n3 -r1 -m cyclic TELL",
        "salloc -Q -N2 -n4 -m plane=2 srun -l -n1 --overlap srun -l --overlap -N2 -n4 -m block TELL | sed 's/^0: //'",
        "salloc -Q -N1 -n2 -w r1-n2 : -N2 -n4 -w r1-n10,gpu-09 srun -l --het-group=1 -m cyclic TELL",
        "srun -l -N1 -n2 -w r1-n10 TELL : -N1 -n1 -w r1-n2 TELL",
    ],
)
def test_layout_from_the_environment(lab: SlurmLab, tell: Tell, line: str) -> None:
    (told,) = tell.run(lab, line)
    told.check(is_in_environ=True)


@pytest.mark.parametrize(
    "line",
    [
        "srun -l -n4 -m arbitrary -w r1-n10,gpu-09,r1-n10,r1-n2 TELL",
        "srun -l -N2 -n4 -m cyclic -w r1-n2,r1-n9 TELL : -N2 -n3 -m block -w r1-n10,gpu-09 TELL",
    ],
)
def test_layout_from_sattach(lab: SlurmLab, tell: Tell, line: str) -> None:
    (told,) = tell.run(lab, line)
    told.check(is_in_environ=False)


@pytest.mark.parametrize(
    "line",
    [
        "srun -l -N1 -n2 -w r1-n10 TELL : -N2 -n3 -m cyclic -w r1-n2,r1-n9 TELL",
        "srun -l -n3 -m arbitrary -w r1-n10,gpu-09,r1-n10 TELL : -N1 -n2 -w r1-n2 TELL",
        "salloc -Q -N1 -n1 -w r1-n2 : -N2 -n4 -w r1-n10,gpu-09 srun -l -n3 --het-group=1 TELL : -n1 --het-group=0 TELL",
    ],
)
def test_layout_from_the_environment_of_some_tasks(lab: SlurmLab, tell: Tell, line: str) -> None:
    (told,) = tell.run(lab, line)
    told.check(is_in_environ=None)
    assert len({answer["environ"] is None for answer in told.answers}) == 2


def test_two_steps_at_the_same_time(lab: SlurmLab, tell: Tell) -> None:
    line = "srun -l --exact -N2 -n4 -m cyclic -r0 TELL & srun -l --exact -N2 -n3 -r2 TELL & wait"
    steps = tell.run(lab, f"salloc -Q -N4 -n8 --ntasks-per-node=2 bash -c {shlex.quote(line)}")
    assert sorted(len(told.truth) for told in steps) == [3, 4]
    for told in steps:
        told.check(is_in_environ=True)


def test_uneven_step_beside_another_job(lab: SlurmLab, tell: Tell) -> None:
    line = "srun -N1 -n6 -w r1-n9 sh -c 'echo >&2; sleep 2' 2>&1 | (read; srun -l -N3 -n9 -w r1-n2,r1-n9,r1-n10 TELL)"
    (told,) = tell.run(lab, line)
    told.check(is_in_environ=True)


def test_host_names_that_differ_from_node_names(slurm: None, tell: Tell) -> None:
    with SlurmLab(["x9", "x10", "x11"], host_suffix=".lab.example", resolve_names=False) as lab:
        (told,) = tell.run(lab, "srun -l -N3 -n5 -m cyclic TELL")
        told.check(is_in_environ=True)
        (told,) = tell.run(lab, "srun -l -n3 -m arbitrary -w x11,x10,x9 TELL")
        told.check(is_in_environ=False)


def test_layout_of_many_tasks_from_sattach(lab: SlurmLab, tell: Tell, tmp_path: Path) -> None:
    touch = f"touch {tmp_path}/$SLURM_JOB_ID.0-$SLURM_PROCID; exec hostname"
    script = f"[ $SLURM_PROCID = 0 ] || {{ {touch}; }}; exec {tell.command}"
    lines = lab.run("srun", "-O", "-l", "-N4", "-n200", "-m", "cyclic", "sh", "-c", script).stdout.splitlines()
    hosts = {int(label): words.split()[-1] for label, _, words in (line.partition(": ") for line in lines)}
    (told,) = tmp_path.glob("*.0-0")
    answer = json.loads(told.read_text())
    assert answer["asked"] == answer["environ"] == [hosts[rank] for rank in range(200)]
