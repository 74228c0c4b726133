"""What a running script may call: `report`, `should_stop`, `on_stop`, `barrier`, `data_service`, `share_of`.

Most need an agent of tf4slurm; in a script that was started by hand, `report`, `should_stop` and `on_stop` do nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tf4slurm.control.messages import BarrierArrival
from tf4slurm.errors import BarrierError, RendezvousConnectionError, SlurmEnvironmentError
from tf4slurm.script_channel import find_script_channel
from tf4slurm.system.variables import SERVICES_VARIABLE

_MAX_METRICS, _MAX_NAME_CHARACTERS = 100, 100  # a message fits into `agent.script_channel.MAX_MESSAGE_BYTES`
_MAX_BARRIER_CHARACTERS = 1_000
_LATE_SECONDS = 30.0  # how much later than the barrier's timeout its answer may arrive
_N = TypeVar("_N", int, float)
_warned: set[str] = set()


def report(*, step: int | None = None, **metrics: float) -> None:
    """Report the training step, and metrics such as loss=0.2, to the job. Cheap enough for every step.

    The job keeps at most 100 metrics per task, with names of at most 100 characters. Other metrics, and values that are
    not numbers, are left out with one RuntimeWarning, also without an agent. It never raises. With `tf4slurm run
    --stall-timeout SECONDS` the job fails, or starts another attempt, if no task reports a new step for that long.
    """
    changes, complaints = _check_report(step, metrics)
    for subject, text in complaints.items():
        if subject not in _warned:
            _warned.add(subject)
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(f"report() got {text}", RuntimeWarning, stacklevel=2)
    channel = find_script_channel()
    if channel is not None:
        channel.send_soon(**changes)


def should_stop() -> bool:
    """Return whether the job was asked to stop: save and exit then. Call it at every step.

    The job has its grace period to do so (`tf4slurm run --grace-period`). From the first call in the main thread on,
    SIGTERM, SIGUSR1 and SIGUSR2 no longer terminate this process: they are forwarded to its agent and stop the job.
    Signals that the process handles or ignores, as ps and workers under a chief do, are not forwarded. These signals
    still terminate a forked process, such as one of multiprocessing, unless it calls this function too.
    """
    channel = find_script_channel()
    if channel is None:
        return False
    channel.enable_stop_requests()
    return bool(channel.desired.stop_reason)


def on_stop(save: Callable[[], object]) -> None:
    """Call `save()` in a new thread when the job is asked to stop; at once if it has been asked.

    The job ends when these callbacks have returned in all tasks that the job waits for, so `save` must save, not only
    set a flag. Signals are forwarded as by `should_stop`.
    """
    channel = find_script_channel()
    if channel is not None:
        channel.add_stop_callback(save)
        channel.enable_stop_requests()


def barrier(name: str, *, timeout_seconds: float = 300.0, roles: Sequence[str] = ()) -> None:
    """Wait until every task of these roles, by default every task of the job, waits at this barrier.

    A process waits at one barrier at a time. A name may be used again after all tasks have passed.

    Args:
        name: At most 1,000 characters.
        timeout_seconds: How long to wait for the other tasks.
        roles: Such as ("worker",); by default all.

    Raises:
        ValueError: The name is too long.
        BarrierError: A task did not arrive in time, or has ended; the text names it.
        RendezvousConnectionError: This process has no agent, or the agent has exited.
    """
    channel = find_script_channel()
    if channel is None:
        raise RendezvousConnectionError(
            f"Barrier {name!r} needs an agent, and this process has none. Start the script with "
            '"tf4slurm run", or under srun call tf4slurm.get_server_dictionary() first.',
            address="",
        )
    if len(name) > _MAX_BARRIER_CHARACTERS:
        raise ValueError(f"A barrier's name has at most {_MAX_BARRIER_CHARACTERS} characters, this one {len(name)}.")
    token = os.urandom(8).hex()
    channel.send(barrier=BarrierArrival(name, token, float(timeout_seconds), tuple(roles)))
    try:
        if not channel.wait_until(lambda: channel.desired.released_barrier == token, timeout_seconds + _LATE_SECONDS):
            raise BarrierError(f"The launcher did not answer at barrier {name!r} in {timeout_seconds:g} s.", name=name)
        if channel.desired.barrier_error:
            raise BarrierError(f"The barrier broke: {channel.desired.barrier_error}.", name=name)
    finally:
        channel.send(barrier=None)


def data_service() -> str:
    """Return the address of the job's tf.data service, such as "grpc://10.1.0.4:40123".

    Pass it to `tf.data.experimental.service.distribute(processing_mode, service)`; see
    https://www.tensorflow.org/api_docs/python/tf/data/experimental/service.

    Raises:
        SlurmEnvironmentError: The job has no data service.
    """
    for address in json.loads(os.environ.get(SERVICES_VARIABLE, "{}")).get("data-dispatcher", ()):
        return f"grpc://{address}"
    raise SlurmEnvironmentError(
        'This job has no data service. Give "tf4slurm run" (or submit) --data-workers, such as --data-workers 2.',
        variable=SERVICES_VARIABLE,
    )


def share_of(files: Iterable[str | os.PathLike[str]], index: int, count: int) -> list[str]:
    """Return the files that worker `index` of `count` reads: every count-th file by name, from the one at `index` on.

    In one epoch the workers together read each file exactly once. All workers must pass the same files, in any order. A
    restarted worker reads its share from the beginning again.

    Args:
        files: Paths of all files.
        index: 0-based index of this worker.
        count: Number of workers.

    Raises:
        ValueError: A file is named twice, `index` is out of range, or there are fewer files than workers.
        TypeError: `index` is a symbolic tensor.
    """
    names = sort_files(files, count)
    try:
        index = operator.index(index)
    except TypeError:
        raise TypeError(
            f"The index {index!r} is not an integer. Under a ClusterCoordinator it is a tensor: in the function that "
            "makes the dataset, call tf4slurm.tensorflow.worker_files(files) instead."
        ) from None
    if not 0 <= index < count:
        raise ValueError(f"There is no worker {index} of {count}: expected an index from 0 to {count - 1}.")
    return names[index::count]


def sort_files(files: Iterable[str | os.PathLike[str]], count: int) -> list[str]:
    """Return the files sorted by name, for `count` workers.

    Raises:
        ValueError: A file is named twice, or there are fewer files than workers.
    """
    names = sorted(os.fspath(file) for file in files)
    for one, other in itertools.pairwise(names):
        if one == other:
            raise ValueError(f"The file {one!r} is named twice, and would be read twice in an epoch. Name it once.")
    if len(names) < count:
        raise ValueError(
            f"{len(names)} files are too few for {count} workers: some would have nothing to read. Write the data to "
            f"at least {count} files, or share its rows: dataset.shard({count}, index)."
        )
    return names


def _check_report(step: Any, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of ScriptState to change, and for each value that is left out the text of a warning."""
    changes: dict[str, Any] = {}
    complaints: dict[str, str] = {}
    if step is not None and (reached := _to_number("step", step, int, complaints)) is not None:
        changes["step"] = reached
    short = [name for name in metrics if len(name) <= _MAX_NAME_CHARACTERS][:_MAX_METRICS]
    if len(short) < len(metrics):
        complaints["a limit"] = (
            f"{len(metrics)} metrics: the job keeps {len(short)}, with names of at most {_MAX_NAME_CHARACTERS} "
            "characters. Report fewer."
        )
    if metrics:
        numbers = ((name, _to_number(name, metrics[name], float, complaints)) for name in short)
        changes["metrics"] = tuple((name, number) for name, number in numbers if number is not None)
    return changes, complaints


def _to_number(name: str, value: Any, kind: Callable[[Any], _N], complaints: dict[str, str]) -> _N | None:
    try:
        return kind(value)
    except Exception:  # whatever the conversion raises must not end the training
        complaints[name] = f"{name}={reprlib.repr(value)}, which is not a number: it is left out. Report numbers."
        return None
