"""The messages between tasks and control service, as frozen values, and their encoding (JSON).

A message describes a state, never a change: after a broken connection each side sends its current state again, and a
repeated message has no effect. Within one call an `ObservedState` is sent as the fields that differ from the one
before. The empty message is a heartbeat: the service sends it to request one, and a task without news answers with it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import zlib
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.errors import MessageError

logger = logging.getLogger(__name__)

SERVICE = "tf4slurm.Control"
METHOD = "Join"
"""The one gRPC method: a task sends `Registration` and `ObservedState`, the service `Map` and `DesiredState`."""

TOKEN_METADATA = "tf4slurm-token"
"""The metadata key of the job's token, which each call carries."""

HEARTBEAT = b""
"""The message that requests a heartbeat, and the answer of a task that has nothing else to send."""

MAX_STATUS_BYTES = 131_072
"""The largest message that the service accepts; see `shrink`."""

_MAX_MAP_BYTES = 32 * 2**20  # uncompressed; 100,000 tasks take half of it
_COMPRESSION_LEVEL = 6
_MAX_DETAIL_CHARACTERS = 4_000

StopSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"]
TaskState = Literal["registered", "ready", "not_ready", "running", "exited", "terminated"]


@dataclass(frozen=True)
class Registration:
    """A task's first message: who it is, and where it will listen.

    Attributes:
        incarnation: Tells one process of a rank from a later one.
        failure: Why it cannot take part, in a sentence; None if it can.
        owns_child: Whether the agent starts and terminates the task's process. False for the sidecar of a script that
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
    """A script waits at a barrier: of this name, for the tasks of these roles (all if none), for so many seconds.

    `token` tells one arrival from the next, of this process or of the one that took its place.
    """

    name: str
    token: str
    timeout_seconds: float
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptState:
    """What the script of a task says of itself, where it uses tf4slurm.

    Attributes:
        step: The training step it has reached, and `metrics` of that step, as (name, value).
        heeds_stop: It asks whether to stop, or has given a callback: it needs no signal for that.
        has_saved: It was asked to stop, and all its callbacks have returned.
        done: It has signalled that it needs the others no more, and how its work ended.
        waiting: The barrier at which it waits.
        stop_signal: Name of the last signal that asks the job to stop, and that the script's process has passed on.
    """

    step: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    heeds_stop: bool = False
    has_saved: bool = False
    done: Literal["done", "failed"] | None = None
    waiting: BarrierArrival | None = None
    stop_signal: StopSignal | None = None


@dataclass(frozen=True)
class Usage:
    """What a child, with all its processes, uses: resident memory now, processor time since its start.

    `sent_bytes` and `received_bytes` went over the TCP connections that others made to its port.
    """

    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class ObservedState:
    """What a task is doing; said at every change, and what changes all the time when the service asks.

    Attributes:
        state: joined -> proved or unproved (the addresses asked of it) -> running -> exited -> running again … -> left.
        starts: How often the child was started in this attempt.
        process_id: Of the child's last start.
        returncode: Of the child's last end: its exit code, or minus the number of the signal that ended it.
        detail: What is `not_ready`, why the agent killed a silent child, or why it has left by itself, in a clause.
        tail: The last lines the child printed, once it has failed.
        stop_signal: Name of the signal that asks the job to stop, once the agent has got one.
        attempt: Which forming of the cluster it is in, from 1. In a later one than the first, `port` is where its child
            will listen.
        report: What the running script says of itself.
        serves: A server has answered at the running child's port: its imports are over.
        usage: What the running child uses.
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
    report: ScriptState = ScriptState()
    usage: Usage = Usage()
    serves: bool = False


@dataclass(frozen=True)
class Map:
    """The agreed cluster of an attempt, to be proved; one entry per rank: [task_type, task_index, node, host, port]."""

    attempt: int
    entries: tuple[tuple[str, int, str, str, int], ...]

    @classmethod
    def from_cluster(cls, attempt: int, cluster: Cluster) -> Map:
        return cls(attempt, tuple((*member.task, member.node, *member.address) for member in cluster.members))

    def to_cluster(self) -> Cluster:
        return Cluster(
            tuple(
                Member(rank, Task(task_type, index), node, Address(host, port))
                for rank, (task_type, index, node, host, port) in enumerate(self.entries)
            )
        )


