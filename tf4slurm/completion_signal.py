"""`CompletionSignal`: report once, at the latest at exit, that a training task is done or has failed."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from tf4slurm.cluster import Task
from tf4slurm.script_channel import ScriptChannel

_signals: dict[str, CompletionSignal] = {}


class CompletionSignal:
    """Reports once that this process is done or has failed; later calls have no effect."""

    def __init__(self, send: Callable[[bool], None]) -> None:
        """Send nothing yet; `send` is later called with True if this process has failed."""
        self._send = send
        self._lock = threading.Lock()
        self._is_sent = False
        self._has_raised = False
        self._process_id: int | None = None

    def send(self, failed: bool = False) -> None:
        """Send the signal, unless it has been sent."""
        with self._lock:
            is_sent, self._is_sent = self._is_sent, True
        if not is_sent:
            self._send(failed)

    def send_at_exit(self) -> None:
        """Send the signal when the interpreter exits: failed if an uncaught exception ends the main thread.

        sys.exit() counts as done with any code. A killed process sends no signal.
        """
        if self._process_id is not None:
            return
        self._process_id = os.getpid()
        show_exception = sys.excepthook

        def note_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._has_raised = True
            show_exception(kind, error, traceback)

        sys.excepthook = note_exception
        atexit.register(self._exit)

    def _exit(self) -> None:
        if os.getpid() == self._process_id:  # a forked process inherits the exit handlers
            self.send(failed=self._has_raised)


def get_completion_signal(name: str, send: Callable[[bool], None]) -> CompletionSignal:
    """Return this process's completion signal with this name; only the first caller's `send` is used."""
    return _signals.setdefault(name, CompletionSignal(send))


def channel_completion_signal(task: Task, channel: ScriptChannel) -> CompletionSignal:
    """Return the completion signal that this process sends through its agent to the control service."""
    return get_completion_signal(
        f"channel of {task}", lambda failed: channel.send(completion="failed" if failed else "done")
    )
