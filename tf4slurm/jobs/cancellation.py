"""Cancel a job or a job array: ask it to save and stop, and kill it if it does not end in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from tf4slurm.errors import JobStateError, LaunchError
from tf4slurm.jobs.formatting import format_count
from tf4slurm.jobs.registry import KnownJob, find_run_directories, register_cancelled
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.jobs.status import JobStatus
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.slurm.commands import cancel_job, query_job, signal_batch
from tf4slurm.slurm.job_id import JobId
from tf4slurm.system.proc import signal_process

_POLL_SECONDS = 0.3
_MARGIN_SECONDS = 10.0
_KILL_SECONDS = 5.0  # timeout for the end of a killed job
_ASK_SECONDS = 3.0  # minimum seconds between queries while a job is cancelled


def cancel_known(known: KnownJob, grace_period_seconds: float | None, on_progress: Callable[[str], None]) -> JobStatus:
    """Cancel a job and return its last state. The arguments and exceptions are those of `api.cancel`."""
    status = _wait(known, 0.0)
    unclear = _unclear(status)
    if unclear and (not status.can_change or any(each.state == "UNKNOWN" for each in unclear)):
        raise _unclear_error(known, status, "so nothing was changed")
    if not status.can_change:
        on_progress(f"{known.name} has ended already: {status.state}.")
        return status
    if known.slurm_id is None and not known.array and status.state == "PENDING":
        text = f"{known.name} has not started. Cancel the whole sweep."
        raise JobStateError(text, job=known.name, state=status.state)
    if known.slurm_id is None:
        return _cancel_local(known, grace_period_seconds, on_progress)
    known, status = _cancel_pending(known, status, on_progress)
    return _cancel_running(known, status, grace_period_seconds, on_progress)


def _cancel_pending(
    known: KnownJob, status: JobStatus, on_progress: Callable[[str], None]
) -> tuple[KnownJob, JobStatus]:
    """Cancel a job, or the elements of an array, if they are pending. Return the job, and its state afterwards.

    It is done before running elements are asked to stop: their end would let pending ones start.
    """
    pending = [_id(each) for each in status.parts if each.state == "PENDING"]
    if not pending:
        return known, status
    elements = tuple(sorted(index for each in pending for index in each.elements))
    cancelled = JobId(pending[0].number, elements)
    cancel_job(cancelled)
    known = register_cancelled(known, cancelled, os.environ)
    status = _wait(known, _KILL_SECONDS, lambda status: not _in_state(status, "PENDING"))
    if status.elements:
        on_progress(f"{known.name}: {format_count(len(pending), 'pending element')} cancelled.")
    elif status.has_ended or status.state == "PENDING":
        on_progress(f"{known.name} is cancelled.")
    return known, status


def _cancel_running(
    known: KnownJob, status: JobStatus, grace_period_seconds: float | None, on_progress: Callable[[str], None]
) -> JobStatus:
    """Ask a Slurm job, or the elements of an array that run, to save and stop. Kill what does not end in time.

    An element without a run directory has nothing to save, and is cancelled at once.
    """
    asked: dict[JobId, float] = {}
    errors: dict[JobId, LaunchError] = {}
    running = _running(status)
    runs = [found[-1] if found else None for found in find_run_directories([_part(known, each) for each in running])]
    files = [None if run is None else run.read_trusted_job() for run in runs]  # before the first request
    for each, file in zip(running, files, strict=True):
        try:
            if grace_period_seconds != 0 and file is not None:
                _request_stop(_id(each))
                asked[_id(each)] = grace_period_seconds or file.grace_period_seconds + _MARGIN_SECONDS
            else:
                cancel_job(_id(each))
        except LaunchError as error:  # it may have ended meanwhile
            errors[_id(each)] = error
    if asked:
        seconds = max(asked.values())
        who = f"{format_count(len(asked), 'element')} of {known.name}" if status.elements else known.name
        on_progress(
            f"{who} {'is' if len(asked) == 1 else 'are'} asked to save and stop; at most {seconds:g} s are left."
        )
        started = time.monotonic()

        def is_over(status: JobStatus) -> bool:
            passed = time.monotonic() - started
            waiting = [
                each for each in _changing(status) if each.state != "PENDING"
            ]  # a requeued one has saved, and is pending
            return all(passed >= asked.get(_id(each), 0.0) for each in waiting)

        status = _wait(known, seconds, is_over)
    elif running:
        status = _wait(known, 0.0)
    if any(each.state == "UNKNOWN" for each in _unclear(status)):
        raise _unclear_error(known, status, "because Slurm does not answer any more")
    late = [_id(each) for each in _changing(status) if _id(each) not in errors]
    failed = [errors[_id(each)] for each in _changing(status) if _id(each) in errors]
    if failed and late:
        cancel_job(*late)
    if failed:
        raise failed[0]
    if not late:
        if asked and _unclear(status):
            on_progress(f"{known.name}: nothing runs any more. {status.reason}")
        elif asked:
            on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
        return status
    cancel_job(*late)
    text = "did not stop in time and was killed" if asked else "was killed"
    on_progress(f"{' '.join(map(str, late)) if status.elements else known.name} {text}.")
    return _wait(known, _KILL_SECONDS)


def _cancel_local(known: KnownJob, grace_period_seconds: float | None, on_progress: Callable[[str], None]) -> JobStatus:
    runs = [run for each in known.elements or (known,) for run in each.run_directories]
    file = runs[-1].read_trusted_job() if runs else JobFile()
    launchers = [file.process]
    if known.array:  # the process of a sweep forwards SIGINT to its launchers, also if it is a notebook
        is_alive = known.process is not None and known.process.is_alive()
        launchers = [known.process] if is_alive else [run.read_trusted_job().process for run in runs]
    if grace_period_seconds == 0:  # the second SIGINT skips the grace period
        requests = [(signal.SIGINT, _POLL_SECONDS), (signal.SIGINT, _KILL_SECONDS)]
    else:
        seconds = grace_period_seconds or file.grace_period_seconds + _MARGIN_SECONDS
        requests = [(signal.SIGINT if known.array else signal.SIGTERM, seconds)]
        on_progress(f"{known.name} is asked to save and stop; at most {seconds:g} s are left.")
    for number, seconds in requests:
        for launcher in launchers:
            _signal_launcher(known, launcher, number)
        status = _wait(known, seconds)
        if status.has_ended:
            on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
            return status
    for run in runs:
        _signal_launcher(known, run.read_trusted_job().process, signal.SIGKILL)
    on_progress(f"{known.name} {'' if grace_period_seconds == 0 else 'did not stop in time and '}was killed.")
    return _wait(known, _KILL_SECONDS)


def _wait(
    known: KnownJob, seconds: float, is_over: Callable[[JobStatus], bool] = lambda status: not status.can_change
) -> JobStatus:
    """Wait at most `seconds` for a condition of the state of a job, by default its end. Return the last state."""
    reader, deadline = StatusReader([known], ask_seconds=_ASK_SECONDS), time.monotonic() + seconds
    while True:
        (status,) = reader.read()
        if is_over(status) or time.monotonic() >= deadline:
            return status
        time.sleep(_POLL_SECONDS)


def _in_state(status: JobStatus, state: str) -> bool:
    return any(each.state == state for each in status.parts)


def _running(status: JobStatus) -> Sequence[JobStatus]:
    """Return the parts of a job that may run: elements of an array, or the job itself."""
    return [each for each in status.parts if each.can_change and each.state not in ("PENDING", "UNKNOWN")]


def _changing(status: JobStatus) -> Sequence[JobStatus]:
    """Return the parts of a job that may still run or start: elements of an array, or the job itself."""
    return [each for each in status.parts if each.can_change]


def _unclear(status: JobStatus) -> Sequence[JobStatus]:
    """Return the elements, or the job, of which nobody knows whether they still run."""
    return [each for each in status.parts if each.is_unclear]


def _unclear_error(known: KnownJob, status: JobStatus, why: str) -> JobStateError:
    name = _unclear(status)[0].name
    text = f"It is unknown whether {name} still runs, {why}. {status.reason} {' '.join(status.warnings)}"
    return JobStateError(" ".join(text.split()), job=known.name, state=status.state)


def _part(known: KnownJob, status: JobStatus) -> KnownJob:
    """Return the job, or the element of the array, that has this state."""
    index = _id(status).element
    if index is None or known.job_id == status.job_id:
        return known
    return known.with_elements([index]).element(index)


def _id(status: JobStatus) -> JobId:
    assert status.job_id is not None
    return JobId.parse(status.job_id)


def _request_stop(job_id: JobId) -> None:
    """Send SIGINT to the batch script of a Slurm job. A job without one, as with salloc, is cancelled.

    Raises:
        LaunchError: A request to Slurm failed.
    """
    if query_job(job_id).is_batch:
        signal_batch(job_id, "INT")  # Slurm's preemption sends SIGTERM, and may requeue the job
    else:
        cancel_job(job_id)


def _signal_launcher(known: KnownJob, launcher: Process | None, number: signal.Signals) -> None:
    """Send a signal to the launcher of a local job. Do nothing if it has ended or is unknown (None).

    Raises:
        JobStateError: The launcher is on another host.
    """
    if launcher is not None and launcher.is_alive():  # its process ID may belong to another process by now
        signal_process(launcher.id, launcher.start_ticks, number)  # agents of a killed launcher terminate the tasks
    elif launcher is not None and launcher.host != os.uname().nodename:
        text = f"{known.name} runs on {launcher.host}: cancel it there."
        raise JobStateError(text, job=known.name, state="RUNNING")
