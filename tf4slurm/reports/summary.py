"""Summarize the run directory of a job for the report and the live page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event, ResultFile, Sample
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


@dataclass(frozen=True)
class JobSummary:
    """A running or ended job, as described by its run directory.

    Attributes:
        names: Names of the tasks by rank.
        tail: The last lines that the failed task printed.
        warnings: Possible problems, in sentences, from the result or else from the events.
        missing: Missing files of the run directory, in sentences.
    """

    files: JobFiles
    names: tuple[str, ...]
    timeline: Timeline
    curves: Curves
    usage: JobUsage
    tail: tuple[str, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def result(self) -> ResultFile | None:
        return self.files.result

    @property
    def has_failed(self) -> bool:
        return self.files.is_lost or (self.result is not None and self.result.exit_code != 0)

    @property
    def cause(self) -> str | None:
        return self.result.cause if self.result is not None else None

    @property
    def reason(self) -> str:
        return self.files.describe_loss() if self.files.is_lost else (self.result or self.files.status).reason


def read_summary(run: RunDirectory) -> JobSummary:
    """Read a run directory; missing and damaged files are left out and named in `missing`.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote the files.
    """
    files, allocation, events = JobFiles(run), run.read(SlurmResources) or SlurmResources(), run.read_lines(Event)
    result = files.result
    seconds = max(files.status.seconds, (result and result.seconds) or 0.0)
    names = tuple(task.task for task in files.tasks)
    timeline = make_timeline(events, names, seconds, _queue_times(allocation, events))
    names = names or tuple(task.name for task in timeline.tasks)
    curves = make_curves(run.read_lines(Sample), len(names))
    return JobSummary(
        files=files,
        names=names,
        timeline=timeline,
        curves=curves,
        usage=summarize_usage(names, curves, timeline, allocation),
        tail=_tail(run, result) if result is not None and result.exit_code != 0 else (),
        warnings=result.warnings if result is not None else tuple(e.text for e in events if e.kind == "warning"),
        missing=tuple(_missing(files)),
    )


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


def _tail(run: RunDirectory, result: ResultFile) -> tuple[str, ...]:
    """Return the last lines of the failed task, from the result or else from its log."""
    if result.tail or result.log is None:
        return result.tail[-_MAX_TAIL_LINES:]
    path = run.path / "logs" / Path(result.log).name
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return ()
    return tuple(lines[-_MAX_TAIL_LINES:])


def _missing(files: JobFiles) -> Iterator[str]:
    if not files.job.command:
        yield "job.json is missing or cannot be read: the command of the job is unknown."
    if not files.run.events.exists():
        yield "events.jsonl is missing: the timeline is unknown."
    if not files.has_ended:
        phase = f"The last recorded phase is {files.status.phase}." if files.status.phase else "No phase was recorded."
        yield f"result.json is missing: the job still runs, or its launcher was killed. {phase}"
