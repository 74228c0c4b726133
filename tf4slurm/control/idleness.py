"""Notice that no task of a job shows a sign of work. This module does no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf4slurm.cluster import format_tasks
from tf4slurm.control.messages import ObservedState
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.waits import MOST_NAMES, describe_filters

IDLE_SECONDS = 60.0
_CHECK_SECONDS = 5.0
# What a task may use in a minute without working. Tasks that hang used at most 0.21 s and 0 bytes, with TensorFlow 2.21
# on two cores. The leader also had the heartbeats of TensorFlow's coordination service: 2,300 bytes from each task. A
# step of a model with one variable moves 580 bytes at the ps. tests/unit/test_idleness.py has the measurements.
_IDLE_CPU_SECONDS = 0.6
_IDLE_BYTES = 300
_COORDINATION_BYTES = 4000  # for each task of the cluster, at the leader
# A session that waits for the chief makes another one every 30 s. It moved 1,200 bytes, and more with a larger graph.
_SESSION_SHARE = 0.75  # of 60 s; for so long after a new session no traffic is a sign
_PATIENCE = 2.0  # times the longest quiet time that has ended by itself

_USAGE_SECONDS = 5.0
_TASKS_PER_SECOND = 100  # the launcher's sampling rate


def usage_interval_seconds(num_tasks: int) -> float:
    """Return the seconds between two measurements of `Usage`, in a job of `num_tasks` tasks."""
    return max(_USAGE_SECONDS, num_tasks / _TASKS_PER_SECOND)


def find_sign(
    before: ObservedState, now: ObservedState, seconds: float = IDLE_SECONDS, idle_bytes: int = _IDLE_BYTES
) -> str | None:
    """Return the first sign of work between two states of a running child, as a key of `SIGNS`. None if there is none.

    Args:
        before: The earlier state.
        now: The later state.
        seconds: The length of the time in which an idle child may use a bit of processor time and of the network. It
            may be longer than the time between the two states.
        idle_bytes: What an idle child may move at its port in a minute.
    """
    used, minutes = now.usage, seconds / 60
    had, moved = before.usage, now.usage.sent_bytes + now.usage.received_bytes
    signs = {
        "step": now.script != before.script,
        "output": used.num_printed != had.num_printed,
        "traffic": moved - had.sent_bytes - had.received_bytes > idle_bytes * minutes,
        # It decreases when a descendant ends whose parent does not wait for it.
        "processor": abs(used.cpu_seconds - had.cpu_seconds) > _IDLE_CPU_SECONDS * minutes,
        "gpu": bool(used.gpu_percent),
    }
    return next((name for name, is_present in signs.items() if is_present), None)


SIGNS = {
    "step": "no new step",
    "output": "no output of the script",
    "traffic": "no traffic of a step at the ports of TensorFlow's servers",
    "processor": f"at most {_IDLE_CPU_SECONDS:g} s of processor time a minute in each task and its child processes",
    "gpu": "no use of a GPU",
}
"""The signs of work, and how a warning names that each is missing."""


class IdleWatch:
    """Notices that no task shows a sign of work, for example because TensorFlow waits for a chief.

    Attributes:
        limit_seconds: Time without a sign after which `check` returns a warning: 60 s, or twice the longest time
            without a sign that has ended with a sign.
        is_active: Whether the last check has found a sign of work, or that a task has started or ended.
    """

    def __init__(self, seconds: float = IDLE_SECONDS) -> None:
        self.limit_seconds = seconds
        self._session_seconds = _SESSION_SHARE * seconds
        self._num_sessions = 0
        self._session_at = float("-inf")  # when the last new session was noticed
        self.is_active = False
        self._starts: tuple[object, ...] = ()
        self._states: dict[int, ObservedState] = {}  # by rank, at `_since`
        self._since = 0.0  # the start of the time over which traffic and processor time are compared
        self._signed_at = 0.0  # when the last sign was found
        self._has_warned = False
        self._due_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether 5 s have passed since this method last returned True. More checks would be expensive."""
        if now < self._due_at:
            return False
        self._due_at = now + min(_CHECK_SECONDS, self.limit_seconds / 4)
        return True

    def check(self, records: Sequence[TaskRecord], now: float, *, is_explained: bool = False) -> str | None:
        """Return a warning if no running task has shown a sign of work for `limit_seconds`, else None.

        The job has several tasks in its cluster spec, and none of those that run is unknown: disconnected, or not
        measured yet. The warning is repeated only after a sign of work, or the start or the end of a task.

        With `is_explained`, another warning names the cause. The result is None until a call without it.
        """
        limit = max(self.limit_seconds, 2 * usage_interval_seconds(len(records)))
        running = [each for each in records if each.observed.state == "running" and not each.is_gone]
        states = {each.rank: each.observed for each in running}
        starts = tuple((rank, state.attempt, state.start_count) for rank, state in states.items())
        has_changed = starts != self._starts
        is_known = all(each.is_connected and each.owns_child and _is_measured(each) for each in running)
        num_sessions = sum(state.usage.num_sessions for state in states.values())
        if num_sessions != self._num_sessions:
            self._num_sessions, self._session_at = num_sessions, now
        if now - self._session_at < self._session_seconds:
            self._states = {rank: _with_traffic_of(states.get(rank), state) for rank, state in self._states.items()}
        has_sign = not has_changed and any(
            find_sign(self._states[each.rank], each.observed, limit, _idle_bytes(each, records)) for each in running
        )
        self.is_active = has_changed or has_sign
        if has_sign and not has_changed:
            self.limit_seconds = max(self.limit_seconds, _PATIENCE * (now - self._signed_at))
        if self.is_active or not is_known:
            self._signed_at = now
        if self.is_active or not is_known or is_explained:
            self._has_warned = False
        is_over = now - self._signed_at >= limit
        if self.is_active or not is_known or now - self._since >= limit:
            self._starts, self._since, self._states = starts, now, states
        is_job = sum(each.role.is_in_cluster for each in records) > 1 and any(each.role.trains for each in running)
        if not (is_over and is_job) or self._has_warned or is_explained:
            return None
        self._has_warned = True
        return _describe_idleness(records, limit)


