"""Choose the spares that replace lost tasks, and tasks on nodes that failed repeatedly. This module does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tf4slurm.cluster import Task
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.task_table import TaskTable
from tf4slurm.spec.job_spec import JobSpec

_MAX_NODE_FAILURES = 2  # after so many failures, spares on other nodes replace the node's tasks


class Replacement(NamedTuple):
    """A task, and the spare that takes its place."""

    record: TaskRecord
    spare: TaskRecord


class NodeFailures:
    """Counts the failed attempts of each node. An attempt counts for the node of the task that failed first."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    def note(self, members: Sequence[TaskRecord], cause: Task | None) -> None:
        """Count a failed attempt. `cause` is the task that failed first. None counts for no node."""
        self._failures.update(record.node for record in members if record.task == cause)

    def excluded_nodes(self, members: Sequence[TaskRecord]) -> tuple[str, ...]:
        """Return the nodes on each of which two or more attempts have failed.

        Spares on other nodes should replace the tasks there. The result is empty if no other node is left: all members
        that are not gone are on one node.
        """
        if len({record.node for record in members if record.node and not record.is_gone}) <= 1:
            return ()
        return tuple(node for node, failures in self._failures.items() if failures >= _MAX_NODE_FAILURES)


def can_replace(tasks: TaskTable, spec: JobSpec) -> bool:
    """Return whether there is a spare for each lost task that is not done."""
    return bool(spec.spares) and plan_replacements(tasks, (), only_lost=True) is not None


def plan_replacements(
    tasks: TaskTable, excluded: Sequence[str], *, only_lost: bool = False
) -> list[Replacement] | None:
    """Return which spares replace the lost tasks and, if spares are left, tasks on the `excluded` nodes.

    Spares on the node of a lost task are used late, because they may be lost, too. Spares on excluded nodes are used
    last, and only for lost tasks.

    Args:
        excluded: The nodes on which attempts failed repeatedly.
        only_lost: Replace only lost tasks that are not done, because the current attempt goes on.

    Returns:
        The replacements. None if there are fewer spares than lost tasks.
    """
    lost = [record for record in tasks.lost_members if not (only_lost and record.is_done)]
    unwanted = {record.node for record in lost}
    spares = sorted(
        (record for record in tasks.present_members if record.role.is_spare),
        key=lambda record: (record.node in excluded, record.node in unwanted),
    )
    if len(lost) > len(spares):
        return None
    pairs = [*zip(lost, spares, strict=False)]
    if not only_lost:
        others = [spare for spare in spares[len(lost) :] if spare.node not in excluded]
        on_excluded = [r for r in tasks.present_members if r.node in excluded and not r.role.is_spare]
        pairs += zip(on_excluded, others, strict=False)
    return [Replacement(record, spare) for record, spare in pairs]
