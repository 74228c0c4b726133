"""Messages between agents and the control service, and between agents and scripts: dataclasses, encoded as JSON.

A message describes a state, never a change (except `StepMetrics`, which a script sends to its agent). After a broken
connection each side sends its current state again, and a repeated message has no effect. Within one call, an encoded
`ObservedState` contains only the fields that have changed since the previous one. The service sends the empty message
to request a heartbeat. The agent answers with its changed state, or with the empty message if nothing has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.control.shard_position import ShardPosition
from tf4slurm.errors import MessageError
from tf4slurm.spec.job_spec import StopSignal
from tf4slurm.system.typed_json import from_exact_json

logger = logging.getLogger(__name__)

SERVICE = "tf4slurm.Control"
METHOD = "Connect"
TOKEN_METADATA = "tf4slurm-token"  # noqa: S105 - the key of the job's token, which each call sends
HEARTBEAT = b""
JOINING_RANK = -1
"""The rank in a joined worker's registration. The service then chooses a rank."""
MAX_STATE_BYTES = 2**20
"""Maximum size of an encoded `ObservedState`. The service refuses larger messages, and `shrink` avoids them."""
MAX_SCRIPT_BYTES = MAX_STATE_BYTES // 2
"""Maximum size of an encoded `ScriptState`, which describes all processes of a script together."""
MAX_POSITION_BYTES = 3 * 2**17
"""Maximum size of an encoded `ShardPosition`. To restore a position, a script sends it in a `ScriptState`, in which it
leaves 128 KiB for other fields."""

_MAX_CLUSTER_BYTES = 32 * 2**20  # uncompressed; 100,000 tasks take half of it
_COMPRESSION_LEVEL = 6
_MAX_DETAIL_CHARACTERS = 4_000

TaskState = Literal["registered", "ready", "not_ready", "running", "exited", "terminated"]
KilledBy = Literal["liveness_probe", "guard", "slurmstepd", "stop"]
"""What ended a child or its agent: the liveness probe, the loss of the agent's guard or slurmstepd, or the end of the
job or of the attempt."""
PortFailure = Literal["taken", "held"]
"""Why a server could not listen on the port of its task: another process listens there, or none does. Then the port is
held by the agent, and the server has none of the options with which it could share the port."""


@dataclass(frozen=True)
class Registration:
    """The first message that a task sends in each gRPC call to the control service.

    It has the task's rank, its process, and the address where its child will listen.

    Attributes:
        incarnation: Id that distinguishes this process from other processes of the same rank.
        failure: The reason why this task cannot take part, as a sentence. None if it can.
        owns_child: Whether the agent starts and terminates the child. False for the sidecar of a plain srun script.
        joined_rank: The rank that the service has chosen for a joined worker. None until the worker knows it.
    """

    rank: int
    node: str
    host: str
    port: int
    incarnation: str
    version: str
    failure: str | None = None
    owns_child: bool = True
    joined_rank: int | None = None


@dataclass(frozen=True)
class BarrierArrival:
    """A script's arrival at a barrier.

    Attributes:
        token: Unique id of the script's call of `barrier()`.
        timeout_seconds: The barrier breaks if this task has waited so long.
        roles: The task types whose tasks must arrive. Empty for all tasks that run a script.
    """

    name: str
    token: str
    timeout_seconds: float
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardRequest:
    """A script's request for data shards. Shards are numbered from 0 through all epochs, in the order of first leases.

    Attributes:
        token: Unique id of the script's `DataShards` object. The object's leases end when a later message of the script
            has no request with this token.
        size: Number of shards of an epoch.
        fingerprint: A hash of the data and the shard size.
        capacity: Number of shards that the script wants to hold at the same time. With 0 it gives all shards back.
        done: Numbers of shards that are done. The script repeats each number until `ShardGrant.held` lacks it.
        start: The position from which to continue. None to begin with the first shard.
        position_request: A number that the script changes to request the current position. See `ShardGrant`.
    """

    name: str
    token: str
    size: int
    epochs: int
    fingerprint: str
    capacity: int = 1
    done: tuple[int, ...] = ()
    start: ShardPosition | None = None
    position_request: int = 0


