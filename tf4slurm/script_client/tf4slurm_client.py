"""The functions of tf4slurm for scripts whose Python lacks tf4slurm: `import tf4slurm_client`.

`report`, `should_stop`, `on_stop`, `barrier`, `signal_done` and `get_server_dictionary` mean the same as in tf4slurm,
and so do the errors. `tf4slurm run` and the other ways to start a job put this file on the search path of each script,
and `tf4slurm client` does so for plain srun. It needs only the standard library of Python 3.6 or newer.
"""

import atexit
import contextlib
import json
import os
import reprlib
import warnings
from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import tf4slurm_channel as channels
from tf4slurm_channel import (
    MAX_METRICS,
    BarrierError,
    InterfaceError,
    PlacementError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    ShutdownError,
    SlurmEnvironmentError,
    Tf4SlurmError,
    find_channel,
)
from tf4slurm_sidecar import end_script_sidecar, read_line, start_sidecar, watch_sidecar

__all__ = [
    "BarrierError",
    "InterfaceError",
    "PlacementError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "ServerDictionary",
    "ShutdownError",
    "SlurmEnvironmentError",
    "Tf4SlurmError",
    "barrier",
    "current_server_dictionary",
    "get_server_dictionary",
    "on_stop",
    "report",
    "should_stop",
    "signal_done",
]

_START = 'Start the script with "tf4slurm run", or under srun call get_server_dictionary() first.'
_ANSWER_SECONDS = 15.0  # after the timeout for the cluster; the sidecar has timeouts of its own
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
        raise RendezvousConnectionError(f"Barrier {name!r} needs an agent, and this process has none. {_START}")
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
    if current_server_dictionary().task_type == "ps":
        raise ShutdownError("A ps receives completion signals and sends none.")
    channel = find_channel()
    if channel is None:
        raise ShutdownError("This process has no agent. " + _START)
    channel.signal_done(failed)


# The cluster spec


class ServerDictionary(NamedTuple):
    """The cluster spec, and the type and index of this process's task, as (cluster, task_type, task_index)."""

    cluster: Dict[str, List[str]]
    task_type: str
    task_index: int

    @property
    def training_tasks(self) -> Tuple[str, ...]:
        """All tasks of the cluster spec except the ps, such as "worker/0". The chief is first."""
        roles = sorted(set(self.cluster) - {"ps"})
        return tuple(f"{role}/{index}" for role in roles for index in range(len(self.cluster[role])))

    @property
    def is_chief(self) -> bool:
        """Whether this task is the chief, or the first worker of a job without a chief."""
        return f"{self.task_type}/{self.task_index}" in self.training_tasks[:1]


_current: List[ServerDictionary] = []
_sidecars: List[Any] = []


def current_server_dictionary() -> ServerDictionary:
    """Return the last result of `get_server_dictionary`, or else the cluster spec of TF_CONFIG.

    Raises:
        SlurmEnvironmentError: There is none of them.
    """
    if not _current and "TF_CONFIG" not in os.environ:
        raise SlurmEnvironmentError("This process has no cluster. " + _START)
    return _current[0] if _current else _read_tf_config()


