"""The verbs for existing jobs: status, list, wait, cancel and resume."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

from tf4slurm import api
from tf4slurm.cli.options import verb_option
from tf4slurm.cli.shared import Verb, fit_table, job_argument, note, paint
from tf4slurm.control.step_rate import MEANING
from tf4slurm.errors import COMPLETED, REQUEUED, STOPPED, Tf4SlurmError
from tf4slurm.jobs.formatting import as_sentence, format_count, format_number, shorten_in_the_middle
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.schema import TaskStatus
from tf4slurm.jobs.slurm_output import describe_slurm_output
from tf4slurm.jobs.status import JobStatus, describe_checkpoints, describe_variables
from tf4slurm.jobs.status_reader import describe_progress
from tf4slurm.system.typed_json import to_json

_LISTED_JOBS = 20
_REASON_CHARACTERS = 100
_WATCH_SECONDS = 2.0
_WAIT_SECONDS = 0.5
_COLOURS = {COMPLETED: "green", "RUNNING": "cyan", **dict.fromkeys(("PENDING", STOPPED, REQUEUED), "yellow")}
_HEADING = ("TASK", "NODE", "ADDRESS", "STATE", "STEP", "STEP/S", "MEMORY", "HEARTBEAT")
_OPTIONAL = ("ADDRESS", "HEARTBEAT", "MEMORY", "NODE")
_ELEMENT_HEADING = ("ELEMENT", "ARGUMENTS", "STATE", "EXIT", "STEP", "METRICS", "TIME", "REASON")
_OPTIONAL_OF_ELEMENTS = ("REASON", "TIME", "METRICS")


@click.command(
    cls=Verb, examples=("tf4slurm status", "tf4slurm status 4711 --watch", "tf4slurm status train-4711 --json")
)
@job_argument(many=True)
@click.option("--watch", is_flag=True, help="Repeat it until the jobs have ended, or Ctrl-C.")
@click.option("--web", is_flag=True, help="Serve a live page on this host's loopback address, and print its URL.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def status(environ: dict[str, str], /, jobs: list[KnownJob], watch: bool, web: bool, as_json: bool) -> None:
    """Show the state of jobs: each task's state, step and speed, or why a job is pending.

    ID is Slurm's job id, a name (train-4711, or train for the latest of that name), or a run directory; without one,
    the latest job. Of a job array, each element has a row; ID_k is element k.
    """
    if watch + web + as_json > 1:
        raise click.UsageError("--watch, --web and --json exclude each other.")
    if web:
        _serve(jobs, environ)
    elif watch:
        _watch(jobs)
    else:
        statuses = next(api.watch(jobs))
        click.echo(to_json(statuses, indent=2) if as_json else _describe_all(statuses))


def _serve(jobs: Sequence[KnownJob], environ: Mapping[str, str]) -> None:
    from urllib.parse import urlsplit

    from tf4slurm.cli.remote import is_remote, ssh_tunnel
    from tf4slurm.reports.live_page import serve_page

    if len(jobs) > 1 or not jobs[0].run_directories:
        raise click.UsageError("--web is for one job that has started.")

    def show(url: str) -> None:
        click.echo(url)
        if is_remote(environ):
            port = urlsplit(url).port
            assert port is not None
            note(f"to open it on your own computer, run this there first: {ssh_tunnel(environ, port)}")

    note(serve_page(jobs[0].run_directories[-1], show))


def _watch(jobs: Sequence[KnownJob]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as live:
        for statuses in api.watch(jobs, interval_seconds=_WATCH_SECONDS):
            footer = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends this display; the job continues"
            live.update(Text.from_ansi(f"{_describe_all(statuses)}\n\n{footer}"), refresh=True)


def _describe_all(statuses: Sequence[JobStatus]) -> str:
    return "\n\n".join("\n".join(_describe(each)) for each in statuses)


def _describe(job: JobStatus) -> list[str]:
    word = job.job_id or job.name
    lines = [_describe_job(job)]
    lines += [f"  {text}" for text in dict.fromkeys((job.headline, job.reason)) if text]
    lines += [f"  Explanation: {meaning}" for meaning in job.meaning]
    if job.stop_text:
        lines.append(f"  {job.stop_text}")
    if job.start:
        lines.append(f"  Slurm expects to start it at {job.start}.")
    lines += [f"  WARNING: {text}" for text in job.problems]
    lines += [f"  {warning}" for warning in job.warnings]
    lines += [f"  {shards}" for shards in job.shards]
    lines += [f"  {line}" for line in describe_slurm_output(job.slurm_output)]
    if job.elements:
        rows = [_element_row(each) for each in job.elements]
        return [*lines, "", *fit_table([_ELEMENT_HEADING, *rows], _OPTIONAL_OF_ELEMENTS, sys.stdout)]
    if job.tasks:
        left = [task for task in job.tasks if task.has_joined and task.is_gone]
        table = fit_table([_HEADING, *(_row(task) for task in job.tasks if task not in left)], _OPTIONAL, sys.stdout)
        lines += ["", *map(_paint_state, table)]
        lines += [
            f"{task.task} (joined) waits: {task.detail}."
            for task in job.tasks
            if task.has_joined and task.detail and not task.is_gone
        ]
        lines += [f"{format_count(job.workers_left, 'worker')} joined and left again."] if job.workers_left else []
    if not job.has_ended and any(task.steps_per_second is not None for task in job.tasks):
        lines.append(f"STEP/S: {MEANING}")
    if variables := describe_variables(job.tasks):
        lines.append(f"Variables: {variables}.")
    if checkpoints := describe_checkpoints(job.tasks):
        lines.append(f"Checkpoint: {checkpoints}.")
    lines += [
        f"{task.task} reports no new step for {task.seconds_since_step:.0f} s: tf4slurm logs {word} {task.task}"
        for task in job.tasks
        if task.state == "STALLED" and task.seconds_since_step is not None
    ]
    if job.exit_code and job.state not in (STOPPED, REQUEUED) and (job.run_directory or not job.slurm_output):
        is_named = job.failure is not None and job.failure.file is not None
        lines.append(f"{'All output' if is_named else 'To find the reason'}: tf4slurm logs {word}")
    return lines


def _paint_state(line: str) -> str:
    for state in ("STALLED", "BLOCKED"):
        line = line.replace(state, paint(state, "red"), 1)
    return line


def _element_row(job: JobStatus) -> tuple[str, ...]:
    return (
        job.job_id or job.name,
        " ".join(f"{name}={value}" for name, value in job.labels.items()) or "-",
        job.state,
        "-" if job.exit_code is None else str(job.exit_code),
        "-" if job.furthest_step is None else f"{job.furthest_step:,}",
        " ".join(f"{name}={format_number(value)}" for name, value in job.metrics.items() if value is not None) or "-",
        (job.elapsed if job.state != "PENDING" else None) or "-",
        _list_reason(job),
    )


def _describe_job(job: JobStatus) -> str:
    state, *facts = job.facts
    facts.insert(0, paint(state, _COLOURS.get(state, "red")))
    return "  ".join([*dict.fromkeys(filter(None, (job.job_id, job.name))), *facts])


def _row(task: TaskStatus) -> tuple[str, ...]:
    age = task.heartbeat_age_seconds
    return (
        task.name_text,
        task.node or "-",
        task.address or "-",
        task.state_text,
        "-" if task.step is None else f"{task.step:,}",
        "-" if task.steps_per_second is None else f"{task.steps_per_second:g}",
        f"{task.memory_bytes / 1e6:,.0f} MB" if task.memory_bytes else "-",
        "-" if age is None or (task.is_gone and task.state != "lost") else f"{age:.0f} s",
    )


@click.command(name="list", cls=Verb, examples=("tf4slurm list", "tf4slurm list --all --json"))
@click.option("--all", "show_all", is_flag=True, help=f"Show all jobs, not only the latest {_LISTED_JOBS}.")
@click.option("--elements", is_flag=True, help="Show each element of the job arrays.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(show_all: bool, elements: bool, as_json: bool) -> None:
    """List the jobs that this user has started, the latest first. A job array has one line."""
    jobs = api.list_jobs(None if show_all else _LISTED_JOBS)
    if elements:
        jobs = [each for job in jobs for each in job.parts]
    if as_json:
        short = [dataclasses.replace(job, elements=tuple(map(_without_tasks, job.elements))) for job in jobs]
        click.echo(to_json([{k: v for k, v in vars(job).items() if k != "tasks"} for job in short], indent=2))
        return
    if not jobs:
        click.echo("No job was started yet. Start one: tf4slurm run --help", err=True)
        return
    rows = [("ID", "NAME", "STATE", "EXIT", "TIME", "STARTED", "REASON", "RUN DIRECTORY")]
    for job in jobs:
        code = "-" if job.exit_code is None else str(job.exit_code)
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started))
        facts = (job.job_id or "-", job.name, _list_state(job), code, job.elapsed or "-", started)
        rows.append((*facts, _list_reason(job), job.run_directory or "-"))
    click.echo("\n".join(fit_table(rows, ("RUN DIRECTORY", "STARTED", "EXIT", "REASON"), sys.stdout)))
    for warning in dict.fromkeys(warning for job in jobs for warning in job.warnings):
        note(warning)


def _without_tasks(job: JobStatus) -> JobStatus:
    return dataclasses.replace(job, tasks=())


def _list_reason(job: JobStatus) -> str:
    """Return for a list what ended a script, or the first sentence of the reason. A completed job has none."""
    if job.state == COMPLETED:
        return "-"
    text = job.headline if job.failure is not None else job.reason.partition(". ")[0]
    return shorten_in_the_middle(text, _REASON_CHARACTERS) or "-"


def _list_state(job: JobStatus) -> str:
    """Return the state of a job for a list, such as "FAILED", or "2 of 6 done, 1 failed" for a job array."""
    return describe_progress(job.elements) if job.elements else job.state


@click.command(cls=Verb, examples=("tf4slurm wait 4711", "tf4slurm wait 4711 4712 --timeout 3600"))
@job_argument(many=True)
@verb_option("timeout_seconds", float, "Exit with code 124 after this time.", minimum=0)
def wait(jobs: list[KnownJob], timeout_seconds: float | None) -> None:
    """Wait until jobs have ended. The exit code is 0 if all succeeded, else that of the first ID that failed.

    The exit code of a job array is that of its element with the worst state. For a job that Slurm has forgotten without
    a result it is 1. Ctrl-C ends the wait, not the job.
    """
    started = time.monotonic()
    is_terminal = sys.stderr.isatty()
    shown = ""
    statuses: list[JobStatus] = []
    try:
        for statuses in api.watch(jobs, interval_seconds=_WAIT_SECONDS, timeout_seconds=timeout_seconds):
            waiting = (each for each in statuses if each.can_change)
            text = ", ".join(f"{each.name} {_list_state(each)} {each.phase or ''}".strip() for each in waiting)
            if is_terminal:
                line = f"{time.monotonic() - started:5.0f} s  {text}" if text else ""
                click.echo(f"\r\x1b[2K{line}", err=True, nl=False)
            elif text and text != shown:
                note(text)
            shown = text
    except KeyboardInterrupt:
        words = " ".join(job.job_id or job.name for job in jobs)
        click.echo(f"\ntf4slurm: no longer waiting; the job continues. To end it: tf4slurm cancel {words}", err=True)
        raise
    for each in statuses:
        _note_end(each)
        for line in describe_slurm_output(each.slurm_output):
            click.echo(line, err=True)
        for element in each.elements:
            if element.exit_code != 0:
                _note_end(element)
    codes = [1 if each.exit_code is None else each.exit_code for each in statuses]
    sys.exit(next(filter(None, codes), 0))


def _note_end(job: JobStatus) -> None:
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    texts = [f"{job.name} {job.state}{code}.", *dict.fromkeys((as_sentence(job.headline), as_sentence(job.reason)))]
    note(" ".join(filter(None, texts)))


@click.command(cls=Verb, examples=("tf4slurm cancel 4711", "tf4slurm cancel 4711 --now"))
@job_argument(many=True, is_optional=False, is_changed=True)
@verb_option(
    "grace_period_seconds",
    float,
    "Seconds until it is killed; 0 is --now. [default: the job's own grace period and 10 s]",
    minimum=0,
)
@click.option("--now", is_flag=True, help="End it at once, also while it saves. On a terminal, ask before.")
@click.option("-y", "--yes", is_flag=True, help="With --now: do not ask.")
def cancel(jobs: list[KnownJob], grace_period_seconds: float | None, now: bool, yes: bool) -> None:
    """Ask jobs to save and stop, and kill those that have not ended after their grace period.

    A second call leaves jobs that save the rest of that time, and prints how long it is. Only --now skips it.

    ID_k is element k of a job array. Of a whole array, pending elements are cancelled first, so that they do not start.
    For jobs that have ended nothing is done. The exit code is 0, or that of the first error.
    """
    if now and grace_period_seconds:
        raise click.UsageError("--now and --grace-period exclude each other.")
    now = now or grace_period_seconds == 0
    if now and not yes and sys.stdin.isatty() and not _confirm(jobs):
        note("nothing was changed.")
        sys.exit(1)
    exit_code = 0
    for job in jobs:
        try:
            api.cancel(job, grace_period_seconds=grace_period_seconds, now=now, on_progress=note)
        except Tf4SlurmError as error:
            exit_code = exit_code or error.exit_code
            note(f"{job.name}: {error}")
    sys.exit(exit_code)


def _confirm(jobs: Sequence[KnownJob]) -> bool:
    """Ask on the terminal whether jobs are ended without a save. Return the answer."""
    try:
        return click.confirm(f"End {', '.join(job.name for job in jobs)} at once, without saving?", err=True)
    except click.Abort:  # Ctrl-C or Ctrl-D
        click.echo(err=True)
        return False


@click.command(cls=Verb, examples=("tf4slurm resume 4711", "tf4slurm resume train-20261231-120000"))
@job_argument(is_optional=False)
@click.pass_obj
def resume(environ: dict[str, str], /, job: KnownJob) -> None:
    """Start an ended job again with the same options, in the same working directory.

    A submitted job is submitted again, and its new id is printed. Of a job array, the elements that did not complete
    are submitted again, as a new array. A local job runs here, and of a local sweep one element (NAME_k). The script
    continues from its own checkpoint.
    """

    def replace_process(command: list[str], directory: Path) -> NoReturn:
        os.chdir(directory)
        note(f"in {directory}: {shlex.join(command)}")
        os.execvpe(command[0], command, environ)

    click.echo(api.resume(job, environ=environ, replace_process=replace_process).job_id)
