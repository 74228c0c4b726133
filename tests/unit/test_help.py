"""Help texts and tables of the command line, on narrow and wide terminals."""

from __future__ import annotations

import io
import shlex

import click
import pytest
from click.testing import CliRunner

from tf4slurm.cli import main
from tf4slurm.cli.shared import fit_table
from tf4slurm.jobs.formatting import format_table

GROUPS = ("Roles", "Resources", "Network", "Time and recovery", "Files", "Environment", "Slurm", "Advanced", "Options")
ROWS = (("TASK", "NODE", "ADDRESS", "STATE"), ("chief/0", "n0", "10.0.0.1:40000", "running"))


def help_of(*words: str, columns: int = 80) -> str:
    """Return a help text as the program prints it on a terminal of this width."""
    return (
        CliRunner()
        .invoke(
            main.cli, [*words, "--help"], obj={}, terminal_width=columns, prog_name="tf4slurm", catch_exceptions=False
        )
        .output
    )


def verbs() -> list[tuple[str, ...]]:
    context = click.Context(main.cli)
    found: list[tuple[str, ...]] = []
    for verb in main.cli.list_commands(context):
        command = main.cli.get_command(context, verb)
        found += [(verb, each) for each in command.commands] if isinstance(command, click.Group) else [(verb,)]
    return found


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command | None = main.cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command


def test_help_lists_every_command_in_a_group_and_three_examples() -> None:
    text = help_of()
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        *("Start a job:", "Watch and stop:", "After the end:", "Check:", "Advanced:", "Options:", "Examples:")
    ]
    assert all(f"\n  {verb} " in text for verb in main._VERBS)
    assert text.partition("Examples:\n")[2].count("\n  tf4slurm ") == 2


@pytest.mark.parametrize("verb", ["run", "submit", "script", "task"])
def test_options_of_a_job_are_in_groups_with_roles_first(verb: str) -> None:
    text = help_of(verb)
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Roles"
    assert headings == [*(group for group in GROUPS if group in headings), "Examples"]
    assert text.index("--ps N") < text.index("--workers N") < text.index("\nNetwork:")
    assert text.partition("Examples:\n")[2].count("tf4slurm") == 2


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_examples_have_existing_options(verb: tuple[str, ...]) -> None:
    command = command_of(verb)
    examples = getattr(command, "examples")  # noqa: B009  # of Verb
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" | ")[0] if example.startswith("tf4slurm") else example, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        if "tf4slurm" not in words:  # inside of $(…)
            continue
        start = words.index("tf4slurm") + 1
        assert tuple(words[start : start + len(verb)]) == verb, example
        arguments = words[start + len(verb) :]
        command.make_parser(click.Context(command)).parse_args(arguments)


@pytest.mark.parametrize("columns", [60, 140])
@pytest.mark.parametrize("verb", [(), *verbs()], ids=" ".join)
def test_help_fits_the_terminal(verb: tuple[str, ...], columns: int) -> None:
    text, _, _ = help_of(*verb, columns=columns).partition("\nExamples:")
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize(
    ("columns", "headings"),
    [(80, "TASK NODE ADDRESS STATE"), (32, "TASK NODE STATE"), (20, "TASK STATE"), (5, "TASK STATE")],
)
def test_table_on_a_narrow_terminal_leaves_out_columns(
    monkeypatch: pytest.MonkeyPatch, columns: int, headings: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    assert fit_table(ROWS, ("ADDRESS", "NODE"), Terminal())[0].split() == headings.split()
    assert fit_table(ROWS, ("ADDRESS", "NODE"), io.StringIO()) == format_table(ROWS)


def test_help_of_grow_has_its_default_of_output() -> None:
    text = help_of("grow")
    assert "worker-%A_%a.out" in text
    assert "slurm-<id>.out" not in text
