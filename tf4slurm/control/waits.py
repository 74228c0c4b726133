"""Notice tasks in which TensorFlow waits for a task that has ended. This module does no I/O.

A session of TensorFlow 1 without `device_filters` waits for the servers of all tasks, and prints their names every
10 s. The agents report these names (`ObservedState.waits_for`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tf4slurm.cluster import format_tasks
from tf4slurm.control import rules
from tf4slurm.control.messages import WAIT_SECONDS
from tf4slurm.control.records import Failure, Outcome, TaskRecord
from tf4slurm.errors import EXIT_TASK_LOST, describe_end
from tf4slurm.spec.job_spec import JobSpec

_DELAY_SECONDS = 2.0  # from a line of the script to its report in the launcher, at most
_RECENT_SECONDS = WAIT_SECONDS + _DELAY_SECONDS + 3.0
MOST_NAMES = 3  # in each list of a warning


@dataclass(frozen=True)
class VainWait:
    """A wait of a task for tasks that have ended.

    Attributes:
        record: The task that waits.
        ended: The tasks that have ended.
        since: Job time in seconds from which on the task has waited in vain.
    """

    record: TaskRecord
    ended: tuple[TaskRecord, ...]
    since: float


def describe_waits(waits: Sequence[VainWait]) -> str:
    """Return sentences that name the tasks that wait, the tasks that have ended, and the cure.

    All waits are for the same ended tasks. At most three of each are named.
    """
    ended = waits[0].ended
    how = format_tasks((f"{each} ({_describe_end_of(each)})" for each in ended), MOST_NAMES)
    who = format_tasks((wait.record for wait in waits), MOST_NAMES)
    text = f"TensorFlow in {who} waits for {how}, and would wait for ever."
    servers = [each.name for each in ended if each.role.is_server]
    if servers:
        names = format_tasks(servers, MOST_NAMES)
        return f"{text} {names} must run until training is over: let the script call server.join()."
    if len(waits) == 1:
        return f"{text} Give its session {describe_filters(waits[0].record)}."
    first = waits[0].record
    return f"{text} Give each session filters with /job:ps and itself, in {first.task} {describe_filters(first)}."


def describe_filters(record: TaskRecord) -> str:
    """Return the argument with which a session of this task waits only for the ps."""
    task = f"/job:{record.task.task_type}/task:{record.task.task_index}"
    return f'config=tf.compat.v1.ConfigProto(device_filters=["/job:ps", "{task}"])'


def group_waits(waits: Iterable[VainWait]) -> dict[frozenset[int], list[VainWait]]:
    """Return the waits by the ranks of the tasks that have ended: one warning describes those for the same tasks."""
    found: dict[frozenset[int], list[VainWait]] = {}
    for wait in waits:
        found.setdefault(frozenset(each.rank for each in wait.ended), []).append(wait)
    return found


def _describe_end_of(record: TaskRecord) -> str:
    returncode = record.observed.returncode
    return describe_end(returncode) if returncode is not None else "is lost"


class WaitWatch:
    """Finds tasks in which TensorFlow waits for a task that has ended."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._reported_at: dict[tuple[int, str], float] = {}  # when a task first reported the wait, by rank and name

    def check(self, members: Sequence[TaskRecord], now: float) -> list[VainWait]:
        """Return the present waits for tasks that have ended. Call this in each tick of the control service.

        A report does not say when TensorFlow printed the line, and the agent repeats it for 30 s. If the wait was
        reported before the other task ended, it may be over. It is in the result only if it is reported 35 s later.
        """
        waiting = [each for each in members if each.observed.state == "running" and each.observed.waits_for]
        present = {(each.rank, name) for each in waiting if not each.is_gone for name in each.observed.waits_for}
        self._reported_at = {key: self._reported_at.get(key, now) for key in present}
        if not present:
            return []
        ended = {str(each.task): each for each in members if each.is_done or each.is_gone}
        found: list[VainWait] = []
        for record in waiting:
            since: dict[str, float] = {}
            for name in record.observed.waits_for:
                at = self._reported_at.get((record.rank, name))
                if name in ended and at is not None:
                    ended_at = ended[name].ended_at or 0.0
                    is_recent = at < ended_at + _DELAY_SECONDS
                    if not is_recent or now >= ended_at + _RECENT_SECONDS:
                        since[name] = max(at, ended_at)
            if since:
                found.append(VainWait(record, tuple(ended[name] for name in since), min(since.values())))
        return found

    def find_failure(self, waits: Sequence[VainWait], members: Sequence[TaskRecord], now: float) -> Failure | None:
        """Return the failure of the attempt if one of the waits, the result of `check`, has lasted too long."""
        ranks = {wait.record.rank for wait in waits}
        others = (each for each in members if each.role.is_waited_for and not each.role.is_wait_bounded)
        is_final = all(each.is_done or each.rank in ranks for each in others)
        limit = rules.wait_limit_seconds(self._spec, is_final=is_final)
        for wait in waits:
            since = max(wait.since, self._last_end(members)) if is_final else wait.since
            if limit is not None and now - since >= limit:
                (equal,) = (each for each in group_waits(waits).values() if wait in each)
                return Failure(Outcome(EXIT_TASK_LOST, describe_waits(equal), wait.record.task), now, wait.record)
        return None

    def _last_end(self, members: Sequence[TaskRecord]) -> float:
        return max((each.ended_at or 0.0 for each in members if each.is_done), default=0.0)
