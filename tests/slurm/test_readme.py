"""The Python snippets of README: each, completed to a program, ends by itself on a real Slurm."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
SECONDS = 150
TF4SLURM = Path(sys.executable).with_name("tf4slurm")
SRUN = ("srun", "-Q", "-n4", "-N4", sys.executable)
ALLOCATE = ("salloc", "-Q", "-N4", "-n4")
IMPORTS = "import sys\nimport tensorflow as tf\nimport tf4slurm\n"
TOTAL = """
with strategy.scope():
    total = tf.Variable(0.0)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
for _ in range(20):
    coordinator.schedule(tf.function(lambda: total.assign_add(1.0)))
coordinator.join()
print("total", total.numpy(), flush=True)
"""


@dataclass(frozen=True)
class Program:
    """Snippets of README (a part of each), the code before, between and after them, and the expected output."""

    snippets: tuple[str, ...]
    prints: tuple[str, ...]
    command: tuple[str | Path, ...] = SRUN
    before: str = IMPORTS
    between: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        found = [snippet for piece in self.snippets for snippet in SNIPPETS if piece in snippet]
        assert len(found) == len(self.snippets)
        return self.before + self.between.join(found) + self.after


def launched(*options: str) -> tuple[str | Path, ...]:
    return (*ALLOCATE, TF4SLURM, "run", *options, "--", sys.executable)


PROGRAMS = {
    "resolver": Program(("SlurmClusterResolver",), ("total 20.0",), after=TOTAL),
    "own servers": Program(
        ("infiniband=True", "serve_until_done"),
        ("trained 0", "trained 1", "trained 2"),
        before=f"{IMPORTS}def train(server):\n    print('trained', task_index, flush=True)\n",
    ),
    "whole script": Program(
        ("evaluate_checkpoints",),
        ("ckpt-300",),
        launched("--ps", "1", "--workers", "1", "--evaluators", "1"),
        before="",
    ),
    "share of the files": Program(
        ('interface="ib0"', "share_of"),
        ("worker 0 ['a', 'c']", "worker 1 ['b', 'd']"),
        between="all_paths, num_workers = ['a', 'b', 'c', 'd'], 2\n",
        after="print(task_type, task_index, sorted(paths), flush=True)",
    ),
    "data service": Program(
        ("ShardingPolicy",),
        ("[0, 1, 2, 3]",),
        launched("--ps", "0", "--no-chief", "--workers", "1", "--data-workers", "2"),
        before=f"{IMPORTS}dataset = tf.data.Dataset.range(4)\n",
        after="print(sorted(map(int, dataset)), flush=True)",
    ),
    "save and stop": Program(
        ("should_stop",),
        ("saved at 3",),
        launched("--ps", "0", "--no-chief", "--workers", "4"),
        before=f"""{IMPORTS}import os, signal, time
steps, loss = 1000000, 0.5
def train(step):
    if step == 3:
        os.kill(os.getppid(), signal.SIGTERM)
        while not tf4slurm.should_stop():
            time.sleep(0.01)
def save():
    print("saved at", step, flush=True)
""",
    ),
    "notebook": Program(
        ("LocalCluster",),
        ("led a ps and workers",),
        (sys.executable,),
        after="\n    print('led a ps and workers', flush=True)\nsys.exit(job.wait())",
    ),
}


def test_every_snippet_is_in_a_program() -> None:
    pieces = [piece for program in PROGRAMS.values() for piece in program.snippets]
    assert [sum(piece in snippet for piece in pieces) for snippet in SNIPPETS] == [1] * len(SNIPPETS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "resolver" else [pytest.mark.long]) for name in PROGRAMS]
)
def test_program_of_snippet_ends_by_itself(tmp_path: Path, lab: SlurmLab, name: str) -> None:
    program = PROGRAMS[name]
    (tmp_path / "train.py").write_text(PROGRAMS["whole script"].text)  # what the notebook submits
    script = tmp_path / "program.py"
    script.write_text(program.text)
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "PATH": f"{TF4SLURM.parent}:/usr/bin:/bin:/usr/sbin:/sbin"}
    done = lab.run(*program.command, script, timeout_seconds=SECONDS, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == (143 if name == "save and stop" else 0), done.stdout + done.stderr
    for text in program.prints:
        assert text in done.stdout, done.stdout + done.stderr
