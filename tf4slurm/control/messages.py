"""The messages between tasks and control service, as frozen values, and their encoding (JSON).

A message describes a state, never a change: after a broken connection each side sends its current state again, and a
repeated message has no effect. Within one call, each `ObservedState` contains only the fields that changed since the
previous one. The empty message is a heartbeat: the service sends it as a request, and a task that has nothing else to
send answers with it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.errors import MessageError
from tf4slurm.spec import StopSignal

logger = logging.getLogger(__name__)

SERVICE = "tf4slurm.Control"
METHOD = "Connect"
"""The one gRPC method: a task sends `Registration` and `ObservedState`, the service `DesiredState` and the cluster."""

TOKEN_METADATA = "tf4slurm-token"  # noqa: S105
"""The metadata key of the job's token, which each call carries."""

HEARTBEAT = b""
"""The message that requests a heartbeat, and the answer of a task that has nothing else to send."""

MAX_STATE_BYTES = 131_072
"""The largest encoded `ObservedState` that the service accepts; see `shrink`."""

_MAX_CLUSTER_BYTES = 32 * 2**20  # uncompressed; 100,000 tasks take half of it
_COMPRESSION_LEVEL = 6
_MAX_DETAIL_CHARACTERS = 4_000

TaskState = Literal["registered", "ready", "not_ready", "running", "exited", "terminated"]


@dataclass(frozen=True)
class Registration:
    """A task's first message: its rank and process, and the address at which its child process will listen.

    Attributes:
        incarnation: Identifies this process; a later process of the same rank has another.
        failure: Why this task cannot take part, in a sentence; None if it can.
        owns_child: Whether the agent starts and terminates the child process. False for the sidecar of a script that
            srun started.
    """

    rank: int
    node: str
    host: str
    port: int
    incarnation: str
    version: str
    failure: str | None = None
    owns_child: bool = True


@dataclass(frozen=True)
class BarrierArrival:
    """A script waits at the barrier `name` for all tasks of these `roles` (empty: all tasks that run the script).

    `token` identifies this call of `barrier`, in this process or in the one that replaced it.
    """

    name: str
    token: str
    timeout_seconds: float
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptState:
    """What a script has reported through tf4slurm's functions.

    Attributes:
        step: The latest training step; `metrics` has the metrics of that step, as (name, value).
        handles_stop: It calls `should_stop` or `on_stop`, so it needs no signal to stop.
        has_saved: The job is to stop, and all callbacks of `on_stop` have returned.
        completion: Its completion signal: it no longer needs the other tasks, because it is done or has failed.
        barrier: The barrier at which it waits.
        stop_signal: The last signal that asks the job to stop and that the script's own process received.
    """

    step: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    handles_stop: bool = False
    has_saved: bool = False
    completion: Literal["done", "failed"] | None = None
    barrier: BarrierArrival | None = None
    stop_signal: StopSignal | None = None


@dataclass(frozen=True)
class Usage:
    """What a child process and its descendants use: resident memory now, processor time since the start.

    `sent_bytes` and `received_bytes` count the TCP connections that other processes made to the child's port.
    """

    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class ObservedState:
    """What a task is doing. Agents send it at once when it changes; steps, metrics and usage go with a heartbeat.

    Attributes:
        state: registered -> ready or not_ready (after the reachability check) -> running -> exited -> running again ...
            -> terminated.
        starts: How many times the child process was started in this attempt.
        process_id: Process id of the child's last start.
        returncode: How the child last ended: its exit code, or minus the number of the signal that killed it.
        detail: Why the task is `not_ready`, why the agent killed the child, or why the agent terminated by itself.
        tail: The last lines that the child printed, if it failed.
        stop_signal: The last signal that asks the job to stop and that the agent received.
        attempt: The attempt that the task takes part in, from 1.
        port: The port at which the child will listen; sent from the second attempt on.
        script: What the running script has reported.
        usage: What the running child uses.
        has_server: A server has answered at the running child's port.
    """

    state: TaskState = "registered"
    starts: int = 0
    process_id: int | None = None
    returncode: int | None = None
    detail: str | None = None
    tail: tuple[str, ...] = ()
    stop_signal: StopSignal | None = None
    attempt: int = 1
    port: int = 0
    script: ScriptState = ScriptState()
    usage: Usage = Usage()
    has_server: bool = False


@dataclass(frozen=True)
class DesiredState:
    """What the launcher wants of a task, and what the task's script may know of the job.

    Attributes:
        attempt: The attempt to take part in. A task in an earlier one ends its child and chooses a new port.
        starts: How many times the child process should have been started in this attempt.
        terminate: Terminate the child (SIGKILL follows SIGTERM after `kill_wait_seconds`), then the agent.
        terminate_reason: Why, in a sentence. `has_timed_out` is set if the cluster did not form in time.
        stop_reason: Why the script should save and stop, within `grace_period_seconds`; empty if it should not.
        released_barrier: Token of the script's last barrier that is over; `barrier_error` says why if it broke.
        is_training_over: No task but the ps needs the other tasks; `failed_tasks` names those of them that failed.
        is_finishing: The job now waits only for roles with a bounded wait (evaluators): they should finish.
    """

    attempt: int = 1
    starts: int = 0
    terminate: bool = False
    kill_wait_seconds: float = 0.0
    terminate_reason: str = ""
    has_timed_out: bool = False
    stop_reason: str = ""
    grace_period_seconds: float = 0.0
    released_barrier: str = ""
    barrier_error: str = ""
    is_training_over: bool = False
    failed_tasks: tuple[str, ...] = ()
    is_finishing: bool = False


