"""The script's end of the script channel: send the script's state to the agent, receive the desired state.

The agent's end is `agent/script_channel_server.py`. The channel is a Unix socket; each message is one line of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from tf4slurm.control.clock import JobClock
from tf4slurm.control.messages import MAX_SCRIPT_BYTES, DesiredState, ScriptState, ShardRequest, decode, encode
from tf4slurm.control.script_metrics import StepMetrics, merge_metrics, merge_to_limit
from tf4slurm.errors import DataShardsError, RendezvousConnectionError
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE

_SEND_SECONDS = 0.2  # the shortest interval between messages with reports
_MAX_VALUES = 1_000  # numbers sent together; if there are more, reports are merged
_WAKE_SECONDS = 1.0
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

MAX_METRICS = 100
"""Maximum number of metrics of a task."""

_channel: ScriptChannel | None = None
_channel_process = 0


def find_script_channel() -> ScriptChannel | None:
    """Return this process's channel to its agent. Return None if the process has no agent, or cannot connect to it.

    A forked process gets a channel of its own.
    """
    global _channel, _channel_process
    name = os.environ.get(SCRIPT_CHANNEL_VARIABLE)
    if name is None:
        return None
    if _channel is None or _channel_process != os.getpid() or _channel.name != name:
        is_fork = _channel is not None and _channel_process != os.getpid()
        is_helper = is_fork or _is_started_by_multiprocessing()
        try:
            _channel, _channel_process = ScriptChannel(name, is_helper=is_helper), os.getpid()
        except OSError:
            return None
    return _channel


def replace_script_channel(name: str | None) -> str | None:
    """Let `find_script_channel` connect to the agent's socket `name` from now on. Return the name before.

    The previous connection sends the metrics that wait to be sent, and is closed. None stands for no agent.
    """
    before = os.environ.pop(SCRIPT_CHANNEL_VARIABLE, None)
    if name is not None:
        os.environ[SCRIPT_CHANNEL_VARIABLE] = name
    if _channel is not None and _channel_process == os.getpid():
        _channel.close()
    return before


def _is_started_by_multiprocessing() -> bool:
    processes = sys.modules.get("multiprocessing.process")  # not imported here, because most scripts do not need it
    return processes is not None and processes.parent_process() is not None


def to_socket_address(name: str) -> str:
    """Return the address of the Unix socket `name`, the value of SCRIPT_CHANNEL_VARIABLE."""
    return f"\0{name[1:]}" if name.startswith("@") else name


class CompletionSignal:
    """Sends "done" or "failed" for this process, once. If the process fails after "done", "failed" is sent, too."""

    def __init__(self, send: Callable[[bool], None]) -> None:
        """Store `send`, the function that sends the signal. Its argument is whether the process has failed."""
        self._send = send
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._sent: bool | None = None

    def send(self, failed: bool = False) -> None:
        """Send the signal, unless it was sent before. After "done", a failure is still sent. In a fork, do nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            is_new = self._sent is None or (failed and not self._sent)
            if is_new:
                self._sent = failed
        if is_new:
            self._send(failed)

    def send_at_exit(self) -> None:
        """Send the signal when the interpreter exits. It is a failure if an uncaught exception has ended the script."""

        def send() -> None:
            # `last_value` is an uncaught exception, which does not end an interactive interpreter (`ps1`).
            self.send(failed=hasattr(sys, "last_value") and not hasattr(sys, "ps1"))

        atexit.register(send)