@dataclass(frozen=True)
class ShardGrant:
    """The launcher's answer to a `ShardRequest` of the same `token`.

    Attributes:
        held: The numbers of the shards that are leased to the script.
        is_over: All shards are done.
        error: The reason why the request is refused. Empty if it is not.
        position: The position that the script has requested. None again after the next change of the request.
        position_reply: The last `position_request` that the launcher has answered.
    """

    token: str
    held: tuple[int, ...] = ()
    is_over: bool = False
    error: str = ""
    position: ShardPosition | None = None
    position_reply: int = 0


@dataclass(frozen=True)
class CheckpointState:
    """The state of a script's checkpoints, which `tf4slurm.tensorflow.Checkpoints` reports.

    Attributes:
        newest: Path of the newest complete checkpoint, such as "saved/ckpt-300". Empty if there is none.
        step: The step of `newest`.
        num_saves: Number of saves that have ended in this process, including those that failed.
        seconds: Duration of the last save that succeeded. 0 if there was none in this process.
        num_bytes: Size of its files in bytes.
        error: Why the last save failed, as a sentence. Empty if it succeeded.
    """

    newest: str = ""
    step: int = 0
    num_saves: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""

    def __str__(self) -> str:
        """Return the state for a terminal, such as "saved/ckpt-300 (1,600.0 MB in 2.2 s)"."""
        text = self.newest or "none yet"
        if self.seconds:
            text += f" ({max(self.num_bytes / 1e6, 0.1):,.1f} MB in {self.seconds:.1f} s)"
        return f"{text}. The last save failed: {self.error.removesuffix('.')}" if self.error else text


@dataclass(frozen=True)
class ScriptState:
    """The state that a script has reported by calling tf4slurm's functions.

    Attributes:
        step: The latest training step.
        steps_per_second: The average that the agent makes of the reports (`StepRate`). None before the second.
        metrics: The latest value of each metric, as pairs (name, value).
        handles_stop: The script calls `should_stop` or `on_stop`, so it needs no signal to stop.
        has_saved: All callbacks of `on_stop` have returned after a stop request.
        completion: The completion signal, after which the script no longer needs the other tasks.
        barrier: The barrier at which the script waits.
        stop_signal: The last stop signal that the script's process received.
        shards: The requests for leases of shards.
        workers: The indices of the workers that a chief uses. None if its workers cannot change, or before it has a
            strategy.
        workers_error: The reason why the workers cannot change. Empty if they can, or if the chief has no strategy yet.
        unusable_workers: The index of each joined worker whose first closure failed, and the error of this closure.
        ps_bytes: The bytes of the variables that a chief has created on each ps, by index. Empty if unknown.
        checkpoint: The state of the script's checkpoints. None if it has no `Checkpoints` object.
        is_helper: The process is a fork of another process of the script, or multiprocessing has started it.
    """

    step: int | None = None
    steps_per_second: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    handles_stop: bool = False
    has_saved: bool = False
    completion: Literal["done", "failed"] | None = None
    barrier: BarrierArrival | None = None
    stop_signal: StopSignal | None = None
    shards: tuple[ShardRequest, ...] = ()
    workers: tuple[int, ...] | None = None
    workers_error: str = ""
    unusable_workers: tuple[tuple[int, str], ...] = ()
    ps_bytes: tuple[int, ...] = ()
    checkpoint: CheckpointState | None = None
    is_helper: bool = False


@dataclass(frozen=True)
class Usage:
    """Resource usage of a child process and its descendants.

    Attributes:
        memory_bytes: Resident memory now.
        cpu_seconds: Processor time since the start.
        sent_bytes, received_bytes: Traffic of all TCP connections to the child's port.
        gpu_percent, gpu_memory_bytes: See `agent.gpu_usage.GpuUsage`.
        num_printed, num_sessions: See `agent.child_log.ChildLog`.
    """

    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    num_printed: int = 0
    num_sessions: int = 0


WAIT_SECONDS = 30.0
"""Seconds for which an agent reports a wait after a line about it. TensorFlow repeats the line every 10 s."""


