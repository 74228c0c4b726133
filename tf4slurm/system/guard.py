"""A small process above an agent: it ends what the agent's script leaves behind when the agent is killed.

The child is killed with its agent, but not what it has started in sessions of its own: slurmstepd or init would adopt
that, and it would hold memory, a GPU and a port in an allocation that goes on. Local agents have the launcher for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from tf4slurm.errors import EXIT_TASK_LOST
from tf4slurm.system.exec_child import STOP_SIGNALS
from tf4slurm.system.proc import read_stat

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_CLEAN_SECONDS = 4.0
_POLL_SECONDS = 0.005

GUARD_LOST = signal.SIGHUP
"""The signal that the agent gets when its guard is killed."""


def start_guard() -> None:
    """Fork, and return in the fork: it becomes the agent. This process stays above it, and ends with its exit code.

    Call it before anything large is imported, while the process has one thread: the guard stays as small as it is then.
    """
    if sys.platform != "linux":
        return
    guard = os.getpid()
    agent = os.fork()
    if agent:
        _guard(agent)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, GUARD_LOST)
    if os.getppid() != guard:
        os._exit(EXIT_TASK_LOST)


def _guard(agent: int) -> NoReturn:
    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(agent, number)  # not reaped yet: it is this process

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    returncode = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    _end_children()
    if returncode < 0:
        why = f"tf4slurm: the agent on {os.uname().nodename} was killed by signal {-returncode}.\n"
        with contextlib.suppress(OSError):  # after `2>&-`
            os.write(2, why.encode())
    os._exit(returncode if returncode >= 0 else EXIT_TASK_LOST)


def _end_children() -> None:
    """Kill what this process has adopted, and what it adopts by that, until nothing is left."""
    deadline = time.monotonic() + _CLEAN_SECONDS  # a process that waits for a file server cannot be killed
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in _children():
            with contextlib.suppress(PermissionError):  # a program of another user, by its mode
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _children() -> list[int]:
    """Return the children of this process. Only it reaps them, so no other process can get their ids."""
    found = []
    for process_id in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended
            if read_stat(process_id).parent_id == os.getpid():
                found.append(process_id)
    return found
