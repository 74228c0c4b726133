"""`tf4slurm grow`, `shrink` and `join`: change the workers of a running job."""

from __future__ import annotations

import sys
from typing import Any

import click

from tf4slurm import api
from tf4slurm.cli.options import given, job_options, site_option, verb_option
from tf4slurm.cli.shared import Verb, job_argument, note
from tf4slurm.jobs.formatting import format_count
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.joining.grow import OPTIONS
from tf4slurm.spec.batch_spec import BatchSpec

_OUTPUT_HELP = "File for the output. [default: <run directory>/worker-%A_%a.out]"


@click.command(cls=Verb, examples=("tf4slurm grow 4711 --workers 4 --partition preempt --time 2h",))
@job_argument(is_optional=False, is_changed=True)
@click.option("--workers", type=click.IntRange(min=1), required=True, help="Number of workers to add.")
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@site_option
@job_options("grow", BatchSpec, [name for name in OPTIONS if name != "output"])
@verb_option("output", str, _OUTPUT_HELP, flags=("-o",), group="Files")
@click.pass_obj
def grow(
    environ: dict[str, str], /, job: KnownJob, workers: int, dry_run: bool, site: str | None, **options: Any
) -> None:
    """Add workers to a running job: submit a job array to Slurm, each element of which joins the job as a worker.

    Each worker takes part in training as soon as it has started, if the chief's script calls parameter_server_strategy
    or job_strategy of tf4slurm.tensorflow. It may leave at any time, so a preemptible partition is suitable. The array
    ends with the job.
    """
    if dry_run:
        click.echo(api.grow_script(job, workers, environ=environ, site=site, **given(options)), nl=False)
        return
    job_id = api.grow(job, workers, environ=environ, site=site, **given(options))
    click.echo(job_id)
    added = format_count(workers, "worker")
    show = f"tf4slurm status {job.name}, or for pending ones: squeue -j {job_id}"
    note(f"{added} will join {job.name} when Slurm has room. Show the workers: {show}")


@click.command(cls=Verb, examples=("tf4slurm shrink 4711 --workers 2",))
@job_argument(is_optional=False, is_changed=True)
@click.option("--workers", type=click.IntRange(min=1), required=True, help="Number of workers to remove.")
def shrink(job: KnownJob, workers: int) -> None:
    """Remove workers that "tf4slurm grow" added: pending ones first, then the newest.

    Their Slurm jobs are cancelled. A worker that computes a function finishes it first, if that takes at most 20 s.
    """
    for job_id in api.shrink(job, workers):
        click.echo(job_id)


@click.command(cls=Verb, examples=("tf4slurm join train-4711", "srun --ntasks=2 tf4slurm join 4711"))
@job_argument(is_optional=False)
@click.pass_obj
def join(environ: dict[str, str], /, job: KnownJob) -> None:
    """Run one more worker of a running job in this process, until the job ends or this process receives SIGTERM.

    This is the command of the jobs that "tf4slurm grow" submits. It also works in any allocation, and beside a local
    job.
    """
    from tf4slurm.joining.join import join_job

    sys.exit(join_job(job, environ))
