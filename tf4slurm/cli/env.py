"""`tf4slurm env`: what this process sees."""

from __future__ import annotations

import json
from typing import Any

import click

from tf4slurm.cli.options import given, job_options
from tf4slurm.doctor.environment import describe_environment
from tf4slurm.errors import Tf4SlurmError
from tf4slurm.server_dictionary import get_server_dictionary
from tf4slurm.spec import JobSpec


@click.command()
@click.option("--interface", help="The network whose address would be taken.")
@click.option(
    "--tasks", help="A role for each rank, such as ps,worker,worker: show the map of it, without an exchange."
)
@job_options("env", ("ports",))
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_obj
def env(environ: dict[str, str], /, interface: str | None, tasks: str | None, as_json: bool, **options: Any) -> None:
    """Show what this process sees: its step, the layout, the address it would take, TF_CONFIG, and what is doubtful."""
    description = describe_environment(environ, interface)
    if tasks is not None and description["tf_config"] is None:
        try:
            cluster, role, index = get_server_dictionary(
                tasks.split(","), ports=JobSpec(**given(options)).ports, exchange=False
            )
            description["tf_config"] = {"cluster": cluster, "task": {"type": role, "index": index}}
        except Tf4SlurmError as error:
            description["doubts"].append(str(error))
    click.echo(json.dumps(description, indent=2) if as_json else _text(description))


def _text(description: dict[str, Any]) -> str:
    lines = [f"where: {description['where']}"]
    for name, value in (description["step"] or {}).items():
        if value not in (None, [], ""):
            lines.append(f"{name}: {value}")
    if description["nodes_by_rank"]:
        ranks = (f"{rank}={node}" for rank, node in enumerate(description["nodes_by_rank"]))
        lines.append(f"layout: {' '.join(ranks)}")
    lines.append(f"address: {description['address']}")
    for name, addresses in description["interfaces"].items():
        lines.append(f"interface {name}: {', '.join(addresses) or 'down, or without an address'}")
    if description["tf_config"]:
        lines.append(f"TF_CONFIG: {json.dumps(description['tf_config'])}")
    return "\n".join([*lines, *(f"doubtful: {doubt}" for doubt in description["doubts"])])
