"""The library behind the command line: its verbs as functions that return typed values.

They print nothing, but the launcher that `run` and `resume` start does. The argument `job` is Slurm's job id, the name
of the job, the path of its run directory, or a `KnownJob`. A name as given with --name is the latest job of that name.
ID_k or NAME_k is element k of a job array, and ID or NAME
the whole array. None is this user's latest job. If there is no such job, UnknownJobError is raised. If a newer version
of tf4slurm wrote the job's files, SchemaVersionError is raised, except by `list_jobs`.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tf4slurm.errors import (
    JobStateError,
    LaunchError,
    RunDirectoryError,
    Tf4SlurmError,
    UnknownJobError,
    WaitTimeoutError,
)
from tf4slurm.jobs.cancellation import cancel_known
from tf4slurm.jobs.formatting import as_sentence
from tf4slurm.jobs.logs import LogLine, follow_logs, omit_boilerplate, read_logs
from tf4slurm.jobs.registry import KnownJob, find_job, find_jobs, find_run_directories, latest_run, registered_jobs
from tf4slurm.jobs.run_directory import RunDirectory, write_report
from tf4slurm.jobs.schema import JobFile
from tf4slurm.jobs.slurm_output import describe_slurm_output
from tf4slurm.jobs.status import JobStatus
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.slurm.job_id import JobId
from tf4slurm.system.variables import ANSWER_VARIABLE

if TYPE_CHECKING:
    from tf4slurm.reports.runs import Run
    from tf4slurm.spec.batch_spec import BatchSpec
    from tf4slurm.spec.job_spec import JobSpec

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0


def script(spec: BatchSpec) -> str:
    """Return the batch script that `submit` submits. This host needs no Slurm.

    Raises:
        OptionError: The options cannot be written as a batch script.
    """
    from tf4slurm.submission.batch_script import make_script
    from tf4slurm.submission.snapshot import place_snapshot

    spec.warn_of_mistakes()
    return make_script(place_snapshot(spec))


def submit(spec: BatchSpec, *, environ: Mapping[str, str] | None = None) -> KnownJob:
    """Submit a job to Slurm, and return it.

    Args:
        environ: Environment variables of the job, by default those of this process. If this process is in a Slurm job,
            the variables of that job are removed.

    Raises:
        OptionError: The options cannot be written as a batch script, or the snapshot cannot be taken.
        CommandError: The command does not exist and the job sets up no environment, or it reads standard input.
        RunDirectoryError: The script, the snapshot or the directory of --output cannot be written.
        RefusedError, LaunchError: sbatch refused the job, or cannot be started.
    """
    from tf4slurm.submission import submit as submission

    return submission.submit(spec, os.environ if environ is None else environ)


def estimate(spec: BatchSpec, *, environ: Mapping[str, str] | None = None) -> str:
    """Return Slurm's sentence about when and where a job would start. Submit nothing. The errors are as in `submit`."""
    from tf4slurm.submission import submit as submission

    return submission.estimate(spec, os.environ if environ is None else environ)


def run(
    spec: JobSpec,
    *,
    local: bool = False,
    isolated: bool = False,
    on_output: Callable[[str], None] | None = None,
) -> JobStatus:
    """Run a job to its end, as local processes or in the current allocation. Return its last state.

    The launcher runs in a child process, because it forks and handles signals. Unlike `Job`, this function reads no
    settings files.

    Args:
        local: Start local processes even inside a Slurm allocation.
        isolated: Run local processes in their own network, which has only loopback.
        on_output: Called with each line that the launcher would print, with its line break. By default it is printed.

    Raises:
        LaunchError: The launcher exited before it created a run directory. Its output has the reason.
    """
    words = ["run", "--site", "none"]  # settings would override options that equal a default
    words += [flag for flag, is_set in (("--local", local), ("--isolated", isolated)) if is_set]
    command = own_command(*words, *spec.to_arguments(), "--", *spec.command)
    return _run_launcher(command, on_output=on_output)