@dataclass(frozen=True)
class ObservedState:
    """The observed state of a task. Its agent sends changes at once, but steps, metrics and usage with heartbeats.

    Attributes:
        state: registered -> ready or not_ready (after the reachability check, or without a port) -> running -> exited
            -> running again ... -> terminated.
        start_count: How many times the child was started in this attempt.
        process_id: Process id of the last child.
        returncode: Exit code of the last child, or minus the number of the signal that killed it.
        killed_by: What ended the child or its agent. None if the child ended by itself. A sidecar sends why Slurm does
            not notice the end of the script: the script is suspended ("liveness_probe"), or its slurmstepd is lost.
        exit_age_seconds: Seconds from the child's exit until this message was sent.
        detail: `killed_by`, or the reason why the task is `not_ready`, in words. No rule reads this text.
        tail: The last lines of a child that failed.
        failure: What ended a child that failed. It arrives with `tail`.
        port_failure: Why the server of a child that failed could not listen. None if it could, or if that is unknown.
        stop_signal: The last stop signal that the agent received.
        attempt: The attempt in which the task takes part, from 1.
        port: The port where the child will listen. Sent from the second attempt on: the registration has the first.
        script, usage: The state and resource usage of the running child.
        has_server: A server has answered at the port of the running child.
        printed_nothing: The last child has exited with 0 and printed nothing.
        waits_for: The tasks, such as "worker/0", for which the running child waits. TensorFlow has printed that within
            the last `WAIT_SECONDS`. See `jobs.waiting_lines`.
        next_chief_seconds: The process of an external chief has left, and asks the job to start ps and workers again
            for another chief, which may attach within this time. Sent with the state "terminated". None otherwise.
        is_forked: Whether the preloader has forked the last child (`--preload`).
        not_forked: Why it has not, as a clause. Empty if it has, or if no child is to be forked.
    """

    state: TaskState = "registered"
    start_count: int = 0
    process_id: int | None = None
    returncode: int | None = None
    killed_by: KilledBy | None = None
    exit_age_seconds: float = 0.0
    detail: str | None = None
    tail: tuple[str, ...] = ()
    failure: ScriptFailure | None = None
    port_failure: PortFailure | None = None
    stop_signal: StopSignal | None = None
    attempt: int = 1
    port: int = 0
    script: ScriptState = ScriptState()
    usage: Usage = Usage()
    has_server: bool = False
    printed_nothing: bool = False
    waits_for: tuple[str, ...] = ()
    next_chief_seconds: float | None = None
    is_forked: bool = False
    not_forked: str = ""


@dataclass(frozen=True)
class DesiredState:
    """The desired state of a task, with the facts about the job that its script needs.

    Attributes:
        attempt: The current attempt. A task of an earlier attempt ends its child and chooses a new port.
        start_count: How many times the child should have been started in this attempt.
        terminate: Terminate the child (SIGTERM, then SIGKILL after `JobSpec.kill_wait_seconds`), then the agent.
        terminate_reason: The reason for `terminate`, as a sentence.
        has_timed_out: The reason for `terminate` is that the cluster did not form in time.
        stop_reason: The reason to save and stop within `grace_period_seconds`. Empty without a stop request.
        released_barrier: Token of the script's latest call of `barrier()` whose barrier has ended.
        barrier_error: The reason why this barrier broke. Empty if all tasks arrived.
        shards: The answers to the script's requests for shards.
        is_training_over: No task needs the ps any more.
        failed_tasks: The tasks, other than servers, that had failed when training was over. Under plain srun, those
            that have failed so far.
        have_leaders_ended: The chief has ended or is lost. In a job without a chief, every worker has ended or is lost.
        is_finishing: The job waits only for roles with a bounded wait (evaluators), which should finish now.
        rank: The rank that the service has chosen for a joined worker. None for other tasks.
        exit_code: The exit code of a joined worker that must terminate. For other tasks it is 0, or that of the job if
            Slurm may not notice the end of rank 0. Otherwise the process of rank 0 exits with the code of the job.
        workers: The index and "host:port" of each worker that a chief should use. See `JoinedWorkers.workers`.
        failure_reason: The attempt has failed, as this sentence says, and the job waits for `restart()` of its external
            chief. Empty otherwise.
        releases_ports: Release the port of the task when its child starts, because a server of this job could not share
            a held one.
    """

    attempt: int = 1
    start_count: int = 0
    terminate: bool = False
    terminate_reason: str = ""
    has_timed_out: bool = False
    stop_reason: str = ""
    grace_period_seconds: float = 0.0
    released_barrier: str = ""
    barrier_error: str = ""
    shards: tuple[ShardGrant, ...] = ()
    is_training_over: bool = False
    failed_tasks: tuple[str, ...] = ()
    have_leaders_ended: bool = False
    is_finishing: bool = False
    rank: int | None = None
    exit_code: int = 0
    workers: tuple[tuple[int, str], ...] = ()
    failure_reason: str = ""
    releases_ports: bool = False