Message = Registration | ObservedState | ScriptState | DesiredState
_CLASSES: dict[str, type[Any]] = {each.__name__: each for each in get_args(Message)}
_WITH_FIELDS = {*_CLASSES.values(), BarrierArrival, Usage}
_M = TypeVar("_M", bound=Message)


def encode(message: Message, before: Message | None = None) -> bytes:
    """Encode a message: the fields that differ from `before`, which the receiver has, or from the defaults."""
    content = [type(message).__name__, _changed_fields(message, before)]
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, default=_changed_fields).encode(
        errors="replace"
    )


def decode(payload: bytes, expected: type[_M], before: _M | None = None) -> _M:
    """Decode a message that must be of class `expected`; fields that it does not contain are those of `before`.

    Raises:
        MessageError: Not a message, or of another class, or a field is missing, unknown or of a wrong type.
    """
    try:
        name, fields = json.loads(payload)
        if _CLASSES[name] is not expected:
            raise ValueError(f"expected {expected.__name__}")
        message: _M = _checked(fields, expected, before)
        return message
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _message_error(payload, "control message", error) from error


def shrink(observed: ObservedState, max_bytes: int = MAX_STATE_BYTES) -> ObservedState:
    """Drop log lines, then metrics, then characters of detail, until the encoded state has at most `max_bytes`.

    All other fields always fit: `script_channel.MAX_MESSAGE_BYTES` limits what a script can report to half of it.
    """
    if len(encode(observed)) <= max_bytes:
        return observed
    logger.warning("the state of this task exceeds %d bytes: log lines or metrics are dropped", max_bytes)
    while observed.tail and len(encode(observed)) > max_bytes:
        observed = dataclasses.replace(observed, tail=observed.tail[len(observed.tail) // 2 + 1 :])
    while (metrics := observed.script.metrics) and len(encode(observed)) > max_bytes:
        script = dataclasses.replace(observed.script, metrics=metrics[: len(metrics) // 2])
        observed = dataclasses.replace(observed, script=script)
    if observed.detail is not None and len(encode(observed)) > max_bytes:
        observed = dataclasses.replace(observed, detail=observed.detail[:_MAX_DETAIL_CHARACTERS])
    return observed


def encode_cluster(attempt: int, cluster: Cluster) -> bytes:
    """Encode the cluster of an attempt, compressed: it is the only message whose size grows with the number of tasks.

    The content is [attempt, entries]; see `cluster_to_entries`.
    """
    return zlib.compress(json.dumps([attempt, cluster_to_entries(cluster)]).encode(), _COMPRESSION_LEVEL)


def cluster_to_entries(cluster: Cluster) -> list[tuple[str, int, str, str, int]]:
    """Return the cluster as a value for JSON: (task_type, task_index, node, host, port) of each rank."""
    return [(*member.task, member.node, *member.address) for member in cluster.members]


def cluster_from_entries(entries: Iterable[Sequence[Any]]) -> Cluster:
    """Return the cluster of which `cluster_to_entries` returned these."""
    return Cluster(
        tuple(
            Member(rank, Task(task_type, index), node, Address(host, port))
            for rank, (task_type, index, node, host, port) in enumerate(entries)
        )
    )


def is_encoded_cluster(payload: bytes) -> bool:
    """Whether this message contains a cluster; all other messages are JSON arrays or empty."""
    return payload[:1] not in (b"", b"[")


def decode_cluster(payload: bytes) -> tuple[int, Cluster]:
    """Decode a message of `encode_cluster`; return the attempt and the cluster.

    Raises:
        MessageError: The message is incomplete, too large, or has other content.
    """
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(payload, _MAX_CLUSTER_BYTES)
        if not inflater.eof:
            raise ValueError("it is incomplete or too large")
        attempt, entries = json.loads(content)
        if type(attempt) is not int or {tuple(map(type, entry)) for entry in entries} != {_ENTRY_TYPES}:
            raise TypeError("a field has a wrong type")
        return attempt, cluster_from_entries(entries)
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise _message_error(payload, "cluster spec", error) from error


def _message_error(payload: bytes, expected: str, error: Exception) -> MessageError:
    return MessageError(
        f"{payload[:80]!r} is not a {expected} of this version of tf4slurm ({error}). "
        "Install the same version on all hosts."
    )


_ENTRY_TYPES = (str, int, str, str, int)


def _changed_fields(message: Any, before: Any = None) -> dict[str, Any]:
    """Return the fields whose values differ from those of `before`, or without it from the defaults."""
    known = vars(before) if before is not None else _defaults(message.__class__)
    return {name: value for name, value in vars(message).items() if value != known[name]}


@functools.cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of the fields; computed at first use, because it takes half as long as the module's import."""
    return get_type_hints(kind)


_arguments = functools.cache(get_args)


def _checked(value: Any, hint: Any, before: Any = None) -> Any:
    """Convert a JSON value to the type that a field declares: lists to tuples, objects to the declared class."""
    if hint in _WITH_FIELDS:
        hints = _hints(hint)
        fields = {key: _checked(field, hints[key]) for key, field in value.items()}
        return hint(**fields) if before is None else hint(**{**vars(before), **fields})
    arguments = _arguments(hint)
    origin = getattr(hint, "__origin__", None)
    if type(None) in arguments:  # such as "int | None"
        return None if value is None else _checked(value, arguments[0])
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(_checked(item, kind) for item, kind in zip(value, kinds, strict=True))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if type(value) is not hint and not (type(value) is int and hint is float):
        raise TypeError(f"{value!r} is not {hint}")
    return value
