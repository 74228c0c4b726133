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

begin: The worker's thread has taken a closure. It runs the closure if the new state is RUNNING.
end: The worker's thread is done with the closure.
fail: A closure has failed, because the worker's server had ended or did not answer.
release: The worker should not be used any more, or does not answer.
connect: TensorFlow has connected to the worker.
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
"""The state after an event. OUT begins no closure, because the worker's thread waits.

Only workers in the state OUT are connected: "connect" cannot occur in the other states. A worker that has failed may be
connected again before its thread, which waits, ends the failed closure. So IDLE has a state after "end".

RUNNING and FINISHING have a state after "begin", because runs of a resource closure can be nested: if its error is
transient, such as a cancellation, TensorFlow's `_process_resource_closure` calls itself.

* In RUNNING, the inner run is an ordinary one. Its "end" makes the worker IDLE, and the outer "end" changes nothing.
* In FINISHING, the inner "begin" makes the worker OUT. So the closure does not run again, and no inner "end" follows:
  the thread waits in the inner run until the worker is IDLE. The outer "end" changes nothing.
"""


class WorkerStates:
    """The state of each worker by index. Thread-safe.

    Attributes:
        unchanged: A context manager. During its block, only the thread of the block can change states.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        """Create the states, with each of these workers IDLE."""
        self._states = dict.fromkeys(indices, IDLE)
        self._changed = threading.Condition()
        self.unchanged: contextlib.AbstractContextManager[object] = self._changed
        self._is_stopped = False

    def change(self, event: WorkerEvent, indices: Iterable[int]) -> None:
        """Apply an event to each of these workers. An unknown worker counts as OUT before the event."""
        with self._changed:
            for index in indices:
                self._states[index] = _NEXT[self._states.get(index, OUT)][event]
            self._changed.notify_all()

    def begin(self, index: int) -> bool:
        """Note that the worker's thread has taken a closure. Return whether the thread may run it."""
        with self._changed:
            self.change("begin", [index])
            return self._states[index] is RUNNING

    def find(self, *states: WorkerState) -> set[int]:
        """Return the indices of the workers that are in one of these states."""
        with self._changed:
            return {index for index, state in self._states.items() if state in states}

    def wait_until_used(self, index: int) -> None:
        """Wait until the worker is in use (IDLE or RUNNING), or `stop` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._states.get(index, OUT) in (IDLE, RUNNING) or self._is_stopped)

    def stop(self) -> None:
        """Let all present and later calls of `wait_until_used` return."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
