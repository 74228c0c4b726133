"""Cancel a job or a job array: ask it to save and stop, and kill it if it does not end in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tf4slurm.errors import JobStateError, LaunchError
from tf4slurm.jobs.formatting import as_sentence, format_count
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.registry import KnownJob, find_run_directories, register_cancelled
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.jobs.status import JobStatus, find_grace_seconds_left
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.jobs.sweep_stops import SweepStop, SweepStops
from tf4slurm.slurm.commands import cancel_job, kill_job, query_job, signal_batch, signal_step
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import NOW_SIGNAL
from tf4slurm.system.proc import signal_process

_POLL_SECONDS = 0.3
_MARGIN_SECONDS = 10.0
_NOW_SECONDS = 10.0  # timeout for the end of a job without its grace period: default of --kill-wait, and its result
_LATE = "did not stop in time and was killed"
_KILL_SECONDS = 5.0  # timeout for the end of a killed job
_ASK_SECONDS = 3.0  # minimum seconds between queries while a job is cancelled


class _Stop(NamedTuple):
    """How running parts of a job are stopped.

    Attributes:
        grace_period_seconds: Seconds until the kill. None for the job's own grace period plus 10.
        now: Skip the grace period.
        on_progress: See `api.cancel`.
    """

    grace_period_seconds: float | None
    now: bool
    on_progress: Callable[[str], None]

    def seconds_until_kill(self, left: float, file: JobFile, *, is_repeated: bool = False) -> float:
        """Return when a job is killed that has `left` seconds of its own grace period to save and stop.

        A job that saves already (`is_repeated`) has at least these. `file` has the job's --kill-wait: if that is longer
        than by default, the tasks need as much more time to end.
        """
        longer = _longer_kill_wait_seconds(file)
        if self.now:
            return _NOW_SECONDS + longer
        seconds = left + _MARGIN_SECONDS + longer
        given = seconds if self.grace_period_seconds is None else self.grace_period_seconds
        return max(seconds, given) if is_repeated else given


def _longer_kill_wait_seconds(file: JobFile) -> float:
    default = JobSpec.kill_wait_seconds
    value = file.options.get("kill_wait_seconds")
    return max(0.0, value - default) if isinstance(value, (int, float)) else 0.0


def cancel_known(
    known: KnownJob, grace_period_seconds: float | None, on_progress: Callable[[str], None], *, now: bool = False
) -> JobStatus:
    """Cancel a job and return its last state. The arguments and exceptions are those of `api.cancel`."""
    stop = _Stop(grace_period_seconds, now or grace_period_seconds == 0, on_progress)
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
        return _cancel_local(known, status, stop)
    known, status = _cancel_pending(known, status, on_progress)
    return _cancel_running(known, status, stop)


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


class _Requests(NamedTuple):
    """The requests to the running parts of a job: elements of an array, or the job itself.

    Attributes:
        asked: When each part that saves and stops, or ends, is killed: seconds from now.
        errors: The requests that failed.
        new: The grace period in seconds of each part that was asked to stop now.
        repeated: The seconds that are left to each part that saves already, after an earlier request.
    """

    asked: dict[JobId, float]
    errors: dict[JobId, LaunchError]
    new: list[float]
    repeated: list[float]


def _request_stops(known: KnownJob, running: Sequence[JobStatus], stop: _Stop) -> _Requests:
    """Ask parts of a job to stop. A part without a run directory has nothing to save, and is cancelled at once."""
    made = _Requests({}, {}, [], [])
    runs = [found[-1] if found else None for found in find_run_directories([_part(known, each) for each in running])]
    files = [None if run is None else run.read_trusted_job() for run in runs]  # before the first request
    for each, run, file in zip(running, runs, files, strict=True):
        job_id, left = _id(each), None if stop.now or run is None else _seconds_left(run)
        try:
            if left is not None and file is not None:
                made.repeated.append(left)
                made.asked[job_id] = stop.seconds_until_kill(left, file, is_repeated=True)
            elif file is not None and _request_stop(job_id, file, now=stop.now):
                made.new.append(file.grace_period_seconds)
                made.asked[job_id] = stop.seconds_until_kill(file.grace_period_seconds, file)
            elif stop.now:
                kill_job(job_id)
            else:
                cancel_job(job_id)
        except LaunchError as error:  # it may have ended meanwhile
            made.errors[job_id] = error
    return made


def _cancel_running(known: KnownJob, status: JobStatus, stop: _Stop) -> JobStatus:
    """Ask a Slurm job, or the elements of an array that run, to save and stop. Kill what does not end in time."""
    running, started = _running(status), time.monotonic()
    asked, errors, new, repeated = _request_stops(known, running, stop)
    _report_requests(known, stop, new, repeated, is_array=bool(status.elements))
    if asked:

        def is_over(status: JobStatus) -> bool:
            passed = time.monotonic() - started
            waiting = [
                each for each in _changing(status) if each.state != "PENDING"
            ]  # a requeued one has saved, and is pending
            return all(passed >= asked.get(_id(each), 0.0) for each in waiting)

        status = _wait(known, max(asked.values()), is_over)
    elif running:
        status = _wait(known, 0.0)
    if any(each.state == "UNKNOWN" for each in _unclear(status)):
        raise _unclear_error(known, status, "because Slurm does not answer any more")
    late = [_id(each) for each in _changing(status) if _id(each) not in errors]
    failed = [errors[_id(each)] for each in _changing(status) if _id(each) in errors]
    kill = kill_job if stop.now and asked else cancel_job
    if failed and late:
        kill(*late)
    if failed:
        raise failed[0]
    if not late:
        if asked and _unclear(status):
            stop.on_progress(f"{known.name}: nothing runs any more. {status.reason}")
        elif running:
            stop.on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
        return status
    kill(*late)
    text = "was killed" if not asked else "did not end and was killed" if stop.now else _LATE
    stop.on_progress(f"{' '.join(map(str, late)) if status.elements else known.name} {text}.")
    return _wait(known, _KILL_SECONDS)


def _cancel_local(known: KnownJob, status: JobStatus, stop: _Stop) -> JobStatus:
    """Ask a local job, or a local sweep with the jobs that it runs, to save and stop. Kill what does not end in time.

    The process of a sweep may be a notebook, so it gets no signal but a request in a file.
    """
    runs = [run for each in known.elements or (known,) for run in each.run_directories]
    file = runs[-1].read_trusted_job() if runs else JobFile()
    is_sweep = known.array and known.process is not None and known.process.is_alive()
    running = [each.run_directory for each in status.parts if each.can_change and each.run_directory is not None]
    lefts = [None if stop.now else _seconds_left(RunDirectory(Path(each))) for each in running]
    repeated = [left for left in lefts if left is not None]
    is_repeated = bool(lefts) and len(repeated) == len(lefts)
    if is_sweep:
        request = SweepStop.NOW if stop.now else SweepStop.SAVE
        SweepStops.of(known.runs_directory, known.name).add(request)
    else:
        number = NOW_SIGNAL if stop.now else signal.SIGTERM
        for run in runs:
            _signal_launcher(known, run.read_trusted_job().process, number)
    new = [] if is_repeated else [file.grace_period_seconds]
    _report_requests(known, stop, new, [max(repeated)] if is_repeated else [], is_array=False)
    left = max(repeated) if is_repeated else file.grace_period_seconds
    status = _wait(known, stop.seconds_until_kill(left, file, is_repeated=is_repeated))
    if status.has_ended:
        stop.on_progress(f"{known.name} has ended: {status.state}, exit code {status.exit_code}.")
        return status
    for each in known.elements or (known,):
        for run in each.run_directories:
            _signal_launcher(known, run.read_trusted_job().process, signal.SIGKILL)
    stop.on_progress(f"{known.name} {'was killed' if stop.now else _LATE}.")
    return _wait(known, _KILL_SECONDS)


def _report_requests(
    known: KnownJob, stop: _Stop, new: Sequence[float], repeated: Sequence[float], *, is_array: bool
) -> None:
    """Report the requests to stop, and how much time is left.

    Args:
        new: For each part of the job that was asked to stop: its grace period in seconds.
        repeated: For each part that saves already, after an earlier request: the seconds that are left.
    """
    for lefts, is_new in ((new, True), (repeated, False)):
        if not lefts:
            continue
        who = f"{format_count(len(lefts), 'element')} of {known.name}" if is_array else known.name
        verb = "is" if len(lefts) == 1 else "are"
        seconds = stop.grace_period_seconds if is_new and stop.grace_period_seconds is not None else max(lefts)
        if stop.now:
            stop.on_progress(f"{who} {verb} asked to end at once.")
        elif is_new:
            stop.on_progress(f"{who} {verb} asked to save and stop; at most {seconds:g} s are left.")
        else:
            text = f"saves already, or ends: at most {seconds:.0f} s are left" if len(lefts) == 1 else ""
            text = text or f"save already, or end: at most {seconds:.0f} s are left"
            how = f"To skip them: tf4slurm cancel --now {known.job_id or known.name}"
            stop.on_progress(f"{who} {text}. {how}")


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
    text = f"It is unknown whether {name} still runs, {why}. {as_sentence(status.reason)} {' '.join(status.warnings)}"
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


def _seconds_left(run: RunDirectory) -> float | None:
    """Return how many seconds a job has left to save after an earlier stop request. None without such a request.

    For a job whose tasks are terminated it is 0. The files are read anew, because the job may have got the request
    since its state was read. A stale file may be that of an earlier run of a requeued job.
    """
    files = JobFiles(run)
    age = files.status_age_seconds
    if files.result is not None or (age is not None and age > files.status.stale_seconds):
        return None
    if files.status.phase in ("terminating", "ended"):
        return 0.0
    return find_grace_seconds_left(files.status, age)


def _request_stop(job_id: JobId, file: JobFile, *, now: bool) -> bool:
    """Ask the launcher of a Slurm job to stop. Return False if no launcher can be asked.

    A launcher is the process of the batch script, a process of this host, as with salloc, or in the task of rank 0. Of
    the last, the whole step gets the signal, because Slurm cannot signal one task; its scripts would save in vain if
    they were to end at once.

    Raises:
        LaunchError: A request to Slurm failed.
    """
    if file.step is not None:
        if not now:
            signal_step(file.step, "TERM")
        return not now
    if query_job(job_id).is_batch:
        # Slurm's preemption sends SIGTERM, and may requeue the job.
        signal_batch(job_id, NOW_SIGNAL.name.removeprefix("SIG") if now else "INT")
        return True
    if file.process is None or not file.process.is_alive():
        return False
    signal_process(file.process.id, file.process.start_ticks, NOW_SIGNAL if now else signal.SIGTERM)
    return True


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