class ScriptChannel:
    """A process's connection to its agent, with the last `state` sent and the last `desired` state received."""

    def __init__(self, name: str, *, is_helper: bool = False) -> None:
        """Connect to the agent's socket `name`, the value of SCRIPT_CHANNEL_VARIABLE. Raise OSError if that fails.

        `is_helper` is true in a process that is a fork of another one with a channel, or that multiprocessing started.
        """
        self.name = name
        self.desired = DesiredState()
        self.state = ScriptState(is_helper=is_helper)
        self.completion_signal = CompletionSignal(lambda failed: self.send(completion="failed" if failed else "done"))
        self.is_open = True
        self._loss = "The agent of this process has exited."
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(to_socket_address(name))
        self._socket.sendall(encode(self.state) + b"\n")  # a helper's completion signal waits for this process
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._close_in_fork)
        self._sent_at = 0.0
        self._reports: list[StepMetrics] = []
        self._delayed: threading.Timer | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._is_saving = False
        self._forwards_signals = False
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, name="tf4slurm-script-channel", daemon=True).start()

    def send(self, **changes: object) -> None:
        """Change fields of `state`. Send the metrics that wait to be sent, and then `state`.

        In a fork, do nothing, because the state is that of the parent process.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            reports = merge_to_limit(self._reports, _MAX_VALUES)
            self._reports.clear()
            changes = {**_state_after(reports, self.state), **changes}
            self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]
            if self._delayed is not None:
                self._delayed.cancel()
                self._delayed = None
            self._sent_at = time.monotonic()
            try:
                lines = [*map(encode, reports), encode(self.state), b""]
                self._socket.sendall(b"\n".join(lines))
            except OSError:
                self.is_open = False  # the receiving thread wakes the waiting threads

    def report(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Send the step and metrics of one call of `tf4slurm.report()`. Calls within 0.2 s are sent together."""
        with self._changed:
            self._reports.append(StepMetrics(step, round(time.time(), 3), metrics=metrics))
            if self._delayed is not None:
                return
            wait = self._sent_at + _SEND_SECONDS - time.monotonic()
            if wait > 0:
                self._delayed = threading.Timer(wait, self.send)  # no daemon, so the last report is always sent
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    self._delayed.start()
                    return
            self.send()

    def send_shards(self, token: str, request: ShardRequest | None) -> None:
        """Send the request for shards of the `DataShards` object with this token. It replaces the object's last one.

        If `request` is None, remove the object's request. The requests of other objects stay.

        Raises:
            DataShardsError: The message is too long. Nothing was sent.
        """
        with self._changed:
            others = tuple(other for other in self.state.shards if other.token != token)
            shards = others if request is None else (*others, request)
            num_bytes = len(encode(dataclasses.replace(self.state, shards=shards)))
            if request is not None and num_bytes > MAX_SCRIPT_BYTES:
                raise DataShardsError(
                    f"The requests for the data shards of this process have {num_bytes:,} bytes, at most "
                    f"{MAX_SCRIPT_BYTES:,} are possible. Take fewer shards ahead, or divide the data by fewer names."
                )
            self.send(shards=shards)

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Wait until `condition()`, which reads `desired`, is true. Return False if the timeout expires before.

        Time in which this process was suspended does not count. None as timeout waits without a limit.

        Raises:
            RendezvousConnectionError: The condition is not true and the agent has exited, or `lose` was called.
        """
        clock = JobClock(2 * _WAKE_SECONDS)
        clock.start()
        deadline = math.inf if timeout_seconds is None else clock.now() + timeout_seconds
        with self._changed:
            while not condition():
                if not self.is_open:
                    raise RendezvousConnectionError(self._loss)
                left = deadline - clock.now()
                if left <= 0:
                    return False
                # a signal that arrives just before this thread sleeps is handled only when the thread wakes
                self._changed.wait(min(left, _WAKE_SECONDS))
            return True

    def close(self) -> None:
        """Send the metrics that wait to be sent, and end the connection."""
        self.send()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # the agent then closes its end, and `_receive` returns

    def lose(self, why: str) -> None:
        """Count the agent as lost: `wait_until` raises an error with the sentence `why`, also in other threads."""
        with self._changed:
            self.is_open, self._loss = False, why
            self._changed.notify_all()

    def add_stop_callback(self, save: Callable[[], object]) -> None:
        """Call `save` in a new thread when the job is asked to stop, or at once if the request was earlier."""
        with self._changed:
            self._callbacks.append(save)
        self._save_if_stopping()

    def enable_stop_requests(self) -> None:
        """Inform the agent that this script checks for stop requests. Idempotent.

        The first call in the main thread also installs a handler that forwards stop signals to the agent. Signals that
        the script handles or ignores are left alone.
        """
        if not self.state.handles_stop:
            self.send(handles_stop=True)
        if not self._forwards_signals and threading.current_thread() is threading.main_thread():
            self._forwards_signals = True
            numbers = [number for number in _FORWARDED_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            if numbers:
                _forward_signals(numbers, self)

    def _close_in_fork(self) -> None:
        """In a fork, close the copy of the parent's socket.

        While a copy is open, the agent cannot notice the end of the parent.
        """
        self.is_open = False
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                desired = decode(line, DesiredState)
                with self._changed:
                    self.desired = desired
                    self._changed.notify_all()
                self._save_if_stopping()
        with self._changed:
            self.is_open = False
            self._changed.notify_all()

    def _save_if_stopping(self) -> None:
        with self._changed:
            if self._is_saving or not (self.desired.stop_reason and self._callbacks):
                return
            self._is_saving = True
            if self.state.has_saved:  # earlier callbacks have returned; the job must wait for the new one too
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


def _state_after(reports: Sequence[StepMetrics], before: ScriptState) -> dict[str, object]:
    """Return the fields of the state `before` that these reports change, with their new values."""
    if not reports:
        return {}
    latest = merge_metrics(reports)
    metrics = {**dict(before.metrics), **latest.metrics}
    step = before.step if latest.step is None else latest.step
    return {"step": step, "metrics": tuple(metrics.items())[-MAX_METRICS:]}


def _forward_signals(numbers: Sequence[signal.Signals], channel: ScriptChannel) -> None:
    """Handle these signals by sending them to the agent, from a thread.

    The signal handler itself cannot send, because it may interrupt the main thread in a send.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)

    def handle(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full
            os.write(writable, bytes([number]))

    def forward() -> None:
        while received := os.read(readable, 1):
            channel.send(stop_signal=signal.Signals(received[0]).name)

    threading.Thread(target=forward, name="tf4slurm-signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, handle)
    _restore_in_forks(numbers, handle)


def _restore_in_forks(numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> None:
    """Let each of these signals end a forked process again, instead of stopping the job.

    The signals are blocked during the fork, so that the new process does not call `handle` for any of them.
    """
    held = threading.local()

    def block() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def restore() -> None:
        for number in numbers:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
