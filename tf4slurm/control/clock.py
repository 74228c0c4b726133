"""The clock of a job: monotonic time that leaves out the pauses of its process."""

from __future__ import annotations

import time
from collections.abc import Callable


class JobClock:
    """Job time in seconds. Deadlines in job time do not expire while the process is paused.

    A process is paused by SIGSTOP, by the suspension of its job or by its virtual machine. Messages that arrived in the
    meantime are read afterwards, so no deadline may expire before they are.
    """

    def __init__(self, max_gap_seconds: float, read: Callable[[], float] = time.monotonic) -> None:
        """`max_gap_seconds` is the longest time between two calls of `now` that is no pause, once `start` was called.

        `read` returns the monotonic time in seconds.
        """
        self._max_gap_seconds = max_gap_seconds
        self._read = read
        self._on_pause: Callable[[float, float], None] | None = None
        self._last = read()
        self._paused = 0.0

    def start(self, on_pause: Callable[[float, float], None] = lambda _, __: None) -> None:
        """Leave out pauses from now on, because `now` is called regularly.

        `on_pause` is called with the seconds of each pause, and the job time after it.
        """
        self._on_pause, self._last = on_pause, self._read()

    def now(self) -> float:
        """Return the job time in seconds."""
        time_now = self._read()
        gap, self._last = time_now - self._last, time_now
        if self._on_pause is not None and gap > self._max_gap_seconds:
            self._paused += gap - self._max_gap_seconds
            self._on_pause(gap, time_now - self._paused)
        return time_now - self._paused

    @property
    def paused_seconds(self) -> float:
        """The time that was left out until now, in seconds."""
        self.now()
        return self._paused