def _is_measured(record: TaskRecord) -> bool:
    """Return whether the usage of the child is known. A program that only waits may use no processor time."""
    usage = record.observed.usage
    return usage.memory_bytes > 0 or usage.cpu_seconds > 0


def _with_traffic_of(other: ObservedState | None, state: ObservedState) -> ObservedState:
    """Return `state` with the traffic of `other`, so that `find_sign` sees none between the two."""
    if other is None:
        return state
    sent, received = other.usage.sent_bytes, other.usage.received_bytes
    return dataclasses.replace(state, usage=dataclasses.replace(state.usage, sent_bytes=sent, received_bytes=received))


def _idle_bytes(record: TaskRecord, records: Sequence[TaskRecord]) -> int:
    """Return what an idle task may move at its port in a minute.

    The chief, or without one worker 0, has TensorFlow's coordination service, to which all tasks send heartbeats.
    """
    if not (record.role.is_leader and record.task.task_index == 0):
        return _IDLE_BYTES
    return _IDLE_BYTES + _COORDINATION_BYTES * sum(each.role.is_in_cluster for each in records)


_ADVICE = 'If they should work, see what each printed last with "tf4slurm logs".'
_SEEN = f"Seen: {', '.join(SIGNS.values())}."


def _describe_idleness(records: Sequence[TaskRecord], seconds: float) -> str:
    """Return a warning that names the likely cause, and the signs of work that are missing."""
    return f"No task has shown a sign of work for {seconds:.0f} s. {_likely_cause(records)}{_ADVICE} {_SEEN}"


def _likely_cause(records: Sequence[TaskRecord]) -> str:
    """Return why tasks may wait for ever, as sentences with the cure and a space, or "" if nothing hints at a cause.

    In a job without a chief, the script may wait for one. In a job with a chief, the script may expect none.
    """
    task_types = {record.task.task_type for record in records if record.role.is_in_cluster}
    is_beginning = all(record.observed.script.step is None and record.observed.returncode is None for record in records)
    ended = [record for record in records if record.role.trains and record.observed.returncode == 0]
    if "ps" in task_types and ended:
        waiting = next((each for each in records if each.role.trains and each not in ended), ended[0])
        names = format_tasks((each.name for each in ended), MOST_NAMES)
        return (
            f"{names} exited with 0: a session of TensorFlow 1 without device_filters waits for such a task for ever. "
            f"Give it, in {waiting.task}, {describe_filters(waiting)}. "
        )
    if "ps" not in task_types or not is_beginning:
        return ""
    if "chief" not in task_types:
        return (
            "This job has no chief: if the script waits for one, as ParameterServerStrategy does, start it without "
            "--no-chief. "
        )
    return "This job has a chief: if worker 0 leads in the script, start it with --no-chief. "
