"""What numbers are worth a word, and what a failure means."""

from __future__ import annotations

from typing import Any

import pytest

from tf4slurm.reports.advice import explain_failure, give_advice
from tf4slurm.reports.curves import make_curves
from tf4slurm.reports.resource_usage import JobNeeds, TaskNeeds, make_needs
from tf4slurm.reports.timeline import Mark, TaskLife, Timeline, Wait

QUIET = Timeline(0, 100, (), (), (), 10)


def task(name: str, cores: float | None = 1.0, sent: float = 0, steps: float | None = None) -> TaskNeeds:
    return TaskNeeds(name, cores, 1e9, sent, 0, steps)


def needs_of(*tasks: TaskNeeds, **fields: Any) -> JobNeeds:
    values: dict[str, Any] = {
        "cores": 4.0,
        "memory_bytes": 4e9,
        "given_cpus": None,
        "given_memory_bytes": None,
        "seconds": 100.0,
        "samples": 50,
    }
    return JobNeeds(tasks=tasks, **{**values, **fields})


def said(needs: JobNeeds, timeline: Timeline = QUIET) -> list[str]:
    return [advice.seen for advice in give_advice(needs, timeline)]


HEAVY = (task("ps/0", sent=9e8), task("ps/1", sent=1e8))


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (needs_of(*HEAVY), "ps/0 carried 90% of the bytes of 2 ps: 900 MB of 1 GB; an even share is 50%."),
        (
            needs_of(task("ps/0", 0.95), task("worker/0", 0.1), task("worker/1", 0.12)),
            "The workers look as if they wait for the ps: ps/0 used 0.95 cores, the workers 0.11 each.",
        ),
        (
            needs_of(task("worker/0", steps=10.0), task("worker/1", steps=4.0), task("worker/2", steps=10.0)),
            "The workers are unequal: worker/1 had 4 steps per second, the median is 10.",
        ),
        (
            needs_of(task("worker/0", 1.0), task("worker/1", 0.5)),
            "The workers are unequal: worker/1 had 0.5 cores in use, the median is 1.",
        ),
        (
            needs_of(task("worker/0"), given_memory_bytes=40 * 10**9),
            "40 GB of memory were given, 4 GB used at most: 10 times what was needed.",
        ),
        (
            needs_of(task("worker/0"), idle_end_seconds=25.0),
            "The job went on for 25 s after the last reported step, 25% of its time.",
        ),
        (needs_of(task("worker/0"), given_cpus=32), "32 cores were given, 4 were busy on average."),
    ],
)
def test_what_is_seen_is_told_with_its_numbers(needs: JobNeeds, words: str) -> None:
    assert said(needs) == [words]


@pytest.mark.parametrize(
    "needs",
    [
        needs_of(task("ps/0", sent=5.5e8), task("ps/1", sent=4.5e8)),
        needs_of(task("ps/0", sent=9e8)),
        needs_of(task("ps/0", 0.95), task("worker/0", 0.9)),
        needs_of(task("worker/0", 1.0), task("worker/1", 0.9)),
        needs_of(task("worker/0", None), task("worker/1", None)),
        needs_of(task("worker/0"), given_memory_bytes=8 * 10**9, given_cpus=6),
        needs_of(*HEAVY, samples=4),
        needs_of(idle_end_seconds=25.0, seconds=300.0),
    ],
)
def test_where_all_is_well_or_little_was_measured_nothing_is_said(needs: JobNeeds) -> None:
    assert said(needs) == []


def test_long_waits_restarts_and_unreported_steps_are_told() -> None:
    restarted = TaskLife("worker/0", marks=[Mark(5, "restarting", "")] * 2)
    timeline = Timeline(0, 100, (restarted,), (), (Wait(50, 40, "worker/3", "to join"),), 10)
    assert said(needs_of(), timeline) == [
        "All others waited 40 s for worker/3 to join, 40% of the job's time.",
        "2 restarts in place, 2 of them of worker/0.",
    ]
    (silent,) = said(needs_of(), Timeline(0, 9, (TaskLife("ps/0", spans=[None]),), (), (), None))  # type: ignore[list-item]
    assert silent.startswith("No task reported its steps")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"exit_code": 1, "cause": "chief/0", "tail": ["Traceback (most", "KeyError: 3"]}, "raised an exception"),
        ({"exit_code": 1, "cause": "ps/0", "tail": ["ModuleNotFoundError: No module named 'x'"]}, "lacks a package"),
        ({"exit_code": 137, "cause": "ps/0", "tasks": [{"task": "ps/0", "returncode": -9}]}, "The job had 2 GB"),
        ({"exit_code": 139, "cause": "ps/0", "tasks": [{"task": "ps/0", "returncode": -11}]}, "compiled library"),
        ({"exit_code": 6, "cause": "ps/0"}, "never formed"),
        ({"exit_code": 7, "cause": "ps/0"}, "lost or stood still"),
        ({"exit_code": 143, "cause": None}, "asked to stop"),
        ({"exit_code": 1, "cause": "ps/0", "collateral": ["x"]}, "needs no repair"),
    ],
)
def test_what_a_failure_means(result: dict[str, Any], words: str) -> None:
    assert words in " ".join(explain_failure(result, {"memory_bytes": 2 * 10**9}))


def test_needs_are_those_of_the_time_of_training() -> None:
    samples = [{"seconds": 10 * n, "cpu": [30.0 * n if n < 3 else 60 + 5.0 * (n - 2)], "memory": [n]} for n in range(7)]
    needs = make_needs(["ps/0"], make_curves(samples, 1), {"cpus": 4, "memory_bytes": "x"}, (30, 60), 70)
    assert needs.tasks == (TaskNeeds("ps/0", 0.5, 6, 0, 0, None),)
    assert (needs.cores, needs.memory_bytes, needs.given_cpus, needs.given_memory_bytes) == (0.5, 6, 4, None)
    assert (needs.samples, needs.idle_end_seconds) == (4, None)


def test_the_idle_end_counts_from_the_last_step() -> None:
    samples = [{"seconds": 10 * n, "step": [min(n, 3), None]} for n in range(9)]
    needs = make_needs(["chief/0", "ps/0"], make_curves(samples, 2), {}, (0, 80), 80)
    assert needs.idle_end_seconds == 50
