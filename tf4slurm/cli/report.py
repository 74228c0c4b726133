"""The verbs report and tensorboard: show a job in charts."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import click

from tf4slurm import api
from tf4slurm.cli.jobs import job_argument
from tf4slurm.errors import CommandError
from tf4slurm.jobs.registry import latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile

_MAX_SEARCH_SECONDS = 10.0


@click.command()
@job_argument()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help='Where to write it: "-" for standard output; a name that ends in .svg or .png gets the drawings alone. '
    "[default: report.html in the run directory]",
)
@click.option("--open", "is_opened", is_flag=True, help="Open it in this host's browser.")
def report(job: str | None, output: Path | None, is_opened: bool) -> None:
    """Write the report of a job, running or ended, as one HTML file that needs no network; print its path.

    ID is Slurm's job id, a job's name or its run directory; without one, the latest job.
    """
    if output == Path("-"):
        click.echo(api.render_report(job), nl=False)
        return
    path = api.make_report(job, output)
    click.echo(path)
    if is_opened:
        click.launch(path.as_uri())


@click.command()
@job_argument()
@click.option("--logdir", type=click.Path(path_type=Path), help="Directory of the event files. [default: search]")
@click.option("--port", type=click.IntRange(1024, 65535), default=6006, show_default=True)
@click.option("--print", "is_printed", is_flag=True, help="Only print the command, and how to reach it from elsewhere.")
@click.pass_obj
def tensorboard(environ: dict[str, str], /, job: str | None, logdir: Path | None, port: int, is_printed: bool) -> None:
    """Start TensorBoard on a job's event files, on this host's loopback address; if it is not installed, explain how.

    Event files are searched in the run directory and in the directory that the job was started in; older ones than the
    job do not count.
    """
    run = latest_run(api.find(job))
    place = logdir or find_event_files(run)
    if place is None:
        searched = " and ".join(repr(str(path)) for path in _places(run))
        raise CommandError(
            f"No event files of TensorBoard (events.out.tfevents.*) of this job were found in {searched}. Let the "
            "script write them with tf.summary or keras.callbacks.TensorBoard, or give --logdir.",
            command=("tensorboard",),
        )
    command = ["tensorboard", "--logdir", str(place), "--host", "127.0.0.1", "--port", str(port)]
    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {_user()}@{socket.getfqdn()}"
    click.echo(f"It serves http://127.0.0.1:{port}/ here. To reach it from your own machine: {tunnel}", err=True)
    program = shutil.which("tensorboard", path=environ.get("PATH"))
    if program is not None and not is_printed:
        os.execve(program, command, environ)  # replaces this process, so Ctrl-C ends it
    if program is None:
        click.echo("TensorBoard is not installed here. Install it with pip install tensorboard, then run:", err=True)
    click.echo(shlex.join(command))


def find_event_files(run: RunDirectory) -> Path | None:
    """Return the deepest directory that contains all event files of a job; None if there are none.

    The run directory is searched first. After 10 s only the files found so far count.
    """
    try:
        started = (run.path / "job.json").stat().st_mtime
    except OSError:
        started = 0.0
    deadline = time.monotonic() + _MAX_SEARCH_SECONDS
    for place in _places(run):
        found = [path.parent for path in _event_files(place, deadline) if path.stat().st_mtime >= started]
        if found:
            return Path(os.path.commonpath(found))
    return None


def _places(run: RunDirectory) -> list[Path]:
    job = run.read(JobFile)
    return [run.path, *([Path(job.directory)] if job is not None and job.directory else [])]


def _event_files(place: Path, deadline: float) -> Iterator[Path]:
    for directory, _, files in os.walk(place):
        if time.monotonic() > deadline:
            return
        yield from (Path(directory, name) for name in files if name.startswith("events.out.tfevents."))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the host has no name for this user
        return "USER"
