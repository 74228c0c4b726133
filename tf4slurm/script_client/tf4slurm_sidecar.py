"""Under plain srun: start and end the sidecar of this script, and end the script if it would wait for ever.

The sidecar is an agent whose "child" is this process (`agent/sidecar.py`). The request is one line of JSON on its
standard input, the answer one line on its standard output. tf4slurm and `tf4slurm_client` share this file, so it runs
with Python 3.6 and imports the standard library only.

These waits have no end. A ps, or a worker that serves a chief, waits in `server.join()`, which never returns. A session
without `device_filters` and a new ParameterServerStrategy wait for each server, also for that of a task that has
failed. A ClusterCoordinator waits until a worker is back, and a MonitoredTrainingSession until the chief has
initialized the variables. A thread, `ScriptWatch`, notices them. It also notices a sidecar that a signal has stopped,
and ends the script's waits at the script channel.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional

STOPPED_SECONDS = 10.0
"""Seconds after which a sidecar that a signal has stopped counts as lost.

Sidecars have the default heartbeat timeout, which is equal, so the launcher then counts the sidecar as lost, too.
"""

_POLL_SECONDS = 1.0
_EXIT_SECONDS = 15.0  # for the exit of a sidecar without the control service
_WAIT_SECONDS = 10.0  # in TensorFlow for a failed task; a session that waits for no server needs less than 1 s
_CHIEF_SECONDS = 40.0  # longer than the 30 s between two checks of TensorFlow for initialized variables
# Calls of TensorFlow that may wait for ever: the innermost one for the first two.
_JOIN, _CREATE_SESSION = "server_lib.join", "session._extend_graph"
_WAIT_FOR_CHIEF = "session_manager.wait_for_session"
_CONNECT, _COORDINATOR = "parameter_server_strategy_v2._connect_to_cluster", "cluster_coordinator."
_IGNORE = 1  # SIG_IGN of signal.h
# Not "-m": a json.py in the user's directory would replace Python's own.
_MAIN = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from tf4slurm.{} import main; main()"
)
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_watches: "List[ScriptWatch]" = []


# The sidecar


def start_sidecar(
    program: str,
    request: Mapping[str, object],
    *,
    python: str = sys.executable,
    environ: Optional[Mapping[str, str]] = None,
    in_own_session: bool = False,
) -> "subprocess.Popen[str]":
    """Start a sidecar, and send it a request.

    Args:
        program: The module of tf4slurm whose `main` is the sidecar's program, such as "launch.sidecar_program".
        request: Values for JSON.
        python: A Python that has what tf4slurm needs.
        environ: The environment variables of the sidecar. Default: those of this process.
        in_own_session: Start the sidecar in a session of its own, so that Ctrl-Z in the terminal does not stop it.
    """
    sidecar = subprocess.Popen(
        [python, "-c", _MAIN.format(program), _HOME],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
        start_new_session=in_own_session,
    )
    assert sidecar.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the sidecar has exited, and its answer is missing
        print(json.dumps(request), file=sidecar.stdin, flush=True)  # an argument could be too long
    return sidecar


def read_line(sidecar: "subprocess.Popen[str]", timeout_seconds: float) -> str:
    """Return the first line that the sidecar prints, or "" if the sidecar exits, is stopped, or prints none in time."""
    assert sidecar.stdout is not None
    poll = select.poll()
    poll.register(sidecar.stdout)
    has_answered = _wait_for_sidecar(sidecar, lambda seconds: bool(poll.poll(int(1000 * seconds))), timeout_seconds)
    return sidecar.stdout.readline() if has_answered else ""


def send_end(sidecar: "subprocess.Popen[str]", text: str) -> None:
    """Send the sidecar how this process has ended. `text` is what the sidecar's class expects."""
    assert sidecar.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        sidecar.stdin.write(text)
        sidecar.stdin.close()


def wait_for_exit(sidecar: "subprocess.Popen[str]", timeout_seconds: Optional[float]) -> None:
    """Wait for the sidecar's exit. Kill it at the timeout, or if a signal has stopped it for 10 s.

    `timeout_seconds` is None for no limit.
    """
    if not _wait_for_sidecar(sidecar, functools.partial(_has_exited, sidecar), timeout_seconds):
        sidecar.kill()
        sidecar.wait()


