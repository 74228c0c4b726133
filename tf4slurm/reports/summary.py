"""Summarize the run directory of a job: timeline, curves over time, and usage.

The launcher takes a sample of all tasks at intervals (samples.jsonl). The curve of a counter (steps, processor seconds,
bytes) is its rate from one change to the next, because agents report counters less often than samples are taken. If
there are more than 240 samples, the curves use every nth, so that at most 240 remain.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.jobs.formatting import format_seconds
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.schema import Event, Sample
from tf4slurm.reports.metrics import ReportedMetrics
from tf4slurm.reports.timeline import Timeline, make_timeline, task_type_of
from tf4slurm.slurm.parsing import SlurmResources

MAX_POINTS = 240
_STEPS_TIMEOUT_SECONDS = 20.0  # a counter that has not changed for this long has the rate 0
_USAGE_TIMEOUT_SECONDS = 6.0  # agents measure every 5 s
_MAX_TAIL_LINES = 20
_MAX_TAIL_BYTES = 16_000

Values = list[float | None]
"""The values of a curve, one for each of its times. None where nothing was measured."""


class Curves:
    """The curves of all tasks, and their totals and peaks.

    An attribute with curves is a list that has one curve (`Values`) for each task.

    Attributes:
        seconds: The times of all curves, in seconds since the start of the job.
        steps: Curves of steps per second.
        cores: Curves of processor seconds per second.
        memory, gpu_memory: Curves of bytes.
        gpu_percent: Curves of the share of time in which the GPUs were busy.
        sent, received: Curves of bytes per second.
        total_sent, total_received: Bytes of each task, over all its starts.
        peak_memory, peak_gpu_memory: Peak of each task in bytes, over all samples.
        peak_job_memory, peak_job_gpu_memory: Peak in bytes of the sum over the tasks in the job's allocation.
        num_allocated: Number of tasks in the job's allocation. They come first.
        num_samples_left_out: Number of samples that have no point on a curve.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        num_tasks: int,
        num_allocated: int | None = None,
        joined: Sequence[int] = (),
    ) -> None:
        """Make the curves of `samples`. Samples without a time, or not later than one before, are ignored.

        Args:
            samples: The samples, in the order of time.
            num_tasks: Number of curves. First come the tasks in the job's allocation, then the joined workers, then
                tasks that are known only from events. The last ones have no measured values.
            num_allocated: Number of tasks in the job's allocation, by default all.
            joined: The ranks of the joined workers, in the order of their curves.
        """
        self.num_allocated = num_tasks if num_allocated is None else num_allocated
        valid: list[tuple[float, Sample]] = []
        for sample in samples:
            if sample.seconds is not None and (not valid or sample.seconds > valid[-1][0]):
                valid.append((sample.seconds, sample))
        stride = max(1, math.ceil(len(valid) / MAX_POINTS))
        chosen = valid[::-1][::stride][::-1]  # contains the last sample
        self.seconds = [at for at, _ in chosen]
        self.num_samples_left_out = len(valid) - len(chosen)

        def columns(name: str, rows: Sequence[tuple[float, Sample]] = chosen) -> list[Values]:
            values = [_place(getattr(sample, name), sample.joined, self.num_allocated, joined) for _, sample in rows]
            return _columns(values, num_tasks)

        def rates(name: str, timeout: float = _USAGE_TIMEOUT_SECONDS) -> list[Values]:
            return [_rate(counter, self.seconds, timeout) for counter in columns(name)]

        memory, gpu_memory = columns("memory_bytes", valid), columns("gpu_memory_bytes", valid)
        self.steps = rates("step", _STEPS_TIMEOUT_SECONDS)
        self.memory = columns("memory_bytes")
        self.cores = rates("cpu_seconds")
        self.gpu_percent = columns("gpu_percent")
        self.gpu_memory = columns("gpu_memory_bytes")
        self.sent, self.received = rates("sent_bytes"), rates("received_bytes")
        self.total_sent = [_total(column) for column in columns("sent_bytes", valid)]
        self.total_received = [_total(column) for column in columns("received_bytes", valid)]
        self.peak_memory, self.peak_gpu_memory = [*map(peak, memory)], [*map(peak, gpu_memory)]
        memory, gpu_memory = memory[: self.num_allocated], gpu_memory[: self.num_allocated]
        self.peak_job_memory, self.peak_job_gpu_memory = peak(combine(memory, sum)), peak(combine(gpu_memory, sum))


