"""Test the notebooks: their stored outputs, their outputs when executed, and their commands on a real Slurm."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="pip install tf4slurm[test,tutorials]")
pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

import nbformat

from tests.slurm.lab import SlurmLab
from tests.tutorials.notebook import (
    NOTEBOOKS,
    TUTORIALS,
    alternative_text,
    console_blocks,
    digest,
    execute,
    lay_out,
    runs_on_slurm,
    text_of,
)
from tests.tutorials.session import NODES, session_of, type_again

pytestmark = pytest.mark.keras

ACCURATE = r"(?:0\.9[5-9]\d*|1\.0+)"
PRINTED: Mapping[str, tuple[str, ...]] = {
    "01": (rf"test accuracy: {ACCURATE}", "#SBATCH --cpus-per-task=2"),
    "02": (
        r"worker/1 \| I am worker/1 at 127.0.0.1:\d+",
        r"pack +ps on \['r1-n9:23082', 'r1-n9:23083'\], rank 3 is worker/1",
        r"spread +ps on \['r1-n9:23082', 'r1-n10:23082'\]",
        r"TensorFlow: \{'ps': \['r1-n10:8888'\]",
        r"tf4slurm:   \{'ps': \['r1-n9:8888'\], 'worker': \['r1-n9:8889', 'r1-n9:8890', 'r1-n10:8888'\]\}",
        r"Error: .*nvidia-smi",
    ),
    "03": (
        rf"second \S+ step \d+ loss \S+ accuracy {ACCURATE}\nstep 60\d, test accuracy: {ACCURATE}\nmade \d+ steps",
        rf"workers: 2, steps: \d+ \+ \d+, test accuracy: {ACCURATE}",
        rf"workers: 3, steps: \d+ \+ \d+ \+ \d+, test accuracy: {ACCURATE}",
        r"num_steps=200: \d+ \+ \d+ = (?:39\d|40\d) steps",
        r"last_step=200: \d+ \+ \d+ = (?:19\d|20\d) steps",
    ),
    "04": (
        rf"worker/0 test accuracy: {ACCURATE} made \d+ steps",
        rf"worker/0 (sum of the variables \S+), test accuracy: {ACCURATE}\nworker/1 \1",
        r"(?s)asynchronous .*3 workers: +[\d,]+ images/s\nsynchronous .*3 workers: +[\d,]+ images/s",
    ),
    "05": (
        r"kernel is on /job:ps/replica:0/task:0",
        rf"epoch  6  step 288 .* val_accuracy {ACCURATE}",
        rf"test accuracy: {ACCURATE}\nread: .*\nwritten: ",
        rf"epoch  4  step 480  accuracy {ACCURATE} .*\nthe part on ps/0: \(300, 16\)",
        r"240 steps, \d+ steps/s, mean loss 0\.",
        # The kernel sends what a cell prints a little later than the messages of the cluster: their order may vary.
        r"epoch  7 .*\nkilled worker/1\n",
        r"tf4slurm: worker/1 on .* was killed by signal 9 .*: restart 1 of at most 3\n",
        rf"\nepoch  8 .*\nepoch 10 .* val_accuracy {ACCURATE}.*\nsteps: (?:4[89]|5)\d",
        "tf4slurm run --site none --workers 2",
    ),
    "06": (
        rf"killed worker/1 ---.*worker/1.*restart.*test accuracy: {ACCURATE}.*exit code 0\n",
        rf"killed ps/0 ---.*resuming from step \d+.*test accuracy: {ACCURATE}.*exit code 0\n",
        r"killed chief/0 ---.*Root cause: SIGKILL: another process killed it \(chief/0\)\nexit code 137\n",
    ),
    "07": (
        r"asked to stop: saved at step (\d+).*exit code 143.*going on from step \1\b",
        rf"test accuracy: {ACCURATE}.*exit code 0",
        "--requeue",
    ),
    "08": ("#SBATCH --gres=gpu:a100:3", "--interface infiniband", "COMPLETED in"),
    "09": (
        r"ps 0 received done 1",
        r"worker 1 ended with loss 0\.0",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --exclusive",
    ),
    "10": (
        rf"made \d+ steps, .*made \d+ steps, .*COMPLETED\n.*serve_until_done.*step 150\d, test accuracy: {ACCURATE}\n",
        r"serve_until_done.*worker/1 \| made [1-9]\d\d+ steps.*COMPLETED\n.*worker 1 made [1-9]\d\d+ steps",
        r"saved at step (\d+).*exit code 143.*resuming from step \1\b",
        rf"step 2400, loss \S+, test accuracy: {ACCURATE}.*exit code 0",
    ),
    "11": (
        r"exit code 0\n(?:\{'lr': .*COMPLETED .*\n){6}.*best: \{'lr': '1', 'units': '32'\}\n.*\.html",
        r"\{'lr': '0\.0185664', 'units': '32'\}",
    ),
    "13": (
        r"workers: \['worker/0', 'worker/1', 'worker/2'\]",
        rf"test accuracy: {ACCURATE}\n(?:Slurm|Local)Cluster\(\S+: running\)\nCOMPLETED\n",
    ),
    "12": (rf"(?:trial \d: lr \S+ units \d+ COMPLETED.*\n){{6}}best accuracy {ACCURATE}\n",),
}
"""Patterns in the output of the cells of each notebook."""

TYPED: Mapping[str, tuple[str, ...]] = {
    "01": (r"1 +debug first_jo +you +R ", rf"n1: \d+ CPUs.*\ntest accuracy: {ACCURATE}", r"slurm-2.out\n.*accuracy"),
    "02": (r"3: I am worker/2 at 10\.78\.0\.4:\d+", r"3: I am worker/2 at 172\.29\.0\.4:\d+", "ib7.*eth0"),
    "03": (rf"test accuracy: {ACCURATE}.*COMPLETED.*srun.*3: made \d+ steps",),
    "04": (rf"worker/3 \| sum of the variables \S+, test accuracy: {ACCURATE}.*COMPLETED in",),
    "05": (r"worker/1 +n4 +\S+ +running", rf"chief/0 \| test accuracy: {ACCURATE}", "COMPLETED in"),
    "06": (rf"ps/0 .*SIGKILL.*resuming from step \d+.*test accuracy: {ACCURATE}.*COMPLETED in",),
    "07": (r"saved at step (\d+).*going on from step \1\b", rf"test accuracy: {ACCURATE}"),
    "08": (r"worker/1 +n4 +172\.29\.0\.4:\d+ +running", r"worker/\d \| on n\d, GPU [0-3]", "COMPLETED in"),
    "09": (r"0: ps 0 received done 2", r"3: worker 2 ended with loss 0\.0"),
    "10": (
        rf"made \d+ steps.*COMPLETED.*srun.*1: step 150\d, test accuracy: {ACCURATE}",
        r"saved at step (\d+).*REQUEUED.*resuming from step \1\b.*step 9000, .*COMPLETED in",
    ),
    "11": (
        r"1_\[2-5%2\] .*exit code 137\n.*6 elements: 5 COMPLETED, 1 FAILED\..*1_1 +lr=0\.01 units=32 +FAILED +137 ",
        r"\n7\n.*resuming from epoch \d+\nepoch 30 .*tune_digits-1-comparison\.html",
    ),
    "13": (),
    "12": (rf"4_0 lr 10\.000 units 16: PRUNED.*best: accuracy {ACCURATE} .*4_0 +lr=10 units=16 +STOPPED +130 ",),
}
"""Patterns in the blocks marked `console` of each notebook."""

FAST = ("05",)
"""The notebooks that `make test` executes; `make test-long` executes all, and runs their console commands again."""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def number(path: Path) -> str:
    return path.name[:2]


def check(text: str, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        assert re.search(pattern, text, re.DOTALL), f"{pattern} is not in:\n{text}"


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=number)

MAX_LINES = 45
END_TABLE = re.compile(r"^ *task +node +address +started +ended", re.MULTILINE | re.IGNORECASE)
BOILERPLATE = re.compile(
    r"oneDNN|absl::|cpu_feature_guard|rebuild TensorFlow|\b[IWE]0000 |grpc_server_lib|FutureWarning"
)
OLD_WORDS = re.compile(
    r"script is kept|verdict|companion|muster|FAILED with exit code (75|143)",
    re.IGNORECASE,
)


def outputs_of(notebook: Any) -> list[str]:
    """Return the text of each output: those of the cells, and those of the commands in the console blocks."""
    commands = [text for block in console_blocks(notebook) for text in re.split(r"^\$ .*\n", block, flags=re.MULTILINE)]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [*commands, *(text_of({"cells": [cell]}) for cell in cells)]


@each
def test_notebook_is_stored_with_its_outputs_and_texts(path: Path) -> None:
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    check(text_of(notebook), PRINTED[number(path)])
    check(session_of(notebook), TYPED[number(path)])


@each
def test_stored_outputs_belong_to_the_stored_code_and_commands(path: Path) -> None:
    """Edit only texts by hand; after a change of the code or of a command run `make notebooks`."""
    notebook = read(path)
    assert notebook.metadata["tf4slurm"]["executed"] == digest(notebook)


@each
def test_scripts_that_a_notebook_shows_are_those_of_today(path: Path) -> None:
    for cell in (cell for cell in read(path).cells if cell.cell_type == "code"):
        for name in re.findall(r"(?:^!cat |Path\(\")(\w+\.py)", cell.source, re.MULTILINE):
            script = (TUTORIALS / name).read_text(encoding="utf-8")
            shown = text_of({"cells": [cell]})
            assert [line for line in shown.splitlines() if line.strip(" .") and line.rstrip() not in script] == []


@each
def test_outputs_are_short_and_contain_only_what_matters(path: Path) -> None:
    outputs = outputs_of(read(path))
    for output in outputs:
        assert len(output.splitlines()) <= MAX_LINES, output
        assert not BOILERPLATE.search(output), output
        assert not OLD_WORDS.search(output), output
    assert sum(len(END_TABLE.findall(output)) for output in outputs) <= 1


@each
def test_notebook_is_a_page_with_one_title_and_an_outline(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    levels = [
        len(marks) for marks in re.findall(r"^(#+) ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    ]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@each
def test_every_picture_has_an_alternative_text(path: Path) -> None:
    for cell in (cell for cell in read(path).cells if cell.cell_type == "code"):
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert any(kind.startswith("image/") for kind in kinds) == bool(alternative_text(cell)), cell.source


@each
def test_notebook_contains_nothing_of_the_machine_that_executed_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"/tmp/\w+|/root\b|/home/(?!you/)\w+| root |Traceback", text)
    for notebook in (cell for cell in read(path).cells if cell.cell_type == "code"):
        errors = "".join(output["text"] for output in notebook.outputs if output.get("name") == "stderr")
        assert all(line.startswith("tf4slurm: ") for line in errors.splitlines()), errors  # notices of a cluster


@each
def test_notebook_has_a_summary_and_valid_links(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].source.startswith(f"# {int(number(path))}. ")
    assert "**In this tutorial**" in cells[0].source
    assert "## Read next" in cells[-1].source
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    for link in re.findall(r"\]\(([\w./-]+)\)", "\n".join(texts)):
        assert (TUTORIALS / link).exists(), link


def test_readme_lists_all_notebooks() -> None:
    readme = (TUTORIALS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\d\d-[\w-]+\.ipynb)", readme)) == {path.name for path in NOTEBOOKS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if number(path) in FAST], ids=number)
def test_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    check(text_of(execute(lay_out(tmp_path) / path.name, tmp_path)), PRINTED[number(path)])


@pytest.mark.long
@pytest.mark.timeout(1800)
@each
def test_notebook_runs_and_its_console_blocks_match_a_real_slurm(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if runs_on_slurm(path):
        request.getfixturevalue("slurm")
    with SlurmLab(NODES) if runs_on_slurm(path) else nullcontext() as login:
        notebook = execute(lay_out(tmp_path) / path.name, tmp_path, login)
    check(text_of(notebook), PRINTED[number(path)])
    request.getfixturevalue("slurm")  # without Slurm, skip the test only here
    if session_of(notebook):
        with SlurmLab(NODES) as lab:
            type_again(notebook, lab, tmp_path)
    check(session_of(notebook), TYPED[number(path)])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_notebook_on_slurm_runs_on_a_laptop_after_a_change_of_one_line(tmp_path: Path) -> None:
    (path,) = filter(runs_on_slurm, NOTEBOOKS)
    copy = lay_out(tmp_path) / path.name
    old, new = 'SlurmCluster(ps=1, workers=2, nodes=3, time=\\"20m\\")', "LocalCluster(ps=1, workers=2)"
    assert copy.read_text().count(old) == 1
    copy.write_text(copy.read_text().replace(old, new))
    check(text_of(execute(copy, tmp_path)), PRINTED[number(path)])
