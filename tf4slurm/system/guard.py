"""Start the guard of an agent: a small parent process that kills the processes that the agent leaves behind.

If an agent is killed, the kernel kills the agent's child (the user's script), but not the processes that the child
started. They would hold memory, a GPU and a port. Agents on Slurm have a guard. The launcher does the guard's work for
local agents.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from tf4slurm.errors import EXIT_TASK_LOST
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS, OTHER_SIGNALS, PR_SET_PDEATHSIG, STOP_SIGNALS
from tf4slurm.system.proc import Others, adopt_orphans, find_others, find_own_children, kill_descendants

if TYPE_CHECKING:
    import asyncio

_GUARD_SIGNALS = (*LAUNCHER_SIGNALS, *OTHER_SIGNALS)
_CLEAN_SECONDS = 4.0
_POLL_SECONDS = 0.005

GUARD_LOST = signal.SIGVTALRM
"""The signal that the kernel sends to an agent when its guard is killed. Schedulers and terminals do not send it."""


def handle_stop_signals(loop: asyncio.AbstractEventLoop, on_stop: Callable[[str], object]) -> None:
    """Call `on_stop` with the name, such as "SIGTERM", of each stop signal that this agent receives from now on.

    The stop signals are STOP_SIGNALS, without SIGHUP if it is ignored (nohup). OTHER_SIGNALS are ignored. If the caller
    has blocked LAUNCHER_SIGNALS, those that came earlier are handled now.
    """
    for number in _handled_signals():
        loop.add_signal_handler(number, on_stop, number.name)
    for number in OTHER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)


def watch_guard(loop: asyncio.AbstractEventLoop, on_loss: Callable[[], object]) -> None:
    """Call `on_loss` when the guard of this agent ends. `start_guard` must have started the guard."""
    guard = os.getppid()

    def check() -> None:
        if os.getppid() != guard:
            on_loss()

    loop.add_signal_handler(GUARD_LOST, check)


def _handled_signals() -> list[signal.Signals]:
    """Return the stop signals that a guard or agent handles. SIGHUP is left out if it is ignored (nohup)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (is_ignored and number == signal.SIGHUP)]


def start_guard(*, is_in_terminal: bool = False, blocks_signals: bool = False) -> None:
    """Fork this process, and return in the child, which becomes the agent. The parent becomes the guard.

    The guard passes stop signals on to the agent. When the agent has ended, the guard kills the agent's remaining
    processes. It exits with the agent's exit code, or with EXIT_TASK_LOST if a signal killed the agent. On a system
    other than Linux this function does nothing. Call it while the process has one thread, and before large imports, so
    that the guard stays small.

    Args:
        is_in_terminal: Whether a person starts this process in a terminal. If so, the agent gets its own process group,
            and Ctrl-C, Ctrl-Z and the end of the terminal reach only the guard.
        blocks_signals: Whether stop signals wait until the agent calls `handle_stop_signals`. Otherwise they end it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GUARD_SIGNALS)  # until the guard handles or ignores them
    if sys.platform == "linux":
        _fork_guard(is_in_terminal=is_in_terminal)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | set(LAUNCHER_SIGNALS) if blocks_signals else mask)


def _fork_guard(*, is_in_terminal: bool) -> None:
    guard = os.getpid()
    others = find_others()
    adopt_orphans()  # before the agent can end
    agent = os.fork()
    if agent:
        _guard(agent, others)
    if is_in_terminal:
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, GUARD_LOST)
    if os.getppid() != guard:
        os._exit(EXIT_TASK_LOST)


def _guard(agent: int, others: Others) -> NoReturn:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(agent, number)  # safe: the id is not reused before the agent is reaped

    numbers = _handled_signals()
    for number in numbers:
        signal.signal(number, pass_on)
    for number in OTHER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GUARD_SIGNALS)
    os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    returncode = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    _end_children(others)
    if returncode < 0:
        why = f"tf4slurm: the agent on {os.uname().nodename} was killed by signal {-returncode}.\n"
        with contextlib.suppress(OSError):  # after `2>&-`
            os.write(2, why.encode())
    os._exit(returncode if returncode >= 0 else EXIT_TASK_LOST)


def _end_children(others: Others) -> None:
    """Kill all descendants of the guard except `others`, which were there before the agent (see `Others`).

    This is repeated, because the descendants may start new processes. Give up after 4 s.
    """
    deadline = time.monotonic() + _CLEAN_SECONDS  # a process that waits for a file server cannot be killed
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if find_own_children() <= others:  # zombies count, because their children are adopted only now
            return
        kill_descendants(others)
        time.sleep(_POLL_SECONDS)
