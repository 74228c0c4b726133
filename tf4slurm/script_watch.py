"""Under plain srun: a thread of each script that watches the sidecar, and ends a ps that no task needs any more.

Without it a ps, or a worker that serves a chief, would wait in `server.join()` for ever.
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

from tf4slurm.cluster import Task
from tf4slurm.control.clock import JobClock
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.script_channel import ScriptChannel
from tf4slurm.system.proc import read_stat

_POLL_SECONDS = 1.0
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
        self._idle_since: float | None = None
        self._stopped_since: float | None = None

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
                self._end_if_idle(now)

    def _check_sidecar(self, now: float) -> None:
        try:
            is_stopped = read_stat(self._sidecar_id).state == "T"
        except OSError:
            return  # it has ended, which closes the channel
        if not is_stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since >= _STOPPED_SECONDS:
            self._channel.lose(f"The sidecar of {self._task} was stopped for {_STOPPED_SECONDS:g} s.")

    def _end_if_idle(self, now: float) -> None:
        """End this process after `exit_seconds` in which no task needs it."""
        if self.exit_seconds is None or not self._is_idle():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self.exit_seconds:
            _exit(f"{self._task} ends: training was over {self.exit_seconds:g} s ago (ps_exit_seconds)")

    def _is_idle(self) -> bool:
        desired = self._channel.desired
        if not desired.have_leaders_ended:
            return False
        if self._task.task_type == "ps":
            return desired.is_training_over
        return self._task.task_type == "worker" and _is_in_join()


def _is_in_join() -> bool:
    """Whether the main thread waits in the `join` method of a TensorFlow server."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    return frame.f_code.co_name == "join" and os.path.basename(frame.f_code.co_filename) == "server_lib.py"


def _exit(why: str) -> None:
    """End this process with 0 after its exit functions. The main thread may wait in C++, so no exception can end it."""
    sys.stderr.write(f"tf4slurm: {why}.\n")
    ignore_termination()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def ignore_termination() -> None:
    """Ignore SIGTERM, so that the end of the step does not change the exit code of a process that ends anyway.

    Any thread may call this, unlike `signal.signal`.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(_IGNORE))
