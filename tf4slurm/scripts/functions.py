"""Functions that a running script may call.

Without an agent, `report` only checks its arguments, `on_stop` does nothing, and `should_stop` returns False.
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
from tf4slurm.scripts.channel import MAX_METRICS, find_script_channel
from tf4slurm.system.variables import SERVICES_VARIABLE

_MAX_NAME_CHARACTERS = 100
_MAX_STEP = 10**15
_MAX_BARRIER_CHARACTERS = 1_000
_LATE_SECONDS = 30.0  # extra time for the launcher's answer after the barrier's timeout
_warned: set[str] = set()
_T = TypeVar("_T")


def report(*, step: int | None = None, **metrics: float) -> None:
    """Send the training step, and metrics such as loss=0.2, to the job. A call takes about 10 µs.

    The run directory and the job's report contain every value, up to a limit for each task: 20,000 numbers divided by
    the number of tasks, but at least 100. Beyond it, neighbouring calls are merged, and the last, lowest and highest
    values are kept. The job keeps at most 100 metrics per task, with names of at most 100 characters. Other metrics,
    and values that are not numbers, are dropped with a RuntimeWarning, once for each name. This function never raises
    an exception. With `tf4slurm run --stall-timeout SECONDS`, the job fails or starts another attempt if no task
    reports a new step in time.
    """
    found, numbers, complaints = _check_report(step, metrics)
    for subject, text in complaints.items():
        if subject not in _warned:
            _warned.add(subject)
            with contextlib.suppress(Warning):  # if warnings are turned into errors
                warnings.warn(f"report() got {text}", RuntimeWarning, stacklevel=2)
    channel = find_script_channel()
    if channel is not None:
        channel.report(found, numbers)


def should_stop() -> bool:
    """Return whether the job was asked to stop. If so, save and exit. Call this function at every step.

    The script has the grace period of the job to save (`tf4slurm run --grace-period`). If the first call of this
    function or `on_stop` is in the main thread, then SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 stop the job, and no longer
    terminate this process. That excludes signals that the process handles or ignores. Under `tf4slurm run`, a ps, and a
    worker of a job with a chief, ignore all of them. The signals still terminate a forked process, such as one of
    multiprocessing, unless that process calls this function too.
    """
    channel = find_script_channel()
    if channel is None:
        return False
    channel.enable_stop_requests()
    return bool(channel.desired.stop_reason)


def on_stop(save: Callable[[], object]) -> None:
    """Call `save()` in a new thread when the job is asked to stop, or at once if the request was earlier.

    The job may end as soon as the callbacks of all tasks that it waits for have returned. So `save` must return only
    after it has saved. An exception in `save` is printed. A task with several processes has saved when each process
    that calls `should_stop` or `on_stop` has saved or ended. Signals are handled as after `should_stop`.
    """
    channel = find_script_channel()
    if channel is not None:
        channel.add_stop_callback(save)
        channel.enable_stop_requests()


def barrier(name: str, *, timeout_seconds: float = 300.0, roles: Sequence[str] = ()) -> None:
    """Wait until all tasks of these roles, by default all tasks that run a script, have reached this barrier.

    Joined workers are not waited for. A process waits at one barrier at a time. If several processes of a script wait,
    the task arrives at their barriers one after another, in the order of the calls. A name may be used again after all
    tasks have passed.

    Args:
        name: Name of the barrier. This name and those of the roles have at most 1,000 characters together.
        timeout_seconds: Seconds after this call at which the barrier breaks for all tasks that wait (default 300).
        roles: Roles of the waiting tasks, such as ("worker",).

    Raises:
        ValueError: The names are too long.
        BarrierError: A task, named in the message, did not arrive in time or has ended. Or this task has none of the
            roles, or the launcher did not answer.
        RendezvousConnectionError: This process has no agent, or the agent has exited.
    """
    channel = find_script_channel()
    if channel is None:
        raise RendezvousConnectionError(
            f"Barrier {name!r} needs an agent, and this process has none. Start the script with "
            '"tf4slurm run", or under srun call tf4slurm.get_server_dictionary() first.'
        )
    roles = tuple(dict.fromkeys(roles))
    if (length := sum(map(len, (name, *roles)))) > _MAX_BARRIER_CHARACTERS:
        raise ValueError(
            f"The names of a barrier and its roles have at most {_MAX_BARRIER_CHARACTERS} characters, these {length}."
        )
    token = os.urandom(8).hex()
    channel.send(barrier=BarrierArrival(name, token, float(timeout_seconds), roles))
    try:
        if not channel.wait_until(lambda: channel.desired.released_barrier == token, timeout_seconds + _LATE_SECONDS):
            raise BarrierError(f"The launcher did not answer at barrier {name!r} in {timeout_seconds:g} s.")
        if channel.desired.barrier_error:
            raise BarrierError(f"The barrier broke: {channel.desired.barrier_error}.")
    finally:
        channel.send(barrier=None)


def data_service() -> str:
    """Return the address of the job's tf.data service, such as "grpc://10.1.0.4:40123".

    See https://www.tensorflow.org/api_docs/python/tf/data/experimental/service/distribute.

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
    """Return the files of worker `index`: every `count`-th file in the order of names, starting at position `index`.

    Together, `count` workers that pass the same files, in any order, read each file exactly once per epoch. A restarted
    worker reads its share from the beginning again.

    Raises:
        ValueError: A file is named twice, `index` is out of range, or there are fewer files than workers.
        TypeError: `index` is not an integer. Under a ClusterCoordinator it is a symbolic tensor.
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
    """Return the files sorted by name. Check that there are at least `count`, the number of workers.

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


def _check_report(step: Any, metrics: Mapping[str, Any]) -> tuple[int | None, dict[str, float], dict[str, str]]:
    """Check the arguments of `report`. Return the step, the valid metrics, and the warnings.

    The warnings are texts by the name of the value that is dropped.
    """
    complaints: dict[str, str] = {}
    short = [name for name in metrics if len(name) <= _MAX_NAME_CHARACTERS][:MAX_METRICS]
    if len(short) < len(metrics):
        complaints["a limit"] = (
            f"{len(metrics)} metrics: the job keeps {len(short)}, with names of at most {_MAX_NAME_CHARACTERS} "
            "characters. Report fewer."
        )
    reached = None if step is None else _convert("step", step, _to_step, complaints)
    numbers = {name: _convert(name, metrics[name], float, complaints) for name in short}
    return reached, {name: number for name, number in numbers.items() if number is not None}, complaints


def _convert(name: str, value: Any, convert: Callable[[Any], _T], complaints: dict[str, str]) -> _T | None:
    """Return `convert(value)`. If it fails, add a warning to `complaints`, under the metric's name, and return None."""
    try:
        return convert(value)
    except Exception:
        shown = f"an object of class {type(value).__name__}"
        with contextlib.suppress(Exception):
            shown = reprlib.repr(value)
        complaints[name] = f"{name}={shown}, which is not a number: it is left out. Report numbers."
        return None


def _to_step(value: Any) -> int:
    step = int(value)
    if abs(step) > _MAX_STEP:
        raise OverflowError
    return step
