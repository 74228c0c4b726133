"""Choose how many steps the next closure gets, and count the completed steps of each worker (`StepScheduler`)."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

CLOSURE_SECONDS = 0.25
"""The duration in seconds that a closure should have at most, unless `steps_per_call` is given.

The chief's work of some milliseconds per closure is then negligible. A stop request waits for one closure of each
worker. A lost worker loses one.
"""

CLOSURES_PER_SECOND = 100
"""The most closures per second of all workers together, unless a step is longer or `steps_per_call` is given.

With more than 25 workers closures are longer than CLOSURE_SECONDS: between 2.5 and 5 s with 250 workers.
"""

_MAX_STEPS = 64  # of a closure
_LONG_STEP_SECONDS = 0.1  # to call a function for such a step, in place of a copy of the step, costs about 1 %

_MAX_GROWTH = 8  # factor between closures: few sizes are traced, but closures are short until the speed is known
_STEPS_PER_COPY = 100  # with fewer expected steps per step in a closure, tracing takes longer than it saves


class StepScheduler:
    """Decides how many steps each closure of one `run_closures` call gets, and counts the completed steps. Thread-safe.

    Attributes:
        steps_by_worker: Completed steps by worker index. Workers that join are added.
        num_workers: The number of connected workers, at least 1.
        sums: By name, each value that the steps return, added up over all completed steps: a float or an array.
        closure_steps: Number of steps that the next closure should have, unless `steps_per_call` is given.
        changed_at: The last time at which a closure completed or `set_limit` was called, by the monotonic clock.
    """

    def __init__(
        self, num_workers: int, steps_per_call: int | None = None, closure_steps: int = 1, *, expected_steps: int
    ) -> None:
        """Create a scheduler that gives out no steps until `set_limit` is called.

        With `steps_per_call`, each closure has that number of steps. Otherwise the first closures have `closure_steps`
        steps each. Later ones adapt to the speed of the training, and to the number of steps that it is expected to
        have (`expected_steps`).
        """
        self.steps_by_worker = [0] * num_workers
        self.sums: dict[str, Any] = {}
        self.changed_at = time.monotonic()
        self.closure_steps = closure_steps
        self._steps_per_call = steps_per_call
        self._max_closure_steps = max(closure_steps, _round_down_to_power(expected_steps // _STEPS_PER_COPY), 1)
        self._scheduled = 0
        self._limit = 0
        self._are_steps_long = False
        self._lock = threading.Lock()
        self.num_workers = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self.set_workers(num_workers)

    @property
    def completed(self) -> int:
        """The number of completed steps."""
        return sum(self.steps_by_worker)

    def set_workers(self, count: int) -> None:
        """Set the number of connected workers, to which `closure_steps` adapts. 0 counts as 1."""
        with self._lock:
            if self.num_workers != max(count, 1):
                self.num_workers = max(count, 1)
                self._recent = collections.deque(maxlen=2 * self.num_workers + 1)

    def set_limit(self, limit: int) -> None:
        """Set how many steps all calls of `take` together may give out, including earlier calls."""
        with self._lock:
            self._limit = limit
            self.changed_at = time.monotonic()

    def stop(self) -> None:
        """Give out no more steps, unless `set_limit` is called again."""
        with self._lock:
            self._limit = self._scheduled

    def take(self, max_copies: int) -> int:
        """Give out steps for the next closure. Return their number, or 0 if the limit is reached.

        The number is `steps_per_call`, or a power of two up to `max_copies`, the number of copies of the step that a
        graph may have. If a step takes long, it is up to 64. If fewer steps remain, they are split into powers of two,
        because TensorFlow traces a graph for each number of steps.
        """
        with self._lock:
            rest = self._limit - self._scheduled
            max_steps = _MAX_STEPS if self._are_steps_long else min(max_copies, _MAX_STEPS)
            steps = self._steps_per_call or _round_down_to_power(min(self.closure_steps, max_steps))
            steps = steps if steps <= rest else _round_down_to_power(rest)
            self._scheduled += steps
            return steps

    def snapshot(self) -> tuple[int, dict[str, Any]]:
        """Return a consistent copy of `completed` and `sums`."""
        with self._lock:
            return self.completed, dict(self.sums)

    def add_completed(self, worker: int, steps: int, sums: Mapping[str, Any], now: float | None = None) -> None:
        """Record a closure that a worker has completed, and add the sums that the closure returned.

        `now` is a time of the monotonic clock (default: the current time). Tests give it.
        """
        with self._lock:
            self.steps_by_worker += [0] * (worker + 1 - len(self.steps_by_worker))
            self.steps_by_worker[worker] += steps
            for name, total in sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + total
            self.changed_at = time.monotonic() if now is None else now
            self._recent.append((self.changed_at, steps))
            self._choose_size()

    def _choose_size(self) -> None:
        """Set `closure_steps` to a power of two with which a closure takes at most CLOSURE_SECONDS.

        It is greater if all workers would run more than CLOSURES_PER_SECOND. If a single step takes longer, it is 1. It
        grows at most 8-fold at a time.
        """
        num_workers = self.num_workers
        seconds = self._recent[-1][0] - self._recent[0][0]
        if len(self._recent) > num_workers and seconds > 0:
            steps_per_second = sum(steps for _, steps in list(self._recent)[1:]) / seconds / num_workers
            self._are_steps_long = steps_per_second * _LONG_STEP_SECONDS <= 1
            few = math.ceil(steps_per_second * num_workers / CLOSURES_PER_SECOND)
            steps = max(_round_down_to_power(int(steps_per_second * CLOSURE_SECONDS)), 2 ** (few - 1).bit_length())
            steps = min(steps, _MAX_GROWTH * self.closure_steps, self._max_closure_steps)
            self.closure_steps = _round_down_to_power(max(1, steps))


def _round_down_to_power(number: int) -> int:
    """Return the largest power of two that is at most `number`, or 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0
