"""Run seeds of the simulation."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

from tests.simulation.invariants import CHECKS
from tests.simulation.job import Job, Violation
from tests.simulation.plan import make_compared_plans, make_plan

_COLLECT_EVERY = 20
_COMPARED_EVERY = 10
_EVENTS_OF_TIMES = (
    "barrier",
    "shards",
    "warning",
    "first_step",
    "serving",
    "started",
    "exited",
    "exited_early",
    "terminated",
    "disconnected",
    "reconnected",
)
"""Kinds of events that depend on when a script does something, which a pause may change."""


def run_seed(seed: int) -> tuple[list[Violation], list[Job]]:
    """Run one seed; return the violations and its jobs: one, or two that are compared."""
    if seed % _COMPARED_EVERY == _COMPARED_EVERY - 1:
        return _compare(seed)
    job = Job(make_plan(seed), CHECKS)
    return job.run(), [job]


def _compare(seed: int) -> tuple[list[Violation], list[Job]]:
    """Run a job without failures, with and without a pause: the pause changes nothing but the time."""
    plans = make_compared_plans(seed)
    jobs = [Job(plan, CHECKS) for plan in plans]
    violations = [violation for job in jobs for violation in job.run()]
    one, other = ((_end(job), sorted(_events(job))) for job in jobs)
    if one != other:
        difference = [event for event in [*one[1], *other[1]] if (event in one[1]) != (event in other[1])]
        text = f"{plans[1].faults[0]}: {one[0]}, {other[0]}, {difference}"
        jobs[1].violate("pause_changes_nothing_but_the_time", text)
        violations.append(jobs[1].violations[-1])
    return violations, jobs


def _end(job: Job) -> tuple[int, str] | None:
    outcome = job.state.outcome
    return None if outcome is None else (outcome.exit_code, str(outcome.cause))


def _events(job: Job) -> list[tuple[str, str]]:
    before = (event for event in job.events if job.outcome_at is None or event[0] < job.outcome_at)
    return [(kind, task or "") for _, kind, task, _ in before if kind not in _EVENTS_OF_TIMES]


def run_seeds(seeds: Iterable[int]) -> list[Violation]:
    """Run seeds; return all violations."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # what has been imported is not searched again
    gc.disable()
    try:
        found: list[Violation] = []
        for number, seed in enumerate(seeds):
            found += run_seed(seed)[0]
            if number % _COLLECT_EVERY == 0:
                gc.collect()
        return found
    finally:
        gc.unfreeze()
        gc.enable()
        logging.disable(logging.NOTSET)
