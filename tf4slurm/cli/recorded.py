"""A verb that keeps the arguments it was given, for the first lines of a batch script."""

from __future__ import annotations

import sys

import click

_ARGUMENTS = "tf4slurm.arguments"
_SHOWS_ONLY = ("--dry-run", "--test-only")


class RecordedCommand(click.Command):
    """A command that keeps the arguments it was given, for the script's first lines."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


def made_by(context: click.Context) -> tuple[str, ...]:
    """Return the command that submits what this one prints, shows or submits: the same text for all."""
    arguments = list(context.meta[_ARGUMENTS])
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ("tf4slurm", "submit", *(word for word in arguments[:end] if word not in _SHOWS_ONLY), *arguments[end:])


def write_script(text: str) -> None:
    """Write a script to standard output as it is, also where a name in it is not UTF-8."""
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
