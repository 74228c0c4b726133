"""`tf4slurm tensorboard`: the curves that the script itself wrote."""

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

from tf4slurm.errors import CommandError
from tf4slurm.jobs.registry import find_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile

_LONGEST_SEARCH_SECONDS = 10.0


@click.command()
@click.argument("job", metavar="[ID]", required=False)
@click.option("--logdir", type=click.Path(path_type=Path), help="Where the event files are. [default: looked for]")
@click.option("--port", type=click.IntRange(1024, 65535), default=6006, show_default=True)
@click.option("--print", "is_printed", is_flag=True, help="Only print the command, and how to see it from elsewhere.")
@click.pass_obj
def tensorboard(environ: dict[str, str], /, job: str | None, logdir: Path | None, port: int, is_printed: bool) -> None:
    """Start TensorBoard, on this host's loopback only, on the event files of a job; if it is not installed, say how.

    They are looked for in the run directory and in the directory that the job was started in, if they are younger than
    the job.
    """
    run = find_run(job, environ)
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
    click.echo(f"It serves http://127.0.0.1:{port}/ here. To see it from your own machine: {tunnel}", err=True)
    program = shutil.which("tensorboard", path=environ.get("PATH"))
    if program is not None and not is_printed:
        os.execve(program, command, environ)  # it is the foreground process now: Ctrl-C ends it
    if program is None:
        click.echo("TensorBoard is not installed here. Install it with pip install tensorboard, then type:", err=True)
    click.echo(shlex.join(command))


def find_event_files(run: RunDirectory) -> Path | None:
    """Return the lowest directory that holds all event files of a job; None if there are none.

    Those in the run directory count first. The search ends after a while: what was found by then counts.
    """
    try:
        started = (run.path / "job.json").stat().st_mtime
    except OSError:
        started = 0.0
    deadline = time.monotonic() + _LONGEST_SEARCH_SECONDS
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
    except (OSError, KeyError):  # a user that the host does not know
        return "USER"
