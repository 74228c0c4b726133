"""`StepScheduler` chooses how many steps the next closure gets, and counts the completed steps of each worker."""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from collections.abc import Mapping

from tf4slurm.script_api import report

logger = logging.getLogger(__name__)

CLOSURE_SECONDS = 0.25
"""The target duration of a closure without `steps_per_call`.

The chief needs some milliseconds for a closure, which is then negligible. A stop waits for at most two closures of each
worker, and a killed worker loses no more than these.
"""

# The largest growth from one closure to the next. Each size is traced, so there should be few sizes; but before the
# pace is known, none may take long.
_MAX_GROWTH = 8


class StepScheduler:
    """The steps of one call of `run_steps`. Thread-safe.

    Attributes:
        steps_by_worker: Completed steps of each worker, by its index.
        sums: The sum over these steps of each number that they returned, by name.
        closure_steps: The size of the next closure, if it may be chosen.
        changed_at: When a closure last completed, on the monotonic clock.
    """

    def __init__(self, num_workers: int, steps_per_call: int | None = None, closure_steps: int = 1) -> None:
        """Schedule nothing yet. Without `steps_per_call` closures have `closure_steps` first, then fit the pace."""
        self.steps_by_worker = [0] * num_workers
        self.sums: dict[str, float] = {}
        self.changed_at = time.monotonic()
        self.closure_steps = closure_steps
        self._steps_per_call = steps_per_call
        self._scheduled = 0
        self._limit = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=2 * num_workers + 1)
        self._lock = threading.Lock()

    @property
    def completed(self) -> int:
        """The number of completed steps."""
        return sum(self.steps_by_worker)

    def set_limit(self, limit: int) -> None:
        """Schedule steps up to this total number, counted from the first."""
        with self._lock:
            self._limit = limit
            self.changed_at = time.monotonic()

    def stop(self) -> None:
        """Schedule no more steps."""
        with self._lock:
            self._limit = self._scheduled

    def take(self, max_steps: int) -> int:
        """Return the number of steps for the next closure, at most `max_steps` if it may be chosen; 0 at the limit.

        It is `steps_per_call` or a power of two, also for the last steps, so that few sizes are traced.
        """
        with self._lock:
            rest = self._limit - self._scheduled
            steps = self._steps_per_call or _round_down_to_power(min(self.closure_steps, max_steps))
            steps = steps if steps <= rest else _round_down_to_power(rest)
            self._scheduled += steps
            return steps

    def snapshot(self) -> tuple[int, dict[str, float]]:
        """Return a consistent copy of `completed` and `sums`."""
        with self._lock:
            return self.completed, dict(self.sums)

    def add_completed(self, worker: int, steps: int, sums: Mapping[str, float], now: float | None = None) -> None:
        """Add a closure that a worker has completed, and the sums that it returned."""
        with self._lock:
            self.steps_by_worker[worker] += steps
            for name, total in sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + total
            self.changed_at = time.monotonic() if now is None else now
            self._recent.append((self.changed_at, steps))
            self._choose_size()

    def _choose_size(self) -> None:
        """Choose the power of two with which a closure takes at most CLOSURE_SECONDS at the current pace."""
        num_workers = len(self.steps_by_worker)
        seconds = self._recent[-1][0] - self._recent[0][0]
        if len(self._recent) > num_workers and seconds > 0:
            pace = sum(steps for _, steps in list(self._recent)[1:]) / seconds / num_workers
            steps = max(1, min(int(pace * CLOSURE_SECONDS), _MAX_GROWTH * self.closure_steps))
            self.closure_steps = _round_down_to_power(steps)


class ProgressReporter:
    """Reports to the job the step reached, and the mean of each number since the last report."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self._scheduler = scheduler
        self._reported = scheduler.snapshot()
        self._has_warned = False

    def report(self, first_step: int) -> None:
        """Report the steps completed since the last report; `first_step` is the counter at the scheduler's step 0."""
        completed, sums = self._scheduler.snapshot()
        completed_before, sums_before = self._reported
        if completed == completed_before:
            return
        latest = {name: total - sums_before.get(name, 0.0) for name, total in sums.items()}
        means = {name: total / (completed - completed_before) for name, total in latest.items()}
        report(step=first_step + completed, **means)
        self._reported = completed, sums
        self._warn_of_divergence(first_step + completed, latest)

    def _warn_of_divergence(self, step: int, numbers: Mapping[str, float]) -> None:
        not_finite = [f"{name} is {number}" for name, number in numbers.items() if not math.isfinite(number)]
        if not_finite and not self._has_warned:
            self._has_warned = True
            text = ", ".join(not_finite)
            logger.warning("%s since step %d or a little before: training has probably diverged.", text, step)


def _round_down_to_power(number: int) -> int:
    """Return the largest power of two that is at most `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0
