"""The table of a job's tasks. It has their records by rank, and the groups of tasks that the rules need."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.control.messages import ObservedState, Registration
from tf4slurm.control.records import Phase, TaskRecord
from tf4slurm.roles import JOINED_WORKER, role_of

_MAX_LEFT = 20
_STRATEGY_SECONDS = 20.0  # from the chief's server to the report of its workers; usually less than 2 s
_OWN_STRATEGY = (
    "the script of the chief has started its TensorFlow server without parameter_server_strategy() or job_strategy() "
    "of tf4slurm.tensorflow, so it uses only the workers of the cluster spec"
)


class TaskTable:
    """All tasks of a job: its members, which form the cluster, and its joined workers.

    A joined worker that is gone leaves the table. Ranks, and the indices of workers, are never used again.

    Attributes:
        members: The members by rank. A lost member keeps its record.
        left: The latest joined workers that have left, at most 20.
        num_joined: The number of joined workers that have ever joined.
    """

    def __init__(self, tasks: Sequence[Task], *, is_placed: bool) -> None:
        """Create the table of tasks that have not registered. `is_placed` is False if `place` is called later."""
        has_chief = any(task.task_type == "chief" for task in tasks)
        self.members = tuple(
            TaskRecord(rank, task, role_of(task.task_type, has_chief=has_chief), is_placed=is_placed)
            for rank, task in enumerate(tasks)
        )
        self.left: collections.deque[TaskRecord] = collections.deque(maxlen=_MAX_LEFT)
        self.num_joined = 0
        self._order = tuple(tasks)
        self._joined_workers: dict[int, TaskRecord] = {}
        self._active: set[int] = set()  # ranks that have registered and are not gone
        self._unregistered = set(range(len(tasks)))  # of members that have sent no address in this attempt
        self._not_ready = self._unregistered.copy()  # of members whose reachability check has not succeeded

    def __iter__(self) -> Iterator[TaskRecord]:
        yield from self.members
        yield from self._joined_workers.values()

    def __len__(self) -> int:
        return len(self.members) + len(self._joined_workers)

    def __getitem__(self, rank: int) -> TaskRecord:
        return self.members[rank] if 0 <= rank < len(self.members) else self._joined_workers[rank]

    def get(self, rank: int) -> TaskRecord | None:
        """Return the record of this rank. Return None for a joined worker that has left."""
        return self.members[rank] if 0 <= rank < len(self.members) else self._joined_workers.get(rank)

    @property
    def num_left(self) -> int:
        """The number of joined workers that have left."""
        return self.num_joined - len(self._joined_workers)

    # Groups of tasks

    @property
    def joined_workers(self) -> tuple[TaskRecord, ...]:
        return tuple(self._joined_workers.values())

    @property
    def present_members(self) -> list[TaskRecord]:
        return [record for record in self.members if not record.is_gone]

    @property
    def lost_members(self) -> list[TaskRecord]:
        """The members that are lost or have terminated, without spares. A task that a spare replaced is a spare now."""
        return [record for record in self.members if record.is_gone and not record.role.is_spare]

    @property
    def chief(self) -> TaskRecord | None:
        return next((record for record in self.members if record.task.task_type == "chief"), None)

    @property
    def workers_error(self) -> str:
        """The reason that the chief's script has reported why no worker can join. Empty if it has reported none."""
        chief = self.chief
        return "" if chief is None else chief.observed.script.workers_error

    def find_workers_obstacle(self, now: float) -> str:
        """Return why no worker can join. Return "" if one can, or if that is not yet known.

        This is `workers_error`, or that the chief's TensorFlow server has answered for 20 s without a strategy of
        tf4slurm.tensorflow. Such a strategy starts that server and reports the workers within a few seconds.
        """
        chief = self.chief
        if chief is None or self.workers_error or self.accepts_workers or not chief.observed.has_server:
            return self.workers_error
        is_own = chief.serving_at is not None and now - chief.serving_at >= _STRATEGY_SECONDS
        return _OWN_STRATEGY if is_own else ""

    def variable_bytes(self, record: TaskRecord) -> int | None:
        """Return the bytes of the variables on a ps. None if the chief has not reported them, or for another task."""
        chief = self.chief
        task = record.task
        known = () if chief is None or task.task_type != "ps" else chief.observed.script.ps_bytes
        return known[task.task_index] if task.task_index < len(known) else None

    @property
    def accepts_workers(self) -> bool:
        """Whether the chief's script can use joined workers, and spares in place of lost workers."""
        chief = self.chief
        return chief is not None and chief.observed.script.workers is not None

    @property
    def has_active(self) -> bool:
        """Whether a task has registered and is not gone."""
        return bool(self._active)

    @property
    def has_active_members(self) -> bool:
        return any(rank < len(self.members) for rank in self._active)

    @property
    def has_running(self) -> bool:
        """Whether a child runs, as far as that is known."""
        return any(not record.is_gone and record.observed.state == "running" for record in self)

    @property
    def are_all_registered(self) -> bool:
        """Whether each member has sent its address in this attempt. Members that the cluster forms without are ignored.

        See `form_without`.
        """
        return not self._unregistered

    @property
    def are_all_ready(self) -> bool:
        """Whether each member's reachability check has succeeded. Members that the cluster forms without are ignored.

        See `form_without`.
        """
        return not self._not_ready

    @property
    def is_disconnected(self) -> bool:
        """Whether a member has lost its connection but does not count as lost yet."""
        return any(r.has_registered and not (r.is_gone or r.is_connected) for r in self.members)

    def in_order(self, *, with_left: bool = True) -> list[TaskRecord]:
        """Return all tasks: the members, the joined workers that have left, and the present joined workers.

        The members are in their order at the job's start. A spare has the position of the task that it replaced. Of the
        joined workers that have left, only the latest 20 are returned, and none if `with_left` is False.
        """
        records = {record.task: record for record in self.members}
        left = self.left if with_left else ()
        return [*(records[task] for task in self._order), *left, *self._joined_workers.values()]

    def count(self, *states: str) -> int:
        """Return the number of registered members whose `ObservedState.state` is one of `states`."""
        return sum(record.has_registered and record.observed.state in states for record in self.members)

    def describe_phase(self, phase: Phase, now: float) -> str:
        """Return the phase as users see it. Until a task reports a step, "training" is "importing" or "running"."""
        if phase is not Phase.TRAINING or any(record.observed.script.step is not None for record in self):
            return phase.value
        return "importing" if any(record.is_importing(now) for record in self) else "running"

    def find_unstarted(self) -> list[TaskRecord]:
        """Return the members that are not gone, are no spares and were not asked to start a child in this attempt."""
        return [r for r in self.present_members if not (r.role.is_spare or r.desired_start_count)]

    def to_cluster(self) -> Cluster:
        """Return all members and joined workers with their addresses. The address of a lost member has port 0."""
        return Cluster(tuple(map(_to_member, self)))

    def to_members_cluster(self) -> Cluster:
        return Cluster(tuple(map(_to_member, self.members)))

    # Changes

    def add_joined_worker(self) -> TaskRecord:
        """Add a joined worker with the next rank, and the next index of a worker."""
        num_workers = sum(record.task.task_type == "worker" for record in self.members)
        rank, index = len(self.members) + self.num_joined, num_workers + self.num_joined
        record = self._joined_workers[rank] = TaskRecord(rank, Task("worker", index), JOINED_WORKER)
        self.num_joined += 1
        return record

    def register(self, record: TaskRecord, registration: Registration, now: float) -> None:
        """Record the first registration of a task."""
        record.incarnation, record.node, record.last_message_at = registration.incarnation, registration.node, now
        self._active.add(record.rank)

    def take_address(self, record: TaskRecord, address: Address, attempt: int) -> None:
        record.address, record.attempt = address, attempt
        self._unregistered.discard(record.rank)

    def mark_ready(self, record: TaskRecord) -> None:
        self._not_ready.discard(record.rank)

    def mark_gone(self, record: TaskRecord, now: float) -> None:
        """Record that a task has terminated or is lost. A joined worker leaves the table."""
        record.is_gone = True
        self._active.discard(record.rank)
        if record.has_registered and record.ended_at is None:
            record.ended_at = now
        if self._joined_workers.pop(record.rank, None) is not None:
            self.left.append(record)

    def vacate(self, record: TaskRecord) -> None:
        """Let another process register for a member whose process has left. Then call `begin_attempt`."""
        self._active.discard(record.rank)
        record.vacate()

    def mark_exited_as_done(self) -> None:
        """Mark each task whose child has exited as done, unless a restart of the child was already requested.

        Call this when the scripts must save and stop: from then on no restart is requested.
        """
        for record in self:
            if record.observed.state == "exited" and record.observed.start_count >= record.desired_start_count:
                record.is_done = True

    def begin_attempt(self, attempt: int) -> None:
        """Reset the tasks that have registered and are not gone. They and a vacant chief must send an address."""
        for rank in self._active:
            self[rank].begin_attempt(attempt)
        vacant = {record.rank for record in self.members if not (record.has_registered or record.is_gone)}
        self._unregistered = ({record.rank for record in self.members} & self._active) | vacant
        self._not_ready = self._unregistered.copy()

    def place(self, tasks: Sequence[Task]) -> None:
        """Assign a task to each member, in the order of ranks."""
        has_chief = any(task.task_type == "chief" for task in tasks)
        for record, task in zip(self.members, tasks, strict=True):
            record.task, record.role = task, role_of(task.task_type, has_chief=has_chief)
            record.is_placed = True
        self._order = tuple(tasks)

    def form_without(self, record: TaskRecord) -> None:
        """Let the cluster form without the address and the check of a lost task.

        The task is a spare, or a spare replaces it.
        """
        self._unregistered.discard(record.rank)
        self._not_ready.discard(record.rank)

    def exchange(self, record: TaskRecord, spare: TaskRecord) -> None:
        """Let a spare replace a task: each gets the task type, index and role of the other."""
        if record.is_gone:
            self.form_without(record)
        record.task, record.role, spare.task, spare.role = spare.task, spare.role, record.task, record.role
        record.observed = ObservedState()  # its step and usage belong to its former role


def _to_member(record: TaskRecord) -> Member:
    address = record.address or Address("", 0)
    return Member(record.rank, record.task, record.node, Address(address.host, 0) if record.is_gone else address)
