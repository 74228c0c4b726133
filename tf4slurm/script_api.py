"""What a script can say to its job, and ask of it: `report`, `should_stop`, `on_stop`, `barrier`.

Under an agent of tf4slurm all of it works; in a script that was started by hand, `report` and `should_stop` do nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import reprlib
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from tf4slurm.control.messages import BarrierArrival, DesiredState, ScriptState, decode, encode
from tf4slurm.errors import BarrierError, RendezvousConnectionError
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE

_REPORT_SECONDS = 0.2  # steps follow each other faster than anybody wants to know
_WAKE_SECONDS = 1.0
_MAX_METRICS, _MAX_NAME_CHARACTERS = 100, 100  # so that a report always fits into `line.MAX_REPORT_BYTES`
_MAX_BARRIER_CHARACTERS = 1_000
_LATE_SECONDS = 30.0  # how much later than its own timeout a barrier's answer may come
_N = TypeVar("_N", int, float)
_SLURMS_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def report(*, step: int | None = None, **metrics: float) -> None:
    """ScriptState the training step, and metrics such as loss=0.2, to the job. Cheap enough for every step.

    The job keeps at most 100 metrics per task, with names of at most 100 characters. The rest, and a value that is not
    a number, is left out with one RuntimeWarning, without an agent too; nothing here raises. `tf4slurm run
    --stall-timeout SECONDS` ends a job, or begins another attempt, when no task reports a new step for so long.
    """
    changes, complaints = _checked(step, metrics)
    for what, text in complaints.items():
        if what not in _warned:
            _warned.add(what)
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(f"report() got {text}", RuntimeWarning, stacklevel=2)
    line = find_script_channel()
    if line is not None:
        line.say_soon(**changes)


def should_stop() -> bool:
    """Whether the job was asked to stop: save, and exit. Ask it at every step.

    The job then has its grace period (`tf4slurm run --grace-period`). From the first call in the main thread on,
    SIGTERM, SIGUSR1 and SIGUSR2 to this process do not end it, but stop the job: they are passed on to its agent. A
    signal that the process handles itself or ignores, as a ps does, and a worker under a chief, is not passed on. A
    forked process, such as one of multiprocessing, is ended by these signals, unless it calls this function too.
    """
    line = find_script_channel()
    if line is None:
        return False
    _heed(line)
    return bool(line.desired.stop_reason)


def on_stop(save: Callable[[], object]) -> None:
    """Have `save()` called, in a new thread, when the job is asked to stop: at once if it was asked already.

    When all such callbacks of all tasks that the job waits for have returned, the job is ended; so let it save, not
    only note that it should. Signals are passed on as by `should_stop`.
    """
    line = find_script_channel()
    if line is not None:
        line.add_callback(save)
        _heed(line)


def barrier(name: str, *, timeout_seconds: float = 300.0, roles: Sequence[str] = ()) -> None:
    """Wait until every task of these roles (every task of the job, if none are given) waits at this barrier.

    A name, of at most 1,000 characters, may be used again once all have passed. One barrier at a time for each process.

    Raises:
        ValueError: The name is too long.
        BarrierError: A task did not come in time, or has ended and will never come; the text names it.
        RendezvousConnectionError: This process has no agent, or it is gone.
    """
    line = find_script_channel()
    if line is None:
        raise RendezvousConnectionError(
            f"There is nobody to meet at barrier {name!r}: this process has no agent. Start the script with "
            '"tf4slurm run", or under srun call tf4slurm.get_server_dictionary() first.',
            address="",
        )
    if len(name) > _MAX_BARRIER_CHARACTERS:
        raise ValueError(f"A barrier's name has at most {_MAX_BARRIER_CHARACTERS} characters, this one {len(name)}.")
    token = os.urandom(8).hex()
    line.say(barrier=BarrierArrival(name, token, float(timeout_seconds), tuple(roles)))
    try:
        if not line.wait_until(lambda: line.desired.released_barrier == token, timeout_seconds + _LATE_SECONDS):
            raise BarrierError(f"Nothing was heard of barrier {name!r} within {timeout_seconds:g} s.", name=name)
        if line.desired.barrier_error:
            raise BarrierError(f"The barrier broke: {line.desired.barrier_error}.", name=name)
    finally:
        line.say(barrier=None)


def _checked(step: Any, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the report that change, and by what is left out of it why."""
    complaints: dict[str, str] = {}

    def as_number(name: str, value: Any, kind: Callable[[Any], _N]) -> _N | None:
        try:
            return kind(value)
        except Exception:  # whatever a value raises, it must not end the training
            text = f"{name}={reprlib.repr(value)}, which is not a number: it is left out. ScriptState numbers."
            complaints[name] = text
            return None

    changes: dict[str, Any] = {}
    if step is not None and (reached := as_number("step", step, int)) is not None:
        changes["step"] = reached
    short = [name for name in metrics if len(name) <= _MAX_NAME_CHARACTERS][:_MAX_METRICS]
    if len(short) < len(metrics):
        complaints["a limit"] = (
            f"{len(metrics)} metrics: the job keeps {len(short)}, with names of at most {_MAX_NAME_CHARACTERS} "
            "characters. ScriptState fewer."
        )
    if metrics:
        numbers = ((name, as_number(name, metrics[name], float)) for name in short)
        changes["metrics"] = tuple((name, number) for name, number in numbers if number is not None)
    return changes, complaints


