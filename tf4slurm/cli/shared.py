"""Provide what several verbs use: classes of click commands, the argument ID, messages, tables, shell completion."""

from __future__ import annotations

import math
import os
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem

from tf4slurm.errors import EXIT_USAGE
from tf4slurm.jobs.formatting import format_table

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_COMPLETED_JOBS = 50


class _WithExamples(click.Command):
    """A command whose help ends with examples."""

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **values: Any) -> None:
        epilog = "\n  ".join(("\b\nExamples:", *examples)) if examples else None
        super().__init__(*arguments, **{"epilog": epilog, **values})
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.examples))


class Verb(_WithExamples):
    """A command whose help shows its options in groups, and examples at the end."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from tf4slurm.spec.options import (
            Group,  # imported here, because `tf4slurm --version` and `--help` do not need it
        )

        records: dict[str, list[tuple[str, str]]] = {group: [] for group in typing.get_args(Group)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                records[getattr(parameter, "group", "Options")].append(record)
        for group, lines in records.items():
            if lines:
                with formatter.section(group):
                    formatter.write_dl(lines)


class VerbGroup(_WithExamples, click.Group):
    """A command with subcommands. Called without a subcommand, it prints its help and exits with 2."""

    command_class = Verb

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(EXIT_USAGE)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verbs = self.list_commands(ctx)
        if args[0] not in verbs and not args[0].startswith("-") and not ctx.resilient_parsing:
            from tf4slurm.cli.mistakes import explain_verb

            raise click.UsageError(explain_verb(args[0], verbs, ctx.command_path), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in sorted(self.commands.items())])


def job_argument(*, many: bool = False, is_optional: bool = True, is_changed: bool = False) -> Decorator:
    """Return a decorator that adds the argument ID, which the function gets as the `KnownJob` `job`.

    Args:
        many: Whether several ids may be given. The function then gets a list, `jobs`.
        is_optional: Whether the id may be omitted. The job is then this user's latest one.
        is_changed: Whether the function changes a running job, so that several running jobs of one name are refused.
    """
    from tf4slurm import api

    def find(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if many:
            return [find_one(job) for job in value or ((None,) if is_optional else ())]
        return find_one(value)

    def find_one(text: str | None) -> object:
        return api.find_to_change(text) if is_changed and text is not None else api.find(text)

    name, num, metavar = ("jobs", -1, "ID...") if many else ("job", 1, "ID")
    metavar = metavar.replace("ID", "[ID]") if is_optional else metavar
    return click.argument(
        name, nargs=num, metavar=metavar, required=not is_optional, callback=find, shell_complete=find_jobs
    )


def note(text: str) -> None:
    """Print a message to standard error, after "tf4slurm: "."""
    click.echo(f"tf4slurm: {text}", err=True)


def paint(text: str, colour: str) -> str:
    """Return text in bold and in a colour of click, such as "red", for standard output.

    The text is returned unchanged if standard output is no terminal or NO_COLOR is set (https://no-color.org).
    """
    is_plain = click.get_current_context().obj.get("NO_COLOR") or not sys.stdout.isatty()
    return text if is_plain else click.style(text, fg=colour, bold=True)


def fit_table(rows: Sequence[Sequence[str]], optional: Iterable[str], stream: TextIO) -> list[str]:
    """Return the lines of a table as `format_table` does. If `stream` is a narrow terminal, columns are left out.

    Args:
        rows: The rows. The first one has the headings.
        optional: The headings of the columns that may be left out. The first of them is left out first.
        stream: The stream to which the lines will be printed.
    """
    import shutil  # imported here, because it imports three compression libraries

    lines = format_table(rows)
    width = shutil.get_terminal_size().columns if stream.isatty() else math.inf
    for heading in optional:
        if max(map(len, lines)) > width:
            index = rows[0].index(heading)
            rows = [(*row[:index], *row[index + 1 :]) for row in rows]
            lines = format_table(rows)
    return lines


def complete(find: Callable[[click.Context], Iterable[str]]) -> _Completion:
    """Return a `shell_complete` function for click: it offers the names from `find` that begin with the typed text."""
    return lambda context, _, start: [CompletionItem(name) for name in find(context) if name.startswith(start)]


def find_jobs(_context: click.Context, _parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Return the ids and names of this user's latest 50 jobs that begin with `start`, for shell completion.

    The help text of an id is the job's name, and that of a name is the job's id.
    """
    from tf4slurm.jobs.registry import registered_jobs

    found: dict[str, str] = {}
    for job in registered_jobs(os.environ)[:_COMPLETED_JOBS]:
        if job.job_id:
            found.setdefault(job.job_id, job.name)
        found.setdefault(job.name, f"job {job.job_id}" if job.job_id else "local job")
    return [CompletionItem(word, help=text) for word, text in found.items() if word.startswith(start)]
