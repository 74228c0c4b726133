"""Recommendations from measurements, and explanations of failures."""

from __future__ import annotations

from typing import Any

import pytest

from tf4slurm.jobs.schema import ResultFile, Sample
from tf4slurm.reports.advice import explain_failure, give_advice
from tf4slurm.reports.summary import Curves, JobUsage, TaskUsage, summarize_usage
from tf4slurm.reports.timeline import TaskTimeline, Timeline, TimelineEvent, Wait
from tf4slurm.slurm.parsing import SlurmResources
from tf4slurm.system.typed_json import from_json

QUIET = Timeline(0, 100, (), (), (), 10)


def task(name: str, cores: float | None = 1.0, sent: float = 0, steps: float | None = None) -> TaskUsage:
    return TaskUsage(name, cores, 1e9, sent, 0, steps)


def usage_of(*tasks: TaskUsage, **fields: Any) -> JobUsage:
    values: dict[str, Any] = {
        "cores": 4.0,
        "memory_bytes": 4e9,
        "allocation": SlurmResources(),
        "seconds": 100.0,
        "num_samples": 50,
    }
    return JobUsage(tasks=tasks, **{**values, **fields})


def findings(usage: JobUsage, timeline: Timeline = QUIET) -> list[str]:
    return [advice.finding for advice in give_advice(usage, timeline)]


def ps(name: str, variable_bytes: int | None) -> TaskUsage:
    return TaskUsage(name, 1.0, 1e9, 0, 0, None, variable_bytes=variable_bytes)


HEAVY = (task("ps/0", sent=9e8), task("ps/1", sent=1e8))


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (usage_of(*HEAVY), "ps/0 transferred 90% of the bytes of 2 ps: 900 MB of 1 GB. An even share is 50%."),
        (
            usage_of(ps("ps/0", 16_781_312), ps("ps/1", 16_388)),
            "ps/0 holds 16.8 MB of the variables, the other ps 16.4 kB on average.",
        ),
        (
            usage_of(task("ps/0", 0.95), task("worker/0", 0.1), task("worker/1", 0.12)),
            "The workers probably wait for the ps: ps/0 used 0.95 cores, the workers 0.11 each.",
        ),
        (
            usage_of(task("worker/0", steps=10.0), task("worker/1", steps=4.0), task("worker/2", steps=10.0)),
            "The workers are unequal: worker/1 had 4 steps per second, the median is 10.",
        ),
        (
            usage_of(task("worker/0", 1.0), task("worker/1", 0.5)),
            "The workers are unequal: worker/1 had 0.5 cores in use, the median is 1.",
        ),
        (
            usage_of(task("worker/0"), allocation=SlurmResources(memory_bytes=40 * 10**9)),
            "40 GB of memory were allocated, at most 4 GB used: 10 times the peak.",
        ),
        (
            usage_of(task("worker/0"), seconds_after_last_step=25.0),
            "The job ran for 25 s after the last reported step, 25% of its duration.",
        ),
        (
            usage_of(task("worker/0"), allocation=SlurmResources(cpus=32)),
            "32 cores were allocated, 4 were in use on average.",
        ),
    ],
)
def test_finding_names_its_numbers(usage: JobUsage, words: str) -> None:
    assert findings(usage) == [words]


@pytest.mark.parametrize(
    "usage",
    [
        usage_of(task("ps/0", sent=5.5e8), task("ps/1", sent=4.5e8)),
        usage_of(task("ps/0", sent=9e8)),
        usage_of(ps("ps/0", 16_781_312), ps("ps/1", 9_000_000)),
        usage_of(ps("ps/0", 900_000), ps("ps/1", 0)),
        usage_of(ps("ps/0", 16_781_312), ps("ps/1", None)),
        usage_of(ps("ps/0", 16_781_312)),
        usage_of(task("ps/0", 0.95), task("worker/0", 0.9)),
        usage_of(task("worker/0", 1.0), task("worker/1", 0.9)),
        usage_of(task("worker/0", None), task("worker/1", None)),
        usage_of(task("worker/0"), allocation=SlurmResources(memory_bytes=8 * 10**9, cpus=6)),
        usage_of(*HEAVY, num_samples=4),
        usage_of(seconds_after_last_step=25.0, seconds=300.0),
    ],
)
def test_no_finding_without_a_problem_or_measurements(usage: JobUsage) -> None:
    assert findings(usage) == []


