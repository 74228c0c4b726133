"""The keeper: the parent of one forked child. It is for the child what the agent is for a child that it executes."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import time
import warnings
from typing import Any

from .messages import receive, send

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_CLEAN_SECONDS = 4.0
_POLL_SECONDS = 0.005


def fork() -> int:
    """Call os.fork without the warning of Python 3.12, which counts the threads of OpenBLAS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (`man 2 prctl`)."""
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


class Keeper:
    """Waits for the child's end, signals it, and adopts and kills the processes that it leaves behind.

    If the agent ends, the keeper kills the child. If the keeper is killed, the kernel kills the child.

    Attributes:
        process_id: The process id of the keeper.
        note: Memory in which the child writes why it executes its command. The script would see a pipe.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Make this process a keeper. `connection` leads to the agent."""
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.process_id = os.getpid()
        self.note = mmap.mmap(-1, mmap.PAGESIZE)
        self._connection = connection
        self._child = 0
        self._has_ended = False
        self._wake, self._wakeup = os.pipe()
        for descriptor in (self._wake, self._wakeup):
            os.set_blocking(descriptor, False)

    def start(self) -> bool:
        """Fork the child, if the agent still wants it. Return True in the child."""
        send(self._connection, {"keeper": self.process_id})
        answer, _ = receive(self._connection)
        if answer is None:
            os._exit(0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup)
        self._child = fork()
        if self._child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wake)
            os.close(self._wakeup)
            self._connection.close()
        return self._child == 0

    def run(self) -> None:
        """Follow the child and the agent until the agent ends or asks for the end. Then kill what is left."""
        send(self._connection, {"process_id": self._child})
        while True:
            ready, _, _ = select.select([self._connection.fileno(), self._wake], [], [])
            if self._wake in ready:
                _drain(self._wake)
                self._reap()
            if self._connection.fileno() in ready:
                message, _ = receive(self._connection)
                if message is None or "clean" in message:
                    break
                self._signal(message["signal"])
        self._signal(signal.SIGKILL)
        self._clean()

    def _signal(self, number: int) -> None:
        if self._has_ended:  # another process may have its id
            return
        try:
            os.killpg(self._child, number)
        except OSError:
            try:
                os.kill(self._child, number)  # it has not created its group yet
            except OSError:
                pass

    def _reap(self) -> None:
        """Report the child's end, after its process group has been killed, and reap orphans that have ended."""
        if not self._has_ended and os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            ended_at = time.monotonic()
            self._signal(signal.SIGKILL)
            self._has_ended = True
            _, status = os.waitpid(self._child, 0)
            self._report(
                {
                    "returncode": -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
                    "ended_at": ended_at,
                    "executed": self.note[:].rstrip(b"\0").decode(errors="replace"),
                }
            )
        for each in find_children(self.process_id):
            if each != self._child or self._has_ended:
                try:
                    os.waitpid(each, os.WNOHANG)
                except OSError:
                    pass

    def _report(self, message: dict[str, Any]) -> None:
        try:
            send(self._connection, message)
        except OSError:
            pass  # the agent has ended, which `run` sees

    def _clean(self) -> None:
        """Kill all descendants, at most 4 s long: a process that waits for a file server cannot be killed."""
        deadline = time.monotonic() + _CLEAN_SECONDS
        while time.monotonic() < deadline:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except OSError:
                return  # none is left
            for each in find_descendants(self.process_id):
                try:
                    os.kill(each, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(_POLL_SECONDS)


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass


def find_children(process_id: int) -> list[int]:
    """Return the ids of a process's children, as far as /proc shows them."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process_id}/task"):
            with open(f"/proc/{process_id}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def find_descendants(process_id: int) -> list[int]:
    """Return the ids of a process's descendants, parents first."""
    found: list[int] = []
    for each in find_children(process_id):
        found += [each, *find_descendants(each)]
    return found
