"""The verbs that show what a job has written: logs, report and tensorboard."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tf4slurm import api
from tf4slurm.cli.shared import complete, job_argument, note
from tf4slurm.errors import CommandError
from tf4slurm.jobs.logs import find_logs
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile
from tf4slurm.jobs.status import JobStatus

_TIME = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_SEARCH_SECONDS = 10.0


def _find_tasks(context: click.Context) -> list[str]:
    job: KnownJob | None = context.params.get("job")
    return list(dict.fromkeys(str(log.task) for log in find_logs(job.run_directories))) if job else []


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"{text!r} is not a valid regular expression: {error}.") from error


def _time_before_now(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r}: expected a time such as 30s, 10m, 2h or 1d.")
    return time.time() - float(match["number"]) * _UNITS[match["unit"]]


@click.command()
@job_argument()
@click.argument("tasks", nargs=-1, metavar="[TASK]...", shell_complete=complete(_find_tasks))
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, until the job has ended.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each task.")
@click.option(
    "--grep", type=_pattern, metavar="PATTERN", help="Only lines that match this regular expression somewhere."
)
@click.option(
    "--since",
    type=_time_before_now,
    metavar="TIME",
    help="Only lines that are not older than, for example, 30s, 10m, 2h or 1d.",
)
@click.option("--merged", is_flag=True, help="Sort the lines of all tasks by time (known to about a second).")
def logs(job: KnownJob, tasks: tuple[str, ...], follow: bool, grep: re.Pattern[str] | None, **options: Any) -> None:
    """Print the output of a job's tasks, over all attempts: "tf4slurm logs 4711 chief/0 'worker/*'".

    ID is Slurm's job id, a job's name or its run directory; without one, the latest job.
    """
    names = {log.task for log in find_logs(job.run_directories, tasks)}
    has_names = len(names) != 1 or (follow and not tasks)
    try:
        for line in api.logs(job, *tasks, follow=follow, on_pending=_note_reason, **options):
            if grep is None or grep.search(line.text):
                click.echo(f"{line.task} | {line.text}" if has_names else line.text)
    except BrokenPipeError:  # `| head` has ended
        sys.exit(0)


def _note_reason(pending: JobStatus) -> None:
    note(f"{pending.name} is pending: {pending.reason}")


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
def report(job: KnownJob, output: Path | None, is_opened: bool) -> None:
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
def tensorboard(environ: dict[str, str], /, job: KnownJob, logdir: Path | None, port: int, is_printed: bool) -> None:
    """Start TensorBoard on a job's event files, on this host's loopback address; if it is not installed, explain how.

    Event files are searched in the run directory and in the directory that the job was started in. Files older than the
    job are ignored.
    """
    logdir = logdir or _find_event_files(latest_run(job))
    command = ["tensorboard", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port)]
    user = "USER"
    with contextlib.suppress(OSError, KeyError):  # the host has no name for this user
        user = getpass.getuser()
    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.getfqdn()}"
    click.echo(f"It serves http://127.0.0.1:{port}/ here. To reach it from your own machine: {tunnel}", err=True)
    program = shutil.which("tensorboard", path=environ.get("PATH"))
    if program is not None and not is_printed:
        os.execve(program, command, environ)  # replaces this process, so Ctrl-C ends it
    if program is None:
        click.echo("TensorBoard is not installed here. Install it with pip install tensorboard, then run:", err=True)
    click.echo(shlex.join(command))


def _find_event_files(run: RunDirectory) -> Path:
    """Return the deepest directory that contains all event files of a job.

    The run directory is searched first, and then the directory in which the job was started. The search ends after
    10 s, and only the files found until then count.
    """
    try:
        started = (run.path / "job.json").stat().st_mtime
    except OSError:
        started = 0.0
    deadline = time.monotonic() + _MAX_SEARCH_SECONDS
    directories = [run.path]
    if (job := run.read(JobFile)) is not None and job.directory:
        directories.append(Path(job.directory))
    for directory in directories:
        found = [path.parent for path in _event_files(directory, deadline) if path.stat().st_mtime >= started]
        if found:
            return Path(os.path.commonpath(found))
    searched = " and ".join(repr(str(path)) for path in directories)
    raise CommandError(
        f"No event files of TensorBoard (events.out.tfevents.*) of this job were found in {searched}. Let the "
        "script write them with tf.summary or keras.callbacks.TensorBoard, or give --logdir.",
        command=("tensorboard",),
    )


def _event_files(directory: Path, deadline: float) -> Iterator[Path]:
    for path, _, files in os.walk(directory):
        if time.monotonic() > deadline:
            return
        yield from (Path(path, name) for name in files if name.startswith("events.out.tfevents."))
