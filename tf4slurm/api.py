"""The library behind the command line: status, logs, wait, cancel, resume and report of jobs, as functions.

Each function takes a job as Slurm's job id, its name, the path of its run directory, or a `KnownJob`; None is this
user's latest job. They print nothing, return typed values and raise the errors of `tf4slurm.errors`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.errors import JobStateError, LaunchError, RunDirectoryError, WaitTimeoutError
from tf4slurm.jobs.logs import LogLine, follow_logs, read_logs
from tf4slurm.jobs.registry import KnownJob, find_job, known_jobs, latest_run
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.jobs.status import JobStatus, StatusReader
from tf4slurm.slurm.commands import cancel_job, signal_batch

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_CANCEL_POLL_SECONDS = 0.3
_CANCEL_MARGIN_SECONDS = 10.0
_SLURM_SECONDS = 3.0  # age of Slurm's answers while a job is cancelled


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
    return StatusReader(known_jobs(os.environ)[:limit], refuse_newer=False).read()


def watch(
    jobs: Sequence[str | KnownJob | None],
    *,
    interval_seconds: float = _WATCH_SECONDS,
    timeout_seconds: float | None = None,
) -> Iterator[list[JobStatus]]:
    """Return the state of jobs again and again, until all have ended.

    Args:
        jobs: The jobs.
        interval_seconds: How often their files are read; Slurm is asked every 10 s.
        timeout_seconds: How long to wait for their end; None for no limit.

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
        tail: Only so many last lines of each log.
        since: Only lines that are not older, in seconds since 1970.
        merged: Sort the lines of all tasks by time, which is known to about a second.
        follow: Continue with new lines, sorted by time, until the job has ended.
        on_pending: With `follow`, called while the job is pending, whenever the reason changes.

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

    A job that has ended is left as it is.

    Args:
        job: The job.
        grace_period_seconds: How long the script may take to save; 0 to kill the job at once. By default the job's own
            grace period and 10 s.
        on_progress: Called with a sentence at each step.

    Raises:
        UnknownJobError: There is no such job.
        JobStateError: It is a local job of another host.
        UntrustedFileError: Another user could have written the job's files.
        LaunchError: Slurm cannot be asked.
    """
    known = find(job)
    reader = StatusReader([known], ask_seconds=_SLURM_SECONDS)
    (status,) = reader.read()
    if status.has_ended:
        on_progress(f"{known.name} has ended already: {status.state}.")
        return status
    runs = known.run_directories
    file = runs[-1].read_trusted_job() if runs else JobFile()
    if known.job_id is not None and (status.state == "PENDING" or not runs or grace_period_seconds == 0):
        cancel_job(known.job_id)
        on_progress(f"{known.name} is cancelled.")
        return status
    if grace_period_seconds != 0:
        _request_stop(known, file)
        seconds = grace_period_seconds or file.grace_period_seconds + _CANCEL_MARGIN_SECONDS
        on_progress(f"{known.name} is asked to save and stop; it has {seconds:g} s.")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            (status,) = reader.read()
            if status.has_ended:
                on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
                return status
            time.sleep(_CANCEL_POLL_SECONDS)
    _kill(known, file)
    on_progress(f"{known.name} did not stop in time and was killed." if grace_period_seconds else "It was killed.")
    return status


def _request_stop(known: KnownJob, file: JobFile) -> None:
    if known.job_id is None:
        _signal_launcher(known, file.process, signal.SIGTERM)
        return
    try:
        signal_batch(known.job_id, "INT")  # SIGTERM is also Slurm's preemption, which may requeue the job
    except LaunchError:  # not a batch job: with salloc, Slurm did not start the launcher
        cancel_job(known.job_id)


def _kill(known: KnownJob, file: JobFile) -> None:
    if known.job_id is not None:
        cancel_job(known.job_id)
    else:
        _signal_launcher(known, file.process, signal.SIGKILL)  # its agents then terminate the tasks


def _signal_launcher(known: KnownJob, process: Process | None, number: signal.Signals) -> None:
    """Signal the launcher of a local job, unless another process has its process ID now."""
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
    """How a job is started again.

    Attributes:
        job: The job.
        directory: The directory to start it in.
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
    """Return how a job that has ended is started again.

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

    A submitted job is submitted again, and its state returned. A local job runs in a child process to its end.

    Raises:
        UnknownJobError, JobStateError, UntrustedFileError, RunDirectoryError: See `find_resumption`.
        RefusedError, LaunchError: sbatch refused the job, or cannot be started.
    """
    resumption = find_resumption(job)
    if resumption.script is not None:
        return status(resumption.submit())
    arguments = [sys.executable, "-m", "tf4slurm", *resumption.arguments[1:]]
    with subprocess.Popen(arguments, cwd=resumption.directory) as process:
        process.wait()
    return status(find_job_of(process.pid))


def find_job_of(process_id: int) -> KnownJob:
    """Return the job whose launcher is, or was, this process of this host.

    Raises:
        RunDirectoryError: The process ended before it created a run directory.
    """
    host = os.uname().nodename
    for job in known_jobs(os.environ):
        for run in reversed(job.run_directories):
            process = (run.read(JobFile) or JobFile()).process
            if process is not None and (process.host, process.id) == (host, process_id):
                return job
    raise RunDirectoryError(f"Process {process_id} did not start a job. See its output.", path="")


def make_report(job: str | KnownJob | None = None, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a job, running or ended; return its path.

    Args:
        job: The job.
        path: Where to write it, by default report.html in the run directory. A name that ends in .svg or .png gets the
            timeline and curves alone.

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
