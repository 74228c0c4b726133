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
    "Ray's": "--exp-name --num-nodes --node --num-gpus --partition --load-env --command",
    "ray symmetric-run": (
        "--address --num-cpus --num-gpus --wait-for-nnodes --min-nodes --disable-usage-stats --resources "
        "--min-worker-port --max-worker-port --node-manager-port --object-manager-port --runtime-env-agent-port "
        "--dashboard-agent-grpc-port --dashboard-agent-listen-port --metrics-export-port"
    ),
    "yaspi": (
        "--install_location --job_name --recipe --template_dir --partition --time_limit --gen_script_dir --cmd --mem "
        "--prep --job_array_size --cpus_per_task --gpus_per_task --throttle_array --env_setup --ssh_forward --log_dir "
        "--use_custom_ray_tmp_dir --refresh_logs --watch --exclude --constraint_str --job_queue --custom_directives "
        "--code_snapshot_dir --code_snapshot_filter_patterns"
    ),
    "torchrun": (
        "--nnodes --nproc-per-node --rdzv-endpoint --rdzv-id --max-restarts --log-dir --redirects --tee "
        "--signals-to-handle"
    ),
    "submitit": "",  # its parameters are arguments in Python
    "Old tf4slurm": "-ps -workers --data_dir --model_dir -batch_size -Iterations",
}
"""Their options, from their sources."""

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
