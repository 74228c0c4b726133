"""Under plain srun: a thread of each script that watches the sidecar, and ends a script that would wait for ever.

A ps, or a worker that serves a chief, waits in `server.join()`, which never returns. A session without `device_filters`
waits for each server of the cluster, also for that of a task that has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.control.clock import JobClock
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.script_channel import ScriptChannel
from tf4slurm.system.proc import read_stat

_POLL_SECONDS = 1.0
_SESSION_SECONDS = 10.0  # a session that waits for no server needs less than 1 s
_STOPPED_SECONDS = 10.0  # the heartbeat timeout of sidecars
_IGNORE = 1  # SIG_IGN of signal.h

_watches: list[ScriptWatch] = []


def watch_sidecar(channel: ScriptChannel, sidecar_id: int, task: Task, exit_seconds: float | None) -> None:
    """Start the thread. `exit_seconds`: see `ps_exit_seconds` of `get_server_dictionary`."""
    _watches[:] = [ScriptWatch(channel, sidecar_id, task, exit_seconds)]
    threading.Thread(target=_watches[0].run, name="tf4slurm-script-watch", daemon=True).start()


def call_after_training(function: Callable[[], object]) -> None:
    """Call a function in the thread when no task needs the ps any more; do nothing without a sidecar."""
    for watch in _watches:
        watch.functions.append(function)


def keep_running() -> None:
    """Do not end this process: the script knows by itself that training is over."""
    for watch in _watches:
        watch.exit_seconds = None


class ScriptWatch:
    """Watches the sidecar of this process.

    Attributes:
        exit_seconds: Seconds from the end of training until this process ends; None if it is not to be ended.
        functions: Called when training is over.
    """

    def __init__(self, channel: ScriptChannel, sidecar_id: int, task: Task, exit_seconds: float | None) -> None:
        self.exit_seconds = exit_seconds
        self.functions: list[Callable[[], object]] = []
        self._channel = channel
        self._sidecar_id = sidecar_id
        self._task = task
        self._clock = JobClock(2 * _POLL_SECONDS)
        self._since: dict[str, float] = {}  # the times from which on a condition has been true

    def run(self) -> None:
        """Watch until the sidecar is lost or this process ends."""
        self._clock.start()
        with contextlib.suppress(RendezvousConnectionError):
            while True:
                self._channel.wait_until(lambda: False, _POLL_SECONDS)
                now = self._clock.now()
                self._check_sidecar(now)
                while self._channel.desired.is_training_over and self.functions:
                    self.functions.pop()()
                self._end_if_it_waits_for_ever(now)

    def _check_sidecar(self, now: float) -> None:
        try:
            is_stopped = read_stat(self._sidecar_id).state == "T"
        except OSError:
            return  # it has ended, which closes the channel
        if self._has_lasted("stopped", is_stopped, _STOPPED_SECONDS, now):
            self._channel.lose(f"The sidecar of {self._task} was stopped for {_STOPPED_SECONDS:g} s.")

    def _end_if_it_waits_for_ever(self, now: float) -> None:
        seconds, failed = self.exit_seconds, self._channel.desired.failed_tasks
        if seconds is not None and self._has_lasted("idle", self._is_idle(), seconds, now):
            _exit(0, f"{self._task} ends: training was over {seconds:g} s ago (ps_exit_seconds)")
        is_waiting = bool(failed) and self._task.task_type != "ps" and _is_main_thread_in("_extend_graph", "session.py")
        if self._has_lasted("waiting", is_waiting, _SESSION_SECONDS, now):
            why = f"its session waits for all servers, but {format_tasks(failed)} failed. Give it device_filters"
            _exit(1, f"{self._task} ends: {why}")

    def _has_lasted(self, what: str, is_true: bool, seconds: float, now: float) -> bool:
        """Return whether the condition `what` has been true for `seconds`."""
        if not is_true:
            self._since.pop(what, None)
            return False
        return now - self._since.setdefault(what, now) >= seconds

    def _is_idle(self) -> bool:
        desired = self._channel.desired
        if not desired.have_leaders_ended:
            return False
        if self._task.task_type == "ps":
            return desired.is_training_over
        return self._task.task_type == "worker" and _is_main_thread_in("join", "server_lib.py")


def _is_main_thread_in(function: str, file: str) -> bool:
    """Whether the main thread is in C++, called by this function of TensorFlow."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and (frame.f_code.co_name, os.path.basename(frame.f_code.co_filename)) == (function, file)


def _exit(exit_code: int, why: str) -> None:
    """End this process after its exit functions. The main thread may wait in C++, so no exception can end it."""
    sys.stderr.write(f"tf4slurm: {why}.\n")
    if exit_code:
        sys.last_value = RuntimeError(why)  # as after an uncaught exception: exit functions report a failure
    ignore_termination()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def ignore_termination() -> None:
    """Ignore SIGTERM, so that the end of the step does not change the exit code of a process that ends anyway.

    Any thread may call this, unlike `signal.signal`.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(_IGNORE))
