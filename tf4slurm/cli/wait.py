"""`tf4slurm wait`: until jobs have ended."""

from __future__ import annotations

import sys
import time

import click

from tf4slurm.cli.jobs import job_argument
from tf4slurm.errors import EXIT_WAIT_TIMEOUT
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.status import StatusReader

_LOOK_SECONDS = 0.5


@click.command()
@job_argument(many=True)
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait no longer, and exit with 124.")
@click.pass_obj
def wait(environ: dict[str, str], /, jobs: tuple[str, ...], timeout: float | None) -> None:
    """Wait until jobs have ended, and exit with the exit code of the first that failed.

    Ctrl-C ends the wait, not the job.
    """
    known = [find_job(job, environ) for job in jobs or (None,)]
    reader, started, said = StatusReader(known), time.monotonic(), ""
    words = " ".join(job.job_id or job.name for job in known)
    try:
        while True:
            now = time.monotonic()
            statuses = reader.read()
            waiting = [each for each in statuses if not each.has_ended]
            if not waiting:
                break
            if timeout is not None and now - started >= timeout:
                click.echo(f"tf4slurm: {words}: not ended within {timeout:g} s; it goes on.", err=True)
                sys.exit(EXIT_WAIT_TIMEOUT)
            state = ", ".join(f"{each.name} {each.state} {each.phase or ''}".strip() for each in waiting)
            if sys.stderr.isatty():
                click.echo(f"\r\x1b[2K{now - started:5.0f} s  {state}", err=True, nl=False)
            elif state != said:
                click.echo(f"tf4slurm: {state}", err=True)
                said = state
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        click.echo(f"\ntf4slurm: no longer waiting; the job goes on. To end it: tf4slurm cancel {words}", err=True)
        sys.exit(130)
    if sys.stderr.isatty():
        click.echo("\r\x1b[2K", err=True, nl=False)
    for each in statuses:
        click.echo(f"tf4slurm: {each.name} {each.state}, exit code {each.exit_code}. {each.reason}".rstrip(), err=True)
    sys.exit(next((each.exit_code for each in statuses if each.exit_code), 0))
