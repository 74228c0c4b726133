"""The pages of options: that of a job is up to date, that of other launchers has all their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tf4slurm.cli.options import job_options
from tf4slurm.cli.run import run, task
from tf4slurm.cli.submit import submit

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "guides/coming-from.md").read_text(encoding="utf-8")

THEIRS = {
    "Ray": (
        "--exp-name --num-nodes --node --num-gpus --partition --load-env --command "
        "--address --num-cpus --wait-for-nnodes --min-nodes --disable-usage-stats --resources --min-worker-port"
    ),
    "torchrun": (
        "--nnodes --nproc-per-node --rdzv-endpoint --max-restarts --log-dir --redirects --tee --signals-to-handle"
    ),
    "submitit": "",  # its parameters are arguments in Python
    "Old tf4slurm": "-ps -workers",
}
"""Their options, from their sources. One row has all ports of Ray."""

OURS = {
    name
    for verb in (run, submit, task)
    for parameter in verb.params
    for name in (*parameter.opts, *parameter.secondary_opts)
}


def rows(section: str) -> list[list[str]]:
    (text,) = (part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(section))
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return cells[2:]


@pytest.mark.parametrize("section", THEIRS)
def test_each_option_of_other_launcher_has_a_row(section: str) -> None:
    named = [option for row in rows(section) for option in re.findall(r"`(-{1,2}[A-Za-z][\w-]*)`", row[0])]
    assert len(named) == len(set(named))
    assert set(THEIRS[section].split()) <= set(named)


@pytest.mark.parametrize("section", THEIRS)
def test_each_row_has_an_existing_counterpart_or_a_text(section: str) -> None:
    for theirs, ours, words in rows(section):
        options = ours.replace("`", "").split()
        assert set(options) <= OURS, theirs
        assert options or len(words) > 10, theirs


def test_every_verb_has_the_options_of_a_job() -> None:
    def nothing(**values: object) -> None: ...

    shared = {parameter.name for parameter in job_options("task")(nothing).__click_params__}  # type: ignore[attr-defined]
    for verb in (run, submit, task):
        assert shared <= {parameter.name for parameter in verb.params}
