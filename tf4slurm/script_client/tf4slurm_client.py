"""The functions of tf4slurm for scripts whose Python lacks tf4slurm: `import tf4slurm_client`.

`report`, `should_stop`, `on_stop`, `barrier` and `signal_done` mean the same as in tf4slurm, and so do the errors.
`tf4slurm run` and the other ways to start a job put this file on the search path of each script. It needs only the
standard library of Python 3.6 or newer.
"""

import contextlib
import json
import os
import reprlib
import warnings
from typing import Any, Callable, Dict, Optional, Sequence, Set

from tf4slurm_channel import (
    MAX_METRICS,
    BarrierError,
    RendezvousConnectionError,
    RendezvousError,
    ShutdownError,
    SlurmEnvironmentError,
    Tf4SlurmError,
    find_channel,
)

__all__ = [
    "BarrierError",
    "RendezvousConnectionError",
    "RendezvousError",
    "ShutdownError",
    "SlurmEnvironmentError",
    "Tf4SlurmError",
    "barrier",
    "on_stop",
    "report",
    "should_stop",
    "signal_done",
]

_LATE_SECONDS = 30.0  # extra time for the launcher's answer after the barrier's timeout
_MAX_NAME_CHARACTERS = 100
_MAX_STEP = 10**15
_MAX_BARRIER_CHARACTERS = 1000

_warned: Set[str] = set()


def report(*, step: Optional[int] = None, **metrics: float) -> None:
    """Send the training step, and metrics such as loss=0.2, to the job. See `tf4slurm.report`.

    Values that are not numbers are dropped with a RuntimeWarning. This function never raises an exception.
    """
    complaints: Dict[str, str] = {}
    short = [name for name in metrics if len(name) <= _MAX_NAME_CHARACTERS][:MAX_METRICS]
    if len(short) < len(metrics):
        text = "{} metrics: the job keeps {}, with names of at most {} characters. Report fewer."
        complaints["a limit"] = text.format(len(metrics), len(short), _MAX_NAME_CHARACTERS)
    reached = None if step is None else _convert("step", step, _to_step, complaints)
    numbers = {name: _convert(name, metrics[name], float, complaints) for name in short}
    for subject in set(complaints) - _warned:
        _warned.add(subject)
        with contextlib.suppress(Warning):  # if warnings are turned into errors
            warnings.warn("report() got " + complaints[subject], RuntimeWarning, stacklevel=2)
    channel = find_channel()
    if channel is not None:
        channel.report(reached, {name: number for name, number in numbers.items() if number is not None})


def should_stop() -> bool:
    """Return whether the job was asked to stop. If so, save and exit. See `tf4slurm.should_stop`."""
    channel = find_channel()
    if channel is None:
        return False
    channel.enable_stop_requests()
    return bool(channel.desired.stop_reason)


def on_stop(save: Callable[[], object]) -> None:
    """Call `save()` in a new thread when the job is asked to stop, or at once if it was. See `tf4slurm.on_stop`."""
    channel = find_channel()
    if channel is not None:
        channel.add_stop_callback(save)
        channel.enable_stop_requests()


def barrier(name: str, *, timeout_seconds: float = 300.0, roles: Sequence[str] = ()) -> None:
    """Wait until all tasks of these roles, by default all tasks that run a script, have reached this barrier.

    See `tf4slurm.barrier`.

    Raises:
        ValueError: The names are too long.
        BarrierError: A task did not arrive in time or has ended, or the launcher did not answer.
        RendezvousConnectionError: This process has no agent, or the agent has exited.
    """
    channel = find_channel()
    if channel is None:
        raise RendezvousConnectionError(
            f'Barrier {name!r} needs an agent, and this process has none. Start the script with "tf4slurm run".'
        )
    roles = list(dict.fromkeys(roles))
    length = sum(map(len, [name, *roles]))
    if length > _MAX_BARRIER_CHARACTERS:
        text = "The names of a barrier and its roles have at most {} characters, these {}."
        raise ValueError(text.format(_MAX_BARRIER_CHARACTERS, length))
    token = os.urandom(8).hex()
    arrival = {"name": name, "token": token, "timeout_seconds": float(timeout_seconds), "roles": roles}
    channel.send(barrier=arrival)
    try:
        if not channel.wait_until(lambda: channel.desired.released_barrier == token, timeout_seconds + _LATE_SECONDS):
            text = "The launcher did not answer at barrier {!r} in {:g} s."
            raise BarrierError(text.format(name, timeout_seconds))
        if channel.desired.barrier_error:
            raise BarrierError(f"The barrier broke: {channel.desired.barrier_error}.")
    finally:
        channel.send(barrier=None)


def signal_done(failed: bool = False) -> None:
    """Send the completion signal of this worker or chief: it needs the ps no longer. See `tf4slurm.shutdown`.

    Only the first signal of a process is sent. After "done", a failure is sent, too.

    Raises:
        ShutdownError: This process is a ps, or has no agent.
        SlurmEnvironmentError: This process has no cluster.
    """
    task_type = _task_type()
    if task_type == "ps":
        raise ShutdownError("A ps receives completion signals and sends none.")
    channel = find_channel()
    if channel is None:
        raise ShutdownError('This process has no agent. Start the script with "tf4slurm run".')
    channel.signal_done(failed)


def _task_type() -> str:
    """Return the role of this process."""
    if "TF_CONFIG" not in os.environ:
        raise SlurmEnvironmentError('This process has no cluster. Start the script with "tf4slurm run".')
    return str(json.loads(os.environ["TF_CONFIG"])["task"]["type"])


def _to_step(value: Any) -> int:
    step = int(value)
    if abs(step) > _MAX_STEP:
        raise OverflowError
    return step


def _convert(name: str, value: Any, convert: Callable[[Any], Any], complaints: Dict[str, str]) -> Any:
    """Return `convert(value)`. If it fails, add a warning to `complaints`, under the metric's name, and return None."""
    try:
        return convert(value)
    except Exception:
        shown = f"an object of class {type(value).__name__}"
        with contextlib.suppress(Exception):
            shown = reprlib.repr(value)
        complaints[name] = f"{name}={shown}, which is not a number: it is left out. Report numbers."
        return None