Message = Registration | ObservedState | ScriptState | StepMetrics | DesiredState
_M = TypeVar("_M", bound=Message)


def encode(message: Message, before: Message | None = None) -> bytes:
    """Encode the fields of a message that differ from the previous message `before`, or from the defaults."""
    content = [type(message).__name__, changed_fields(message, before)]
    return _encoder.encode(content).encode(errors="replace")


def decode(payload: bytes, expected: type[_M], before: _M | None = None) -> _M:
    """Decode a message of class `expected` from the result of `encode`.

    Fields that the payload lacks keep their values in `before`, the previous message. Without it they have their
    defaults.

    Raises:
        MessageError: The payload is no message of this class.
    """
    try:
        name, fields = json.loads(payload)
        if name != expected.__name__:
            raise ValueError(f"expected {expected.__name__}")
        return from_exact_json(expected, fields, before)
    except (ValueError, TypeError, RecursionError) as error:
        raise _message_error(payload, "control message", error) from error


def shrink(observed: ObservedState, max_bytes: int = MAX_STATE_BYTES) -> ObservedState:
    """Drop lines of `tail`, then metrics, then the end of `detail`, until the encoded state has at most `max_bytes`.

    The other fields always fit, because `MAX_SCRIPT_BYTES` is half of the default limit.
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
    """Encode and compress the cluster of an attempt, the longest message in a job of many tasks."""
    return zlib.compress(json.dumps([attempt, cluster_to_entries(cluster)]).encode(), _COMPRESSION_LEVEL)


def cluster_to_entries(cluster: Cluster) -> list[tuple[int, str, int, str, str, int]]:
    """Return (gap, task_type, task_index, node, host, port) of each member, for JSON.

    `gap` is the number of smaller ranks that are missing. It is equal for most members, and equal numbers take no space
    in a compressed message.
    """
    return [
        (member.rank - position, *member.task, member.node, *member.address)
        for position, member in enumerate(cluster.members)
    ]


def cluster_from_entries(entries: Iterable[Sequence[Any]]) -> Cluster:
    """Return the cluster for which `cluster_to_entries` has returned these entries, possibly decoded from JSON."""
    return Cluster(
        tuple(
            Member(position + gap, Task(task_type, index), node, Address(host, port))
            for position, (gap, task_type, index, node, host, port) in enumerate(entries)
        )
    )


def is_encoded_cluster(payload: bytes) -> bool:
    """Return whether a message of the service is a result of `encode_cluster`. Others are empty or a JSON array."""
    return payload[:1] not in (b"", b"[")


def decode_cluster(payload: bytes) -> tuple[int, Cluster]:
    """Return the attempt and the cluster from the result of `encode_cluster`.

    Raises:
        MessageError: The payload is incomplete, too large, or not such a result.
    """
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(payload, _MAX_CLUSTER_BYTES)
        if not inflater.eof:
            raise ValueError("it is incomplete or too large")
        attempt, entries = json.loads(content)
        if type(attempt) is not int or {tuple(map(type, entry)) for entry in entries} != {
            (int, str, int, str, str, int)
        }:
            raise TypeError("a field has a wrong type")
        return attempt, cluster_from_entries(entries)
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise _message_error(payload, "cluster spec", error) from error


def _message_error(payload: bytes, expected: str, error: Exception) -> MessageError:
    return MessageError(
        f"{payload[:80]!r} is not a {expected} of this version of tf4slurm ({error}). "
        "Install the same version on all hosts."
    )


def changed_fields(message: Any, before: Any = None) -> dict[str, Any]:
    """Return the names and values of a message's fields that differ from the message `before`.

    If `before` is None, they are compared with the defaults.
    """
    known = vars(before) if before is not None else _defaults(message.__class__)
    return {name: value for name, value in vars(message).items() if value != known[name]}


@functools.cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


_encoder = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=changed_fields)
