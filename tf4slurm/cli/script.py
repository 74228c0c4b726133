"""`tf4slurm script`: the batch script of a job, printed."""

from __future__ import annotations

from typing import Any

import click

from tf4slurm.cli.options import job_options
from tf4slurm.cli.recorded import RecordedCommand, made_by, write_script
from tf4slurm.cli.settings import site_option
from tf4slurm.cli.submission_options import make_job, submission_options
from tf4slurm.submission.batch_script import make_script


@click.command(cls=RecordedCommand)
@site_option
@submission_options
@job_options("script")
@click.pass_context
def script(context: click.Context, /, **options: Any) -> None:
    """Print the batch script that "tf4slurm submit" with the same options gives to sbatch.

    Slurm need not be there. `tf4slurm script … | sbatch` submits it.
    """
    spec, submission = make_job(context, made_by(context), options)
    if submission.snapshot != "none":
        raise click.UsageError('Printing a script takes no snapshot. Leave --snapshot out, or use "tf4slurm submit".')
    write_script(make_script(spec, submission))