def resume(
    job: str | KnownJob | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    replace_process: Callable[[list[str], Path], NoReturn] | None = None,
) -> JobStatus:
    """Start an ended job again with the same options in the same directory. Return the new job's state.

    A batch job is submitted again. Of a job array, the elements that did not complete are submitted again, as a new
    array. A local job runs to its end in a child process. Of a sweep of local jobs, only a single element can be
    resumed.

    Args:
        environ: Environment variables of the new batch job, by default those of this process.
        replace_process: Called for a local job with the launcher's command and working directory. It executes the
            command in place of this process, and never returns. By default the command runs in a child process.

    Raises:
        JobStateError: The job has not ended, its end is unknown, all elements of the array completed, or it is a whole
            sweep of local jobs.
        UntrustedFileError: Another user could have written the job's files.
        RunDirectoryError: Neither a batch script nor a command line was kept.
        RefusedError, LaunchError: sbatch refused the job, or cannot be started. Or as for `run`.
    """
    known = find(job)
    state = status(known)
    elements = _elements_to_resume(known, state)
    file = _read_trusted(known)
    directory = Path(file.directory or ".")
    if known.job_id is not None and known.batch_script.is_file():
        from tf4slurm.submission.submit import submit_again

        return status(submit_again(known, directory, os.environ if environ is None else environ, elements))
    if known.job_id is None and file.arguments:
        command = own_command(*file.arguments[1:])
        if replace_process is not None:
            replace_process(command, directory)
        return _run_launcher(command, directory)
    raise RunDirectoryError(
        f"It is unknown how {known.name} was started: neither {known.batch_script} nor job.json has its command line. "
        "Start it again with the command you used.",
        path=str(known.batch_script),
    )


def _elements_to_resume(known: KnownJob, state: JobStatus) -> tuple[int, ...]:
    """Return the elements of a job array to submit again: those that did not complete. For another job, return ().

    Raises:
        JobStateError: An element, or the job, has not ended, or it is unknown whether it has; or all completed.
    """
    parts = state.parts
    text = ""
    if unclear := [each for each in parts if each.is_unclear]:
        text = f"It is unknown whether {unclear[0].name} has ended. {as_sentence(unclear[0].reason)} If it has, submit "
        text += f"it again with the command you used, or its script {known.batch_script}."
    elif running := [each for each in parts if not each.has_ended]:
        text = f"{running[0].name} is still {running[0].state}. Wait for its end, or cancel it first."
    elif state.elements and all(each.exit_code == 0 for each in parts):
        text = f"All {len(parts)} elements of {known.name} have completed."
    elif state.elements and known.job_id is None:
        names = [each.name for each in parts if each.exit_code and each.run_directory is not None] or [parts[0].name]
        text = f"{known.name} is a sweep of local jobs, of which {len(names)} did not complete. Resume one with "
        text += f'"tf4slurm resume {names[0]}", or run the sweep again.'
    if text:
        raise JobStateError(text, job=known.name, state=state.state)
    if state.elements:
        failed = [JobId.parse(each.job_id).element for each in parts if each.exit_code and each.job_id]
        return tuple(index for index in failed if index is not None)
    own = known.slurm_id.element if known.slurm_id is not None else None
    return () if own is None else (own,)


def own_command(*arguments: str) -> list[str]:
    """Return the words of a command that runs `tf4slurm` with these arguments, from this installation."""
    return [sys.executable, "-m", "tf4slurm", *arguments]


