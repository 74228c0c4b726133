"""`tf4slurm resume`: a job started again as it was; its script goes on from its own checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from tf4slurm.cli.jobs import job_argument
from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.schema import JobFile
from tf4slurm.jobs.status import StatusReader
from tf4slurm.submission.submit import submit_again


@click.command()
@job_argument()
@click.pass_obj
def resume(environ: dict[str, str], /, job: str | None) -> None:
    """Start a job again with the same options, in the same directory.

    A job that was submitted is submitted again, and its new id printed; a local one runs here. Where training goes on
    is the script's own affair: its checkpoint.
    """
    known = find_job(job, environ)
    (status,) = StatusReader([known]).read()
    if not status.has_ended:
        raise click.UsageError(f"{known.name} is still {status.state}. Wait for its end, or cancel it first.")
    runs = known.run_directories
    job_file = runs[-1].read_trusted_job() if runs else JobFile()
    os.chdir(job_file.directory or ".")
    script = Path(known.runs_directory) / f"{known.name}.sh"
    if known.job_id is not None and script.is_file():
        click.echo(submit_again(script, known.name.removesuffix(f"-{known.job_id}"), environ))
        return
    arguments = job_file.arguments
    if not arguments or known.job_id is not None:
        raise RunDirectoryError(
            f"How {known.name} was started is not kept: neither {script} nor job.json tells it. Start it again with "
            "the command you used.",
            path=str(script),
        )
    sys.stderr.write(f"tf4slurm: in {os.getcwd()}: {' '.join(arguments)}\n")
    sys.stderr.flush()
    os.execvpe(sys.executable, [sys.executable, "-m", "tf4slurm", *arguments[1:]], environ)
