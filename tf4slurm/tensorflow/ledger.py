"""Which training steps are handed out, which are done and by whom, and how many the next closure gets."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Mapping

CLOSURE_SECONDS = 0.25
"""What a closure is to take where nobody says its steps.

The chief's work for a closure is some milliseconds, so that it is no longer seen; a stop waits for two closures of each
worker, half a second; and a worker that is killed has not more than this to do again.
"""

# From one size of closures to the next: each is traced, so there are to be few, and none is long before pace is known.
_GROWTH = 8


class Ledger:
    """The account of one call of `run_steps`; each method may be called from any thread.

    Attributes:
        steps_by_worker: The steps of the closures that have come back, for each worker by its index.
        sums: The sum over these steps of each number that they gave, by name.
        portion: What a closure gets next, if it may.
        changed_at: When a closure came back last, by the monotonic clock.
    """

    def __init__(self, num_workers: int, steps_per_call: int | None = None, portion: int = 1) -> None:
        """`portion` is what the first closures get where nobody says it, such as that of an earlier account."""
        self.steps_by_worker = [0] * num_workers
        self.sums: dict[str, float] = {}
        self.changed_at = time.monotonic()
        self._steps_per_call = steps_per_call
        self.portion = portion
        self._handed_out = 0
        self._limit = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=2 * num_workers + 1)
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """The number of steps whose closures have come back."""
        return sum(self.steps_by_worker)

    def open(self, limit: int) -> None:
        """Let steps be taken until so many are handed out, counted from the beginning."""
        with self._lock:
            self._limit = limit
            self.changed_at = time.monotonic()

    def close(self) -> None:
        """Hand out no more."""
        with self._lock:
            self._limit = self._handed_out

    def take(self, most: int) -> int:
        """Return the number of steps for the next closure, at most so many if it is free to choose; 0 for none left.

        It is `steps_per_call` or a power of two, at the end, too: each number is traced, so there are to be few.
        """
        with self._lock:
            rest = self._limit - self._handed_out
            steps = self._steps_per_call or _power_below(min(self.portion, most))
            steps = steps if steps <= rest else _power_below(rest)
            self._handed_out += steps
            return steps

    def account(self) -> tuple[int, dict[str, float]]:
        """Return `done` and `sums` of one moment."""
        with self._lock:
            return self.done, dict(self.sums)

    def enter(self, worker: int, steps: int, sums: Mapping[str, float], now: float | None = None) -> None:
        """Note that a worker has done a closure of so many steps, which gave these sums."""
        with self._lock:
            self.steps_by_worker[worker] += steps
            for name, total in sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + total
            self.changed_at = time.monotonic() if now is None else now
            self._recent.append((self.changed_at, steps))
            self._set_portion()

    def _set_portion(self) -> None:
        """Make a closure as long as CLOSURE_SECONDS at the pace of the latest ones, to the power of two below."""
        num_workers = len(self.steps_by_worker)
        seconds = self._recent[-1][0] - self._recent[0][0]
        if len(self._recent) > num_workers and seconds > 0:
            pace = sum(steps for _, steps in list(self._recent)[1:]) / seconds / num_workers
            steps = max(1, min(int(pace * CLOSURE_SECONDS), _GROWTH * self.portion))
            self.portion = _power_below(steps)


def _power_below(number: int) -> int:
    """Return the greatest power of two that is not greater; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0