def _run_launcher(
    command: Sequence[str], directory: Path | None = None, on_output: Callable[[str], None] | None = None
) -> JobStatus:
    """Run a launcher, the process of `command`, to its end. Return the last state of its job.

    `directory` is the launcher's working directory, by default that of this process. See `run` for `on_output`.
    """
    stdout, stderr = (None, None) if on_output is None else (subprocess.PIPE, subprocess.STDOUT)
    with tempfile.NamedTemporaryFile() as file:
        environ = {**os.environ, ANSWER_VARIABLE: file.name}
        with subprocess.Popen(
            command, cwd=directory, env=environ, stdout=stdout, stderr=stderr, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                assert on_output is not None
                on_output(line)
        run_directory = os.fsdecode(file.read())
    if run_directory:
        return status(run_directory)
    code = process.returncode
    text = f"The launcher exited with code {code} before it created a run directory. Its output has the reason."
    raise LaunchError(text, command=command, returncode=code)


def grow(
    job: str | KnownJob,
    workers: int,
    *,
    environ: Mapping[str, str] | None = None,
    site: str | None = "none",
    **options: Any,
) -> str:
    """Add workers to a running job: submit a job array of Slurm whose elements join the job. Return the array's id.

    A worker that joins takes part in training as soon as its TensorFlow server answers, if the chief's script calls
    `parameter_server_strategy`. The worker may leave at any time, for example when it is preempted.

    Args:
        workers: Number of workers to add. For a job array, each element that runs gets this number, and the ids of the
            new arrays are returned, separated by spaces.
        environ: Environment variables of the workers, by default those of this process.
        site: Profile of settings for the options that are not given. With None, the settings files name it. By default
            no settings are read, as by `submit`.
        options: Options of the array as for `BatchSpec`: those for Slurm, such as `partition`, and those that set up an
            environment, such as `module`.

    Raises:
        JobStateError: The job does not run, is a local job, runs another version of tf4slurm, or cannot use more
            workers, or several jobs that may run have the name `job`. If the job ends during this call, the array is
            cancelled.
        OptionError: `workers` or an option is invalid.
        SettingsError: A settings file cannot be used.
        UntrustedFileError: Another user could have written the job's files or a settings file.
        RunDirectoryError: The job has no run directory here, or it cannot be read or written.
        RefusedError, LaunchError: sbatch refused the array, or cannot be started.
    """
    from tf4slurm.joining import grow

    known, environ = find_to_change(job), os.environ if environ is None else environ
    if not known.array:
        return grow.grow(known, workers, options, environ, site)
    running = [each.name for each in status(known).elements if each.state == "RUNNING"]
    if not running:
        raise JobStateError(f"No element of {known.name} runs: add workers while it runs.", job=known.name, state="")
    added: list[str] = []
    try:
        for each in known.elements:
            if each.name in running:
                added.append(grow.grow(each, workers, options, environ, site))
    except Tf4SlurmError:
        if added:
            logger.warning("workers were submitted for some elements only: jobs %s", ", ".join(added))
        raise
    return " ".join(added)


def grow_script(
    job: str | KnownJob,
    workers: int,
    *,
    environ: Mapping[str, str] | None = None,
    site: str | None = "none",
    **options: Any,
) -> str:
    """Return the batch script that `grow` would submit. The errors are as in `grow`."""
    from tf4slurm.joining.grow import make_worker_spec
    from tf4slurm.submission.batch_script import make_script

    known, environ = find_to_change(job), os.environ if environ is None else environ
    return make_script(make_worker_spec(known, latest_run(known), workers, options, environ, site))


def shrink(job: str | KnownJob, workers: int) -> tuple[str, ...]:
    """Remove workers that `grow` added: pending ones first, then the newest. Return the ids of their Slurm jobs.

    The Slurm jobs are cancelled. A worker that trains ends its running closure first, for at most 20 s.

    Raises:
        JobStateError: Fewer such workers are pending or run, or several jobs that may run have the name `job`. None is
            removed.
        OptionError: `workers` is not a number from 1.
        LaunchError: A request to Slurm failed.
    """
    from tf4slurm.joining import grow

    return grow.shrink(find_to_change(job), workers)


def find(job: str | KnownJob | None = None) -> KnownJob:
    """Return the job with this Slurm job id, name or run directory path. By default, return this user's latest."""
    return job if isinstance(job, KnownJob) else find_job(job, os.environ)


def find_to_change(job: str | KnownJob) -> KnownJob:
    """Return the job as `find` does. If several jobs have the given name, return the one that is pending or runs.

    Raises:
        JobStateError: Several of them are pending or run, so it is unknown which one is meant.
    """
    if isinstance(job, KnownJob):
        return job
    first, *others = found = find_jobs(job, os.environ)
    if not others:
        return first
    states = StatusReader(found, refuse_newer=False).read()
    live = [(known, state) for known, state in zip(found, states, strict=True) if state.can_change]
    if len(live) > 1:
        ids = ", ".join(f"{known.job_id or known.name} ({state.state})" for known, state in live)
        text = (
            f"{len(live)} jobs with the name {job!r} are pending or run: {ids}. Give the id of one, or its whole name."
        )
        raise JobStateError(text, job=job, state=live[0][1].state)
    return live[0][0] if live else first


def status(job: str | KnownJob | None = None) -> JobStatus:
    """Return the state of a job and its tasks.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote the job's files.
    """
    return StatusReader([find(job)], reads_output=True).read()[0]


def list_jobs(limit: int | None = None) -> list[JobStatus]:
    """Return the states of the jobs in this user's registry, the latest first, at most `limit` (default: all)."""
    return StatusReader(registered_jobs(os.environ)[:limit], refuse_newer=False).read()


def watch(
    jobs: Sequence[str | KnownJob | None],
    *,
    interval_seconds: float = _WATCH_SECONDS,
    timeout_seconds: float | None = None,
) -> Iterator[list[JobStatus]]:
    """Yield the states of all jobs, in the order of `jobs`, repeatedly until no state can change any more.

    Args:
        interval_seconds: Seconds between two reads of the jobs' files (default 1). Slurm is queried at most every 10 s.
        timeout_seconds: Timeout in seconds for the end of all jobs; None for no limit.

    Raises:
        WaitTimeoutError: A job did not end in time.
    """
    reader, started = StatusReader([find(job) for job in jobs], reads_output=True), time.monotonic()
    while True:
        statuses = reader.read()
        yield statuses
        waiting = [each.name for each in statuses if each.can_change]
        if not waiting:
            return
        if timeout_seconds is not None and time.monotonic() - started >= timeout_seconds:
            text = f"{', '.join(waiting)} did not end within {timeout_seconds:g} s and continues to run."
            raise WaitTimeoutError(text, jobs=waiting)
        time.sleep(interval_seconds)


def wait(job: str | KnownJob | None = None, *, timeout_seconds: float | None = None) -> JobStatus:
    """Wait until a job has ended, or until all elements of a job array have. Return the state.

    The wait also ends when Slurm has forgotten a job without a result (state FORGOTTEN).

    Raises:
        WaitTimeoutError: The job did not end in time.
    """
    *_, (last,) = watch([job], timeout_seconds=timeout_seconds)
    return last


def logs(
    job: str | KnownJob | None = None,
    *tasks: str,
    tail: int | None = None,
    since: float | None = None,
    merged: bool = False,
    follow: bool = False,
    all_output: bool = False,
    on_pending: Callable[[JobStatus], None] = lambda status: None,
) -> Iterator[LogLine]:
    """Return the lines that tasks have printed, over all attempts. Each task has one log in each attempt.

    Args:
        tasks: The tasks, such as "chief/0" or "worker/*", or roles, such as "worker" for all workers. By default all.
        tail: Number of last lines of each log; None for all lines.
        since: Omit lines before this time, in seconds since 1970, accurate to about a second; overrides `tail`.
        merged: Sort the lines of all tasks by time, accurate to about a second. By default log follows log.
        follow: Continue with new lines, sorted by time, until the job has ended.
        all_output: Include the messages that TensorFlow prints at every start.
        on_pending: With `follow`, called while the job is pending, whenever Slurm's reason changes.

    Raises:
        UnknownTaskError: Without `follow`, no task matches, or the job has no logs yet.
    """
    if follow:
        lines = follow_logs(find(job), tasks, tail=tail, since=since, on_pending=on_pending)
    else:
        lines = read_logs(find(job), tasks, tail=tail, since=since, merged=merged)
    return lines if all_output else omit_boilerplate(lines)


def cancel(
    job: str | KnownJob,
    *,
    grace_period_seconds: float | None = None,
    now: bool = False,
    on_progress: Callable[[str], None] = logger.info,
) -> JobStatus:
    """Ask a job to save and stop, and kill it if it does not end in time. Return its last state.

    A job that saves already, after an earlier request, keeps the rest of its grace period. Only `now` skips it.

    A pending job is cancelled at once. Of a whole job array, the pending elements are cancelled first, so that they do
    not start, and the running ones are asked to save. After a kill, this function waits at most 5 s. Slurm may take
    longer.

    Args:
        job: The job. If it has ended, nothing happens.
        grace_period_seconds: Seconds until the kill (default: the job's own grace period, or what is left of it, plus
            10). 0 is `now`.
        now: Terminate the tasks at once, without a grace period, also while they save. The job has 10 s for this,
            or with a long --kill-wait 6 s more than that.
        on_progress: Called with a sentence at each step.

    Raises:
        JobStateError: The job is a local job on another host, it is unknown whether it runs, or several jobs that may
            run have the name `job`.
        UntrustedFileError: Another user could have written the job's files.
        LaunchError: A request to Slurm failed.
    """
    return cancel_known(find_to_change(job), grace_period_seconds, on_progress, now=now)


def _read_trusted(known: KnownJob) -> JobFile:
    runs = [run for found in find_run_directories(known.elements or (known,)) for run in found]
    return runs[-1].read_trusted_job() if runs else JobFile()


def make_report(
    job: str | KnownJob | Sequence[str | KnownJob] | None = None, path: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a running or ended job, or a page that compares many jobs. Return its path.

    Args:
        job: The job. Several jobs, and a job array or sweep, get one page with a table and the curves of all.
        path: Output file, by default report.html in the run directory. For several jobs it is comparison.html in the
            run directory of the first one, and for an array NAME.html beside the run directories. If the first of
            several jobs is an array, it is NAME-comparison.html there. A .svg or .png file is a picture of the timeline
            and the charts of one job.

    Raises:
        RunDirectoryError: A job has no run directory, or `path` cannot be written or has an unknown suffix.
        MissingDependencyError: A picture needs matplotlib: pip install "tf4slurm[plot]".
    """
    jobs = _find_all(job)
    if not jobs:
        raise UnknownJobError("No job was given, so there is nothing to report.")
    _check_has_run(jobs)
    if path is not None:
        where = Path(path).absolute()
    elif jobs[0].array:
        where = Path(jobs[0].runs_directory) / f"{jobs[0].name}{'' if len(jobs) == 1 else '-comparison'}.html"
    else:
        where = latest_run(jobs[0]).path / ("report.html" if len(jobs) == 1 else "comparison.html")
    content = render_report(jobs, where)
    if len(jobs) == 1 and not jobs[0].array:
        return latest_run(jobs[0]).write_report(content, where)
    return write_report(content, where)


def render_report(
    job: str | KnownJob | Sequence[str | KnownJob] | None = None, path: str | os.PathLike[str] = "report.html"
) -> bytes:
    """Return the content that `make_report` would write to `path`, whose suffix determines the format."""
    from tf4slurm.reports.picture import make_picture
    from tf4slurm.reports.report import make_report as make_html
    from tf4slurm.reports.runs_page import make_runs_page
    from tf4slurm.reports.summary import JobSummary

    where, jobs = Path(path).absolute(), _find_all(job)
    _check_has_run(jobs)
    is_one = len(jobs) == 1 and not jobs[0].array
    suffix = where.suffix.lower()
    if suffix in (".svg", ".png") and is_one:
        return make_picture(JobSummary(latest_run(jobs[0])), suffix[1:])
    if suffix not in ("", ".html", ".htm"):
        kind, suffixes = ("report", ".html, .svg or .png") if is_one else ("comparison", ".html")
        raise RunDirectoryError(
            f"{str(path)!r} cannot be written: {suffix!r} is no format of a {kind}. Use one that ends in {suffixes}, "
            "or print the .html from a browser.",
            path=str(path),
        )
    if is_one:
        return make_html(JobSummary(latest_run(jobs[0])), where.parent).encode()
    title = jobs[0].name if len(jobs) == 1 else " and ".join(each.name for each in jobs[:2])
    title += f" and {len(jobs) - 2} more" if len(jobs) > 2 else ""
    return make_runs_page(title, read_runs(jobs), where.parent).encode()


def _check_has_run(jobs: Sequence[KnownJob]) -> None:
    """Raise RunDirectoryError if the only job, which is no array, never made a run directory, and has ended."""
    if len(jobs) != 1 or jobs[0].array or jobs[0].slurm_id is None or jobs[0].run_directories:
        return
    state = status(jobs[0])
    path = os.path.join(jobs[0].runs_directory, jobs[0].name)
    if state.can_change or os.path.lexists(path):
        return
    text = f"{state.name} has no report, because it has no run directory {path!r}. It is {state.state}. {state.reason}"
    lines = describe_slurm_output(state.slurm_output)
    raise RunDirectoryError("\n".join([text.rstrip(), *lines]), path=path)


def read_runs(jobs: Sequence[str | KnownJob | None]) -> list[Run]:
    """Return the results of jobs: labels, state, exit code, steps, metrics. An array has one for each element.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote a job's files.
    """
    from tf4slurm.reports.runs import read_run

    statuses = StatusReader([find(job) for job in jobs]).read()
    found = []
    for each in itertools.chain.from_iterable(status.parts for status in statuses):
        directory = None if each.run_directory is None else RunDirectory(Path(each.run_directory))
        found.append(read_run(directory, each.name, each.labels, each.state, each.exit_code, each.headline))
    return found


def _find_all(job: str | KnownJob | Sequence[str | KnownJob] | None) -> list[KnownJob]:
    return [find(job)] if job is None or isinstance(job, (str, KnownJob)) else [find(each) for each in job]
