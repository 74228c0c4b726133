"""Under plain srun: a thread in each script's process that ends the process if it would wait for ever.

These waits have no end. A ps, or a worker that serves a chief, waits in `server.join()`, which never returns. A session
without `device_filters` and a new ParameterServerStrategy wait for each server, also for that of a task that has
failed. A ClusterCoordinator waits until a worker is back, and a MonitoredTrainingSession until the chief has
initialized the variables.

The thread also notices a sidecar that a signal has stopped, and ends the script's waits at the script channel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.control.clock import JobClock
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.scripts.channel import ScriptChannel
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.proc import is_stopped

_POLL_SECONDS = 1.0
_WAIT_SECONDS = 10.0  # in TensorFlow for a failed task; a session that waits for no server needs less than 1 s
_CHIEF_SECONDS = 40.0  # longer than the 30 s between two checks of TensorFlow for initialized variables
# Calls of TensorFlow that may wait for ever: the innermost one for the first two.
_JOIN, _CREATE_SESSION = "server_lib.join", "session._extend_graph"
_WAIT_FOR_CHIEF = "session_manager.wait_for_session"
_CONNECT, _COORDINATOR = "parameter_server_strategy_v2._connect_to_cluster", "cluster_coordinator."
_IGNORE = 1  # SIG_IGN of signal.h

STOPPED_SECONDS = JobSpec.heartbeat_timeout_seconds
"""Seconds after which a sidecar that a signal has stopped counts as lost.

Sidecars have the default heartbeat timeout, so the launcher then counts the sidecar as lost, too.
"""

_watches: list[ScriptWatch] = []


def watch_sidecar(
    channel: ScriptChannel, sidecar_id: int, task: Task, tasks: Iterable[Task], exit_seconds: float | None
) -> None:
    """Start a thread that watches the sidecar and this process, which runs the script of `task`.

    Args:
        channel: The channel to the sidecar.
        sidecar_id: Process ID of the sidecar.
        task: The task of this process.
        tasks: All tasks of the cluster.
        exit_seconds: See `ps_exit_seconds` of `get_server_dictionary`.
    """
    _watches[:] = [ScriptWatch(channel, sidecar_id, task, tasks, exit_seconds)]
    threading.Thread(target=_watches[0].run, name="tf4slurm-script-watch", daemon=True).start()


def call_after_training(function: Callable[[], object]) -> None:
    """Call `function` when no task needs the ps any more, in the thread of `watch_sidecar`.

    In a process without that thread, do nothing.
    """
    for watch in _watches:
        watch.functions.append(function)


def keep_running() -> None:
    """Let this ps run after the end of training until its script ends.

    Without this call, the thread of `watch_sidecar` ends it; see `ps_exit_seconds` of `get_server_dictionary`. In a
    process without that thread, do nothing.
    """
    for watch in _watches:
        watch.exit_seconds = None


class ScriptWatch:
    """Watches the sidecar and the main thread of this process. See this module's docstring.

    Attributes:
        exit_seconds: Seconds from the end of training until this process is ended, or None to leave that to its script.
            See `ps_exit_seconds` of `get_server_dictionary`.
        functions: Functions to call, once, when no task needs the ps any more.
    """

    def __init__(
        self,
        channel: ScriptChannel,
        sidecar_id: int,
        task: Task,
        tasks: Iterable[Task],
        exit_seconds: float | None,
    ) -> None:
        self.exit_seconds = exit_seconds
        self.functions: list[Callable[[], object]] = []
        self._channel = channel
        self._sidecar_id = sidecar_id
        self._task = task
        names = [str(each) for each in tasks]
        self._workers = {name for name in names if name.startswith("worker/")}
        self._leader = "chief/0" if "chief/0" in names else "worker/0"
        self._clock = JobClock(2 * _POLL_SECONDS)
        self._since: dict[str, float] = {}  # the times from which on a condition has been true

    def run(self) -> None:
        """Watch every second, until the sidecar is lost or this process ends."""
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
        if self._has_lasted("stopped", is_stopped(self._sidecar_id), STOPPED_SECONDS, now):
            self._channel.lose(f"The sidecar of {self._task} was stopped for {STOPPED_SECONDS:g} s.")

    def _end_if_it_waits_for_ever(self, now: float) -> None:
        seconds, failed = self.exit_seconds, self._channel.desired.failed_tasks
        if seconds is not None and self._has_lasted("idle", self._is_idle(), seconds, now):
            _exit(0, f"{self._task} ends: training was over {seconds:g} s ago (ps_exit_seconds)")
        calls = _main_thread_calls() if failed and self._task.task_type != "ps" else []
        is_waiting = calls[:1] == [_CREATE_SESSION] or _CONNECT in calls
        if self._has_lasted("servers", is_waiting, _WAIT_SECONDS, now):
            why = f"it waits for all servers, but {format_tasks(failed)} failed. Give a session device_filters"
            _exit(1, f"{self._task} ends: {why}")
        is_waiting = self._leader in failed and _WAIT_FOR_CHIEF in calls
        if self._has_lasted("chief", is_waiting, _CHIEF_SECONDS, now):
            _exit(1, f"{self._task} ends: its session waits for {self._leader}, which has failed")
        is_waiting = self._workers <= {*failed} and any(call.startswith(_COORDINATOR) for call in calls)
        if self._has_lasted("workers", is_waiting, _WAIT_SECONDS, now):
            _exit(1, f"{self._task} ends: its ClusterCoordinator waits for a worker, but all have failed")

    def _has_lasted(self, what: str, is_true: bool, seconds: float, now: float) -> bool:
        """Return whether the condition named `what` has been true for `seconds`. `is_true` is its value now."""
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
        return self._task.task_type == "worker" and _main_thread_calls()[:1] == [_JOIN]


def _main_thread_calls() -> list[str]:
    """Return the functions on the main thread's stack, the innermost first, such as "server_lib.join"."""
    calls, frame = [], sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        calls.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return calls


def _exit(exit_code: int, why: str) -> None:
    """Run this process's exit functions, print `why`, and end the process. Any thread may call this.

    An exception in the main thread could not end the process, because that thread may wait in C++.
    """
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
    """Ignore SIGTERM in a process that is about to exit, so that the end of the step does not change its exit code.

    Any thread may call this, unlike `signal.signal`.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(_IGNORE))
