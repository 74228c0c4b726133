"""The connection of a script to its agent, and the errors of `tf4slurm_client`, which has the script's functions.

The agent's end is `agent/script_channel_server.py`. tf4slurm has a script's end of its own, `scripts/channel.py`. This
one needs only the standard library of Python 3.6.
"""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

MAX_METRICS = 100

CHANNEL_VARIABLE = "TF4SLURM_SCRIPT_CHANNEL"
_SEND_SECONDS = 0.2  # the shortest interval between messages with reports
_WAKE_SECONDS = 1.0
_MAX_REPORTS = 100  # sent together; if there are more, neighbouring reports are merged
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Tf4SlurmError(Exception):
    """Base class of all errors."""


class SlurmEnvironmentError(Tf4SlurmError):
    """This process has no cluster, or an environment variable is missing."""


class PlacementError(Tf4SlurmError, ValueError):
    """The roles do not fit the tasks of the step."""


class InterfaceError(Tf4SlurmError):
    """The network interface does not exist on this host or cannot be used."""


class RendezvousError(Tf4SlurmError):
    """The cluster did not form."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The cluster did not form in time. The message names the missing tasks."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """This process has no agent, or the agent has exited."""


class BarrierError(RendezvousError):
    """A barrier broke: a task did not arrive in time, or has ended."""


class ShutdownError(Tf4SlurmError):
    """The completion signal cannot be sent."""


class Desired:
    """The fields of a `DesiredState` of tf4slurm that a script needs."""

    stop_reason = ""
    released_barrier = ""
    barrier_error = ""
    is_training_over = False
    failed_tasks: Sequence[str] = ()
    have_leaders_ended = False

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Set the fields that the agent has sent. The others have their defaults."""
        vars(self).update(fields)


_Report = Dict[str, Any]
"""The fields of a `StepMetrics` of tf4slurm."""

_channel: "Optional[Channel]" = None


def find_channel() -> "Optional[Channel]":
    """Return this process's connection to its agent. Return None without an agent. A fork gets one of its own."""
    global _channel
    name = os.environ.get(CHANNEL_VARIABLE)
    if name is None:
        return None
    if _channel is None or _channel.process_id != os.getpid() or _channel.name != name:
        is_fork = _channel is not None and _channel.process_id != os.getpid()
        if _channel is not None:
            _channel.close_in_fork()
        try:
            _channel = Channel(name, is_fork or _is_started_by_multiprocessing())
        except OSError:
            return None
    return _channel


def _is_started_by_multiprocessing() -> bool:
    processes = sys.modules.get("multiprocessing.process")  # not imported here, because most scripts do not need it
    return processes is not None and processes.current_process().name != "MainProcess"


