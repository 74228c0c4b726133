"""`tf4slurm cancel`: ask jobs to save and stop, and end those that do not."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import click

from tf4slurm.cli.jobs import job_argument
from tf4slurm.errors import EXIT_USAGE, LaunchError
from tf4slurm.jobs.registry import KnownJob, find_job
from tf4slurm.jobs.schema import JobFile
from tf4slurm.jobs.status import StatusReader
from tf4slurm.slurm.commands import cancel_job, signal_batch

_LOOK_SECONDS = 0.3
_MARGIN_SECONDS = 10.0
_SLURM_SECONDS = 3.0


@click.command()
@job_argument(many=True)
@click.option(
    "--grace-period",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long it may take to save; 0 ends it at once. [default: the job's own grace and 10 s]",
)
@click.pass_obj
def cancel(environ: dict[str, str], /, jobs: tuple[str, ...], grace_period: float | None) -> None:
    """Ask jobs to save and stop; what has not ended after its grace is killed.

    A job that has ended already stays as it is.
    """
    if not jobs:
        raise click.UsageError("Which job? Give its id; tf4slurm list shows them.")
    failed = False
    for known in [find_job(job, environ) for job in jobs]:
        try:
            _cancel(known, grace_period)
        except (LaunchError, click.ClickException) as error:
            failed = True
            click.echo(f"tf4slurm: {known.name}: {error}", err=True)
    sys.exit(EXIT_USAGE if failed else 0)


def _cancel(known: KnownJob, grace_period: float | None) -> None:
    reader = StatusReader([known], ask_seconds=_SLURM_SECONDS)
    (status,) = reader.read()
    if status.has_ended:
        click.echo(f"tf4slurm: {known.name} has ended already: {status.state}.", err=True)
        return
    runs = known.run_directories
    job = runs[-1].read_trusted_job() if runs else JobFile()
    if known.job_id is not None and (status.state == "PENDING" or not runs or grace_period == 0):
        cancel_job(known.job_id)
        click.echo(f"tf4slurm: {known.name} is cancelled.", err=True)
        return
    if known.job_id is None:
        _signal(known, job, signal.SIGKILL if grace_period == 0 else signal.SIGTERM)
    else:
        try:
            signal_batch(known.job_id, "INT")  # SIGTERM is also how Slurm preempts, and may put a job back in the queue
        except LaunchError:  # no batch job: of salloc's, the launcher is none of Slurm's processes
            cancel_job(known.job_id)
    if grace_period is None:
        grace_period = job.grace_period_seconds + _MARGIN_SECONDS
    click.echo(f"tf4slurm: {known.name} is asked to save and stop; it has {grace_period:g} s.", err=True)
    deadline = time.monotonic() + grace_period
    while time.monotonic() < deadline:
        (status,) = reader.read()
        if status.has_ended:
            click.echo(f"tf4slurm: {known.name} has ended: {status.state}, exit code {status.exit_code}.", err=True)
            return
        time.sleep(_LOOK_SECONDS)
    if known.job_id is not None:
        cancel_job(known.job_id)
    else:
        _signal(known, job, signal.SIGKILL)  # its agents end the tasks by themselves
    click.echo(f"tf4slurm: {known.name} did not stop in time and was killed.", err=True)


def _signal(known: KnownJob, job: JobFile, number: signal.Signals) -> None:
    """Signal the launcher of a local job, unless another process has its number now."""
    process = job.process
    if process is None:
        return
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.id, number)
    elif process.host != os.uname().nodename:
        raise click.ClickException(f"it runs on {process.host}: cancel it there.")
