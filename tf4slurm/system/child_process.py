"""Start a child process in its own process group, read its output, and signal it.

On Linux the kernel kills the child when its agent is killed (see exec_child.py). The agent adopts the processes that
the child leaves behind, and kills them (see proc.py). On other systems only the child's process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import IO

from tf4slurm.system import exec_child
from tf4slurm.system.proc import ignores_signal

logger = logging.getLogger(__name__)

_READ_BYTES = 65536
_DRAIN_SECONDS = 0.5


class Child:
    """A child process of an agent. `Child.start` creates it.

    Attributes:
        ended_at: Time of the child's end in seconds (time.monotonic). None while the child runs.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str = "") -> None:
        self._process = process
        self._name = name or f"child {process.pid}"
        self._has_ended = asyncio.Event()
        self._has_drained = asyncio.Event()
        self._reaping = threading.Lock()  # also held while a signal is sent
        self.process_id: int = process.pid
        self.ended_at: float | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_output: Callable[[bytes], None],
        *,
        ignores_stop_signals: bool = False,
        name: str = "",
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

        Raises:
            OSError: No process can be started, because memory is exhausted or Python is missing.
            RuntimeError: No thread can be started, because the limit of processes is reached.
        """
        first = (sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), str(int(ignores_stop_signals)))
        starting: Future[Child] = Future()
        arguments = ((*first, *command), environment, on_output, asyncio.get_running_loop(), starting, name)
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
    ) -> None:
        """Start the child and wait for its end, both in the thread that calls this method.

        If that thread ended earlier, the kernel would kill the child (PR_SET_PDEATHSIG, see `exec_child.py`).
        `starting` receives the started child, or the error.
        """
        child = None
        # Without this, Python 3.10 (vfork) and 3.13 (posix_spawn) hold the GIL until the program has been read.
        vars(subprocess).update(_USE_POSIX_SPAWN=False, _USE_VFORK=sys.version_info >= (3, 11))
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0
            )
            child = cls(process, name)
            reading = (process.stdout, on_output, functools.partial(_call, loop, child._has_drained.set))
            threading.Thread(target=_read, args=reading, name="child-output", daemon=True).start()
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
        child._wait_and_reap()
        _call(loop, child._has_ended.set)

    def _wait_and_reap(self) -> None:
        """Wait for the end of the child, and kill its process group before another process can get the child's id."""
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

    async def wait_for_exit(self) -> int:
        """Wait until the child has ended and its process group has been killed. `wait` also waits for its output.

        Returns:
            The child's exit code, or minus the number of the signal that ended it.
        """
        await self._has_ended.wait()
        returncode: int = self._process.returncode
        return returncode

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
        """Send a signal to the child's process group.

        Nothing is sent after the child was reaped, because another process may have its id by then.
        """
        with self._reaping:
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises EPERM for a group of zombies
                os.killpg(self.process_id, number)
                return
            with contextlib.suppress(ProcessLookupError):  # exec_child.py has not created the group yet
                os.kill(self.process_id, number)


def _read(pipe: IO[bytes], on_output: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
    with pipe:
        while data := pipe.read(_READ_BYTES):
            on_output(data)
        on_output(b"")
    on_end()


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(callback, *arguments)
