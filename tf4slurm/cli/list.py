"""`tf4slurm list`: the jobs of before."""

from __future__ import annotations

import time

import click

from tf4slurm.cli.jobs import table
from tf4slurm.jobs.registry import known_jobs
from tf4slurm.jobs.schema import to_json
from tf4slurm.jobs.status import StatusReader

_SHOWN = 20


@click.command(name="list")
@click.option("--all", "show_all", is_flag=True, help=f"Show all that are remembered, not only the latest {_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
@click.pass_obj
def list_(environ: dict[str, str], /, show_all: bool, as_json: bool) -> None:
    """List the jobs that this user has started, the latest first."""
    jobs = known_jobs(environ)[: None if show_all else _SHOWN]
    statuses = StatusReader(jobs).read()
    if as_json:
        rows = [{**vars(each), "started": job.started} for job, each in zip(jobs, statuses, strict=True)]
        click.echo(to_json([{k: v for k, v in row.items() if k != "tasks"} for row in rows], indent=2))
        return
    if not jobs:
        click.echo("No job was started yet. Start one: tf4slurm run --help", err=True)
        return
    lines = [("ID", "NAME", "STATE", "EXIT", "TIME", "STARTED", "RUN DIRECTORY")]
    for job, each in zip(jobs, statuses, strict=True):
        code = "-" if each.exit_code is None else str(each.exit_code)
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started))
        lines.append(
            (job.job_id or "-", job.name, each.state, code, each.elapsed or "-", started, each.run_directory or "-")
        )
    click.echo("\n".join(table(lines)))
    for warning in dict.fromkeys(warning for each in statuses for warning in each.warnings):
        click.echo(f"tf4slurm: {warning}", err=True)
