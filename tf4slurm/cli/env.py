"""`tf4slurm env`: show the environment of this process."""

from __future__ import annotations

import json
from typing import Any

import click

from tf4slurm.cli.options import given, job_options
from tf4slurm.doctor.environment import describe_environment, format_environment
from tf4slurm.spec import JobSpec


@click.command()
@click.option("--interface", help="The network whose address a task would use.")
@click.option(
    "--tasks",
    help="A task type for each rank, such as ps,worker,worker: show the cluster spec without communication.",
)
@job_options("env", names=("ports",))
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_obj
def env(environ: dict[str, str], /, interface: str | None, tasks: str | None, as_json: bool, **options: Any) -> None:
    """Show the Slurm step of this process, its layout, the address it would use, TF_CONFIG, and warnings."""
    task_types = None if tasks is None else tasks.split(",")
    description = describe_environment(environ, interface, task_types, JobSpec(**given(options)).ports)
    click.echo(json.dumps(description, indent=2) if as_json else format_environment(description))
