"""Start, question and end the sidecar of this process: an agent whose "child" is this process (`agent/sidecar.py`).

The request is one line of JSON on the sidecar's standard input, the answer one line on its standard output.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tf4slurm import errors
from tf4slurm.errors import RendezvousError
from tf4slurm.scripts.watch import STOPPED_SECONDS
from tf4slurm.system.proc import is_stopped

_POLL_SECONDS = 1.0
# Not "-m": a json.py in the user's directory would replace Python's own.
_MAIN = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from tf4slurm.{} import main; main()"
)
_HOME = str(Path(errors.__file__).parents[1])


def start_sidecar(
    program: str, request: Mapping[str, object], *, in_own_session: bool = False
) -> subprocess.Popen[str]:
    """Start a sidecar, and send it a request.

    Args:
        program: The module of tf4slurm whose `main` is the sidecar's program, such as "launch.sidecar_program".
        request: Values for JSON.
        in_own_session: Start the sidecar in a session of its own, so that Ctrl-Z in the terminal does not stop it.
    """
    sidecar = subprocess.Popen(
        [sys.executable, "-c", _MAIN.format(program), _HOME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=in_own_session,
    )
    assert sidecar.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the sidecar has exited, and its answer is missing
        print(json.dumps(request), file=sidecar.stdin, flush=True)  # an argument could be too long
    return sidecar


def read_answer(sidecar: subprocess.Popen[str], timeout_seconds: float) -> dict[str, Any]:
    """Return the sidecar's answer.

    Raises:
        RendezvousError: The sidecar exits, is stopped, or sends no answer in time.
        Exception: The error that the sidecar has sent, with its type if `errors` has it, else RendezvousError.
    """
    line = read_line(sidecar, timeout_seconds)
    missing = ["RendezvousError", "The sidecar exited, or is stopped.", {}]
    answer: dict[str, Any] = json.loads(line) if line else {"error": missing}
    if "error" in answer:
        name, message, facts = answer["error"]
        kind = getattr(errors, name, None)
        raise kind(message, **facts) if kind else RendezvousError(f"The sidecar failed: {name}: {message}")
    return answer


def read_line(sidecar: subprocess.Popen[str], timeout_seconds: float) -> str:
    """Return the first line that the sidecar prints, or "" if the sidecar exits, is stopped, or prints none in time."""
    assert sidecar.stdout is not None
    poll = select.poll()
    poll.register(sidecar.stdout)
    has_answered = _wait_for_sidecar(sidecar, lambda seconds: bool(poll.poll(1000 * seconds)), timeout_seconds)
    return sidecar.stdout.readline() if has_answered else ""


def send_end(sidecar: subprocess.Popen[str], text: str) -> None:
    """Send the sidecar how this process has ended. `text` is what the sidecar's class expects."""
    assert sidecar.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        sidecar.stdin.write(text)
        sidecar.stdin.close()


def wait_for_exit(sidecar: subprocess.Popen[str], timeout_seconds: float | None) -> None:
    """Wait for the sidecar's exit. Kill it at the timeout, or if a signal has stopped it for 10 s.

    `timeout_seconds` is None for no limit.
    """
    if not _wait_for_sidecar(sidecar, functools.partial(_has_exited, sidecar), timeout_seconds):
        sidecar.kill()
        sidecar.wait()


def _has_exited(sidecar: subprocess.Popen[str], timeout_seconds: float) -> bool:
    try:
        sidecar.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_for_sidecar(
    sidecar: subprocess.Popen[str], wait: Callable[[float], bool], timeout_seconds: float | None
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
