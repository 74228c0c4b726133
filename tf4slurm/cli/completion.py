"""`tf4slurm completion`: for bash, zsh and fish."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, /, shell: str) -> None:
    """Print what makes SHELL complete verbs, options, jobs and tasks: eval "$(tf4slurm completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "tf4slurm", "_TF4SLURM_COMPLETE").source())
