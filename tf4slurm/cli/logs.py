"""The verb logs: the output of a job's tasks."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

import click
from click.shell_completion import CompletionItem

from tf4slurm import api
from tf4slurm.cli.jobs import complete_jobs
from tf4slurm.errors import Tf4SlurmError
from tf4slurm.jobs.logs import find_logs
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.status import JobStatus

_SINCE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _complete_tasks(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
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
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, until the job has ended.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each task.")
@click.option("--grep", metavar="PATTERN", help="Only lines that match this regular expression somewhere.")
@click.option("--since", metavar="TIME", help="Only lines that are not older than, for example, 30s, 10m, 2h or 1d.")
@click.option("--merged", is_flag=True, help="Sort the lines of all tasks by time (known to about a second).")
def logs(
    job: str | None, tasks: tuple[str, ...], follow: bool, grep: str | None, since: str | None, **options: Any
) -> None:
    """Print the output of a job's tasks, over all attempts: "tf4slurm logs 4711 chief/0 'worker/*'".

    ID is Slurm's job id, a job's name or its run directory; without one, the latest job.
    """
    known = api.find(job)
    pattern = _pattern(grep)
    oldest = time.time() - _seconds(since) if since is not None else None
    names = {log.task for log in find_logs(known.run_directories, tasks)}
    has_names = len(names) != 1 or (follow and not tasks)
    try:
        lines = api.logs(known, *tasks, since=oldest, follow=follow, on_pending=_note_pending, **options)
        for line in lines:
            if pattern is None or pattern.search(line.text):
                click.echo(f"{line.task} | {line.text}" if has_names else line.text)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has ended
        sys.exit(0)


def _note_pending(status: JobStatus) -> None:
    click.echo(f"tf4slurm: {status.name} is pending: {status.reason}", err=True)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise click.BadParameter(
            f"{text!r} is not a valid regular expression: {error}.", param_hint="--grep"
        ) from error


def _seconds(text: str) -> float:
    match = _SINCE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r}: expected a time such as 30s, 10m, 2h or 1d.", param_hint="--since")
    return float(match["number"]) * _UNITS[match["unit"]]
