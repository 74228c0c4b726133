"""Summarize the run directory of a job for the report and the live page."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.jobs.schema import Event, Sample
from tf4slurm.jobs.status import JobFiles
from tf4slurm.reports.curves import Curves, Values, combine, make_curves, mean, measured
from tf4slurm.reports.timeline import Timeline, make_timeline, role_of_task
from tf4slurm.slurm.parsing import SlurmResources

_MAX_TAIL_LINES = 20
_MAX_TAIL_BYTES = 16_000


@dataclass(frozen=True)
class TaskUsage:
    """The resource usage of one task; None where nothing was measured.

    Attributes:
        cores: Mean processor seconds per second during training.
        memory_bytes: Peak memory.
        sent_bytes, received_bytes: Bytes on the connections to the task's port.
        steps_per_second: Mean of the reported steps per second during training.
    """

    name: str
    cores: float | None
    memory_bytes: float
    sent_bytes: float
    received_bytes: float
    steps_per_second: float | None

    @property
    def role(self) -> str:
        return role_of_task(self.name)

    @property
    def bytes_moved(self) -> float:
        return self.sent_bytes + self.received_bytes


@dataclass(frozen=True)
class JobUsage:
    """The resource usage of all tasks, and the resources that Slurm allocated.

    Attributes:
        cores: Mean number of cores in use during training.
        memory_bytes: Peak of the total memory.
        allocation: slurm.json; defaults without Slurm.
        seconds: Duration of the job.
        num_samples: Number of samples during training.
        seconds_after_last_step: Time from the last reported step to the outcome; None without steps.
    """

    tasks: tuple[TaskUsage, ...]
    cores: float | None
    memory_bytes: float
    allocation: SlurmResources
    seconds: float
    num_samples: int
    seconds_after_last_step: float | None = None

    def of_role(self, role: str) -> list[TaskUsage]:
        return [task for task in self.tasks if task.role == role]

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(task.role for task in self.tasks))


class JobSummary(JobFiles):
    """A running or ended job, as its run directory describes it; missing and damaged files are left out."""

    @functools.cached_property
    def _allocation(self) -> SlurmResources:
        return self.run.read(SlurmResources) or SlurmResources()

    @functools.cached_property
    def _events(self) -> list[Event]:
        return self.run.read_lines(Event)

    @functools.cached_property
    def timeline(self) -> Timeline:
        names = [task.task for task in self.tasks]
        seconds = max(self.status.seconds, (self.result.seconds if self.result is not None else None) or 0.0)
        return make_timeline(self._events, names, seconds, _queue_times(self._allocation, self._events))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks by rank."""
        return tuple(task.name for task in self.timeline.tasks)

    @functools.cached_property
    def curves(self) -> Curves:
        return make_curves(self.run.read_lines(Sample), len(self.names))

    @functools.cached_property
    def usage(self) -> JobUsage:
        return summarize_usage(self.names, self.curves, self.timeline, self._allocation)

    @property
    def has_failed(self) -> bool:
        return self.is_lost or (self.result is not None and self.result.exit_code != 0)

    @property
    def cause(self) -> str | None:
        """The task that failed first."""
        return self.result.cause if self.result is not None else None

    @property
    def reason(self) -> str:
        return self.describe_loss() if self.is_lost else (self.result or self.status).reason

    @property
    def warnings(self) -> tuple[str, ...]:
        """Possible problems, in sentences, from the result or else from the events."""
        if self.result is not None:
            return self.result.warnings
        return tuple(event.text for event in self._events if event.kind == "warning")

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that the failed task printed, from the result or else from its log."""
        result = self.result
        if result is None or result.exit_code == 0:
            return ()
        if result.tail or result.log is None:
            return result.tail[-_MAX_TAIL_LINES:]
        path = self.run.path / "logs" / Path(result.log).name
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
                return tuple(file.read().decode(errors="replace").splitlines()[-_MAX_TAIL_LINES:])
        except (OSError, ValueError):
            return ()

    def list_missing_files(self) -> Iterator[str]:
        """Yield the missing files of the run directory, in sentences."""
        if not self.job.command:
            yield "job.json is missing or cannot be read: the command of the job is unknown."
        if not self.run.events.exists():
            yield "events.jsonl is missing: the timeline is unknown."
        if not self.has_ended:
            phase = (
                f"The last recorded phase is {self.status.phase}." if self.status.phase else "No phase was recorded."
            )
            yield f"result.json is missing: the job still runs, or its launcher was killed. {phase}"


def summarize_usage(names: Sequence[str], curves: Curves, timeline: Timeline, allocation: SlurmResources) -> JobUsage:
    """Return the usage of all tasks; means cover the time from the first step, or the start, to the outcome."""
    start = timeline.first_step_at or 0.0
    end = next((event.seconds for event in timeline.events if event.kind == "outcome"), timeline.end)
    training = [number for number, at in enumerate(curves.seconds) if start <= at <= end]

    def mean_in_training(column: Values) -> float | None:
        return mean([column[number] for number in training])

    tasks = tuple(
        TaskUsage(
            name=name,
            cores=mean_in_training(curves.cores[rank]),
            memory_bytes=curves.peak_memory[rank],
            sent_bytes=curves.total_bytes[rank][0],
            received_bytes=curves.total_bytes[rank][1],
            steps_per_second=mean_in_training(curves.steps[rank]),
        )
        for rank, name in enumerate(names)
    )
    stepping = [at for at, rates in zip(curves.seconds, zip(*curves.steps, strict=True), strict=False) if any(rates)]
    return JobUsage(
        tasks=tasks,
        cores=mean_in_training(combine(curves.cores, sum)) if curves.cores else None,
        memory_bytes=max(measured(combine(curves.memory, sum)), default=0.0),
        allocation=allocation,
        seconds=timeline.end,
        num_samples=len(training),
        seconds_after_last_step=max(0.0, end - stepping[-1]) if stepping else None,
    )


def _queue_times(allocation: SlurmResources, events: Sequence[Event]) -> tuple[float, float] | None:
    """Return when Slurm queued and started the job, in seconds since the launcher's start."""
    launched = next((e.time - e.seconds for e in events if e.time is not None and e.seconds is not None), None)
    if allocation.submitted is None or launched is None:
        return None
    return allocation.submitted - launched, (allocation.started or launched) - launched
