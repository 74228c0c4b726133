"""Start a child process in its own process group, read its output, and signal it.

On Linux the kernel kills the child when its agent is killed (see exec_child.py). The agent adopts the processes that
the child leaves behind, and kills them (see proc.py). On other systems only the child's process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO

from tf4slurm.preload.client import ForkedProcess, NotPreloaded, PreloaderAddress
from tf4slurm.system import exec_child
from tf4slurm.system.exec_child import OTHER_SIGNALS, STOP_SIGNALS
from tf4slurm.system.proc import ignores_signal, kill_left_processes

logger = logging.getLogger(__name__)

_READ_BYTES = 65536
_DRAIN_SECONDS = 0.5
_LOOK_SECONDS = 0.01  # between two looks whether a child's output has been read
_KILL_SECONDS = 2.0
_LEFT_TO_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them


@dataclass(frozen=True)
class ForkRequest:
    """Where and how a child is forked in place of executed, if it can be.

    Attributes:
        address: The address of the preloader.
        timeout_seconds: How long the preloader may take for its answer.
    """

    address: PreloaderAddress
    timeout_seconds: float


class Child:
    """A child process of an agent. `Child.start` creates it.

    Attributes:
        process_id: The child's process id.
        parent_id: The process id of its parent: this process, or the keeper of a forked child.
        not_forked: Why the child has been executed although a `ForkRequest` was given, as a clause, or "". The reason
            may be known only at its end.
    """

    def __init__(self, process: _ExecutedProcess | ForkedProcess, name: str = "", not_forked: str = "") -> None:
        self._process = process
        self._name = name or f"child {process.process_id}"
        self._has_ended = asyncio.Event()
        self._has_drained = asyncio.Event()
        self._reading = threading.Lock()  # held while a piece of the output is read and passed on
        self._not_forked = not_forked
        self.process_id: int = process.process_id
        self.parent_id: int = process.parent_id

    @property
    def ended_at(self) -> float | None:
        """Time of the child's end in seconds (time.monotonic). None while the child runs."""
        return self._process.ended_at

    @property
    def is_forked(self) -> bool:
        """Whether a preloader has forked the child. It may have executed its command since."""
        return isinstance(self._process, ForkedProcess) and not self._process.executed

    @property
    def not_forked(self) -> str:
        return self._process.executed if isinstance(self._process, ForkedProcess) else self._not_forked

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_output: Callable[[bytes], None],
        *,
        ignores_stop_signals: bool = False,
        name: str = "",
        fork: ForkRequest | None = None,
    ) -> Child:
        """Start `command` in its own process group.

        A thread starts the child, so that a stalled file system delays only the child. If this coroutine is cancelled,
        the child is killed. If the program cannot be executed, the child prints the reason and exits with 127 or 126.

        Args:
            environment: The child's environment variables.
            on_output: Called in another thread with each piece of the child's standard output and error, and with b""
                at their end.
            ignores_stop_signals: Whether the child ignores STOP_SIGNALS unless it installs its own handlers.
            name: The name of the task, such as "chief/0", for log messages (default: "child" and the process id).
            fork: Where a preloader forks the child, if it can. None (default) executes the command.

        Raises:
            OSError: No process can be started, because memory is exhausted or Python is missing.
            RuntimeError: No thread can be started, because the limit of processes is reached.
        """
        starting: Future[Child] = Future()
        loop = asyncio.get_running_loop()
        arguments = (command, environment, on_output, loop, starting, name, ignores_stop_signals, fork)
        threading.Thread(target=cls._own, args=arguments, name="child", daemon=True).start()
        try:
            return await asyncio.shield(asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            if not starting.cancel() and starting.exception() is None:
                starting.result().signal(signal.SIGKILL)
            raise

    @classmethod
    def _own(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_output: Callable[[bytes], None],
        loop: asyncio.AbstractEventLoop,
        starting: Future[Child],
        name: str,
        ignores_stop_signals: bool,
        fork: ForkRequest | None,
    ) -> None:
        """Start the child and wait for its end, both in the thread that calls this method.

        If that thread ended earlier, the kernel would kill the child (PR_SET_PDEATHSIG, see `exec_child.py`).
        `starting` receives the started child, or the error.
        """
        child = None
        try:
            process, not_forked = _start(command, environment, ignores_stop_signals, fork)
            child = cls(process, name, not_forked)
            on_end = functools.partial(_call, loop, child._has_drained.set)
            threading.Thread(target=child._read, args=(on_output, on_end), name="child-output", daemon=True).start()
        except (OSError, RuntimeError) as error:
            if child is not None:  # no thread reads its output
                child.signal(signal.SIGKILL)
                process.wait()
            starting.set_exception(error)
            return
        if starting.set_running_or_notify_cancel():
            starting.set_result(child)
        else:
            child.signal(signal.SIGKILL)
        process.wait()
        _call(loop, child._has_ended.set)

    async def wait_for_exit(self) -> int:
        """Wait until the child has ended and its process group has been killed. `wait` also waits for its output.

        Returns:
            The child's exit code, or minus the number of the signal that ended it.
        """
        await self._has_ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    async def wait(self) -> int:
        """Wait as `wait_for_exit` does, and then at most 0.5 s for the rest of the child's output.

        Return what `wait_for_exit` returns.

        A process that the child started may keep the output open for longer. `on_output` then receives the rest later.
        """
        returncode = await self.wait_for_exit()
        try:
            await asyncio.wait_for(self._has_drained.wait(), _DRAIN_SECONDS)
        except asyncio.TimeoutError:
            logger.warning("the output of %s is still open in a process that it started", self._name)
        return returncode

    async def wait_for_printed(self) -> None:
        """After the child's exit, wait until what it has printed is read, at most 0.5 s.

        Unlike `wait`, do not wait for a process that the child started and that keeps the output open.
        """
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not self._has_read_all() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)

    def _has_read_all(self) -> bool:
        """Return whether all that was printed so far has been passed on. Return False at once if that is under way."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            output = self._process.output
            return output.closed or fcntl.ioctl(output, termios.FIONREAD, b"\0" * 4) == b"\0" * 4
        finally:
            self._reading.release()

    def _read(self, on_output: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Pass each piece of the output on, until its end. This is the work of a thread."""
        output = self._process.output
        readable = select.poll()
        readable.register(output, select.POLLIN)
        data = None
        while data != b"":
            readable.poll()
            with self._reading:
                data = output.read(_READ_BYTES)
                on_output(data)
                if not data:
                    output.close()
        on_end()

    async def end(self, grace_period_seconds: float) -> None:
        """Send SIGTERM to the child's process group, and SIGKILL if the child still runs after the grace period.

        If the child and all its descendants ignore SIGTERM, SIGKILL follows at once. This method does not wait for the
        effect of SIGKILL, which may take time, nor for the child's output. `wait` waits for both.
        """
        ignores = ignores_signal(self.process_id, signal.SIGTERM)  # before SIGTERM, which may end descendants
        self.signal(signal.SIGTERM)
        if ignores:
            self.signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(self._has_ended.wait(), grace_period_seconds)
        except asyncio.TimeoutError:
            logger.warning("%s did not end within %g s of SIGTERM: killed", self._name, grace_period_seconds)
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group. Nothing is sent after the child has ended."""
        self._process.signal(number)

    def kill_left_processes(self) -> None:
        """Kill what the child has left behind, and wait at most 2 s until it is gone. This call blocks."""
        self._process.kill_left_processes()


def _start(
    command: Sequence[str], environment: Mapping[str, str], ignores_stop_signals: bool, fork: ForkRequest | None
) -> tuple[_ExecutedProcess | ForkedProcess, str]:
    """Fork a process that runs `command`, or execute it. Also return why it was not forked, or ""."""
    not_forked = ""
    if fork is not None:
        ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
        ignored -= {*_LEFT_TO_PYTHON, *OTHER_SIGNALS}
        if ignores_stop_signals:
            ignored |= set(STOP_SIGNALS)
        try:
            return ForkedProcess(fork.address, command, environment, sorted(ignored), fork.timeout_seconds), ""
        except NotPreloaded as error:
            not_forked = str(error)
    return _ExecutedProcess(command, environment, ignores_stop_signals), not_forked


class _ExecutedProcess:
    """A process that executes a command, and whose parent is this process. Its attributes are as in `ForkedProcess`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], ignores_stop_signals: bool) -> None:
        # Without this, Python 3.10 (vfork) and 3.13 (posix_spawn) hold the GIL until the program has been read.
        vars(subprocess).update(_USE_POSIX_SPAWN=False, _USE_VFORK=sys.version_info >= (3, 11))
        first = (sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), str(int(ignores_stop_signals)))
        self._process = subprocess.Popen(
            (*first, *command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._reaping = threading.Lock()  # also held while a signal is sent
        self.output: IO[bytes] = self._process.stdout
        self.process_id = self._process.pid
        self.parent_id = os.getpid()
        self.ended_at: float | None = None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self) -> None:
        """Wait for the end of the process, and kill its process group before another process can get its id."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
                os.waitid(os.P_PID, self.process_id, os.WEXITED | os.WNOWAIT)
                self.ended_at = time.monotonic()
                self.signal(signal.SIGKILL)
            with self._reaping:
                self._process.wait()
            return
        self._process.wait()
        self.ended_at = time.monotonic()
        # macOS uses an id again only after all others.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process group.

        Nothing is sent after the process was reaped, because another process may have its id by then.
        """
        with self._reaping:
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises EPERM for a group of zombies
                os.killpg(self.process_id, number)
                return
            with contextlib.suppress(ProcessLookupError):  # exec_child.py has not created the group yet
                os.kill(self.process_id, number)

    def kill_left_processes(self) -> None:
        kill_left_processes(time.monotonic() + _KILL_SECONDS)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(callback, *arguments)
