"""Placeholders that are filled in, text that is left unchanged, and commands that are refused."""

from __future__ import annotations

import logging

import pytest
from click.testing import CliRunner

from tf4slurm.cli.submit import script
from tf4slurm.cluster import Task
from tf4slurm.errors import OptionError
from tf4slurm.placeholders import fill_in

SPEC = {"chief": ["c:1"], "ps": ["a:1", "[::1]:2"], "worker": ["b:3"]}
FLAGS = ("--ps={ps_hosts}", "--workers={worker_hosts}", "--job={task_type}", "--index={task_index}")


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{ps_hosts}", "a:1,[::1]:2"),
        ("--to={job_name}/{task_index}", "--to=ps/1"),
        ("{{task_type}}", "{ps}"),
        ("{worker_hosts}{chief_hosts}", "b:3c:1"),
        ("{PS_HOSTS} { ps_hosts } {ps_hosts", "{PS_HOSTS} { ps_hosts } {ps_hosts"),
        ('{"a": {}, "b": "{name}"} ${x}', '{"a": {}, "b": "{name}"} ${x}'),
    ],
)
def test_only_exact_placeholders_are_filled_in(word: str, filled: str) -> None:
    assert fill_in((word,), SPEC, Task("ps", 1)) == (filled,)


def test_filled_in_value_is_not_expanded_again() -> None:
    assert fill_in(("{ps_hosts}",), {"ps": ["{task_index}:1"]}, Task("ps", 0)) == ("{task_index}:1",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "2"), "give --no-chief, else add {chief_hosts}"),
        (("--single",), "--single has no cluster to fill in"),
    ],
)
def test_placeholders_without_chief_or_cluster_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(script, [*arguments, "--", "python", "train.py", *FLAGS], obj={})
    assert isinstance(done.exception, OptionError) or done.exit_code == 2
    assert message in " ".join([str(done.exception), *done.output.split()])


def test_script_has_the_command_of_one_task() -> None:
    arguments = ["--no-chief", "--ps", "1", "--workers", "2", "--", "python", "train.py", *FLAGS]
    text = CliRunner().invoke(script, arguments, obj={}).output
    assert (
        "# Each task gets its own values; worker/0 runs:\n"
        "#   python train.py --ps=HOST:PORT --workers=HOST:PORT,HOST:PORT --job=worker --index=0\n"
    ) in text
    assert "'--ps={ps_hosts}'" in text.splitlines()[-1]


def test_misspelled_placeholder_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CliRunner().invoke(script, ["--workers", "2", "--", "python", "x.py", "{ps_host}", "{name}"], obj={})
    assert [record.getMessage() for record in caplog.records] == [
        "{ps_host} in the command is not a placeholder; did you mean {ps_hosts}?"
    ]
