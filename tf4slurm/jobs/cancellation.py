"""Cancel a job: ask it to save and stop, and kill it if it does not end in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from tf4slurm.errors import JobStateError, LaunchError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.jobs.status import JobStatus, StatusReader
from tf4slurm.slurm.commands import cancel_job, signal_batch
from tf4slurm.system.proc import signal_process

_POLL_SECONDS = 0.3
_MARGIN_SECONDS = 10.0
_KILL_SECONDS = 5.0  # timeout for the end of a killed job
_SLURM_SECONDS = 3.0  # minimum seconds between queries while a job is cancelled


def cancel_known(known: KnownJob, grace_period_seconds: float | None, on_progress: Callable[[str], None]) -> JobStatus:
    """Cancel a job and return its last state. The arguments and exceptions are those of `api.cancel`."""
    status = _wait_for_end(known, 0.0)
    if status.has_ended:
        on_progress(f"{known.name} has ended already: {status.state}.")
        return status
    runs = known.run_directories
    file = runs[-1].read_trusted_job() if runs else JobFile()
    is_pending = known.job_id is not None and (status.state == "PENDING" or not runs)
    requests: list[tuple[signal.Signals, float]] = []
    if grace_period_seconds == 0 and known.job_id is None:  # the second SIGINT skips the grace period
        requests = [(signal.SIGINT, _POLL_SECONDS), (signal.SIGINT, _KILL_SECONDS)]
    elif grace_period_seconds != 0 and not is_pending:
        seconds = grace_period_seconds or file.grace_period_seconds + _MARGIN_SECONDS
        requests = [(signal.SIGTERM, seconds)]
        on_progress(f"{known.name} is asked to save and stop; it has {seconds:g} s.")
    for number, seconds in requests:
        _signal(known, file.process, number)
        status = _wait_for_end(known, seconds)
        if status.has_ended:
            on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
            return status
    _signal(known, file.process, signal.SIGKILL)
    late = "" if grace_period_seconds == 0 else "did not stop in time and "
    on_progress(f"{known.name} {'is cancelled' if is_pending else f'{late}was killed'}.")
    return _wait_for_end(known, _KILL_SECONDS)


def _wait_for_end(known: KnownJob, seconds: float) -> JobStatus:
    """Wait at most `seconds` for the end of a job. Return its last state, which may be that of a running job."""
    reader, deadline = StatusReader([known], ask_seconds=_SLURM_SECONDS), time.monotonic() + seconds
    while True:
        (status,) = reader.read()
        if status.has_ended or time.monotonic() >= deadline:
            return status
        time.sleep(_POLL_SECONDS)


def _signal(known: KnownJob, launcher: Process | None, number: signal.Signals) -> None:
    """Send a signal to the launcher of a local job. For a Slurm job, SIGTERM requests a stop, and SIGKILL cancels it.

    A Slurm job whose launcher is no batch script, as with salloc, is cancelled in both cases. Nothing is sent to a
    local launcher that has ended or is unknown (None).

    Raises:
        JobStateError: The job is a local job on another host.
        LaunchError: Slurm does not cancel the job.
    """
    if known.job_id is not None:
        if number == signal.SIGTERM:
            with contextlib.suppress(LaunchError):  # not a batch job: with salloc, Slurm did not start the launcher
                signal_batch(known.job_id, "INT")  # Slurm's preemption sends SIGTERM, and may requeue the job
                return
        cancel_job(known.job_id)
    elif launcher is not None and launcher.is_alive():  # its process ID may belong to another process by now
        signal_process(launcher.id, launcher.start_ticks, number)  # agents of a killed launcher terminate the tasks
    elif launcher is not None and launcher.host != os.uname().nodename:
        text = f"{known.name} runs on {launcher.host}: cancel it there."
        raise JobStateError(text, job=known.name, state="RUNNING")
