"""The guard, a small parent process of an agent on Slurm: kills the script's remaining processes when the agent exits.

If the agent is killed, the kernel kills the child, but not the child's own processes, which would hold memory, a GPU
and a port. The launcher does the same for local agents.
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
from tf4slurm.system.exec_child import PR_SET_PDEATHSIG, STOP_SIGNALS
from tf4slurm.system.proc import adopt_orphans, kill_descendants

_CLEAN_SECONDS = 4.0
_POLL_SECONDS = 0.005

GUARD_LOST = signal.SIGHUP
"""The signal that the agent receives when its guard is killed."""


def start_guard(*, stops_at_hangup: bool = False) -> None:
    """Fork: the parent becomes the guard, and this function returns in the child, which becomes the agent.

    The guard exits after the agent; only Linux has one. Call this while the process has one thread, and before large
    imports, so that the guard stays small.

    Args:
        stops_at_hangup: Pass SIGHUP on as SIGTERM, for a process that a person starts in a terminal. The agent then has
            its own process group, because a closed terminal sends SIGHUP to the whole group.
    """
    if sys.platform != "linux":
        return
    guard = os.getpid()
    agent = os.fork()
    if agent:
        _guard(agent, stops_at_hangup=stops_at_hangup)
    if stops_at_hangup:
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, GUARD_LOST)
    if os.getppid() != guard:
        os._exit(EXIT_TASK_LOST)


def _guard(agent: int, *, stops_at_hangup: bool) -> NoReturn:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        # Safe: the id is not reused before the agent is reaped.
        os.kill(agent, signal.SIGTERM if number == signal.SIGHUP else number)

    numbers = [*STOP_SIGNALS]
    if stops_at_hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, pass_on)
    adopt_orphans()
    os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    returncode = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    _end_children()
    if returncode < 0:
        why = f"tf4slurm: the agent on {os.uname().nodename} was killed by signal {-returncode}.\n"
        with contextlib.suppress(OSError):  # after `2>&-`
            os.write(2, why.encode())
    os._exit(returncode if returncode >= 0 else EXIT_TASK_LOST)


def _end_children() -> None:
    """Kill all descendants, repeatedly because they may start others; give up after 4 s."""
    deadline = time.monotonic() + _CLEAN_SECONDS  # a process that waits for a file server cannot be killed
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        kill_descendants()
        time.sleep(_POLL_SECONDS)
