"""The states of a coordinator's workers after they have become elastic, and the table of the changes of state."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterable
from typing import Literal


class WorkerState(enum.Enum):
    """Whether a worker may run closures."""

    OUT = "it runs no closure: it has failed, is released or is not connected yet"
    IDLE = "it is connected, and its thread may take a closure"
    RUNNING = "it runs a closure, and its thread may take the next one"
    FINISHING = "it runs its last closure"


WorkerEvent = Literal["begin", "end", "fail", "release", "connect"]
"""What changes the state of a worker.

begin, end: Its thread has taken a closure, or is done with it.
fail: A closure has failed because the worker is lost.
release: It should not be used any more, or does not answer.
connect: TensorFlow has connected to it.
"""

OUT, IDLE, RUNNING, FINISHING = WorkerState

# fmt: off
_NEXT: dict[WorkerState, dict[WorkerEvent, WorkerState]] = {
    OUT:       {"begin": OUT,     "end": OUT,  "fail": OUT, "release": OUT,       "connect": IDLE},
    IDLE:      {"begin": RUNNING, "end": IDLE, "fail": OUT, "release": OUT,       "connect": IDLE},
    RUNNING:   {"begin": RUNNING, "end": IDLE, "fail": OUT, "release": FINISHING, "connect": RUNNING},
    FINISHING: {"begin": OUT,     "end": OUT,  "fail": OUT, "release": FINISHING, "connect": FINISHING},
}
# fmt: on
"""The state after an event. OUT begins no closure, because its thread waits.

A worker that has failed may be connected again before its thread, which waits, ends the failed closure. So IDLE has a
state after "end".
"""


class WorkerStates:
    """The state of each worker by index. Thread-safe.

    Attributes:
        unchanged: A context manager. In its block, other threads change no state.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        """Begin with these workers in the state IDLE."""
        self._states = dict.fromkeys(indices, IDLE)
        self._changed = threading.Condition()
        self.unchanged: contextlib.AbstractContextManager[object] = self._changed
        self._is_stopped = False

    def change(self, event: WorkerEvent, indices: Iterable[int]) -> None:
        """Apply an event to each of these workers. A worker that is new here begins in the state OUT."""
        with self._changed:
            for index in indices:
                self._states[index] = _NEXT[self._states.get(index, OUT)][event]
            self._changed.notify_all()

    def begin(self, index: int) -> bool:
        """Apply "begin" to a worker. Return whether it may run a closure."""
        with self._changed:
            self.change("begin", [index])
            return self._states[index] is RUNNING

    def find(self, *states: WorkerState) -> set[int]:
        """Return the indices of the workers that are in one of these states."""
        with self._changed:
            return {index for index, state in self._states.items() if state in states}

    def wait_until_used(self, index: int) -> None:
        """Wait until the worker may run closures, or `stop` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._states.get(index, OUT) in (IDLE, RUNNING) or self._is_stopped)

    def stop(self) -> None:
        """Let all present and later calls of `wait_until_used` return."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
