"""The clock of a job. Its time is monotonic, and leaves out the pauses of this process."""

from __future__ import annotations

import time
from collections.abc import Callable


class JobClock:
    """Measures job time in seconds. Deadlines in job time do not expire while the process is paused.

    A process is paused by SIGSTOP, by the suspension of its job or by its virtual machine. Messages that arrive during
    a pause are read after it, and no deadline may expire before they are read.
    """

    def __init__(self, max_gap_seconds: float, read: Callable[[], float] = time.monotonic) -> None:
        """Create a clock that leaves out no pauses until `start` is called.

        Args:
            max_gap_seconds: A longer time between two calls of `now` counts as a pause. Of this time, job time leaves
                out what exceeds `max_gap_seconds`.
            read: Returns the monotonic time in seconds.
        """
        self._max_gap_seconds = max_gap_seconds
        self._read = read
        self._on_pause: Callable[[float, float], None] | None = None
        self._last = read()
        self._paused = 0.0

    def start(self, on_pause: Callable[[float, float], None] = lambda _, __: None) -> None:
        """Leave out pauses from now on. The caller must call `now` regularly.

        `on_pause` is called by `now` after each pause. Its arguments are the whole time in seconds since the previous
        call of `now`, and the present job time.
        """
        self._on_pause = on_pause
        self._last = self._read()

    def now(self) -> float:
        """Return the job time in seconds."""
        time_now = self._read()
        gap = time_now - self._last
        self._last = time_now
        if self._on_pause is not None and gap > self._max_gap_seconds:
            self._paused += gap - self._max_gap_seconds
            self._on_pause(gap, time_now - self._paused)
        return time_now - self._paused

    @property
    def paused_seconds(self) -> float:
        """How much time in seconds job time has left out so far, because the process was paused."""
        self.now()
        return self._paused
