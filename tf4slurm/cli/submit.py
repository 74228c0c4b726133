"""`tf4slurm submit` and `tf4slurm script`: submit or print a batch job."""

from __future__ import annotations

import sys
from typing import Any

import click

from tf4slurm import api
from tf4slurm.cli.options import ARGUMENTS, JobVerb, job_options, read_options, site_option
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.submission.submit import warn_of_missing_files
from tf4slurm.system.program import naming_standard_output

_PRINT_ONLY = ("--dry-run", "--test-only")


@click.command(
    cls=JobVerb,
    examples=(
        "tf4slurm submit --ps 1 --workers 8 -N 2 -t 2h -p short -- python train.py --epochs 3",
        "tf4slurm submit -N 2 --ps 2 --workers 4 --gpus-per-worker 1 --requeue 3 --dry-run -- python train.py",
    ),
)
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@click.option("--test-only", is_flag=True, help="Print when and where Slurm would start it, and submit nothing.")
@site_option
@job_options("submit", BatchSpec)
@click.pass_context
def submit(context: click.Context, /, dry_run: bool, test_only: bool, **options: Any) -> None:
    """Submit COMMAND as a batch job of one TensorFlow cluster, and print the job's id.

    The job runs "tf4slurm run" with the same options. Options for Slurm have Slurm's names. With --single the job
    runs COMMAND alone, once.
    """
    spec = make_spec(context, options)
    if dry_run:
        warn_of_missing_files(spec)
        _print_script(spec)
    elif test_only:
        click.echo(api.estimate(spec, environ=context.obj))
    else:
        job = api.submit(spec, environ=context.obj)
        click.echo(job.job_id)
        if "time" not in spec.sbatch_options:
            click.echo("No time limit given (-t): the partition's default applies.", err=True)
        click.echo(f"Batch script: {job.batch_script}. Show the job: tf4slurm status {job.job_id}", err=True)


@click.command(
    cls=JobVerb,
    examples=(
        "tf4slurm script --ps 1 --workers 8 -N 2 -t 2h -- python train.py > job.sh",
        "tf4slurm script --ps 1 --workers 2 --conda tensorflow -- python train.py | sbatch",
    ),
)
@site_option
@job_options("script", BatchSpec)
@click.pass_context
def script(context: click.Context, /, **options: Any) -> None:
    """Print the batch script that "tf4slurm submit" with the same options submits.

    This host needs no Slurm. `tf4slurm script … | sbatch` submits the script.
    """
    spec = make_spec(context, options)
    if spec.snapshot != "none":
        raise click.UsageError('"tf4slurm script" makes no snapshot. Omit --snapshot, or use "tf4slurm submit".')
    _print_script(spec)


def make_spec(context: click.Context, options: dict[str, Any]) -> BatchSpec:
    """Return the batch job that the options of a verb and the settings describe. See `read_options` for errors."""
    return BatchSpec(**read_options(BatchSpec, context.obj, options), made_by=_made_by(context))


def _made_by(context: click.Context) -> tuple[str, ...]:
    """Return the `tf4slurm submit` command that submits this job: the given options but --dry-run and --test-only."""
    arguments = list(context.meta[ARGUMENTS])
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ("tf4slurm", "submit", *(word for word in arguments[:end] if word not in _PRINT_ONLY), *arguments[end:])


def _print_script(spec: BatchSpec) -> None:
    """Print the batch script byte for byte, also file names in it that are not UTF-8."""
    with naming_standard_output():
        sys.stdout.buffer.write(api.script(spec).encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
