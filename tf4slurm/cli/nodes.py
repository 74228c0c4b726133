"""`tf4slurm nodes`: expand, fold and count Slurm's nodelists."""

from __future__ import annotations

import sys

import click

from tf4slurm.slurm.nodelist import count_nodes, expand_nodelist, fold_nodelist

_nodelists = click.argument("nodelists", nargs=-1)


@click.group()
def nodes() -> None:
    """Expand, fold or count nodelists such as "n[001-003],gpu7": arguments, or lines of standard input."""


@nodes.command()
@_nodelists
def expand(nodelists: tuple[str, ...]) -> None:
    """Write one node name per line, in Slurm's order, with duplicates."""
    click.echo("\n".join(expand_nodelist(_text(nodelists))))


@nodes.command()
@_nodelists
def fold(nodelists: tuple[str, ...]) -> None:
    """Fold node names into one nodelist, such as n[9-10],gpu7."""
    click.echo(fold_nodelist(expand_nodelist(_text(nodelists))))


@nodes.command()
@_nodelists
def count(nodelists: tuple[str, ...]) -> None:
    """Write the number of nodes, including duplicates."""
    click.echo(count_nodes(_text(nodelists)))


def _text(nodelists: tuple[str, ...]) -> str:
    """Return the arguments as one nodelist, or without arguments the standard input."""
    if nodelists:
        return ",".join(nodelists)
    if sys.stdin.isatty():
        raise click.UsageError('No nodelist is given. Give it as an argument, such as "n[1-3]", or on standard input.')
    return sys.stdin.read()