def get_server_dictionary(
    tasks: Union[Sequence[str], Mapping[str, int]],
    infiniband: bool = False,
    *,
    interface: Optional[str] = None,
    ports: Optional[Sequence[int]] = None,
    placement: str = "pack",
    timeout_seconds: float = 300.0,
    directory: str = "runs",
    ps_exit_seconds: Optional[float] = 10.0,
    cancel_on_loss: bool = True,
    hold_ports: str = "auto",
) -> ServerDictionary:
    """Return the cluster spec of this process's Slurm step, and the process's task in it.

    See `tf4slurm.get_server_dictionary`, which has the same arguments. Under plain srun, the sidecar of this process
    runs with tf4slurm's own Python: type `eval "$(tf4slurm client)"` before srun.

    Raises:
        SlurmEnvironmentError: This process is neither a task of a Slurm step nor started by an agent. Or
            TF4SLURM_PYTHON is not set.
        PlacementError: `tasks` does not fit the tasks of the step or the launcher's, or has an unknown type.
        InterfaceError: The interface does not exist.
        RendezvousTimeoutError: Some tasks, which the message names, did not register in time.
        RendezvousError: The cluster did not form. The message has the reason.
    """
    counts = dict(tasks) if isinstance(tasks, Mapping) else dict(Counter(tasks))
    if "TF4SLURM_TASK" in os.environ:
        _current[:] = [_read_tf_config()]
        given = {role: len(addresses) for role, addresses in _current[0].cluster.items()}
        asked = {role: count for role, count in counts.items() if count and role != "evaluator"}
        if asked != given:
            raise PlacementError(
                f"The script asks for {asked}, but was launched with {given}. Change the script or the launcher's "
                "options."
            )
        return _current[0]
    request = {
        "counts": counts,
        "placement": placement if isinstance(tasks, Mapping) else ",".join(tasks),
        "directory": str(directory),
        "number": len(_sidecars) + 1,  # the same in all tasks, which make the same calls
        "interface": "infiniband" if infiniband else interface,
        "ports": list(ports or ()),
        "timeout_seconds": timeout_seconds,
        "cancels_step": cancel_on_loss,
        "hold_ports": hold_ports,
    }
    _current[:] = [_form_cluster(request, timeout_seconds, ps_exit_seconds)]
    return _current[0]


def _form_cluster(request: Dict[str, Any], timeout_seconds: float, exit_seconds: Optional[float]) -> ServerDictionary:
    """Start this process's sidecar, which forms the step's cluster. Return the cluster spec."""
    if "TF4SLURM_PYTHON" not in os.environ:
        raise SlurmEnvironmentError(
            'TF4SLURM_PYTHON is not set, and this process has no agent. Type: eval "$(tf4slurm client)" before srun, '
            'or start the script with "tf4slurm run".'
        )
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environ["PYTHONPATH"] = os.environ.get("TF4SLURM_PYTHONPATH", "")
    sidecar = start_sidecar("launch.sidecar_program", request, python=os.environ["TF4SLURM_PYTHON"], environ=environ)
    _sidecars.append(sidecar)
    ranks: List[int] = []  # the sidecar of rank 0 runs the control service
    atexit.register(lambda owner: end_script_sidecar(sidecar, owner, runs_service=ranks == [0]), os.getpid())
    line = read_line(sidecar, timeout_seconds + _ANSWER_SECONDS)
    missing = ["RendezvousError", "The sidecar exited, or is stopped."]
    answer: Dict[str, Any] = json.loads(line) if line else {"error": missing}
    ranks.append(answer.get("rank", -1))
    if "error" in answer:
        name, message = answer["error"][:2]
        kind = getattr(channels, name, None)
        raise kind(message) if kind else RendezvousError(f"The sidecar failed: {name}: {message}")
    os.environ[channels.CHANNEL_VARIABLE] = answer["channel"]
    os.environ.update(answer["environment"])
    cluster: Dict[str, List[str]] = {}
    for _, role, _, _, host, port in sorted(answer["entries"], key=lambda entry: (entry[1], entry[2])):
        if role != "evaluator":
            cluster.setdefault(role, []).append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    names = {position + gap: (role, index) for position, (gap, role, index, *_) in enumerate(answer["entries"])}
    result = ServerDictionary(cluster, *names[answer["rank"]])
    channel = find_channel()
    if channel is not None:
        task = f"{result.task_type}/{result.task_index}"
        tasks = [f"{role}/{index}" for role, index in names.values()]
        watch_sidecar(channel, sidecar.pid, task, tasks, exit_seconds)
    return result


def _read_tf_config() -> ServerDictionary:
    config = json.loads(os.environ["TF_CONFIG"])
    return ServerDictionary(config["cluster"], config["task"]["type"], config["task"]["index"])


# The arguments of report()


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
