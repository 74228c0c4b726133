"""What a job's numbers say could be done better, and what a failure means, in words: pure.

Each piece of advice rests on numbers that it names; where too little was measured there is none.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tf4slurm.agent.log_tail import explain
from tf4slurm.reports.quantities import format_bytes, format_number, format_seconds
from tf4slurm.reports.resource_usage import JobNeeds, TaskNeeds
from tf4slurm.reports.timeline import Timeline

_FEWEST_SAMPLES = 5
_WAIT_SECONDS = 30.0
_IDLE_END_SECONDS = 20.0
_WAIT_SHARE = 0.1
_HEAVY_PS = 1.5  # times its fair share of the bytes
_BUSY_PS, _IDLE_WORKER = 0.8, 0.4  # cores
_MUCH_MEMORY, _MANY_CORES = 4.0, 2.0  # given over used
_SLOW_WORKER = 0.7  # of the median


@dataclass(frozen=True)
class Advice:
    """One thing that could be better: what was seen, with its numbers, and what to do."""

    seen: str
    todo: str


def give_advice(
    needs: JobNeeds, timeline: Timeline, undefined: Mapping[tuple[str, int], float] | None = None
) -> list[Advice]:
    """Return what is worth telling, the weightiest first; `undefined` is that of the job's curves."""
    found = [*_of_waits(needs, timeline), *_of_restarts(timeline)]
    if needs.samples >= _FEWEST_SAMPLES:
        found = [
            *_of_ps(needs),
            *_of_waiting_workers(needs),
            *_of_unequal_workers(needs),
            *_of_grant(needs),
            *_of_end(needs),
            *found,
        ]
    found = [*_of_undefined(undefined or {}, needs), *found]
    if timeline.training_at is None and any(task.spans for task in timeline.tasks):
        found.append(
            Advice(
                "No task reported its steps, so this report cannot tell waiting from training, nor how fast it was.",
                "Call tf4slurm.report(step=step, loss=loss) in the training loop.",
            )
        )
    return found


def explain_failure(result: Mapping[str, Any], grant: Mapping[str, Any]) -> list[str]:
    """Return what the end of a failed job means, and what to look at next, in sentences."""
    code, cause = result.get("exit_code"), result.get("cause")
    tail = [str(each) for each in result.get("tail") or ()]
    tasks = result.get("tasks") or ()
    ends = [task.get("returncode") for task in tasks if isinstance(task, dict) and task.get("task") == cause]
    returncode = ends[0] if ends else None
    words = "\n".join(tail)
    said = explain(tail)
    if returncode == -9:
        memory = grant.get("memory_bytes")
        had = f" The job had {format_bytes(memory)} on all its nodes together." if type(memory) is int else ""
        said.append(
            "SIGKILL ends a process at once, without a word. Most often the host ran out of memory, or the job passed "
            f"its limit: look at the curve of memory before the end.{had} Else somebody, or the scheduler, killed it."
        )
    elif returncode in (-11, -6, -7, -4):
        said.append("The process crashed inside a compiled library, not in Python. Run it with PYTHONFAULTHANDLER=1.")
    elif code == 6 and any(task.get("starts") for task in tasks if isinstance(task, dict)):
        said.append("The scripts ran, but not as one cluster: see the reason above.")
    elif code == 6:
        said.append("The cluster never formed, so training has not begun. What is missing stands in the reason above.")
    elif isinstance(code, int) and code > 128 and not cause:
        said.append("The job did not fail by itself: it was asked to stop, by a person, a time limit or preemption.")
    elif code == 7 and not said:
        said.append("A task was lost or stood still, and had no chance to say why. Look at its host, and at its log.")
    if tail and re.search(r"^Traceback|^\w*(Error|Exception)\b", words, re.MULTILINE):
        said.insert(0, "The script raised an exception: its last line says which, the lines above it where.")
    if result.get("collateral"):
        said.append("What ended after the cause followed from it, and needs no repair of its own.")
    return said


def _of_ps(needs: JobNeeds) -> Iterator[Advice]:
    ps, moved = needs.of_role("ps"), sum(task.bytes_moved for task in needs.of_role("ps"))
    if len(ps) < 2 or moved < 1e6:
        return
    heaviest = max(ps, key=lambda task: task.bytes_moved)
    share = heaviest.bytes_moved / moved
    if share >= _HEAVY_PS / len(ps):
        yield Advice(
            f"{heaviest.name} carried {share:.0%} of the bytes of {len(ps)} ps: {format_bytes(heaviest.bytes_moved)} "
            f"of {format_bytes(moved)}; an even share is {1 / len(ps):.0%}.",
            "A large variable lies there. Split it with a variable_partitioner (Keras 3 layers cannot), or take fewer "
            "ps.",
        )


