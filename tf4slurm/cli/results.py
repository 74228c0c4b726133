"""The verbs that show what a job has written: logs, report and tensorboard."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tf4slurm import api
from tf4slurm.cli.options import verb_option
from tf4slurm.cli.remote import ssh_tunnel
from tf4slurm.cli.shared import Verb, find_jobs, job_argument, note
from tf4slurm.cluster import format_tasks
from tf4slurm.errors import RunDirectoryError, Tf4SlurmError, UnknownJobError
from tf4slurm.jobs.logs import find_logs_of_job
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile
from tf4slurm.jobs.slurm_output import describe_slurm_output
from tf4slurm.jobs.status import JobStatus
from tf4slurm.roles import TASK_TYPES
from tf4slurm.spec.options import did_you_mean, nearest

_TASK = re.compile(rf"({'|'.join(TASK_TYPES)})(/(\d+|[^/]*[*?\[][^/]*))?")
_MOST_NAMED = 3
_MAX_SEARCH_SECONDS = 10.0


def _split(words: Sequence[str]) -> tuple[KnownJob, Sequence[str]]:
    """Split the arguments of `logs` into the job (without ID, the latest one) and the names of tasks.

    A role, such as "worker", is never a job. Of a job with that name, the name with the id is the ID.
    """
    match = _TASK.fullmatch(words[0]) if words else None
    if words and (match is None or (match[2] and os.path.isdir(words[0]))):
        return _find_job(words[0]), words[1:]
    return api.find(None), words


def _find_job(word: str) -> KnownJob:
    """Return the job with this id or name. If there is none, the error suggests a task that `word` may stand for."""
    try:
        return api.find(word)
    except UnknownJobError as error:
        role, *index = word.split("/", 1)
        tasks = ["/".join((each, *index)) for each in nearest(role, TASK_TYPES)]
        if not tasks:
            raise
        text = f"There is no task and no job {word!r}.{did_you_mean(tasks)} To list the jobs: tf4slurm list"
        raise UnknownJobError(text, job=word) from error


def _find_words(context: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Return the completions of an argument of `logs` that begins with `start`.

    The first argument can be the id or name of a job, or a task of the latest job. Later ones are tasks of the same
    job.
    """
    words = context.params.get("words") or ()
    try:
        job, _ = _split(words)
    except Tf4SlurmError:
        return []
    tasks = dict.fromkeys(str(log.task) for log in find_logs_of_job(job))
    found = [CompletionItem(task, help=f"task of {job.name}") for task in tasks if task.startswith(start)]
    return found if words else [*find_jobs(context, parameter, start), *found]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"{text!r} is not a valid regular expression: {error}.") from error


@click.command(
    cls=Verb,
    examples=("tf4slurm logs", "tf4slurm logs chief/0 -n 20", "tf4slurm logs 4711 'worker/*' --grep loss --since 10m"),
)
@click.argument("words", nargs=-1, metavar="[ID] [TASK]...", shell_complete=_find_words)
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, until the job has ended.")
@verb_option("tail", int, "Only the last N lines of each task.", flags=("-n",), minimum=0)
@click.option(
    "--grep", type=_pattern, metavar="PATTERN", help="Only lines that match this regular expression somewhere."
)
@verb_option(
    "since_seconds",
    float,
    "Only lines that are not older than, for example, 30s, 10m, 2h or 1d.",
    metavar="TIME",
    minimum=0,
)
@click.option("--all-output", is_flag=True, help="TensorFlow's start-up messages, too.")
@click.option("--merged", is_flag=True, help="Sort the lines of all tasks by time (known to about a second).")
def logs(
    words: tuple[str, ...], follow: bool, grep: re.Pattern[str] | None, since_seconds: float | None, **options: Any
) -> None:
    """Print the output of a job's tasks, over all attempts.

    ID is Slurm's job id, a name (train-4711, or train for the latest of that name), or a run directory; without one,
    the latest job. ID_k is element k of a job array. TASK is a task such as chief/0, a role such as worker for all its
    tasks, or a pattern such as 'worker/*'; without one, all tasks.
    """
    job, tasks = _split(words)
    names = {log.task for log in find_logs_of_job(job, tasks)}
    since = None if since_seconds is None else time.time() - since_seconds
    is_empty = True
    has_names = bool(job.array) or len(names) != 1 or (follow and not tasks)
    try:
        for line in api.logs(job, *tasks, follow=follow, since=since, on_pending=_note_reason, **options):
            is_empty = False
            if grep is None or grep.search(line.text):
                click.echo(f"{line.source} | {line.text}" if has_names else line.text)
    except BrokenPipeError:  # `| head` has ended
        sys.exit(0)
    if is_empty and names:
        what = "no lines of this time" if since is not None else "no output"
        note(f"{format_tasks(sorted(names), _MOST_NAMED)} of {job.name}: {what}.")