def measured(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def peak(values: Sequence[float | None]) -> float | None:
    """Return the highest of the values that are not None, or None if all are."""
    return max(measured(values), default=None)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are."""
    found = measured(values)
    return sum(found) / len(found) if found else None


def combine(columns: Sequence[Values], function: Callable[[list[float]], float]) -> Values:
    """Combine the curves of several tasks into one: call `function` with the measured values of each time.

    A time without a measured value gets None.
    """
    return [function(found) if (found := measured(row)) else None for row in zip(*columns, strict=True)]


def _place(
    values: Sequence[float | None], ranks: Sequence[int], num_allocated: int, joined: Sequence[int]
) -> Sequence[float | None]:
    """Return one value of a sample for each task: first the tasks in the allocation, then all joined workers.

    A joined worker that was not in the job when the sample was taken has None.

    Args:
        values: The sample's values: of the tasks in the allocation, then of the joined workers with the ranks `ranks`.
        num_allocated: Number of tasks in the allocation.
        joined: Ranks of all joined workers, in the order of the result.
    """
    if not ranks:
        return values
    by_rank = dict(zip(ranks, values[len(values) - len(ranks) :], strict=False))
    return [*values[:num_allocated], *(by_rank.get(rank) for rank in joined)]


def _columns(rows: Sequence[Sequence[float | None]], num_tasks: int) -> list[Values]:
    """Transpose rows, one per time, into `num_tasks` columns, one per task.

    Missing values at the end of a row become None.
    """
    padded = [row if len(row) == num_tasks else (*row, *[None] * num_tasks)[:num_tasks] for row in rows]
    return [list(column) for column in zip(*padded, strict=True)] or [[] for _ in range(num_tasks)]


def _rate(column: Values, seconds: list[float], timeout: float) -> Values:
    """Return the rate of a counter at each time: its increase per second from one change to the next.

    A counter that does not change for `timeout` seconds has the rate 0. The rate is None at the first value, at the
    first one after a restart, where the counter begins again, and after the last change until the timeout.
    """
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


def _total(column: Values) -> float | None:
    """Return the total increase of a task's counter over the whole job, or None if it was not measured.

    The counter begins again at 0 at each restart of the child process.
    """
    values = measured(column)
    if not values:
        return None
    return sum(after - before if after >= before else after for before, after in itertools.pairwise([0.0, *values]))


@dataclass(frozen=True)
class TaskUsage:
    """The resource usage of one task. Values that were not measured are None.

    Attributes:
        cores: Mean processor seconds per second during training.
        memory_bytes, gpu_memory_bytes: Peaks over the whole job.
        variable_bytes: Bytes of the variables on a ps, at the end of the job.
        sent_bytes, received_bytes: Totals on the connections to the task's port, over the whole job.
        steps_per_second: Mean during training.
        gpu_percent: Mean share of time in which the GPUs were busy, during training.
    """

    name: str
    cores: float | None
    memory_bytes: float | None
    sent_bytes: float | None
    received_bytes: float | None
    steps_per_second: float | None
    gpu_percent: float | None = None
    gpu_memory_bytes: float | None = None
    variable_bytes: int | None = None

    @property
    def task_type(self) -> str:
        return task_type_of(self.name)

    @property
    def bytes_moved(self) -> float:
        return (self.sent_bytes or 0.0) + (self.received_bytes or 0.0)


@dataclass(frozen=True)
class JobUsage:
    """The resource usage of all tasks, and the resources that Slurm allocated.

    Attributes:
        tasks: The usage of each task, also of joined workers.
        cores: Mean number of cores in use during training, by the tasks in the job's allocation.
        memory_bytes, gpu_memory_bytes: Peaks of the total memory of the tasks in the job's allocation.
        seconds: Duration of the job.
        num_samples: Number of points of the curves during training, at most 240.
        seconds_after_last_step: Time from the last reported step to the outcome. None without steps.
    """

    tasks: tuple[TaskUsage, ...]
    cores: float | None
    memory_bytes: float | None
    allocation: SlurmResources
    seconds: float
    num_samples: int
    seconds_after_last_step: float | None = None
    gpu_memory_bytes: float | None = None

    @property
    def has_gpus(self) -> bool:
        return any((task.gpu_percent, task.gpu_memory_bytes) != (None, None) for task in self.tasks)

    def of_role(self, role: str) -> list[TaskUsage]:
        return [task for task in self.tasks if task.task_type == role]

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(task.task_type for task in self.tasks))


class JobSummary(JobFiles):
    """The facts about a running or ended job that its report shows, read from its run directory.

    Missing and damaged files count as empty.
    """

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
        joined = [task.task for task in self.tasks if task.has_joined]
        return make_timeline(self._events, names, seconds, _queue_times(self._allocation, self._events), joined)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.timeline.tasks)

    @functools.cached_property
    def curves(self) -> Curves:
        joined = [task.rank for task in self.tasks if task.has_joined]
        num_allocated = len(self.tasks) - len(joined) if joined else None
        return Curves(self.run.read_lines(Sample), len(self.names), num_allocated, joined)

    @functools.cached_property
    def metrics(self) -> ReportedMetrics:
        """The metrics that scripts reported. Empty if events.jsonl does not show when the job started."""
        launched = _find_launch(self._events)
        return ReportedMetrics(self.run.read_metrics() if launched is not None else {}, self.names, launched or 0.0)

    @functools.cached_property
    def usage(self) -> JobUsage:
        variables = {task.task: task.variable_bytes for task in self.tasks}
        return summarize_usage(self.names, self.curves, self.timeline, self._allocation, variables)

    @property
    def has_failed(self) -> bool:
        return self.is_lost or (self.result is not None and self.result.exit_code != 0)

    @property
    def cause(self) -> str | None:
        return self.result.cause if self.result is not None else None

    @property
    def reason(self) -> str:
        return self.describe_loss() if self.is_lost else (self.result or self.status).reason

    @property
    def headline(self) -> str:
        """What ended the script of the task that failed first, or else `reason`."""
        return self.result.headline if self.result is not None else self.reason

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about possible problems that still exist, or existed when the job ended."""
        return (self.result or self.status).warnings

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(map(str, (self.result or self.status).shards))

    @property
    def tail(self) -> tuple[str, ...]:
        """At most 20 last lines of output of the task that failed first, from result.json or else from its log.

        Empty while the job runs and after a job with exit code 0.
        """
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
        """Yield sentences about missing files, and about a status that the launcher no longer updates."""
        if not self.job.command:
            yield "job.json is missing or cannot be read: the command of the job is unknown."
        if not self.run.events.exists():
            yield "events.jsonl is missing: the timeline is unknown."
        age = self.status_age_seconds
        if not self.has_ended and age is not None and age > self.status.stale_seconds:
            yield (
                f"The launcher has written nothing for {format_seconds(age)}: it is stopped, its host failed, or the "
                "file system is slow. This page shows the job as it was then."
            )


def summarize_usage(
    names: Sequence[str],
    curves: Curves,
    timeline: Timeline,
    allocation: SlurmResources,
    variable_bytes: Mapping[str, int | None] | None = None,
) -> JobUsage:
    """Return the resource usage of a job.

    Means cover the training: the time from the first step, or without steps from the start, to the outcome.

    Args:
        names: The names of the tasks, in the order of `curves`.
        variable_bytes: Bytes of the variables by name of a ps.
    """
    variable_bytes = variable_bytes or {}
    start = timeline.first_step_at or 0.0
    end = next((event.seconds for event in timeline.events if event.kind == "outcome"), timeline.end)
    training = [number for number, at in enumerate(curves.seconds) if start <= at <= end]

    def mean_in_training(column: Values) -> float | None:
        """Return the mean during training. Each point is weighted with the time since the point before it."""
        found = [(column[n], curves.seconds[n] - (curves.seconds[n - 1] if n else 0.0)) for n in training]
        weighted = [(value, seconds) for value, seconds in found if value is not None]
        total = sum(seconds for _, seconds in weighted)
        return sum(value * seconds for value, seconds in weighted) / total if total > 0 else None

    tasks = tuple(
        TaskUsage(
            name=name,
            cores=mean_in_training(curves.cores[rank]),
            memory_bytes=curves.peak_memory[rank],
            sent_bytes=curves.total_sent[rank],
            received_bytes=curves.total_received[rank],
            steps_per_second=mean_in_training(curves.steps[rank]),
            gpu_percent=mean_in_training(curves.gpu_percent[rank]),
            gpu_memory_bytes=curves.peak_gpu_memory[rank],
            variable_bytes=variable_bytes.get(name),
        )
        for rank, name in enumerate(names)
    )
    stepping = [at for at, rates in zip(curves.seconds, zip(*curves.steps, strict=True), strict=False) if any(rates)]
    return JobUsage(
        tasks=tasks,
        cores=mean_in_training(combine(curves.cores[: curves.num_allocated], sum)) if curves.cores else None,
        memory_bytes=curves.peak_job_memory,
        allocation=allocation,
        seconds=timeline.end,
        num_samples=len(training),
        seconds_after_last_step=max(0.0, end - stepping[-1]) if stepping else None,
        gpu_memory_bytes=curves.peak_job_gpu_memory,
    )


def _queue_times(allocation: SlurmResources, events: Sequence[Event]) -> tuple[float, float] | None:
    """Return when Slurm queued and started the job, in seconds since the launcher's start, or None if unknown."""
    launched = _find_launch(events)
    if allocation.submitted is None or launched is None:
        return None
    return allocation.submitted - launched, (allocation.started or launched) - launched


def _find_launch(events: Sequence[Event]) -> float | None:
    """Return when the launcher started, in seconds since 1970. None if no event has both `time` and `seconds`."""
    return next((e.time - e.seconds for e in events if e.time is not None and e.seconds is not None), None)
