"""The library behind the command line: run, submit, status, logs, wait, cancel, resume and report as functions.

A job is given as Slurm's job id, its name, the path of its run directory, or a `KnownJob`; None is this
user's latest job. The functions print nothing, return typed values and raise the errors of `tf4slurm.errors`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tf4slurm.errors import JobStateError, LaunchError, RunDirectoryError, SchemaVersionError, WaitTimeoutError
from tf4slurm.jobs.logs import LogLine, follow_logs, read_logs
from tf4slurm.jobs.registry import KnownJob, find_job, latest_run, registered_jobs
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.jobs.status import JobStatus, StatusReader
from tf4slurm.slurm.commands import cancel_job, signal_batch

if TYPE_CHECKING:
    from tf4slurm.batch_spec import BatchSpec
    from tf4slurm.spec import JobSpec

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_CANCEL_POLL_SECONDS = 0.3
_CANCEL_MARGIN_SECONDS = 10.0
_KILL_SECONDS = 5.0  # timeout for the end of a killed job
_SLURM_SECONDS = 3.0  # minimum seconds between queries while a job is cancelled


def find(job: str | KnownJob | None = None) -> KnownJob:
    """Return a job that this user has started.

    Raises:
        UnknownJobError: There is no such job; the message names similar ones.
    """
    return job if isinstance(job, KnownJob) else find_job(job, os.environ)


def status(job: str | KnownJob | None = None) -> JobStatus:
    """Return the state of a job and its tasks.

    Raises:
        UnknownJobError: There is no such job.
        SchemaVersionError: A newer version of tf4slurm wrote the job's files.
    """
    return StatusReader([find(job)]).read()[0]


def list_jobs(limit: int | None = None) -> list[JobStatus]:
    """Return the state of this user's jobs, the latest first, at most `limit`."""
    return StatusReader(registered_jobs(os.environ)[:limit], refuse_newer=False).read()


def watch(
    jobs: Sequence[str | KnownJob | None],
    *,
    interval_seconds: float = _WATCH_SECONDS,
    timeout_seconds: float | None = None,
) -> Iterator[list[JobStatus]]:
    """Yield the state of jobs repeatedly, until all have ended.

    Args:
        jobs: The jobs.
        interval_seconds: Seconds between two reads of their files; Slurm is queried every 10 s.
        timeout_seconds: Timeout in seconds for the end of all jobs; None for no limit.

    Raises:
        UnknownJobError: There is no such job.
        WaitTimeoutError: A job did not end in time.
    """
    reader, started = StatusReader([find(job) for job in jobs]), time.monotonic()
    while True:
        statuses = reader.read()
        yield statuses
        waiting = [each.name for each in statuses if not each.has_ended]
        if not waiting:
            return
        if timeout_seconds is not None and time.monotonic() - started >= timeout_seconds:
            text = f"{', '.join(waiting)} did not end within {timeout_seconds:g} s and continues to run."
            raise WaitTimeoutError(text, jobs=waiting, seconds=timeout_seconds)
        time.sleep(interval_seconds)


