"""The tasks of a step agreeing on a map among themselves: each script has a sidecar that does it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf4slurm import errors
from tf4slurm.agent.registration import JoinSettings
from tf4slurm.cluster import Cluster
from tf4slurm.control.messages import Map
from tf4slurm.errors import RendezvousError
from tf4slurm.slurm.step import SlurmStep
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE

_LEAVE_SECONDS = 15.0
# Not "-m tf4slurm.sidecar": that would let a json.py in the user's directory take the place of Python's own.
_MAIN = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from tf4slurm.agent.sidecar import main; main()"
)
_HOME = str(Path(errors.__file__).parents[1])
_companions: list[subprocess.Popen[str]] = []


def agree(counts: Mapping[str, int], placement: str, settings: JoinSettings, step: SlurmStep) -> Cluster:
    """Agree with the other tasks of the step on the cluster; afterwards `script.py` has its line to them.

    The sidecar process goes on until this process ends. Where this is rank 0, and its script waits for the others or
    tells them its end, the process does not exit before they have: its sidecar serves them.

    Raises:
        Tf4SlurmError: What kept the tasks from agreeing, whatever it was.
    """
    number = len(_companions) + 1  # every task calls as often
    if number > 1:
        settings = dataclasses.replace(settings, run_directory=f"{settings.run_directory}.{number}")
    request = {"counts": dict(counts), "placement": placement, "settings": dataclasses.asdict(settings)}
    sidecar = subprocess.Popen(
        [sys.executable, "-c", _MAIN, _HOME, json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _companions.append(sidecar)
    atexit.register(_let_go, sidecar, is_host=step.rank == 0)
    assert sidecar.stdout is not None
    line = sidecar.stdout.readline()  # its own limits see to it that this comes
    answer: dict[str, Any] = json.loads(line) if line else {"error": ["RendezvousError", "The sidecar ended.", {}]}
    if "error" in answer:
        raise _rebuild(*answer["error"])
    os.environ[SCRIPT_CHANNEL_VARIABLE] = answer["line"]
    return Map(1, tuple(map(tuple, answer["entries"]))).to_cluster()


def _let_go(sidecar: subprocess.Popen[str], *, is_host: bool) -> None:
    """This process ends: its sidecar leaves."""
    assert sidecar.stdin is not None
    with contextlib.suppress(OSError):
        sidecar.stdin.close()
    try:
        sidecar.wait(None if is_host else _LEAVE_SECONDS)  # the host stays until all have left, or are dead
    except subprocess.TimeoutExpired:
        sidecar.kill()
        sidecar.wait()


def _rebuild(name: str, message: str, facts: dict[str, object]) -> Exception:
    """Return the error that the sidecar met."""
    kind: type[Exception] = getattr(errors, name, getattr(builtins, name, RendezvousError))
    error: Exception = kind.__new__(kind)
    Exception.__init__(error, message)
    vars(error).update(facts)
    return error
