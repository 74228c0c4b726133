"""`tf4slurm logs`: what the tasks of a job printed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence

import click
from click.shell_completion import CompletionItem

from tf4slurm.cli.jobs import complete_jobs
from tf4slurm.errors import Tf4SlurmError
from tf4slurm.jobs.logs import LogFile, LogLine, LogReader, find_logs, merge
from tf4slurm.jobs.registry import KnownJob, find_job
from tf4slurm.jobs.status import StatusReader

_LOOK_SECONDS = 0.3
_STATUS_SECONDS = 3.0
_SINCE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _complete_tasks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if not context.params.get("job"):
        return []
    try:
        logs = find_logs(find_job(context.params["job"], os.environ).run_directories)
    except Tf4SlurmError:
        return []
    names = dict.fromkeys(str(log.task) for log in logs)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command()
@click.argument("job", required=False, metavar="[ID]", shell_complete=complete_jobs)
@click.argument("tasks", nargs=-1, metavar="[TASK]...", shell_complete=_complete_tasks)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until the job has ended.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each task.")
@click.option("--grep", metavar="PATTERN", help="Only lines in which this regular expression is found.")
@click.option("--since", metavar="TIME", help="Only what is not older, such as 30s, 10m, 2h or 1d.")
@click.option("--merged", is_flag=True, help="All tasks together, in the order of time (known to about a second).")
@click.pass_obj
def logs(
    environ: dict[str, str],
    /,
    job: str | None,
    tasks: tuple[str, ...],
    follow: bool,
    tail: int | None,
    grep: str | None,
    since: str | None,
    merged: bool,
) -> None:
    """Print what the tasks of a job printed, over all its attempts: "tf4slurm logs 4711 chief/0 'worker/*'".

    ID is Slurm's, the name of a run, or its directory; the latest job if there is none.
    """
    known = find_job(job, environ)
    pattern = _pattern(grep)
    oldest = time.time() - _seconds(since) if since is not None else None
    found = find_logs(known.run_directories, tasks)
    if not found and not follow:
        _say_why_none(known, tasks)
    has_names = len({log.task for log in found}) != 1 or (follow and not tasks)
    try:
        if follow:
            lines = _follow(known, tasks, tail, oldest)
        elif merged:
            lines = merge([_open(log, tail, oldest) for log in found])
        else:
            lines = (line for log in found for line in _open(log, tail, oldest).read())
        for line in lines:
            if pattern is None or pattern.search(line.text):
                click.echo(f"{line.task} | {line.text}" if has_names else line.text)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        sys.exit(0)


def _open(log: LogFile, tail: int | None, oldest: float | None) -> LogReader:
    reader = LogReader(log)
    if oldest is not None:
        reader.skip_until(oldest)
    elif tail is not None:
        reader.skip_to_tail(tail)
    return reader


def _follow(known: KnownJob, tasks: Sequence[str], tail: int | None, oldest: float | None) -> Iterator[LogLine]:
    """Return lines as they come, of files that come later, too, until the job has ended."""
    readers: dict[LogFile, LogReader] = {}
    looked_at, has_ended, said = float("-inf"), False, ""
    while True:
        if not has_ended and time.monotonic() - looked_at > _STATUS_SECONDS:
            (status,) = StatusReader([known]).read()
            looked_at, has_ended = time.monotonic(), status.has_ended
            if status.state == "PENDING" and status.reason != said:
                said = status.reason
                click.echo(f"tf4slurm: {known.name} is pending: {said}", err=True)
        for log in find_logs(known.run_directories, tasks):
            if log not in readers:
                readers[log] = _open(log, tail, oldest)
        yield from merge(list(readers.values()), is_final=has_ended)
        if has_ended:
            return
        time.sleep(_LOOK_SECONDS)


def _say_why_none(known: KnownJob, tasks: Sequence[str]) -> None:
    names = dict.fromkeys(str(log.task) for log in find_logs(known.run_directories))
    if names:
        raise click.UsageError(f"No task of {known.name} fits {' '.join(tasks)}. It has: {', '.join(names)}.")
    (status,) = StatusReader([known]).read()
    raise click.ClickException(
        f"{known.name} has no logs: it is {status.state}. {status.reason} To wait for them: tf4slurm logs -f "
        f"{known.job_id or known.name}"
    )


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"{text!r} is no regular expression: {error}.", param_hint="--grep") from error


def _seconds(text: str) -> float:
    match = _SINCE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r}: expected a time such as 30s, 10m, 2h or 1d.", param_hint="--since")
    return float(match["number"]) * _UNITS[match["unit"]]