def end_script_sidecar(sidecar: "subprocess.Popen[str]", owner: int, *, runs_service: bool) -> None:
    """At the exit of this process, report to the sidecar whether it failed, and wait for the sidecar's exit.

    A sidecar that does not exit within 15 s is killed. That of rank 0 has no time limit. Each sidecar is killed if a
    signal has stopped it for 10 s.

    Args:
        sidecar: The sidecar.
        owner: Id of the process that has started the sidecar. Do nothing in a fork of that process.
        runs_service: The sidecar runs the control service: it is that of rank 0.
    """
    if os.getpid() != owner:
        return
    send_end(sidecar, "1" if hasattr(sys, "last_value") else "0")
    if runs_service:
        ignore_termination()  # the sidecar may end the step
    # Rank 0's sidecar runs until all tasks have ended.
    wait_for_exit(sidecar, None if runs_service else _EXIT_SECONDS)


def _has_exited(sidecar: "subprocess.Popen[str]", timeout_seconds: float) -> bool:
    try:
        sidecar.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_for_sidecar(
    sidecar: "subprocess.Popen[str]", wait: Callable[[float], bool], timeout_seconds: Optional[float]
) -> bool:
    """Wait for the sidecar's answer or exit. Return whether that has happened.

    False is returned at the timeout, or if a signal has stopped the sidecar for 10 s.

    Args:
        sidecar: The sidecar.
        wait: Waits for the answer or exit, at most the given time in seconds. Returns whether it has happened.
        timeout_seconds: Timeout in seconds. None for no limit.
    """
    left, stopped_seconds = math.inf if timeout_seconds is None else timeout_seconds, 0.0
    while left > 0 and stopped_seconds < STOPPED_SECONDS:
        if wait(_POLL_SECONDS):
            return True
        left -= _POLL_SECONDS
        stopped_seconds = stopped_seconds + _POLL_SECONDS if is_stopped(sidecar.pid) else 0.0
    return False


def is_stopped(process_id: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process. After the process has ended, return False."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


# The thread that watches the sidecar and the script


def watch_sidecar(
    channel: Any, sidecar_id: int, task: object, tasks: Iterable[object], exit_seconds: Optional[float]
) -> None:
    """Start a thread that watches the sidecar and this process, which runs the script of `task`.

    Arguments are those of `ScriptWatch`.
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
        self, channel: Any, sidecar_id: int, task: object, tasks: Iterable[object], exit_seconds: Optional[float]
    ) -> None:
        """Prepare the watch.

        Args:
            channel: The channel to the sidecar, of tf4slurm or of `tf4slurm_client`.
            sidecar_id: Process ID of the sidecar.
            task: The task of this process, such as "worker/0".
            tasks: All tasks of the cluster.
            exit_seconds: The attribute `exit_seconds`.
        """
        self.exit_seconds = exit_seconds
        self.functions: List[Callable[[], object]] = []
        self._channel = channel
        self._sidecar_id = sidecar_id
        self._task = str(task)
        self._task_type = self._task.partition("/")[0]
        names = [str(each) for each in tasks]
        self._workers = {name for name in names if name.startswith("worker/")}
        self._leader = "chief/0" if "chief/0" in names else "worker/0"
        self._since: Dict[str, float] = {}  # the times from which on a condition has been true

    def run(self) -> None:
        """Watch every second, until the sidecar is lost or this process ends. Pauses of this process do not count."""
        now, last = 0.0, time.monotonic()
        with contextlib.suppress(ConnectionError):
            while True:
                self._channel.wait_until(lambda: False, _POLL_SECONDS)
                now += min(time.monotonic() - last, 2 * _POLL_SECONDS)
                last = time.monotonic()
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
        calls = _main_thread_calls() if failed and self._task_type != "ps" else []
        is_waiting = calls[:1] == [_CREATE_SESSION] or _CONNECT in calls
        if self._has_lasted("servers", is_waiting, _WAIT_SECONDS, now):
            why = f"it waits for all servers, but {', '.join(failed)} failed. Give a session device_filters"
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
        if self._task_type == "ps":
            return bool(desired.is_training_over)
        return self._task_type == "worker" and _main_thread_calls()[:1] == [_JOIN]


def _main_thread_calls() -> List[str]:
    """Return the functions on the main thread's stack, the innermost first, such as "server_lib.join"."""
    calls, frame = [], sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = os.path.splitext(os.path.basename(frame.f_code.co_filename))[0]
        calls.append(f"{module}.{frame.f_code.co_name}")
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