def wait(job: str | KnownJob | None = None, *, timeout_seconds: float | None = None) -> JobStatus:
    """Wait until a job has ended; return its state, with its exit code.

    Raises:
        UnknownJobError: There is no such job.
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
    on_pending: Callable[[JobStatus], None] = lambda status: None,
) -> Iterator[LogLine]:
    """Return the lines that tasks have printed, over all attempts.

    Args:
        job: The job.
        tasks: The tasks, such as "chief/0" or "worker/*"; all if none is given.
        tail: Number of last lines of each log; None for all lines.
        since: Omit lines that are certainly older than this time, in seconds since 1970.
        merged: Sort the lines of all tasks by time, which is accurate to about a second.
        follow: Continue with new lines, sorted by time, until the job has ended.
        on_pending: With `follow`, called while the job is pending, whenever Slurm's reason changes.

    Raises:
        UnknownJobError: There is no such job.
        UnknownTaskError: No task matches, or the job has no logs yet.
    """
    if follow:
        return follow_logs(find(job), tasks, tail=tail, since=since, on_pending=on_pending)
    return read_logs(find(job), tasks, tail=tail, since=since, merged=merged)


def cancel(
    job: str | KnownJob,
    *,
    grace_period_seconds: float | None = None,
    on_progress: Callable[[str], None] = logger.info,
) -> JobStatus:
    """Ask a job to save and stop, and kill it after its grace period; return its last state.

    A job that has ended does not change. After a kill, this function waits at most 5 s for the end; Slurm may take
    longer.

    Args:
        job: The job.
        grace_period_seconds: Seconds that the script may take to save; 0 to kill the job at once. By default the job's
            own grace period plus 10 s.
        on_progress: Called with a sentence at each step.

    Raises:
        UnknownJobError: There is no such job.
        JobStateError: The job is a local job on another host.
        UntrustedFileError: Another user could have written the job's files.
        LaunchError: A request to Slurm failed.
    """
    known = find(job)
    status = _wait_for_end(known, 0.0)
    if status.has_ended:
        on_progress(f"{known.name} has ended already: {status.state}.")
        return status
    runs = known.run_directories
    file = runs[-1].read_trusted_job() if runs else JobFile()
    if known.job_id is not None and (status.state == "PENDING" or not runs or grace_period_seconds == 0):
        cancel_job(known.job_id)
        on_progress(f"{known.name} is cancelled.")
        return _wait_for_end(known, _KILL_SECONDS)
    if grace_period_seconds != 0:
        _request_stop(known, file)
        seconds = grace_period_seconds or file.grace_period_seconds + _CANCEL_MARGIN_SECONDS
        on_progress(f"{known.name} is asked to save and stop; it has {seconds:g} s.")
        status = _wait_for_end(known, seconds)
        if status.has_ended:
            on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
            return status
    _kill(known, file)
    on_progress(f"{known.name} {'was' if grace_period_seconds == 0 else 'did not stop in time and was'} killed.")
    return _wait_for_end(known, _KILL_SECONDS)


def _wait_for_end(known: KnownJob, seconds: float) -> JobStatus:
    """Wait at most `seconds` for the end of a job; return its state."""
    reader, deadline = StatusReader([known], ask_seconds=_SLURM_SECONDS), time.monotonic() + seconds
    while True:
        (status,) = reader.read()
        if status.has_ended or time.monotonic() >= deadline:
            return status
        time.sleep(_CANCEL_POLL_SECONDS)


def _request_stop(known: KnownJob, file: JobFile) -> None:
    if known.job_id is None:
        _signal_launcher(known, file.process, signal.SIGTERM)
        return
    try:
        signal_batch(known.job_id, "INT")  # Slurm's preemption sends SIGTERM, after which the job may be requeued
    except LaunchError:  # not a batch job: with salloc, Slurm did not start the launcher
        cancel_job(known.job_id)


def _kill(known: KnownJob, file: JobFile) -> None:
    if known.job_id is not None:
        cancel_job(known.job_id)
    else:
        _signal_launcher(known, file.process, signal.SIGKILL)  # its agents then terminate the tasks


def _signal_launcher(known: KnownJob, process: Process | None, number: signal.Signals) -> None:
    """Signal the launcher of a local job, unless its process ID now belongs to another process."""
    if process is None:
        return
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.id, number)
    elif process.host != os.uname().nodename:
        text = f"{known.name} runs on {process.host}: cancel it there."
        raise JobStateError(text, job=known.name, state="RUNNING")


@dataclass(frozen=True)
class Resumption:
    """The way to start a job again.

    Attributes:
        job: The job.
        directory: The directory to start the job in.
        script: The batch script to submit; None for a local job.
        arguments: The command line of a local job.
    """

    job: KnownJob
    directory: Path
    script: Path | None
    arguments: tuple[str, ...]

    def submit(self) -> str:
        """Submit the batch script again; return the new job id."""
        from tf4slurm.submission.submit import submit_again

        assert self.script is not None
        name = self.job.name.removesuffix(f"-{self.job.job_id}")
        return submit_again(self.script, name, os.environ, self.directory)


def find_resumption(job: str | KnownJob | None = None) -> Resumption:
    """Return the way to start an ended job again.

    Raises:
        UnknownJobError: There is no such job.
        JobStateError: The job has not ended.
        UntrustedFileError: Another user could have written the job's files.
        RunDirectoryError: Neither a batch script nor a command line was kept.
    """
    known = find(job)
    state = status(known)
    if not state.has_ended:
        text = f"{known.name} is still {state.state}. Wait for its end, or cancel it first."
        raise JobStateError(text, job=known.name, state=state.state)
    runs = known.run_directories
    file = runs[-1].read_trusted_job() if runs else JobFile()
    directory = Path(file.directory or ".")
    script = Path(known.runs_directory) / f"{known.name}.sh"
    if known.job_id is not None and script.is_file():
        return Resumption(known, directory, script, ())
    if known.job_id is not None or not file.arguments:
        raise RunDirectoryError(
            f"It is unknown how {known.name} was started: neither {script} nor job.json has its command line. Start it "
            "again with the command you used.",
            path=str(script),
        )
    return Resumption(known, directory, None, file.arguments)


def resume(job: str | KnownJob | None = None) -> JobStatus:
    """Start a job again with the same options in the same directory; its script continues from its checkpoint.

    A batch job is submitted again, and the new job's state returned. A local job runs to its end.

    Raises:
        UnknownJobError, JobStateError, UntrustedFileError, RunDirectoryError: See `find_resumption`.
        RefusedError, LaunchError: sbatch refused the job, or cannot be started.
    """
    resumption = find_resumption(job)
    if resumption.script is not None:
        return status(resumption.submit())
    with subprocess.Popen(own_command(*resumption.arguments[1:]), cwd=resumption.directory) as process:
        launcher = Process.of(process.pid)
    return status(_find_job_of(launcher, process.returncode, resumption.job.runs_directory))


def script(spec: BatchSpec) -> str:
    """Return the batch script that `submit` submits; this host needs no Slurm.

    Raises:
        OptionError: The options cannot be written as a batch script.
    """
    from tf4slurm.submission.batch_script import make_script
    from tf4slurm.submission.snapshot import place_snapshot

    return make_script(place_snapshot(spec))


def submit(spec: BatchSpec) -> KnownJob:
    """Submit a job to Slurm; return it.

    Raises:
        OptionError: The options cannot be written as a batch script.
        RunDirectoryError: The script cannot be written beside the run directories.
        RefusedError, LaunchError: sbatch refused the job, or cannot be started.
    """
    from tf4slurm.submission.snapshot import place_snapshot
    from tf4slurm.submission.submit import submit

    return find(submit(place_snapshot(spec)))


def run(
    spec: JobSpec,
    *,
    local: bool = False,
    isolated: bool = False,
    on_output: Callable[[str], None] | None = None,
) -> JobStatus:
    """Run a job to its end, as local processes or in the current allocation; return its last state.

    The launcher runs in a child process, because it forks and handles signals. It reads no settings; `Job`
    adds settings to its options.

    Args:
        spec: The job.
        local: Start local processes even inside a Slurm allocation.
        isolated: Run local processes in their own network, which has only loopback.
        on_output: Called with each line of output; by default the lines go to this process's standard output.

    Raises:
        LaunchError: The launcher exited before it created a run directory; its output has the reason.
    """
    words = ["run", "--site", "none"]  # settings would override options that equal a default
    words += [flag for flag, is_set in (("--local", local), ("--isolated", isolated)) if is_set]
    command = own_command(*words, *spec.to_arguments(), "--", *spec.command)
    stdout, stderr = (None, None) if on_output is None else (subprocess.PIPE, subprocess.STDOUT)
    with subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, errors="replace") as process:
        launcher = Process.of(process.pid)
        for line in process.stdout or ():
            assert on_output is not None
            on_output(line)
    return status(_find_job_of(launcher, process.returncode, str(spec.runs_directory)))


def own_command(*arguments: str) -> list[str]:
    """Return the command that runs this tf4slurm."""
    return [sys.executable, "-m", "tf4slurm", *arguments]


def _find_job_of(launcher: Process, returncode: int, runs_directory: str) -> KnownJob:
    """Return the job of a launcher that has exited, from the registry or from `runs_directory`."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(Path(runs_directory).iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    registered = (run for job in registered_jobs(os.environ) for run in reversed(job.run_directories))
    for run in itertools.chain(registered, map(RunDirectory, paths)):
        with contextlib.suppress(SchemaVersionError):  # another version wrote it, not this launcher
            if (run.read(JobFile) or JobFile()).process == launcher:
                return find(str(run.path))
    text = f"The launcher exited with code {returncode} before it created a run directory. Its output has the reason."
    raise LaunchError(text, command=own_command(), returncode=returncode)


def make_report(job: str | KnownJob | None = None, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a job, running or ended; return its path.

    Args:
        job: The job.
        path: Output file, by default report.html in the run directory. A .svg or .png file has only the charts.

    Raises:
        UnknownJobError: There is no such job.
        RunDirectoryError: The job has no run directory, or the report cannot be written.
    """
    run = latest_run(find(job))
    where = run.path / "report.html" if path is None else Path(path).absolute()
    return run.write_report(render_report(job, where), where)


def render_report(job: str | KnownJob | None = None, name: str | os.PathLike[str] = "report.html") -> bytes:
    """Return the content of a report file of this name; see `make_report`."""
    from tf4slurm.reports.report import make_file
    from tf4slurm.reports.summary import read_summary

    return make_file(read_summary(latest_run(find(job))), Path(name))
