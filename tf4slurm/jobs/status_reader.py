"""Read the states of jobs repeatedly, also of whole job arrays, with few queries to Slurm."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tf4slurm.errors import COMPLETED, FAILED, REQUEUED, STOPPED, LaunchError, SchemaVersionError
from tf4slurm.jobs.formatting import format_count
from tf4slurm.jobs.registry import (
    KnownEnd,
    KnownJob,
    find_run_directories,
    read_known_ends,
    register_known_ends,
)
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import FILE_NAMES, ResultFile
from tf4slurm.jobs.slurm_output import read_slurm_output
from tf4slurm.jobs.status import FORGOTTEN, SLURM_SECONDS, JobStatus, SlurmEnds, read_status
from tf4slurm.slurm.commands import query_queue
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import QueueEntry

_MIN_ASK_SECONDS = 1.0
_WORST_FIRST = (FAILED, "LOST", FORGOTTEN, "UNKNOWN", STOPPED, REQUEUED, COMPLETED)


class StatusReader:
    """Reads the state of jobs repeatedly. Each call of `read` reads their files, but may reuse Slurm's last answer.

    The files of elements that have ended are read again only after the next answer.
    """

    def __init__(
        self,
        jobs: Sequence[KnownJob],
        *,
        ask_seconds: float = 10.0,
        refuse_newer: bool = True,
        reads_output: bool = False,
    ) -> None:
        """Query Slurm at most once per `ask_seconds` (default 10), or once a second if pending jobs write results.

        If a newer tf4slurm wrote a job's files, `read` raises SchemaVersionError. With `refuse_newer=False`, the job
        has the state UNKNOWN instead. With `reads_output`, `JobStatus.slurm_output` is read.

        An end without a result that Slurm shows is noted in the job's entry in the registry. It stays the end of the
        job when Slurm has forgotten it or does not answer.
        """
        self._jobs = jobs
        self._reads_output = reads_output
        self._refuse_newer = refuse_newer
        self._ask_seconds = ask_seconds
        self._asked_at = self._asked_time = -math.inf
        self._entries: dict[int, list[QueueEntry]] = {}
        self._ends = SlurmEnds()
        self._ended: dict[str, tuple[Sequence[RunDirectory], JobStatus]] = {}
        self._known_ends: dict[tuple[str, str], dict[JobId, KnownEnd]] = {}  # those in the registry, by array or job
        self._new_ends: dict[JobId, KnownEnd] = {}
        self._warnings: list[str] = []

    def read(self) -> list[JobStatus]:
        job_ids = [job.slurm_id for job in self._jobs if job.slurm_id is not None]
        if job_ids and time.monotonic() - self._asked_at >= self._ask_seconds:
            self._ask_slurm(job_ids)
        statuses = [self._read(job) for job in self._jobs]
        if job_ids and time.monotonic() - self._asked_at >= _MIN_ASK_SECONDS and self._has_newer_result(statuses):
            self._ask_slurm(job_ids)
            statuses = [self._read(job) for job in self._jobs]
        return statuses

    def _has_newer_result(self, statuses: Sequence[JobStatus]) -> bool:
        """Return whether a job that was pending in Slurm's last answer has written a result since then."""
        for each in itertools.chain.from_iterable(status.parts for status in statuses):
            if each.state == "PENDING" and each.run_directory is not None:
                with contextlib.suppress(OSError):
                    if os.stat(os.path.join(each.run_directory, FILE_NAMES[ResultFile])).st_mtime > self._asked_time:
                        return True
        return False

    def _ask_slurm(self, job_ids: Sequence[JobId]) -> None:
        self._asked_at, self._asked_time = time.monotonic(), time.time()
        self._entries, self._warnings, self._ends, self._ended = {}, [], SlurmEnds(), {}
        try:
            entries = query_queue(job_ids, timeout_seconds=SLURM_SECONDS)
        except LaunchError as error:
            self._warnings = [f"Slurm's information is missing: {error}"]
            return
        for entry in entries:
            self._entries.setdefault(entry.job_id.number, []).append(entry)

    def _read(self, job: KnownJob) -> JobStatus:
        if job.slurm_id is None:
            if job.array:  # a local sweep
                return combine(job, [self._read_one(each, None, each.run_directories) for each in job.elements])
            return self._read_one(job, None, job.run_directories)
        self._new_ends = {}
        status = self._read_slurm_job(job, job.slurm_id)
        if self._new_ends:
            register_known_ends(job, self._new_ends, os.environ)
        failed = next((each for each in status.parts if each.has_failed and not each.has_result), None)
        if not self._reads_output or failed is None or failed.job_id is None:
            return status
        job_id = JobId.parse(failed.job_id)
        known = job.element(job_id.element) if job.array and job_id.element is not None else job
        in_queue = (entry.job_id == job_id for entry in self._entries.get(job_id.number, ()))
        asks_slurm = failed.state != STOPPED and any(in_queue)  # many elements are cancelled before they start
        return replace(status, slurm_output=read_slurm_output(known, asks_slurm=asks_slurm))

    def _read_slurm_job(self, job: KnownJob, own: JobId) -> JobStatus:
        entries = self._entries.get(own.number, [])
        if own.element is None:
            indices = [entry.job_id.element for entry in entries if entry.job_id.element is not None]
            if job.array or indices:
                return self._read_array(job if own.elements else job.with_elements(indices), entries)
        return self._read_one(job, _find_entry(own, entries), job.run_directories)

    def _read_array(self, job: KnownJob, entries: Sequence[QueueEntry]) -> JobStatus:
        elements, states = job.elements, []
        by_id = {str(entry.job_id): entry for entry in entries}
        for element, runs in zip(elements, find_run_directories(elements), strict=True):
            job_id = str(element.job_id)
            before = self._ended.get(job_id)  # thousands of files would be read every second
            status = before[1] if before and before[0] == runs else self._read_one(element, by_id.get(job_id), runs)
            if status.has_ended:
                self._ended[job_id] = runs, status
            states.append(status)
        if self._warnings and any(each.name for each in job.array):  # elements registered themselves when they started
            text = "Slurm does not answer, so elements that have not started are not known."
            states.append(
                JobStatus(job_id=job.job_id, name=job.name, state="UNKNOWN", started=job.started, reason=text)
            )
        return combine(job, states)

    def _read_one(self, job: KnownJob, entry: QueueEntry | None, runs: Sequence[RunDirectory]) -> JobStatus:
        try:
            status = read_status(job, entry, self._warnings if job.job_id else (), runs=runs, ends=self._ends)
            return status if job.slurm_id is None else self._keep_end(job, job.slurm_id, status)
        except SchemaVersionError as error:
            if self._refuse_newer:
                raise
            return JobStatus(job_id=job.job_id, name=job.name, state="UNKNOWN", reason=str(error), started=job.started)

    def _keep_end(self, job: KnownJob, job_id: JobId, status: JobStatus) -> JobStatus:
        """Return the state of a job of Slurm, with its earlier end if Slurm does not know or show that any more.

        A new end is added to `_new_ends`.
        """
        if status.has_result or not (status.has_ended or status.is_unclear):
            return status
        key = (job.runs_directory, job.whole_name)
        if key not in self._known_ends:
            self._known_ends[key] = read_known_ends(job, os.environ)
        before = self._known_ends[key].get(job_id)
        if status.has_ended and status.state != REQUEUED:
            end = KnownEnd(str(job_id), status.state, status.exit_code or 0, status.reason)
            if before is None or (before.state, before.exit_code) != (end.state, end.exit_code):
                self._known_ends[key][job_id] = self._new_ends[job_id] = end
        elif before is not None and not status.has_ended:
            return replace(status, state=before.state, exit_code=before.exit_code, reason=before.reason)
        return status