def test_findings_of_waits_restarts_and_unreported_steps() -> None:
    restarted = TaskTimeline("worker/0", events=[TimelineEvent(5, "restarting", "worker/0 exited with code 3")] * 2)
    timeline = Timeline(0, 100, (restarted,), (), (Wait(50, 40, "worker/3", "to register"),), 10)
    assert findings(usage_of(), timeline) == [
        "All other tasks waited 40 s for worker/3 to register, 40% of the job's duration.",
        "2 restarts in place, 2 of them of worker/0. The last of these: worker/0 exited with code 3.",
    ]
    (silent,) = findings(usage_of(), Timeline(0, 9, (TaskTimeline("ps/0", spans=[None]),), (), (), None))  # type: ignore[list-item]
    assert silent.startswith("No task reported its steps")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"exit_code": 1, "cause": "ps/0", "meaning": ["The job's Python lacks a package."]}, "lacks a package"),
        ({"exit_code": 137, "cause": "ps/0", "tasks": [{"task": "ps/0", "returncode": -9}]}, "The job had 2 GB"),
        ({"exit_code": 6, "cause": "ps/0"}, "did not form"),
        ({"exit_code": 7, "cause": "ps/0"}, "lost or stalled"),
        ({"state": "STOPPED", "exit_code": 143}, "requested the stop"),
        ({"state": "REQUEUED", "exit_code": 75}, "returned to Slurm's queue"),
        (
            {"state": "STOPPED", "exit_code": 143, "tasks": [{"task": "worker/1", "vain_waits": ["worker/0"]}]},
            "worker/1 waited for a task that had ended, and would have waited for ever",
        ),
        ({"exit_code": 1, "cause": "ps/0", "collateral": ["x"]}, "need no fix"),
    ],
)
def test_explanation_of_a_failure(result: dict[str, Any], words: str) -> None:
    assert words in " ".join(explain_failure(from_json(ResultFile, result), SlurmResources(memory_bytes=2 * 10**9)))


def test_stop_of_a_job_that_hung_is_not_called_harmless() -> None:
    tasks = [{"task": "worker/1", "vain_waits": ["worker/0"]}]
    result = from_json(ResultFile, {"state": "STOPPED", "exit_code": 143, "tasks": tasks})
    assert "did not fail" not in " ".join(explain_failure(result, SlurmResources()))


@pytest.mark.parametrize("state", ["STOPPED", "REQUEUED"])
def test_task_that_a_stop_ended_is_no_failure(state: str) -> None:
    result = ResultFile(state, exit_code=143, collateral=("worker/0 on n1 was killed by signal 15 (SIGTERM)",))
    (sentence,) = explain_failure(result, SlurmResources())
    assert sentence.startswith("The job did not fail")


def samples_of(*samples: dict[str, Any]) -> list[Sample]:
    return [from_json(Sample, sample) for sample in samples]


def test_usage_is_that_during_training() -> None:
    samples = [
        {"seconds": 10 * n, "cpu_seconds": [30.0 * n if n < 3 else 60 + 5.0 * (n - 2)], "memory_bytes": [n]}
        for n in range(7)
    ]
    timeline = Timeline(0, 70, (), (TimelineEvent(60, "outcome", ""),), (), 30)
    usage = summarize_usage(["ps/0"], Curves(samples_of(*samples), 1), timeline, SlurmResources(cpus=4))
    assert usage.tasks == (TaskUsage("ps/0", 0.5, 6, None, None, None),)
    assert (usage.cores, usage.memory_bytes, usage.allocation) == (0.5, 6, SlurmResources(cpus=4))
    assert (usage.num_samples, usage.seconds_after_last_step, usage.seconds) == (4, None, 70)


def test_end_counts_from_the_last_step() -> None:
    samples = [{"seconds": 10 * n, "step": [min(n, 3), None]} for n in range(9)]
    curves = Curves(samples_of(*samples), 2)
    usage = summarize_usage(["chief/0", "ps/0"], curves, Timeline(0, 80, (), (), (), None), SlurmResources())
    assert usage.seconds_after_last_step == 50
    assert usage.tasks[0].steps_per_second == pytest.approx(3 / 70)  # the rate of the last sample is still unknown
