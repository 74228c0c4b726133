"""Read the states of jobs repeatedly, also of whole job arrays, with few queries to Slurm."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence

from tf4slurm.errors import COMPLETED, FAILED, REQUEUED, STOPPED, LaunchError, SchemaVersionError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.status import FORGOTTEN, SLURM_SECONDS, JobStatus, read_status
from tf4slurm.slurm.commands import query_queue
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import QueueEntry

_WORST_FIRST = (FAILED, "LOST", FORGOTTEN, "UNKNOWN", STOPPED, REQUEUED, COMPLETED)


class StatusReader:
    """Reads the state of jobs repeatedly. Each call of `read` reads their files, but may reuse Slurm's last answer."""

    def __init__(self, jobs: Sequence[KnownJob], *, ask_seconds: float = 10.0, refuse_newer: bool = True) -> None:
        """Query Slurm at most once per `ask_seconds` (default 10).

        If a newer tf4slurm wrote a job's files, `read` raises SchemaVersionError. With `refuse_newer=False`, the job
        has the state UNKNOWN instead.
        """
        self._jobs = jobs
        self._refuse_newer = refuse_newer
        self._ask_seconds = ask_seconds
        self._asked_at = -math.inf
        self._entries: dict[JobId, QueueEntry] = {}
        self._warnings: list[str] = []

    def read(self) -> list[JobStatus]:
        job_ids = [job.slurm_id for job in self._jobs if job.slurm_id is not None]
        if job_ids and time.monotonic() - self._asked_at >= self._ask_seconds:
            self._ask_slurm(job_ids)
            self._asked_at = time.monotonic()
        return [self._read(job) for job in self._jobs]

    def _ask_slurm(self, job_ids: Sequence[JobId]) -> None:
        self._entries, self._warnings = {}, []
        try:
            entries = query_queue(job_ids, timeout_seconds=SLURM_SECONDS)
        except LaunchError as error:
            self._warnings = [f"Slurm's information is missing: {error}"]
            return
        self._entries = {entry.job_id: entry for entry in entries}

    def _read(self, job: KnownJob) -> JobStatus:
        own = job.slurm_id
        if own is None:
            elements = [self._read_one(each, None) for each in job.elements]
            return combine(job, elements) if elements else self._read_one(job, None)
        if own.element is None:
            found = [entry.job_id.element for entry in self._entries.values() if entry.job_id.number == own.number]
            indices = [index for index in found if index is not None]
            if job.array or indices:
                whole = job if own.elements else job.with_elements(indices)
                return combine(job, [self._read_one(each, self._find_entry(each.slurm_id)) for each in whole.elements])
        return self._read_one(job, self._find_entry(own))

    def _find_entry(self, job_id: JobId | None) -> QueueEntry | None:
        """Return the entry of a job. For a heterogeneous job it is that of its first component."""
        if job_id is None:
            return None
        return self._entries.get(job_id) or self._entries.get(dataclasses.replace(job_id, component=0))

    def _read_one(self, job: KnownJob, entry: QueueEntry | None) -> JobStatus:
        try:
            return read_status(job, entry, self._warnings if job.job_id else ())
        except SchemaVersionError as error:
            if self._refuse_newer:
                raise
            return JobStatus(job_id=job.job_id, name=job.name, state="UNKNOWN", reason=str(error), started=job.started)


def combine(job: KnownJob, elements: Sequence[JobStatus]) -> JobStatus:
    """Return the state of a job array from those of its elements.

    While an element can change, the array is in the state of the first element that runs, or of the first one that can
    change. Then it is in the worst state of its elements, and has the exit code of the first element in that state.
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
        exit_code=shown.exit_code if all(each.has_ended for each in elements) else None,
        reason=f"{len(elements)} elements: {count_states(elements)}.",
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
    """Return how many elements of an array are done, such as "12 of 40 done, 1 failed"."""
    done = [each for each in elements if not each.can_change]
    failed = sum(each.exit_code != 0 for each in done)
    return f"{len(done)} of {len(elements)} done" + (f", {failed} failed" if failed else "")