def _note_reason(pending: JobStatus) -> None:
    note(f"{pending.name} is pending: {pending.reason}")


@click.command(cls=Verb, examples=("tf4slurm report 4711", "tf4slurm report --open", "tf4slurm report 4711 4712 4713"))
@job_argument(many=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help='Where to write it: "-" for standard output; a name that ends in .svg or .png gets a picture of the timeline '
    "and the charts, drawn by matplotlib. [default: report.html in the run directory]",
)
@click.option("--open", "is_opened", is_flag=True, help="Open it in this host's browser.")
def report(jobs: list[KnownJob], output: Path | None, is_opened: bool) -> None:
    """Write the report of a job, running or ended, as one HTML file that needs no network, and print its path.

    Of several jobs, and of a job array, write one page with a table and the curves of all. By default it is
    comparison.html in the run directory of the first job, or NAME.html beside the run directories of an array. If the
    first of several jobs is an array, it is NAME-comparison.html there.

    ID is Slurm's job id, a name (train-4711, or train for the latest of that name), or a run directory; without one,
    the latest job.
    """
    if output == Path("-"):
        click.echo(api.render_report(jobs), nl=False)
        return
    path = api.make_report(jobs, output)
    click.echo(path)
    if len(jobs) == 1 and not jobs[0].array and (state := api.status(jobs[0])).slurm_output:
        for line in (f"{state.name} has no result: it is {state.state}.", *describe_slurm_output(state.slurm_output)):
            click.echo(line, err=True)
    if is_opened:
        click.launch(path.as_uri())


@click.command(cls=Verb, examples=("tf4slurm tensorboard 4711", "tf4slurm tensorboard --logdir logs --port 6007"))
@job_argument()
@click.option("--logdir", type=click.Path(path_type=Path), help="Directory of the event files. [default: search]")
@verb_option("port", int, "Port that TensorBoard listens at.", 6006, minimum=1024, maximum=65535)
@click.option("--print", "is_printed", is_flag=True, help="Only print the command, and how to reach it from elsewhere.")
@click.pass_obj
def tensorboard(environ: dict[str, str], /, job: KnownJob, logdir: Path | None, port: int, is_printed: bool) -> None:
    """Start TensorBoard on a job's event files, on this host's loopback address.

    If TensorBoard is not installed, this command prints how to install it. Event files are searched in the run
    directory, or if it has none, in the directory that the job was started in. Files older than the job are ignored.
    """
    logdir = logdir or _find_event_files(latest_run(job))
    command = ["tensorboard", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port)]
    tunnel = ssh_tunnel(environ, port)
    click.echo(f"It serves http://127.0.0.1:{port}/ here. To reach it from your own computer: {tunnel}", err=True)
    program = shutil.which("tensorboard", path=environ.get("PATH"))
    if program is not None and not is_printed:
        os.execve(program, command, environ)  # replaces this process, so Ctrl-C ends it
    if program is None:
        click.echo("TensorBoard is not installed here. Install it with pip install tensorboard, then run:", err=True)
    click.echo(shlex.join(command))


def _find_event_files(run: RunDirectory) -> Path:
    """Return the deepest directory that contains all TensorBoard event files of the job that a search of 10 s finds.

    The run directory is searched first, and the directory that the job was started in only if it has none. Files older
    than the job are ignored.

    Raises:
        RunDirectoryError: No event files were found.
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
    raise RunDirectoryError(
        f"No event files of TensorBoard (events.out.tfevents.*) of this job were found in {searched}. Let the "
        "script write them with tf.summary or keras.callbacks.TensorBoard, or give --logdir.",
        path=str(run.path),
    )


def _event_files(directory: Path, deadline: float) -> Iterator[Path]:
    for path, _, files in os.walk(directory):
        if time.monotonic() > deadline:
            return
        yield from (Path(path, name) for name in files if name.startswith("events.out.tfevents."))
