"""The batch job of a `SlurmCluster`: its submission, the wait for its start, and its end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tf4slurm import api
from tf4slurm.clusters.network import ADVICE
from tf4slurm.errors import (
    EXIT_NOT_FORMED,
    STOPPED,
    LaunchError,
    RendezvousError,
    RendezvousTimeoutError,
    Tf4SlurmError,
)
from tf4slurm.jobs.progress import print_notice, show_progress
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.jobs.slurm_output import describe_slurm_output, read_slurm_output
from tf4slurm.jobs.status import JobStatus
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.slurm.commands import cancel_job, query_queue
from tf4slurm.spec.batch_spec import BatchSpec

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_ASK_SECONDS = 3.0  # between two queries to Slurm
_RESULT_SECONDS = 15.0
_END_SECONDS = 10.0  # from the result of the job to its end in Slurm
_END_POLL_SECONDS = 0.5
_NOT_STARTED = ("PENDING", "UNKNOWN")


class BatchJob:
    """A batch job whose launcher waits for this process, its chief.

    Attributes:
        known: The job, or None before `launch` has submitted it.
    """

    def __init__(
        self, spec: BatchSpec, pending_timeout_seconds: float | None = None, known: KnownJob | None = None
    ) -> None:
        """Store the arguments.

        Args:
            spec: The job to submit.
            pending_timeout_seconds: Timeout in seconds for its start in Slurm. None for no limit.
            known: The job, if another process has submitted it. Of `spec`, its options in Slurm are not known then.
        """
        self.known = known
        self._spec = spec
        self._pending_timeout_seconds = pending_timeout_seconds
        self._may_have_epilogue = known is not None or bool(spec.epilogue)
        self._reader = StatusReader([] if known is None else [known], ask_seconds=_ASK_SECONDS)
        self._status: JobStatus | None = None

    def launch(self) -> RunDirectory:
        """Submit the job, and wait until its run directory exists. Show its state meanwhile. Return the run directory.

        Raises:
            RefusedError, LaunchError, OptionError, CommandError, RunDirectoryError: As for `tf4slurm.submit`.
            RendezvousError: The job has ended.
            RendezvousTimeoutError: The job was pending for too long, or has no run directory `start_timeout_seconds`
                after its start.
        """
        known = self._submit()
        self._reader = StatusReader([known], ask_seconds=_ASK_SECONDS)
        with show_progress() as show:
            return self._wait_for_run(known, show)

    def _submit(self) -> KnownJob:
        """Submit the job in a thread. An interrupt of the cell is raised when sbatch has answered: the job is known."""

        def submit() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # sbatch inherits it, and gets the signal, too
            self.known = api.submit(self._spec)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(submit).result()
        assert self.known is not None
        return self.known

    def _wait_for_run(self, known: KnownJob, show: Callable[[str], None]) -> RunDirectory:
        since, was_pending = time.monotonic(), True
        while True:
            if runs := known.run_directories:
                show(f"{known.name} runs: its tasks start.")
                return runs[-1]
            (self._status,) = (status,) = self._reader.read()
            if not status.can_change:
                raise RendezvousError("The cluster could not be started:")
            is_pending = status.state in _NOT_STARTED
            if is_pending != was_pending:
                since, was_pending = time.monotonic(), is_pending
            limit = self._pending_timeout_seconds if is_pending else self._spec.start_timeout_seconds
            if limit is not None and time.monotonic() - since >= limit:
                raise RendezvousTimeoutError(_describe_timeout(status, limit, is_pending=is_pending))
            show(describe_start(status))
            time.sleep(_POLL_SECONDS)

    def has_ended(self) -> bool:
        """Return whether the job has ended or is lost, as far as its files and Slurm's last answer show."""
        if self.known is not None:
            (self._status,) = self._reader.read()
        return self._status is not None and not self._status.can_change

    def describe(self) -> str:
        """Return how the job has ended, with the end of its output if it has no result.

        If the cluster could not form, add what to do if a firewall is the reason.
        """
        if self.known is None:
            return ""
        runs = self.known.run_directories
        result = runs[-1].read(ResultFile) if runs else None
        has_ended = self._status is not None and not self._status.can_change
        if result is not None and result.state == STOPPED and not has_ended:  # by `end`
            return ""
        if result is not None:
            return "\n".join([result.reason, *([ADVICE] if result.exit_code == EXIT_NOT_FORMED else [])])
        lines = describe_slurm_output(read_slurm_output(self.known, asks_slurm=False))
        if has_ended and self._status is not None:
            return "\n".join([f"{self.known.name} is {self._status.state}: {self._status.reason}", *lines])
        return "\n".join(lines)

    def end(self, *, is_started: bool) -> None:
        """Wait for the end of the job, whose chief has ended. Cancel the job if it does not end by itself.

        `is_started` is whether its cluster has formed. If not, the job is cancelled at once. A job that may have an
        epilogue is not cancelled after its result.
        """
        if self.known is None:
            return
        try:
            if is_started and self._has_ended_by_itself(self.known):
                return
            api.cancel(self.known, now=True, on_progress=logger.debug)
        except Tf4SlurmError as error:
            job_id = self.known.job_id
            print_notice(f"It is unknown whether job {job_id} has ended. End it with scancel {job_id}. {error}")

    def _has_ended_by_itself(self, known: KnownJob) -> bool:
        deadline = time.monotonic() + _RESULT_SECONDS
        while known.run_directories[-1].read(ResultFile) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while not self._may_have_epilogue and not _has_left_queue(known):
            if time.monotonic() >= deadline:
                assert known.slurm_id is not None
                cancel_job(known.slurm_id)  # its launcher has ended, so there is nothing to ask
                break
            time.sleep(_END_POLL_SECONDS)
        return True


def describe_start(status: JobStatus) -> str:
    """Return the state of a job that has not started, with Slurm's reason and the expected start, as one line."""
    start = f" Expected start: {status.start}." if status.start else ""
    reason = f": {status.reason}." if status.reason else ""
    return f"{status.name} {status.state}{reason}{start}"


def _describe_timeout(status: JobStatus, seconds: float, *, is_pending: bool) -> str:
    if is_pending:
        return (
            f"Slurm did not start {status.name} within pending_timeout_seconds={seconds:g}, so it is cancelled: "
            f"{status.reason}. Request less, try again later, or give more time."
        )
    return (
        f"{status.name} is {status.state}, but has no run directory after {seconds:g} s. Raise start_timeout_seconds "
        "if its environment takes long to load, and check that all hosts share the runs directory."
    )


def _has_left_queue(known: KnownJob) -> bool:
    """Return whether Slurm has ended a job, or ends it now."""
    assert known.slurm_id is not None
    try:
        entries = query_queue([known.slurm_id])
    except LaunchError:  # Slurm's controller may be busy
        return False
    return all(entry.has_ended or entry.state == "COMPLETING" for entry in entries)