class Channel:
    """The connection of this process to its agent: a Unix socket. Each message is a line of JSON.

    Attributes:
        name: The value of TF4SLURM_SCRIPT_CHANNEL.
        process_id: The process that has opened the connection.
        desired: The last `DesiredState` that the agent has sent.
    """

    def __init__(self, name: str, is_helper: bool) -> None:
        """Connect to the agent. `is_helper`: this process is a fork, or multiprocessing has started it."""
        self.name = name
        self.process_id = os.getpid()
        self.desired = Desired({})
        self._state: Dict[str, Any] = {"is_helper": True} if is_helper else {}
        self._is_open = True
        self._loss = "The agent of this process has exited."
        self._reports: List[_Report] = []
        self._sent_at = 0.0
        self._delayed: Optional[threading.Timer] = None
        self._callbacks: List[Callable[[], object]] = []
        self._is_saving = False
        self._forwards_signals = False
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect("\0" + name[1:] if name.startswith("@") else name)
        self._socket.sendall(_encode("ScriptState", self._state))  # a helper's signal waits for this process
        if hasattr(os, "register_at_fork"):  # Python 3.7
            os.register_at_fork(after_in_child=self.close_in_fork)
        threading.Thread(target=self._receive, name="tf4slurm-script-channel", daemon=True).start()

    def send(self, **changes: object) -> None:
        """Change fields of this process's state. Send the reports that wait to be sent, and then the state."""
        if os.getpid() != self.process_id:
            return
        with self._changed:
            reports, self._reports = _merge_to_limit(self._reports), []
            metrics = dict(self._state.get("metrics", ()))
            for each in reports:
                metrics.update(each["metrics"])
                if each["step"] is not None:
                    self._state["step"] = each["step"]
            if metrics:
                self._state["metrics"] = list(metrics.items())[-MAX_METRICS:]
            self._state.update(changes)
            if self._delayed is not None:
                self._delayed.cancel()
                self._delayed = None
            self._sent_at = time.monotonic()
            lines = [_encode("StepMetrics", each) for each in reports]
            try:
                self._socket.sendall(b"".join([*lines, _encode("ScriptState", self._state)]))
            except OSError:
                self._is_open = False  # the receiving thread wakes the waiting threads

    def report(self, step: Optional[int], metrics: Mapping[str, float]) -> None:
        """Send a report. Reports within 0.2 s are sent together."""
        with self._changed:
            self._reports.append({"step": step, "time": round(time.time(), 3), "calls": 1, "metrics": metrics})
            if self._delayed is not None:
                return
            wait = self._sent_at + _SEND_SECONDS - time.monotonic()
            if wait > 0:
                self._delayed = threading.Timer(wait, self.send)  # no daemon, so the last report is always sent
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    self._delayed.start()
                    return
            self.send()

    def signal_done(self, failed: bool) -> None:
        """Send the completion signal, unless it was sent. A failure is sent after "done", too."""
        with self._changed:
            sent = self._state.get("completion")
            if sent is None or (failed and sent == "done"):
                self.send(completion="failed" if failed else "done")

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until `condition()`, which reads `desired`, is true. Return False if the timeout expires before.

        Time in which this process was suspended does not count.

        Raises:
            RendezvousConnectionError: The condition is not true and the agent has exited.
        """
        left, last = timeout_seconds, time.monotonic()
        with self._changed:
            while not condition():
                if not self._is_open:
                    raise RendezvousConnectionError(self._loss)
                if left <= 0:
                    return False
                # a signal that arrives just before this thread sleeps is handled only when the thread wakes
                self._changed.wait(min(left, _WAKE_SECONDS))
                now = time.monotonic()
                left -= min(now - last, 2 * _WAKE_SECONDS)
                last = now
            return True

    def lose(self, why: str) -> None:
        """Count the agent as lost: `wait_until` raises an error with the sentence `why`, also in other threads."""
        with self._changed:
            self._is_open, self._loss = False, why
            self._changed.notify_all()

    def add_stop_callback(self, save: Callable[[], object]) -> None:
        """Call `save` in a new thread when the job is asked to stop, or at once if it was."""
        with self._changed:
            self._callbacks.append(save)
        self._save_if_stopping()

    def enable_stop_requests(self) -> None:
        """Inform the agent that this script checks for stop requests. Idempotent.

        In the main thread, also forward stop signals that the script neither handles nor ignores.
        """
        if not self._state.get("handles_stop"):
            self.send(handles_stop=True)
        if not self._forwards_signals and threading.current_thread() is threading.main_thread():
            self._forwards_signals = True
            numbers = [number for number in _FORWARDED_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            if numbers:
                self._forward_signals(numbers)

    def close_in_fork(self) -> None:
        """In a fork, close the copy of the parent's socket. While it is open, the agent misses the parent's end."""
        if os.getpid() != self.process_id and self._socket.fileno() >= 0:
            self._is_open = False
            with contextlib.suppress(OSError):
                os.close(self._socket.detach())

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                desired = Desired(json.loads(line.decode())[1])
                with self._changed:
                    self.desired = desired
                    self._changed.notify_all()
                self._save_if_stopping()
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _save_if_stopping(self) -> None:
        with self._changed:
            if self._is_saving or not (self.desired.stop_reason and self._callbacks):
                return
            self._is_saving = True
            if self._state.get("has_saved"):  # earlier callbacks have returned; the job must wait for the new one too
                self.send(has_saved=False)
        threading.Thread(target=self._save, name="tf4slurm-on-stop").start()

    def _save(self) -> None:
        while True:
            with self._changed:
                if not self._callbacks:
                    self._is_saving = False
                    self.send(has_saved=True)
                    return
                save = self._callbacks.pop(0)
            try:
                save()
            except Exception:
                traceback.print_exc()

    def _forward_signals(self, numbers: Sequence[int]) -> None:
        """Handle these signals by sending them to the agent, from a thread.

        The signal handler itself cannot send, because it may interrupt the main thread in a send.
        """
        readable, writable = os.pipe()
        os.set_blocking(writable, False)

        def handle(number: int, _frame: object) -> None:
            if os.getpid() != self.process_id:  # the signal ends a fork, and does not stop the job
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
                return
            with contextlib.suppress(BlockingIOError):  # the pipe is full
                os.write(writable, bytes([number]))

        def forward() -> None:
            while True:
                self.send(stop_signal=signal.Signals(os.read(readable, 1)[0]).name)

        def restore() -> None:
            for number in numbers:
                if signal.getsignal(number) is handle:
                    signal.signal(number, signal.SIG_DFL)

        threading.Thread(target=forward, name="tf4slurm-signals", daemon=True).start()
        for number in numbers:
            signal.signal(number, handle)
        if hasattr(os, "register_at_fork"):  # a fork that waits in C cannot call `handle`
            os.register_at_fork(after_in_child=restore)


def _encode(kind: str, fields: Mapping[str, object]) -> bytes:
    return json.dumps([kind, fields], separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n"


def _merge_to_limit(reports: List[_Report]) -> List[_Report]:
    """Merge consecutive reports in groups of equal size, so that at most `_MAX_REPORTS` remain."""
    size = max(1, -(-len(reports) // _MAX_REPORTS))
    return [_merge(reports[start : start + size]) for start in range(0, len(reports), size)]


def _merge(reports: List[_Report]) -> _Report:
    """Merge consecutive reports into one, with the last, lowest and highest value of each metric."""
    if len(reports) == 1:
        return reports[0]
    last: Dict[str, float] = {}
    values: Dict[str, List[float]] = {}
    for each in reports:
        last.update(each["metrics"])
        for name, value in each["metrics"].items():
            values.setdefault(name, []).append(value)
    steps = [each["step"] for each in reports if each["step"] is not None]
    finite = {name: all(map(math.isfinite, found)) for name, found in values.items()}
    return {
        "step": steps[-1] if steps else None,
        "time": reports[-1]["time"],
        "calls": len(reports),
        "metrics": last,
        "low": {name: min(found) if finite[name] else None for name, found in values.items()},
        "high": {name: max(found) if finite[name] else None for name, found in values.items()},
    }