@dataclass(frozen=True)
class DesiredState:
    """What a task should do, and what its script may know.

    Attributes:
        attempt: Be in this forming of the cluster; a task in an earlier one ends its child and takes a new port.
        starts: Have started the child so often.
        leave: End the child, at most `leave_seconds` after SIGTERM, and leave, for this `reason`; `has_timed_out`
            if the cluster did not form in time.
        stop: Why the script should save and stop; empty if it should not. `grace_period_seconds` is how long it has.
        released: Token of the script's last arrival at a barrier that is over, and why if it `broke`.
        is_training_over: No task but the ps still needs the others; `failed` are those of them that failed.
        is_finishing: All that the job waits for are done, but for those it waits for only so long: finish now.
    """

    attempt: int = 1
    starts: int = 0
    leave: bool = False
    leave_seconds: float = 0.0
    reason: str = ""
    has_timed_out: bool = False
    stop: str = ""
    grace_period_seconds: float = 0.0
    released: str = ""
    broke: str = ""
    is_training_over: bool = False
    failed: tuple[str, ...] = ()
    is_finishing: bool = False


Message = Registration | ObservedState | ScriptState | DesiredState
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_WITH_FIELDS = {*_KINDS.values(), BarrierArrival, Usage}
_M = TypeVar("_M", bound=Message)


def encode(message: Message, before: Message | None = None) -> bytes:
    """Return the encoded message: the fields that differ from those of the one `before`, which the reader has."""
    content = [type(message).__name__, _said_fields(message, before)]
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, default=_said_fields).encode(errors="replace")


def decode(payload: bytes, expected: type[_M] | tuple[type[_M], ...], before: _M | None = None) -> _M:
    """Read a message that must be of one of the `expected` kinds (a class, or a tuple of them).

    Where it was written as what differs from the one `before`, that must be given.

    Raises:
        MessageError: Not a message, or another kind, or a field that is missing, unknown or of another type.
    """
    try:
        name, fields = json.loads(payload)
        kind = _KINDS[name]
        if kind not in (expected if isinstance(expected, tuple) else (expected,)):
            raise ValueError(f"{name} is not expected here")
        message: _M = _checked(fields, kind, before)
        return message
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MessageError(
            f"{payload[:80]!r} is not a control message of this version of tf4slurm ({error}). "
            "Install the same version on all hosts."
        ) from error


def shrink(status: ObservedState, max_bytes: int = MAX_STATUS_BYTES) -> ObservedState:
    """Return the status with fewer log lines, metrics and characters of detail, until it has at most `max_bytes`.

    The rest always fits: a script's report is at most half as long, see `line.MAX_REPORT_BYTES`.
    """
    if len(encode(status)) <= max_bytes:
        return status
    logger.warning("the status of this task exceeds %d bytes: log lines or metrics are left out of it", max_bytes)
    while status.tail and len(encode(status)) > max_bytes:
        status = dataclasses.replace(status, tail=status.tail[len(status.tail) // 2 + 1 :])
    while (metrics := status.report.metrics) and len(encode(status)) > max_bytes:
        report = dataclasses.replace(status.report, metrics=metrics[: len(metrics) // 2])
        status = dataclasses.replace(status, report=report)
    if status.detail is not None and len(encode(status)) > max_bytes:
        status = dataclasses.replace(status, detail=status.detail[:_MAX_DETAIL_CHARACTERS])
    return status


def encode_map(map_: Map) -> bytes:
    """Return the message with a cluster spec: compressed, for it is the one message that grows with the job."""
    return zlib.compress(json.dumps([map_.attempt, map_.entries]).encode(), _COMPRESSION_LEVEL)


def is_encoded_map(payload: bytes) -> bool:
    """Whether this is a message with a cluster spec; all other messages are JSON arrays or empty."""
    return payload[:1] not in (b"", b"[")


def decode_map(payload: bytes) -> Map:
    """Read a message with a cluster spec.

    Raises:
        MessageError: It is incomplete, too large, or no cluster spec.
    """
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(payload, _MAX_MAP_BYTES)
        if not inflater.eof:
            raise ValueError("it is incomplete, or too large")
        attempt, entries = json.loads(content)
        map_ = Map(attempt, tuple(map(tuple, entries)))
        if type(attempt) is not int or {tuple(map(type, entry)) for entry in map_.entries} != {_ENTRY_TYPES}:
            raise TypeError("its fields have other types")
        return map_
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        text = f"{payload[:80]!r} is not a cluster spec of this version of tf4slurm ({error})."
        raise MessageError(f"{text} Install the same version on all hosts.") from error


_ENTRY_TYPES = (str, int, str, str, int)


def _said_fields(message: Any, before: Any = None) -> dict[str, Any]:
    """Return the fields that differ from those before, or else from what a reader takes without them."""
    known = vars(before) if before is not None else _defaults(message.__class__)
    return {name: value for name, value in vars(message).items() if value != known[name]}


@functools.cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of its fields; when they are first needed, for they take as long to find as half an import."""
    return get_type_hints(kind)


_arguments = functools.cache(get_args)


def _checked(value: Any, hint: Any, before: Any = None) -> Any:
    """Return a JSON value as the type that a field declares; lists become tuples, objects the messages they are."""
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
