"""Summarize the run directory of a job for the report and the live page: timeline, curves over time, and usage.

The curve of a counter (steps, processor seconds, bytes) is its rate from one change to the next, because agents report
counters less often than samples are taken. If a counter decreases, its script was restarted. If there are more than
240 samples, only every nth sample is used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.jobs.schema import Event, Sample
from tf4slurm.jobs.status import JobFiles
from tf4slurm.reports.timeline import Timeline, make_timeline, role_of_task
from tf4slurm.slurm.parsing import SlurmResources

MAX_POINTS = 240
_STEPS_TIMEOUT_SECONDS = 20.0  # a counter that has not changed for this long has the rate 0
_USAGE_TIMEOUT_SECONDS = 6.0  # agents measure every 5 s
_MAX_METRICS = 24
_MAX_NAME_LENGTH = 80
_MAX_TAIL_LINES = 20
_MAX_TAIL_BYTES = 16_000

Values = list[float | None]
"""One value per time; None where nothing was measured."""


class Curves:
    """The curves of all tasks. Each list has the `Values` of each rank.

    Attributes:
        seconds: The times of all curves, in seconds since the start of the job.
        metrics: Reported metrics by name and rank.
        total_sent, total_received: Bytes sent and received by each rank, over all its starts.
        peak_memory: Peak memory of each rank in bytes, over all samples.
        not_finite: First time in seconds at which a metric was NaN or infinite, by metric name and rank.
        num_samples_left_out, num_metrics_left_out: Numbers of samples and metrics that have no curve.
    """

    def __init__(self, samples: Iterable[Sample], num_tasks: int) -> None:
        """Make the curves of these samples; samples without a time or out of order are ignored."""
        valid: list[tuple[float, Sample]] = []
        for sample in samples:
            if sample.seconds is not None and (not valid or sample.seconds > valid[-1][0]):
                valid.append((sample.seconds, sample))
        stride = max(1, math.ceil(len(valid) / MAX_POINTS))
        chosen = valid[::-1][::stride][::-1]  # contains the last sample
        self.seconds, shown = [at for at, _ in chosen], [sample for _, sample in chosen]
        self.num_samples_left_out = len(valid) - len(shown)

        def columns(rows: Iterable[Sequence[float | None]]) -> list[Values]:
            return _columns([*rows], num_tasks)

        def rates(counters: list[Values], timeout: float = _USAGE_TIMEOUT_SECONDS) -> list[Values]:
            return [_rate(counter, self.seconds, timeout) for counter in counters]

        sent, received = columns(each.sent_bytes for each in shown), columns(each.received_bytes for each in shown)
        all_memory = columns(each.memory_bytes for _, each in valid)
        self.steps = rates(columns(each.step for each in shown), _STEPS_TIMEOUT_SECONDS)
        self.memory = columns(each.memory_bytes for each in shown)
        self.cores = rates(columns(each.cpu_seconds for each in shown))
        self.sent, self.received = rates(sent), rates(received)
        self.total_sent, self.total_received = [_total(each) for each in sent], [_total(each) for each in received]
        self.peak_memory = [max(measured(column), default=0.0) for column in all_memory]
        self.metrics: dict[str, dict[int, Values]] = {}
        self.not_finite: dict[tuple[str, int], float] = {}
        self.num_metrics_left_out = self._add_metrics(shown, num_tasks)

    def _add_metrics(self, samples: Sequence[Sample], num_tasks: int) -> int:
        """Collect the metrics with the first 24 names found; return the number of names that are left out."""
        others: set[str] = set()
        for number, sample in enumerate(samples):
            for rank, values in sample.metrics.items():
                if not (rank.isdecimal() and int(rank) < num_tasks):
                    continue
                for full_name, value in values.items():
                    name = full_name[:_MAX_NAME_LENGTH]
                    if name not in self.metrics and len(self.metrics) >= _MAX_METRICS:
                        others.add(name)
                        continue
                    by_rank = self.metrics.setdefault(name, {})
                    by_rank.setdefault(int(rank), [None] * len(samples))[number] = value
                    if value is None:
                        self.not_finite.setdefault((name, int(rank)), self.seconds[number])
        return len(others)


def measured(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the measured values; None if there is none."""
    found = measured(values)
    return sum(found) / len(found) if found else None


def combine(columns: Sequence[Values], function: Callable[[list[float]], float]) -> Values:
    """Apply a function to the values of all tasks at each time; the result is None where no task has a value."""
    return [function(found) if (found := measured(row)) else None for row in zip(*columns, strict=True)]


def _columns(rows: Sequence[Sequence[float | None]], num_tasks: int) -> list[Values]:
    """Transpose rows, one per time, into columns, one per task; missing values are None."""
    padded = [row if len(row) == num_tasks else (*row, *[None] * num_tasks)[:num_tasks] for row in rows]
    return [list(column) for column in zip(*padded, strict=True)] or [[] for _ in range(num_tasks)]


def _rate(column: Values, seconds: list[float], timeout: float) -> Values:
    """Return the increase per second between changes of a counter; None before the first value and after a restart."""
    result: Values = [None] * len(column)
    first: int | None = None
    for number, value in enumerate(column):
        before = None if first is None else column[first]
        if value is None or before is None or first is None or value < before:
            first = None if value is None else number
        elif value > before or seconds[number] - seconds[first] >= timeout:
            rate = (value - before) / (seconds[number] - seconds[first])
            result[first + 1 : number + 1] = [rate] * (number - first)
            first = number
    return result


def _total(column: Values) -> float:
    """Return the total of a counter that begins again at 0 whenever the script is restarted."""
    values = measured(column)
    return sum(after - before if after >= before else after for before, after in itertools.pairwise([0.0, *values]))


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
        allocation: The content of slurm.json; default values without Slurm.
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
        return Curves(self.run.read_lines(Sample), len(self.names))

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
            sent_bytes=curves.total_sent[rank],
            received_bytes=curves.total_received[rank],
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
