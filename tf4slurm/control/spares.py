"""Spares take the place of lost tasks, and of tasks on nodes that failed repeatedly. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tf4slurm.cluster import Task
from tf4slurm.control.messages import ObservedState
from tf4slurm.control.records import TaskRecord

_MAX_NODE_FAILURES = 2  # then spares on other nodes replace the node's tasks


class Spares:
    """Chooses the spares of a job that replace tasks."""

    def __init__(
        self,
        members: list[TaskRecord],
        task_records: list[TaskRecord],
        emit: Callable[[str, TaskRecord, str], None],
    ) -> None:
        """`task_records` are all tasks, in which a spare gets the position of the task that it replaces."""
        self._members = members
        self._task_records = task_records
        self._emit = emit
        self._node_failures: Counter[str] = Counter()  # failed attempts, by the node of the task that failed first

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """The nodes on which two attempts have failed; none if only one node is left."""
        if len({record.node for record in self._members if record.node and not record.is_gone}) <= 1:
            return ()
        return tuple(node for node, failures in self._node_failures.items() if failures >= _MAX_NODE_FAILURES)

    def note_failure(self, cause: Task | None) -> None:
        """Count a failed attempt, whose first failure was that of `cause`."""
        self._node_failures.update(record.node for record in self._members if record.task == cause)

    def assign(self, *, only_lost: bool = False) -> bool:
        """Let spares take the place of lost tasks, then of tasks on excluded nodes, unless `only_lost`.

        Spares on other nodes come first, because the rest of a lost node's tasks may be found lost later; those on
        excluded nodes come last. Returns False if the spares do not suffice for the lost tasks.
        """
        excluded = self.excluded_nodes
        lost = [record for record in self._members if record.is_gone and not record.role.is_spare]
        unwanted = {record.node for record in lost}
        spares = sorted(
            (record for record in self._members if record.role.is_spare and not record.is_gone),
            key=lambda record: (record.node in excluded, record.node in unwanted),
        )
        if len(lost) > len(spares):
            return False
        others = [] if only_lost else [spare for spare in spares[len(lost) :] if spare.node not in excluded]
        on_excluded = [r for r in self._members if r.node in excluded and not (r.is_gone or r.role.is_spare)]
        for record, spare in [*zip(lost, spares, strict=False), *zip(on_excluded, others, strict=False)]:
            self._emit("replaced", spare, f"takes the place of {record}")
            record.task, record.role, spare.task, spare.role = spare.task, spare.role, record.task, record.role
            record.observed = ObservedState()  # step and usage were those of the task
            one, other = self._task_records.index(record), self._task_records.index(spare)
            self._task_records[one], self._task_records[other] = spare, record
        return True
