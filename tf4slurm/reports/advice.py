"""Make recommendations from a job's measurements, and explain its failure.

Each recommendation names the numbers that it is based on. Recommendations about resources and speed need at least 5
samples of training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tf4slurm.cluster import format_tasks
from tf4slurm.errors import EXIT_NOT_FORMED, EXIT_TASK_LOST, REQUEUED, STOPPED
from tf4slurm.jobs.formatting import format_bytes, format_number, format_seconds
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.reports.summary import JobUsage, TaskUsage
from tf4slurm.reports.timeline import Timeline
from tf4slurm.slurm.parsing import SlurmResources

_MIN_SAMPLES = 5
_LONG_WAIT_SECONDS = 30.0
_LONG_END_SECONDS = 20.0
_LONG_SHARE = 0.1  # of the job's duration
_UNEVEN_PS_FACTOR = 1.5  # times an even share of the bytes
_UNEVEN_VARIABLES_FACTOR = 2.0  # times the mean of the other ps
_BUSY_PS_CORES, _IDLE_WORKER_CORES = 0.8, 0.4
_EXCESS_MEMORY, _EXCESS_CORES = 4.0, 2.0  # allocated / used
_SLOW_WORKER_FACTOR = 0.7  # of the median


@dataclass(frozen=True)
class Advice:
    """A recommendation. `finding` states what was measured, and `action` tells the user what to do."""

    finding: str
    action: str


def give_advice(
    usage: JobUsage, timeline: Timeline, not_finite: Mapping[tuple[str, str], float] | None = None
) -> list[Advice]:
    """Return the recommendations for a job, the most important first.

    `not_finite` is `ReportedMetrics.not_finite`: metrics that were NaN or infinite.
    """
    advice = [*_metrics_not_finite(not_finite or {})]
    if usage.num_samples >= _MIN_SAMPLES:
        for check in (_uneven_ps, _workers_waiting_for_ps, _unequal_workers, _excess_allocation, _long_end):
            advice += check(usage)
    advice += _uneven_variables(usage)
    return [*advice, *_longest_wait(usage, timeline), *_restarts(timeline), *_steps_not_reported(timeline)]


def explain_failure(result: ResultFile, allocation: SlurmResources) -> list[str]:
    """Return sentences about how a job with an exit code other than 0 ended, and what to check next."""
    code = result.exit_code
    sentences = list(result.meaning)
    cause = next((task for task in result.tasks if task.task == result.cause), None)
    returncode = cause.returncode if cause is not None else None
    blocked = [task.task for task in result.tasks if task.vain_waits]
    if returncode == -9:
        if allocation.memory_bytes is not None:
            limit = format_bytes(allocation.memory_bytes)
            sentences.append(f"The job had {limit} of memory on all its nodes together: compare with the memory chart.")
    elif code == EXIT_NOT_FORMED and any(task.starts for task in result.tasks):
        sentences.append("The scripts ran, but not as one cluster: see the reason above.")
    elif code == EXIT_NOT_FORMED:
        sentences.append("The cluster did not form, so training did not start. The reason above names what is missing.")
    elif blocked:
        sentences.append(
            f"{format_tasks(blocked)} waited for a task that had ended, and would have waited for ever: see the "
            "warning above."
        )
    elif result.state == STOPPED:
        sentences.append("The job did not fail: a person, a time limit or preemption requested the stop.")
    elif result.state == REQUEUED:
        sentences.append(
            "The job did not fail: it returned to Slurm's queue, and continues in a run directory of its own."
        )
    elif code == EXIT_TASK_LOST and not sentences:
        sentences.append("A task was lost or stalled before it could report a reason. Check its host and its log.")
    if result.collateral and result.state not in (STOPPED, REQUEUED):
        sentences.append("The other tasks failed because of the cause. They need no fix of their own.")
    return sentences


def _uneven_ps(usage: JobUsage) -> Iterator[Advice]:
    ps = usage.of_role("ps")
    moved = sum(task.bytes_moved for task in ps)
    if len(ps) < 2 or moved < 1e6:
        return
    busiest = max(ps, key=lambda task: task.bytes_moved)
    share = busiest.bytes_moved / moved
    if share >= _UNEVEN_PS_FACTOR / len(ps):
        yield Advice(
            f"{busiest.name} transferred {share:.0%} of the bytes of {len(ps)} ps: {format_bytes(busiest.bytes_moved)} "
            f"of {format_bytes(moved)}. An even share is {1 / len(ps):.0%}.",
            "It probably holds a large variable. Split it with a variable_partitioner (an embedding of Keras 3 "
            "with tf4slurm.tensorflow.ShardedEmbedding), or use fewer ps.",
        )


def _uneven_variables(usage: JobUsage) -> Iterator[Advice]:
    held = {task.name: task.variable_bytes for task in usage.of_role("ps") if task.variable_bytes is not None}
    if len(held) < 2 or sum(held.values()) < 1e6:
        return
    largest = max(held, key=lambda name: held[name])
    others = statistics.mean(num_bytes for name, num_bytes in held.items() if name != largest)
    if held[largest] >= _UNEVEN_VARIABLES_FACTOR * others:
        yield Advice(
            f"{largest} holds {format_bytes(held[largest])} of the variables, the other ps {format_bytes(others)} on "
            "average.",
            'A variable is on one ps. Split a large one with parameter_server_strategy(sharding="min-size"), an '
            "embedding of Keras 3 with tf4slurm.tensorflow.ShardedEmbedding, or use fewer ps. If the script gives "
            'placement="round-robin", leave it out.',
        )


def _workers_waiting_for_ps(usage: JobUsage) -> Iterator[Advice]:
    workers = [task.cores for task in usage.of_role("worker") if task.cores is not None]
    ps = {task.cores: task.name for task in usage.of_role("ps") if task.cores is not None}
    if not workers or not ps:
        return
    busiest, median = max(ps), statistics.median(workers)
    if busiest >= _BUSY_PS_CORES and median <= _IDLE_WORKER_CORES:
        yield Advice(
            f"The workers probably wait for the ps: {ps[busiest]} used {format_number(busiest)} cores, the workers "
            f"{format_number(median)} each.",
            "Use more ps, larger batches, or several steps per scheduled function.",
        )


def _unequal_workers(usage: JobUsage) -> Iterator[Advice]:
    measures: tuple[tuple[str, Callable[[TaskUsage], float | None]], ...] = (
        ("steps per second", lambda task: task.steps_per_second),
        ("cores in use", lambda task: task.cores),
    )
    for unit, measure in measures:
        values = {task.name: value for task in usage.of_role("worker") if (value := measure(task)) is not None}
        if len(values) < 2:
            continue
        median = statistics.median_high(values.values())
        slow = sorted((value, name) for name, value in values.items() if value < _SLOW_WORKER_FACTOR * median)
        if slow and median > 0.05:
            others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
            yield Advice(
                f"The workers are unequal: {slow[0][1]}{others} had {format_number(slow[0][0])} {unit}, the median is "
                f"{format_number(median)}.",
                "In synchronous training all workers wait for the slowest. Check its host for other load or a slower "
                "processor.",
            )
        return


def _excess_allocation(usage: JobUsage) -> Iterator[Advice]:
    memory, cpus = usage.allocation.memory_bytes, usage.allocation.cpus
    if memory and usage.memory_bytes and memory >= _EXCESS_MEMORY * usage.memory_bytes:
        yield Advice(
            f"{format_bytes(memory)} of memory were allocated, at most {format_bytes(usage.memory_bytes)} used: "
            f"{format_number(memory / usage.memory_bytes)} times the peak.",
            f"Request about {format_bytes(1.5 * usage.memory_bytes)} in total: smaller jobs start sooner.",
        )
    if cpus and usage.cores and cpus >= _EXCESS_CORES * usage.cores and cpus > 1.5 * len(usage.tasks):
        yield Advice(
            f"{cpus:,} cores were allocated, {format_number(usage.cores)} were in use on average.",
            "Request fewer with --cpus-per-task, or use them in TensorFlow's input pipeline (tf.data.AUTOTUNE).",
        )


def _long_end(usage: JobUsage) -> Iterator[Advice]:
    seconds = usage.seconds_after_last_step
    if seconds is not None and seconds >= max(_LONG_END_SECONDS, _LONG_SHARE * usage.seconds):
        yield Advice(
            f"The job ran for {format_seconds(seconds)} after the last reported step, {seconds / usage.seconds:.0%} of "
            "its duration.",
            "Check what the script does then: evaluation, saving, or waiting at its exit.",
        )


def _longest_wait(usage: JobUsage, timeline: Timeline) -> Iterator[Advice]:
    longest = max(timeline.waits, key=lambda wait: wait.seconds, default=None)
    if longest and longest.seconds >= max(_LONG_WAIT_SECONDS, _LONG_SHARE * usage.seconds):
        yield Advice(
            f"All other tasks waited {format_seconds(longest.seconds)} for {longest.task} {longest.what}, "
            f"{longest.seconds / max(usage.seconds, 1e-9):.0%} of the job's duration.",
            "Check its host for other load or a slow file system: importing Python packages reads many files.",
        )


def _metrics_not_finite(not_finite: Mapping[tuple[str, str], float]) -> Iterator[Advice]:
    for (name, task), seconds in sorted(not_finite.items(), key=lambda item: item[1])[:1]:
        others = f", as were {len(not_finite) - 1} more of its metrics and tasks" if len(not_finite) > 1 else ""
        yield Advice(
            f"{name} of {task} was NaN or infinite, first after {format_seconds(seconds)}{others}.",
            "Training has most likely diverged, whatever the exit code: lower the learning rate, clip gradients, or "
            "find the first bad operation with tf.debugging.enable_check_numerics().",
        )


def _restarts(timeline: Timeline) -> Iterator[Advice]:
    restarts = {task.name: [event for event in task.events if event.kind == "restarting"] for task in timeline.tasks}
    total = sum(map(len, restarts.values()))
    if total:
        name = max(restarts, key=lambda each: len(restarts[each]))
        last = restarts[name][-1].text
        finding = "A task was restarted: "
        if total > 1:
            finding = f"{total:,} restarts in place, {len(restarts[name])} of them of {name}. The last of these: "
        yield Advice(f"{finding}{last}.", "Its log contains what it printed before each exit.")


def _steps_not_reported(timeline: Timeline) -> Iterator[Advice]:
    if timeline.first_step_at is None and any(task.spans for task in timeline.tasks):
        yield Advice(
            "No task reported its steps, so the report shows neither waiting and training apart, nor steps per second.",
            "Call tf4slurm.report(step=step, loss=loss) in the training loop.",
        )