def _find_entry(job_id: JobId, entries: Sequence[QueueEntry]) -> QueueEntry | None:
    """Return the entry of a job. For a heterogeneous job it is that of the first component that has not ended."""
    components = [entry for entry in entries if entry.job_id.component is not None]
    if job_id.component is None and not job_id.elements and components:
        return next((entry for entry in components if not entry.has_ended), components[0])
    return next((entry for entry in entries if entry.job_id == job_id), None)


def combine(job: KnownJob, elements: Sequence[JobStatus]) -> JobStatus:
    """Return the state of a job array from those of its elements.

    While an element can change, the array has the state of the first such element that is not pending, or else PENDING.
    Afterwards it has the worst state of its elements, and the exit code of the first element in that state.
    """
    changing = [each for each in elements if each.can_change]
    if changing:
        shown = next((each for each in changing if each.state != "PENDING"), changing[0])
    else:
        shown = min(elements, key=lambda each: _WORST_FIRST.index(each.state) if each.state in _WORST_FIRST else -1)
    return JobStatus(
        job_id=job.job_id,
        name=job.name,
        state=shown.state,
        started=job.started,
        exit_code=None if changing else shown.exit_code,
        reason=f"{format_count(len(elements), 'element')}: {count_states(elements)}.",
        limit=shown.limit,
        warnings=tuple(dict.fromkeys(text for each in elements for text in each.warnings)),
        elements=tuple(elements),
    )


def count_states(elements: Sequence[JobStatus]) -> str:
    """Return how many elements are in each state, such as "8 COMPLETED, 1 FAILED, 2 RUNNING"."""
    counts = Counter(each.state for each in elements)
    order = [*reversed(_WORST_FIRST), *sorted(counts.keys() - set(_WORST_FIRST), reverse=True)]
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])


def describe_progress(elements: Sequence[JobStatus]) -> str:
    """Return how many elements of an array are done, such as "12 of 40 done, 1 failed, 2 stopped"."""
    done = [each for each in elements if not each.can_change]
    stopped, forgotten = (sum(each.state == state for each in done) for state in (STOPPED, FORGOTTEN))
    failed = sum(each.exit_code != 0 for each in done) - stopped - forgotten
    ends = ((failed, "failed"), (stopped, "stopped"), (forgotten, "forgotten"))
    return ", ".join([f"{len(done)} of {len(elements)} done", *(f"{count} {word}" for count, word in ends if count)])
