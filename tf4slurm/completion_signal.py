"""`CompletionSignal`: what a process tells once, when its work is over; at its exit at the latest."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

_words: dict[str, CompletionSignal] = {}


class CompletionSignal:
    """Tells others once that this process is done, or that it failed; the first word stands."""

    def __init__(self, tell: Callable[[bool], None]) -> None:
        """Tell nothing yet; `tell` gets whether this process failed."""
        self._tell = tell
        self._lock = threading.Lock()
        self._is_said = False
        self._has_raised = False
        self._process_id: int | None = None

    def say(self, failed: bool = False) -> None:
        """Say it, unless it has been said."""
        with self._lock:
            is_said, self._is_said = self._is_said, True
        if not is_said:
            self._tell(failed)

    def say_at_exit(self) -> None:
        """From now on say it when the interpreter exits: failed, if an exception of the main thread ends it.

        sys.exit() counts as done, whatever its code. A process that is killed says nothing.
        """
        if self._process_id is not None:
            return
        self._process_id = os.getpid()
        report = sys.excepthook

        def note_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._has_raised = True
            report(kind, error, traceback)

        sys.excepthook = note_exception
        atexit.register(self._exit)

    def _exit(self) -> None:
        if os.getpid() == self._process_id:  # a fork has its parent's handlers
            self.say(failed=self._has_raised)


def completion_signal(name: str, tell: Callable[[bool], None]) -> CompletionSignal:
    """Return this process's last word of that name; `tell` is used by the first who asks for it."""
    return _words.setdefault(name, CompletionSignal(tell))
