"""`tf4slurm status`: where jobs stand, task by task."""

from __future__ import annotations

import sys
import time

import click

from tf4slurm.cli.jobs import job_argument, paint, table
from tf4slurm.jobs.registry import KnownJob, find_job
from tf4slurm.jobs.schema import to_json
from tf4slurm.jobs.status import JobStatus, StatusReader, TaskStatus

_FILES_SECONDS = 2.0
_COLOURS = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "STOPPED": "yellow"}


@click.command()
@job_argument(many=True)
@click.option("--watch", is_flag=True, help="Show it again and again, until the jobs have ended or Ctrl-C.")
@click.option("--web", is_flag=True, help="Serve a live page of it on this host's loopback, and print its address.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def status(environ: dict[str, str], /, jobs: tuple[str, ...], watch: bool, web: bool, as_json: bool) -> None:
    """Show where jobs stand: each task's state, step and speed, or why Slurm lets it wait.

    ID is Slurm's, the name of a run, or its directory; the latest job if there is none.
    """
    known = [find_job(job, environ) for job in jobs or (None,)]
    if watch + web + as_json > 1:
        raise click.UsageError("--watch, --web and --json exclude each other.")
    if web:
        _serve(known)
        return
    if watch:
        _watch(known, environ)
        return
    statuses = StatusReader(known).read()
    if as_json:
        click.echo(to_json(statuses, indent=2))
        return
    click.echo("\n\n".join(describe(each, environ) for each in statuses))


def describe(job: JobStatus, environ: dict[str, str]) -> str:
    """Return where a job stands, for a person."""
    word = job.job_id or job.name
    facts = [paint(job.state, _COLOURS.get(job.state, "red"), environ)]
    if job.elapsed and job.state != "PENDING":
        facts.append(f"{job.elapsed} / {job.limit}" if job.limit else job.elapsed)
    if job.phase and not job.has_ended:
        facts.append(job.phase)
    if job.nodes:
        facts.append(f"on {job.nodes}")
    if job.attempt and (job.max_attempts or 1) > 1:
        facts.append(f"attempt {job.attempt} of {job.max_attempts}")
    if job.has_ended:
        facts.append(f"exit code {job.exit_code}")
    names = dict.fromkeys(filter(None, (job.job_id, job.name)))
    lines = ["  ".join([*names, *facts])]
    if job.reason:
        lines.append(f"  {job.reason}")
    if job.start:
        lines.append(f"  Slurm expects to start it at {job.start}.")
    lines += [f"  {warning}" for warning in job.warnings]
    if job.tasks:
        lines += ["", *table([_HEADING, *(_row(task) for task in job.tasks)])]
        lines = [line.replace("STALLED", paint("STALLED", "red", environ), 1) for line in lines]
    lines += [
        f"{task.task} reports no new step for {task.step_seconds:.0f} s: tf4slurm logs {word} {task.task}"
        for task in job.tasks
        if task.state == "STALLED" and task.step_seconds is not None
    ]
    if job.has_ended and job.exit_code and job.state != "STOPPED":
        lines.append(f"To see why: tf4slurm logs {word}")
    return "\n".join(lines)


_HEADING = ("TASK", "NODE", "ADDRESS", "STATE", "STEP", "STEP/S", "MEMORY", "HEARTBEAT")


def _row(task: TaskStatus) -> tuple[str, ...]:
    age = task.heartbeat_age_seconds
    return (
        task.task,
        task.node or "-",
        task.address or "-",
        task.state + (f" (start {task.starts})" if task.starts > 1 else ""),
        "-" if task.step is None else f"{task.step:,}",
        "-" if task.steps_per_second is None else f"{task.steps_per_second:g}",
        f"{task.memory_bytes / 1e6:,.0f} MB" if task.memory_bytes else "-",
        "-" if age is None or task.state == "terminated" else f"{age:.0f} s",
    )


def _serve(known: list[KnownJob]) -> None:
    from tf4slurm.reports.live_page import serve_page

    if len(known) > 1 or not known[0].run_directories:
        raise click.UsageError("--web is for one job that has started.")
    run = known[0].run_directories[-1]
    said = serve_page(run, lambda address: click.echo(address))
    click.echo(f"tf4slurm: {said}", err=True)


def _watch(known: list[KnownJob], environ: dict[str, str]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    reader, console = StatusReader(known), Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                statuses = reader.read()
                now = time.strftime("%H:%M:%S")
                text = "\n\n".join(describe(each, environ) for each in statuses)
                live.update(Text.from_ansi(f"{text}\n\n{now}  Ctrl-C leaves; the job goes on"), refresh=True)
                if all(each.has_ended for each in statuses):
                    return
                time.sleep(_FILES_SECONDS)
        except KeyboardInterrupt:
            sys.exit(130)
