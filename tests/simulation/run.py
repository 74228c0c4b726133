"""Run seeds of the simulation."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

from tests.simulation.invariants import CHECKS
from tests.simulation.job import Job, Violation
from tests.simulation.plan import make_plan

_COLLECT_EVERY = 20


def run_seed(seed: int) -> tuple[list[Violation], list[Job]]:
    """Run one seed; return the violations and its jobs."""
    job = Job(make_plan(seed), CHECKS)
    return job.run(), [job]


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
