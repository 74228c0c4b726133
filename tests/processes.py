"""The processes that a test has started, on any host of the lab: those with its mark in their environment.

A child that was forked without an exec shows the environment of its parent's start, so it is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.control.rules import FORWARDED_SECONDS

MARK_VARIABLE = "TF4SLURM_TEST_MARK"


@dataclass(frozen=True)
class MarkedProcess:
    """A running process; `host` is its host name, "?" if that cannot be read."""

    pid: int
    command: str
    host: str

    def __str__(self) -> str:
        return f"{self.pid} on {self.host}: {self.command}"


def marked_processes(mark: str) -> list[MarkedProcess]:
    """All processes but this one whose environment carries the mark, lowest id first."""
    return [MarkedProcess(pid, _command(pid), _host(pid)) for pid in _marked_ids(mark)]


def child_of(task: str) -> int:
    """Return the process id of the child of a task such as "worker/0", of a job that this test runs on this host."""
    entry = f"TF4SLURM_TASK={task}".encode()
    marked = marked_processes(os.environ[MARK_VARIABLE])
    (found,) = [process.pid for process in marked if entry in read_process(process.pid, "environ").split(b"\0")]
    return found


def wait_until_gone(mark: str, timeout_seconds: float) -> list[MarkedProcess]:
    """Wait until no process carries the mark; return those that still do at the timeout."""
    wait_until(lambda: not _marked_ids(mark), timeout_seconds)
    return marked_processes(mark)


def kill_leftovers(mark: str, timeout_seconds: float) -> list[MarkedProcess]:
    """Wait like `wait_until_gone`, then kill what is left and return it."""
    leftovers = wait_until_gone(mark, timeout_seconds)
    if leftovers:
        wait_until(lambda: not _kill_marked(mark), timeout_seconds=60)
    return leftovers


def press_later() -> None:
    """Wait as long as a person between two Ctrl-C: the launcher takes an earlier one for a forwarded signal."""
    time.sleep(2 * FORWARDED_SECONDS)


def wait_until(condition: Callable[[], bool], timeout_seconds: float, poll_seconds: float = 0.05) -> bool:
    """Check the condition until it holds or the timeout expires; return whether it holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


def _kill_marked(mark: str) -> bool:
    """Kill each marked process; return whether any was found."""
    pids = _marked_ids(mark)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def _marked_ids(mark: str) -> list[int]:
    entry = f"{MARK_VARIABLE}={mark}".encode()
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if pid != os.getpid() and entry in read_process(pid, "environ").split(b"\0")]


def _command(pid: int) -> str:
    return read_process(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _host(pid: int) -> str:
    try:
        if os.readlink(f"/proc/{pid}/ns/uts") == os.readlink("/proc/self/ns/uts"):
            return socket.gethostname()
        command = ["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() or "?"
    except (OSError, subprocess.TimeoutExpired):
        return "?"


def read_process(pid: int, name: str) -> bytes:
    """Return /proc/PID/NAME; nothing if the process has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