def _of_waiting_workers(needs: JobNeeds) -> Iterator[Advice]:
    workers = [task.cores for task in needs.of_role("worker") if task.cores is not None]
    ps = [task for task in needs.of_role("ps") if task.cores is not None]
    if not workers or not ps:
        return
    busiest = max(ps, key=lambda task: task.cores or 0.0)
    middle = statistics.median(workers)
    if (busiest.cores or 0.0) >= _BUSY_PS and middle <= _IDLE_WORKER:
        yield Advice(
            f"The workers look as if they wait for the ps: {busiest.name} used {format_number(busiest.cores or 0)} "
            f"cores, the workers {format_number(middle)} each.",
            "Take more ps, larger batches, or several steps per scheduled function.",
        )


def _of_unequal_workers(needs: JobNeeds) -> Iterator[Advice]:
    measures: tuple[tuple[str, Callable[[TaskNeeds], float | None]], ...] = (
        ("steps per second", lambda task: task.steps),
        ("cores in use", lambda task: task.cores),
    )
    for unit, measure in measures:
        values = {task.name: value for task in needs.of_role("worker") if (value := measure(task)) is not None}
        if len(values) < 2:
            continue
        middle = statistics.median_high(values.values())
        slow = sorted((value, name) for name, value in values.items() if value < _SLOW_WORKER * middle)
        if slow and middle > 0.05:
            others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
            yield Advice(
                f"The workers are unequal: {slow[0][1]}{others} had {format_number(slow[0][0])} {unit}, the median is "
                f"{format_number(middle)}.",
                "In synchronous training all wait for the slowest. Look at its host: other load, other processor.",
            )
        return


def _of_grant(needs: JobNeeds) -> Iterator[Advice]:
    memory, cpus = needs.given_memory_bytes, needs.given_cpus
    if memory and needs.memory_bytes and memory >= _MUCH_MEMORY * needs.memory_bytes:
        yield Advice(
            f"{format_bytes(memory)} of memory were given, {format_bytes(needs.memory_bytes)} used at most: "
            f"{format_number(memory / needs.memory_bytes)} times what was needed.",
            f"Ask for about {format_bytes(1.5 * needs.memory_bytes)} in all: a smaller job starts sooner.",
        )
    if cpus and needs.cores and cpus >= _MANY_CORES * needs.cores and cpus > 1.5 * len(needs.tasks):
        yield Advice(
            f"{cpus:,} cores were given, {format_number(needs.cores)} were busy on average.",
            "Ask for fewer with --cpus-per-task, or let TensorFlow's input pipeline use them (tf.data.AUTOTUNE).",
        )


def _of_waits(needs: JobNeeds, timeline: Timeline) -> Iterator[Advice]:
    longest = max(timeline.waits, key=lambda wait: wait.seconds, default=None)
    if longest and longest.seconds >= max(_WAIT_SECONDS, _WAIT_SHARE * needs.seconds):
        yield Advice(
            f"All others waited {format_seconds(longest.seconds)} for {longest.task} {longest.what}, "
            f"{longest.seconds / max(needs.seconds, 1e-9):.0%} of the job's time.",
            "Look at its host: a slow file system (Python packages load from it), or another load.",
        )


def _of_end(needs: JobNeeds) -> Iterator[Advice]:
    idle = needs.idle_end_seconds
    if idle is not None and idle >= max(_IDLE_END_SECONDS, _WAIT_SHARE * needs.seconds):
        yield Advice(
            f"The job went on for {format_seconds(idle)} after the last reported step, {idle / needs.seconds:.0%} of "
            "its time.",
            "Look at what the script does then: evaluating, saving, or waiting for something at its exit.",
        )


def _of_undefined(undefined: Mapping[tuple[str, int], float], needs: JobNeeds) -> Iterator[Advice]:
    for (name, rank), seconds in sorted(undefined.items(), key=lambda each: each[1])[:1]:
        others = f", as {len(undefined) - 1} more of its metrics and tasks were" if len(undefined) > 1 else ""
        yield Advice(
            f"{name} of {needs.tasks[rank].name} was NaN or infinite, first after {format_seconds(seconds)}{others}.",
            "Training has most likely diverged, whatever its exit code: lower the learning rate, clip gradients, or "
            "find the first bad operation with tf.debugging.enable_check_numerics().",
        )


def _of_restarts(timeline: Timeline) -> Iterator[Advice]:
    restarts = {task.name: sum(mark.kind == "restarting" for mark in task.marks) for task in timeline.tasks}
    often = {name: count for name, count in restarts.items() if count}
    if often:
        name = max(often, key=lambda each: often[each])
        total = sum(often.values())
        yield Advice(
            f"{total} restarts in place, {often[name]} of them of {name}."
            if total > 1
            else f"{name} was restarted once.",
            "What it printed before each end stands in its log.",
        )
