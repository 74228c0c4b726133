"""`tf4slurm submit`: a job given to Slurm."""

from __future__ import annotations

from typing import Any

import click

from tf4slurm.cli.options import job_options
from tf4slurm.cli.recorded import RecordedCommand, made_by, write_script
from tf4slurm.cli.settings import site_option
from tf4slurm.cli.submission_options import make_job, submission_options
from tf4slurm.launch.checks import check_command
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.submit import estimate, kept_script
from tf4slurm.submission.submit import submit as submit_job


@click.command(cls=RecordedCommand)
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@click.option("--test-only", is_flag=True, help="Print when and where Slurm would start it, and submit nothing.")
@site_option
@submission_options
@job_options("submit")
@click.pass_context
def submit(context: click.Context, /, dry_run: bool, test_only: bool, **options: Any) -> None:
    """Give COMMAND to Slurm as a batch job of one TensorFlow cluster; print the job's id.

    The job runs "tf4slurm run" with the same options. What Slurm is asked has Slurm's own names. With --single it runs
    COMMAND alone, once.
    """
    environ: dict[str, str] = context.obj
    spec, submission = make_job(context, made_by(context), options)
    if dry_run:
        write_script(make_script(spec, submission))
        return
    if not submission.has_environment:  # else what it needs may only be there
        check_command(spec.command)
    if test_only:
        click.echo(estimate(spec, submission, environ))
        return
    job_id = submit_job(spec, submission, environ)
    click.echo(job_id)
    if "time" not in submission.options:
        click.echo("No time limit is asked for (-t): the partition's own counts.", err=True)
    click.echo(
        f"The script is kept as {kept_script(spec, job_id)}; look at the job with: tf4slurm status {job_id}", err=True
    )