def to_path(name: str) -> str:
    """Return the address of the socket that SCRIPT_CHANNEL_VARIABLE names."""
    return f"\0{name[1:]}" if name.startswith("@") else name


class ScriptChannel:
    """This process's end of the line to its agent; the other is `line.py`."""

    def __init__(self, name: str) -> None:
        """Connect to the agent.

        Raises:
            OSError: It does not answer.
        """
        self.desired = DesiredState()
        self.report = ScriptState()
        self.is_open = True
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(to_path(name))
        self._said_at = 0.0
        self._late: threading.Timer | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._is_saving = False
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="tf4slurm-line", daemon=True).start()

    def say(self, **changes: object) -> None:
        """Change fields of `report` and tell the agent now."""
        with self._changed:
            self.report = dataclasses.replace(self.report, **changes)  # type: ignore[arg-type]
            self._send()

    def say_soon(self, **changes: object) -> None:
        """The same, but of many changes within a fifth of a second only the last is told."""
        with self._changed:
            self.report = dataclasses.replace(self.report, **changes)  # type: ignore[arg-type]
            wait = self._said_at + _REPORT_SECONDS - time.monotonic()
            if wait <= 0:
                self._send()
            elif self._late is None:
                self._late = threading.Timer(wait, self.say)  # not a daemon: the last step is told too
                self._late.start()

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Wait until the agent has said what fulfils the condition; return whether it did.

        Raises:
            RendezvousConnectionError: The agent is gone.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            while not condition():
                if not self.is_open:
                    raise RendezvousConnectionError("The agent of this process is gone.", address="")
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                # a signal that comes just before the main thread falls asleep is not served before it wakes up
                self._changed.wait(min(left, _WAKE_SECONDS))
            return True

    def add_callback(self, save: Callable[[], object]) -> None:
        with self._changed:
            self._callbacks.append(save)
        self._save_if_asked()

    def _send(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._said_at = time.monotonic()
        try:
            self._socket.sendall(encode(self.report) + b"\n")
        except OSError:
            self.is_open = False  # the agent is gone; whoever waits is told by the reading thread

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    order = decode(line, DesiredState)
                    with self._changed:
                        self.desired = order
                        self._changed.notify_all()
                    self._save_if_asked()
        except OSError:
            pass
        with self._changed:
            self.is_open = False
            self._changed.notify_all()

    def _save_if_asked(self) -> None:
        with self._changed:
            if self._is_saving or not (self.desired.stop_reason and self._callbacks):
                return
            self._is_saving = True
            if self.report.has_saved:  # earlier callbacks; the job waits for this one too
                self.say(has_saved=False)
        threading.Thread(target=self._save, name="tf4slurm-on-stop").start()

    def _save(self) -> None:
        while True:
            with self._changed:
                if not self._callbacks:
                    self._is_saving = False
                    self.say(has_saved=True)
                    return
                save = self._callbacks.pop(0)
            try:
                save()
            except Exception:
                traceback.print_exc()


_warned: set[str] = set()
_line: ScriptChannel | None = None
_line_process = 0


def find_script_channel() -> ScriptChannel | None:
    """Return this process's line to its agent; None without an agent. After a fork it is a new one."""
    global _line, _line_process
    name = os.environ.get(SCRIPT_CHANNEL_VARIABLE)
    if name is None:
        return None
    if _line is None or _line_process != os.getpid():
        try:
            _line, _line_process = ScriptChannel(name), os.getpid()
        except OSError:
            return None
    return _line


def _heed(line: ScriptChannel) -> None:
    """Tell the agent that this script asks whether to stop, and pass on to it the signals that ask for that."""
    if line.report.handles_stop:
        return
    line.say(handles_stop=True)
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in _SLURMS_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if numbers:
            _pass_on(numbers, line)


def _pass_on(numbers: Sequence[signal.Signals], line: ScriptChannel) -> None:
    """Have a thread tell the agent of these signals: their handler may interrupt whatever the main thread sends."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    held = threading.local()

    def handle(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # told often enough
            os.write(writable, bytes([number]))

    def tell() -> None:
        while told := os.read(readable, 1):
            line.say(stop_signal=signal.Signals(told[0]).name)

    def hold() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def release_fork() -> None:
        for number in numbers:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)
        release()

    threading.Thread(target=tell, name="tf4slurm-signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, handle)
    # A signal to a fork, such as that of Process.terminate(), ends the fork and not the job, however early it comes.
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_fork)
