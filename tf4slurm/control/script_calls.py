"""Handle the requests of scripts for barriers and data shards, and changes of the workers that a chief uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tf4slurm.cluster import Cluster
from tf4slurm.control.barriers import BarrierEnd, Barriers
from tf4slurm.control.desired_states import DesiredStates
from tf4slurm.control.joined_workers import JoinedWorkers, WorkerChanges
from tf4slurm.control.messages import ScriptState
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.shard_leases import ShardChanges, ShardLeases, ShardProgress
from tf4slurm.control.task_table import TaskTable
from tf4slurm.spec.job_spec import JobSpec

_LONG_WAIT_SECONDS = 1.0  # at a barrier; shorter waits, possibly at every step, are not logged


class ScriptCalls:
    """The barriers, data shards and joined workers of a job.

    The methods of `Barriers`, `ShardLeases` and `JoinedWorkers` return what has changed. This class updates the desired
    states and emits the events.
    """

    def __init__(self, spec: JobSpec, tasks: TaskTable, emit: Callable[..., None]) -> None:
        """`emit` is called with the kind, the task and the text of each event, and with facts as keyword arguments."""
        self.joined_workers = JoinedWorkers(spec)
        self._barriers = Barriers()
        self._shards = ShardLeases()
        self._tasks = tasks
        self._emit = emit
        self.desired = DesiredStates(tasks, self.joined_workers, self._shards.grants_of)

    @property
    def shards(self) -> tuple[ShardProgress, ...]:
        """The progress of the data shards of each name."""
        return self._shards.progress()

    def on_script_state(self, record: TaskRecord, before: ScriptState, now: float) -> None:
        """Handle a change of a script's state. `before` is the previous state."""
        script = record.observed.script
        if script.barrier is None:
            self._barriers.withdraw(record)
        elif record.role.has_joined:
            self.desired.release(record.rank, script.barrier.token, "")  # joined workers do not wait at barriers
        elif script.barrier != before.barrier:
            self._end_barriers(self._barriers.arrive(self._tasks.members, record, script.barrier, now), record)
        if script.shards != before.shards and record.observed.state == "running":
            self._note_shards(self._shards.update(record.rank, script.shards))

    def on_end(self, record: TaskRecord) -> None:
        """Handle the end of a task's child or agent.

        Withdraw the task from its barrier, and lease its shards to other tasks. Under plain srun, if its script has
        failed, add the task to `DesiredState.failed_tasks`.
        """
        self._barriers.withdraw(record)
        self._note_shards(self._shards.release(record.rank))
        failed = self.desired.shared.failed_tasks
        role = record.role
        is_script = role.runs_script and not (role.is_server or role.has_joined or record.owns_child)
        if is_script and record.has_failed and record.name not in failed:
            self.desired.change(failed_tasks=(*failed, record.name))

    def check(self, now: float) -> None:
        """End the barriers at which a task's timeout has expired or an expected task has ended without arriving."""
        self._end_barriers(self._barriers.check(self._tasks.members, now))

    def note_end_of_training(self) -> None:
        """Check whether training is over, and whether the chief (without a chief, every worker) has ended.

        If so, set `is_training_over` or `have_leaders_ended` in the desired states of all tasks.
        """
        members = self._tasks.members
        leaders = [record for record in members if record.role.is_leader]
        have_ended = bool(leaders) and all(record.is_done or record.is_gone for record in leaders)
        if have_ended and not self.desired.shared.have_leaders_ended:
            self.desired.change(have_leaders_ended=True)
        if not self.desired.shared.is_training_over and not any(record.needs_others for record in members):
            clients = (record for record in members if record.role.runs_script and not record.role.is_server)
            failed = tuple(record.name for record in clients if record.has_failed)
            self.desired.change(is_training_over=True, failed_tasks=failed)

    def begin_attempt(self) -> None:
        self._barriers.clear()
        self._shards.clear()
        self.apply(self.joined_workers.begin_attempt())

    def update_joined_workers(self, cluster: Cluster | None, attempt: int, now: float) -> bool:
        """Update all joined workers. Return whether the launcher must form a new cluster with more of them.

        That is so if `cluster` lacks a joined worker that the chief's script accepts, or has an old address of it. If
        `cluster` is None, because the job stops, the result is False.
        """
        chief = self._tasks.chief
        if chief is None or not self.joined_workers.has_changes:
            return False
        changes = self.joined_workers.update(self._tasks.members, chief, now)
        self.apply(changes)
        if cluster is None:
            return False
        known = {member.rank: member.address for member in cluster.members}
        missing = [r.rank for r in changes.usable if r.attempt == attempt and known.get(r.rank) != r.address]
        self.desired.note(missing)
        return bool(missing)

    def apply(self, changes: WorkerChanges) -> None:
        self.desired.note(changes.ranks)
        for event in changes.events:
            self._emit(*event)

    def _end_barriers(self, ends: Iterable[BarrierEnd], last: TaskRecord | None = None) -> None:
        """Let the calls of `barrier()` at these barriers return or raise.

        `last` is the task whose arrival has ended the barriers. None if a timeout or the end of a task has.
        """
        for end in ends:
            for rank, token in end.tokens.items():
                self.desired.release(rank, token, end.error)
            if last is not None and not end.error and end.waited_seconds >= _LONG_WAIT_SECONDS:
                text = f"arrived last at barrier {end.name!r}: the first had waited {end.waited_seconds:.1f} s"
                self._emit("barrier", last, text, barrier=end.name, waited_seconds=round(end.waited_seconds, 1))

    def _note_shards(self, changes: ShardChanges) -> None:
        self.desired.note(changes.ranks)
        for progress in changes.finished:
            self._emit("shards", None, str(progress))
