"""The rules by which a job starts, restarts, stops and ends, as a pure state machine.

Its inputs are events and their times; its outputs are the desired states of tasks and the outcome of the job. It never
waits, sends or reads a clock. `service.py` reports messages of tasks; the launcher reports exits and signals.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tf4slurm import __version__
from tf4slurm.cluster import Address, Cluster, Member, Task, format_tasks
from tf4slurm.control.barriers import Barriers
from tf4slurm.control.guests import Guests
from tf4slurm.control.idle_watch import IdleWatch
from tf4slurm.control.messages import GUEST_RANK, DesiredState, ObservedState, Registration, ScriptState
from tf4slurm.control.records import EVENT_KINDS, JobProgress, Outcome, TaskRecord
from tf4slurm.control.shards import ShardChanges, ShardLeases, ShardProgress
from tf4slurm.control.spares import Spares
from tf4slurm.errors import (
    EXIT_NO_PROGRESS,
    EXIT_NOT_FORMED,
    EXIT_PREFLIGHT,
    EXIT_TASK_LOST,
    RendezvousClosedError,
    describe_end,
    exit_code_of,
)
from tf4slurm.network.interfaces import is_loopback
from tf4slurm.placement import SPREAD, place_tasks
from tf4slurm.roles import can_grow, role_of
from tf4slurm.spec import JobSpec


class Phase(enum.Enum):
    """The phase of a job. A new attempt returns to RENDEZVOUS; all other transitions move forward."""

    RENDEZVOUS = "rendezvous"  # not all tasks have registered
    CHECKING = "checking"  # tasks check that the addresses of other tasks are reachable
    TRAINING = "training"  # the child processes run
    STOPPING = "stopping"  # the scripts are asked to save and stop
    TERMINATING = "terminating"  # the outcome is known, and every task must terminate
    ENDED = "ended"


_BEFORE_END = (Phase.RENDEZVOUS, Phase.CHECKING, Phase.TRAINING)
_NEVER = float("inf")
_GUEST_SECONDS = 2.0  # for guests to terminate after all other tasks have
_SERVER_SECONDS = 60.0  # until a warning that no TensorFlow server runs; importing TensorFlow takes less
_LONG_WAIT_SECONDS = 1.0  # at a barrier; shorter waits, possibly at every step, are not logged
_IDLE_CHECK_SECONDS = 5.0


class JobState:
    """The state of one job. `now` is always the time in seconds of a monotonic clock."""

    def __init__(
        self,
        tasks: Sequence[Task],
        spec: JobSpec,
        now: float,
        on_event: Callable[..., None],
    ) -> None:
        """Create the state of a job in which no task has registered.

        Args:
            tasks: The task of each rank, which placement "spread" assigns again when all ranks have registered.
            on_event: Called as `on_event(kind, task, text, **facts)` for each event; see `EVENT_KINDS`.
        """
        has_chief = any(task.task_type == "chief" for task in tasks)
        self.spec = spec
        self.phase = Phase.RENDEZVOUS
        self.outcome: Outcome | None = None
        self.cluster: Cluster | None = None
        self.attempt = 1
        self.records = [
            TaskRecord(rank, task, role_of(task.task_type, has_chief=has_chief), is_placed=spec.placement != SPREAD)
            for rank, task in enumerate(tasks)
        ]
        self._members = self.records.copy()  # without guests
        self.task_records = self.records.copy()  # as `records`, but a spare has the position of the task it replaces
        self._on_event = on_event
        self._changed: set[int] = set()
        self._active: set[int] = set()  # ranks that have registered and are not gone
        self._unregistered = set(range(len(tasks)))  # ranks that have sent no address in this attempt
        self._not_ready = self._unregistered.copy()  # ranks whose reachability check has not succeeded
        self._now = now
        self._phase_deadline = now + spec.start_timeout_seconds
        self._stop: Outcome | None = None
        self._exited_early: TaskRecord | None = None
        self._held_failure: Outcome | None = None
        self._last_step_at = _NEVER
        self._desired = DesiredState()  # the fields that all tasks share; change them with `_desire`
        self._had_server = False
        self._started_at = _NEVER  # time when the children of this attempt were started
        self._warnings: dict[str, str] = {}  # by subject: "servers" or "idle"
        self._idle_watch = IdleWatch()
        self._idle_check_at = now
        self._barriers = Barriers(self._members, self._changed)
        self._guests = Guests(self._members, spec, self._changed, self._emit)
        self._spares = Spares(self._members, self.task_records, self._emit)
        self.progress = JobProgress()
        self._shards = ShardLeases()

    def postpone_start(self, until: float) -> None:
        """Count the start timeout from `until`; from `math.inf` on, it does not expire."""
        self._phase_deadline = until + self.spec.start_timeout_seconds

    # Read by the service and the launcher

    def desired_state_of(self, rank: int) -> DesiredState:
        record = self.records[rank]
        dismissal, exit_code = self._guests.dismissal_of(rank)
        if record.is_gone:  # a task that was lost may send again
            dismissal, exit_code = dismissal or f"{record} was lost", exit_code or EXIT_TASK_LOST
        return dataclasses.replace(
            self._desired,
            terminate=self._desired.terminate or bool(dismissal),
            terminate_reason=self._desired.terminate_reason or dismissal,
            rank=rank if record.role.is_guest else None,
            exit_code=exit_code if record.role.is_guest else 0,
            workers=self._guests.workers if record.task.task_type == "chief" else (),
            start_count=record.desired_start_count,
            released_barrier=record.released_barrier,
            barrier_error=record.barrier_error,
            shards=self._shards.grants_of(rank),
        )

    def take_changed(self) -> set[int]:
        """Return the ranks whose desired state or cluster may have changed since the last call."""
        changed = self._changed.copy()
        self._changed.clear()
        return changed

    @property
    def warnings(self) -> tuple[str, ...]:
        """Possible problems of the job, in sentences, for result.json."""
        return tuple(self._warnings.values())

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """The nodes on which two attempts have failed; none if only one node is left."""
        return self._spares.excluded_nodes

    @property
    def shards(self) -> tuple[ShardProgress, ...]:
        """The progress of the data shards that the scripts lease."""
        return self._shards.progress()

    @property
    def workers_error(self) -> str:
        """The reason why no worker can join; empty if one can, or if the chief's script has not reported it."""
        return "" if self._chief is None else self._chief.observed.script.workers_error

    def describe_phase(self, now: float) -> str:
        """Return the phase; "training" is "importing" or "running" until a task has reported a step."""
        if self.phase is not Phase.TRAINING or any(record.observed.script.step is not None for record in self.records):
            return self.phase.value
        return "importing" if any(record.is_importing(now) for record in self.records) else "running"

    def count(self, *states: str) -> int:
        """Return the number of registered tasks in one of `states`."""
        return sum(record.has_registered and record.observed.state in states for record in self._members)

    # Events

    def on_registration(self, registration: Registration, now: float) -> TaskRecord:
        """Handle a new connection of a task, its first or a later one.

        Raises:
            RendezvousClosedError: The process cannot be a task of this job.
        """
        self._advance(now)
        record = self._checked_record(registration)
        record.owns_child = registration.owns_child
        self.on_disconnect(record.rank, now)  # in case the end of the previous call has not been noticed
        record.is_connected = True
        if record.has_registered:  # a reconnect does not count as a heartbeat
            self._emit("reconnected", record, "is connected again")
            return record
        record.incarnation, record.node, record.last_heartbeat_at = registration.incarnation, registration.node, now
        if registration.failure is not None:
            record.is_gone = True
            reason = f"{record} cannot take part in the job. {registration.failure}"
            self._decide(Outcome(EXIT_PREFLIGHT, reason, record.task))
            return record
        self._active.add(record.rank)
        self._changed.add(record.rank)
        address = Address(registration.host, registration.port)
        if record.role.is_guest and self.attempt > 1:  # it takes part in the first attempt until it knows the current
            record.address = address
        else:
            self._take_address(record, address)
        return record

    def on_heartbeat(self, rank: int, now: float) -> None:
        self._advance(now)
        self.records[rank].last_heartbeat_at = now

    def on_observed_state(self, rank: int, observed: ObservedState, now: float) -> None:
        self._advance(now)
        record = self.records[rank]
        record.last_heartbeat_at = now
        if record.is_gone and observed.state != "terminated":
            return
        before = record.observed
        if observed.attempt == self.attempt or observed.state == "terminated":
            record.observed = observed
        else:  # the other fields describe an earlier attempt
            record.observed = dataclasses.replace(before, stop_signal=observed.stop_signal)
        self._note_stop_signals(record, before)
        if record.observed.script != before.script:
            self._on_script_state(record, before.script)
        if record.observed.has_server and not before.has_server:
            self._had_server = True
            self._warnings.pop("servers", None)
            self._emit("serving", record, "has a server that answers")
        if record.attempt < observed.attempt == self.attempt and record.address is not None and observed.port:
            self._take_address(record, Address(record.address.host, observed.port))
        if (record.observed.state, record.observed.start_count) != (before.state, before.start_count):
            self._on_task_state(record)
            self._note_end_of_training()
        if record.role.is_guest or record.task.task_type == "chief":
            self._update_guests()

    def _note_stop_signals(self, record: TaskRecord, before: ObservedState) -> None:
        """Stop the job after a new stop signal to the agent, or to a script that it has started."""
        name, script = record.observed.stop_signal, record.observed.script.stop_signal
        if record.is_gone:
            return
        if record.role.is_guest:
            if (name, script) != (before.stop_signal, before.script.stop_signal) and (name or script):
                self._guests.leave(record, f"it received {name or script}", self._now)
            return
        if name is not None and name != before.stop_signal:
            self.on_stop(signal.Signals[name], f"{record} received {name}", self._now)
        if script is not None and script != before.script.stop_signal and record.owns_child:
            self.on_stop(signal.Signals[script], f"the script of {record} received {script}", self._now)

    def _on_task_state(self, record: TaskRecord) -> None:
        observed, is_dismissed = record.observed, bool(self._guests.dismissal_of(record.rank)[0])
        if observed.state == "not_ready" and record.role.is_guest:
            self._guests.dismiss(record, f"{observed.detail}", EXIT_NOT_FORMED)
        elif observed.state == "not_ready":
            reason = f"{observed.detail}. {record} checked it. Look at the network, or choose another with --interface."
            self._decide(Outcome(EXIT_NOT_FORMED, reason, record.task))
        elif observed.state == "ready":
            self._not_ready.discard(record.rank)
            if record.role.is_guest and self.phase is Phase.TRAINING:
                record.desired_start_count = 1
                self._changed.add(record.rank)
            elif self.phase is Phase.CHECKING and not self._not_ready:
                self._start_children()
        elif observed.state == "running":
            record.started_at, record.ended_at = self._now, None
            self._emit("started", record, f"started (process {observed.process_id})")
        elif observed.state == "exited":
            self._on_exit(record, observed.returncode or 0)
        elif observed.state == "terminated" and self.outcome is None and record.owns_child and not is_dismissed:
            self._lose(record, observed.detail or "its agent terminated by itself")
        elif observed.state == "terminated":
            self._mark_gone(record)
            self._emit("terminated", record, "terminated")
            self._end_if_all_gone()

    def on_disconnect(self, rank: int, now: float) -> None:
        """Handle the end of a connection; the task may reconnect."""
        self._advance(now)
        record = self.records[rank]
        if record.is_connected and not record.is_gone:
            self._emit("disconnected", record, "lost its connection")
            record.is_connected, record.disconnected_at = False, now

    def on_rejected(self, rank: int, reason: str, now: float) -> None:
        """Count a task as lost after an invalid message, because its state is unknown."""
        self._advance(now)
        self._lose(self.records[rank], f"its message was not accepted: {reason.removesuffix('.')}")

    def on_agent_exit(self, rank: int, returncode: int, now: float) -> None:
        self._advance(now)
        self._lose(self.records[rank], f"its agent {describe_end(returncode)}")

    def on_spawner_exit(self, outcome: Outcome, now: float) -> None:
        """Handle the exit of srun and of all agents."""
        self._advance(now)
        self._decide(outcome)
        for record in self._members:
            self._mark_gone(record)
        self._end_if_all_gone()

    def on_stop(self, number: signal.Signals, what: str, now: float) -> None:
        """Stop the job because of `what`; the scripts have the grace period to save. Later calls have no effect."""
        self._advance(now)
        if self._stop is not None or self.outcome is not None:
            return
        self._stop = Outcome(128 + number, f"The job was stopped: {what}.", is_stop=True)
        self._desire(stop_reason=self._stop.reason, grace_period_seconds=self.spec.grace_period_seconds)
        if self.phase is not Phase.TRAINING or not self.spec.grace_period_seconds:
            self._decide(self._stop)
            return
        for record in self.records:  # children that have just failed are not restarted
            if record.observed.state == "exited" and record.observed.start_count >= record.desired_start_count:
                record.is_done = True
        self._phase_deadline = now + self.spec.grace_period_seconds
        self._move_on(Phase.STOPPING, f"{what}: the job has {self.spec.grace_period_seconds:g} s to save and stop")
        self._end_stop_if_saved()

    def skip_grace_period(self, now: float) -> None:
        self._advance(now)
        if self._stop is not None:
            self._decide(self._stop)

    def on_tick(self, now: float) -> None:
        """Check heartbeats and deadlines. Call this several times per heartbeat interval."""
        self._advance(now)
        self._check_heartbeats()
        held, self._held_failure = self._held_failure, None
        if held is not None and self.phase in _BEFORE_END:
            self._fail(held)
        self._barriers.check(now)
        self._check_steps()
        self._check_servers()
        self._check_idleness()
        self._update_guests()
        if now >= self._phase_deadline:
            self._on_phase_deadline()

    def _check_heartbeats(self) -> None:
        for record in self.records:
            if not record.has_registered or record.is_gone:
                continue
            if not record.is_connected and self._now - record.disconnected_at > self.spec.reconnect_seconds:
                self._lose(record, "its connection broke and was not restored")
            elif self._now - record.last_heartbeat_at > self.spec.task_loss_seconds:
                self._lose(record, f"it sent no heartbeat for {self.spec.task_loss_seconds:g} s")

    def _on_phase_deadline(self) -> None:
        if self.phase in (Phase.RENDEZVOUS, Phase.CHECKING):
            self._decide(self._not_formed())
        elif self.phase is Phase.TRAINING:
            self._phase_deadline = _NEVER
            self._on_finish_timeout([r for r in self.records if r.role.is_waited_for and not r.is_done])
        elif self.phase is Phase.STOPPING and self._stop is not None:
            text = f"the grace period of {self.spec.grace_period_seconds:g} s is over"
            self._emit("grace_period_over", None, text)
            self._decide(self._stop)
        elif self.phase is Phase.TERMINATING:
            late = [record for record in self.records if record.has_registered and not record.is_gone]
            self._emit("not_terminated", None, f"{format_tasks(late)} did not terminate in time")
            self.phase = Phase.ENDED

    def _on_finish_timeout(self, late: Sequence[TaskRecord]) -> None:
        seconds = self.spec.finish_timeout_seconds
        if self._exited_early is not None:
            text = f"{format_tasks(late)} did not end within {seconds:g} s."
            self._fail(Outcome(EXIT_TASK_LOST, text, late[0].task))
        else:
            self._complete(f"all but {format_tasks(late)}, waited for {seconds:g} s")

    # Rules

    def _checked_record(self, registration: Registration) -> TaskRecord:
        rank = registration.rank
        if rank == GUEST_RANK:
            return self._checked_guest(registration)
        record = self._members[rank] if 0 <= rank < len(self._members) else None
        mismatch = ""  # the reason why this process cannot take part
        if registration.version != __version__:
            mismatch = f"it runs tf4slurm {registration.version}, the launcher {__version__}; install one version "
            mismatch += "for all tasks, on a file system that their hosts share"
        elif record is None:
            mismatch = f"rank {rank} is not one of this job's {len(self._members)} tasks"
        elif record.is_gone:
            raise _refusal(f"rank {rank} is lost or has terminated")
        elif record.has_registered and record.incarnation != registration.incarnation:
            raise _refusal(f"rank {rank} was taken by an earlier process, on {record.node}")
        else:
            return record
        if self.phase is Phase.RENDEZVOUS:
            text = f"The process of rank {rank} on {registration.node} cannot take part: {mismatch}."
            self._decide(Outcome(EXIT_NOT_FORMED, text))
        raise _refusal(mismatch)

    def _checked_guest(self, registration: Registration) -> TaskRecord:
        record = self._guests.find(registration.incarnation)
        if registration.version != __version__:
            raise _refusal(f"it runs tf4slurm {registration.version}, the job {__version__}; use the job's version")
        if record is not None and record.is_gone:
            raise _refusal(f"{record} has left the job")
        if record is not None:
            return record
        if registration.failure is not None:
            raise _refusal(registration.failure.removesuffix("."))
        if self.outcome is not None or self._stop is not None:
            raise _refusal("the job is ending")
        if not can_grow(Counter(record.task.task_type for record in self._members)):
            raise _refusal("only a job with a chief and ps can use more workers")
        if self.workers_error:
            raise _refusal(self.workers_error)
        record = self._guests.add(len(self.records), self._now)
        self.records.append(record)
        self.task_records.append(record)
        return record

    @property
    def _chief(self) -> TaskRecord | None:
        return next((record for record in self._members if record.task.task_type == "chief"), None)

    @property
    def _accepts_workers(self) -> bool:
        return self._chief is not None and self._chief.observed.script.workers is not None

    def _update_guests(self) -> None:
        """Update all guests; send the cluster, with all guests, to those that it lacks."""
        chief = self._chief
        if chief is None or self.phase not in (Phase.TRAINING, Phase.STOPPING) or not self._guests.has_changes:
            return
        usable = self._guests.update(chief, self._now)
        if self.phase is Phase.STOPPING or self.cluster is None:
            return
        known = {member.rank: member.address for member in self.cluster.members}
        missing = [r.rank for r in usable if r.attempt == self.attempt and known.get(r.rank) != r.address]
        if missing:
            self.cluster = Cluster(tuple(map(_to_member, self.records)))
            self._changed.update(missing)

    def _take_address(self, record: TaskRecord, address: Address) -> None:
        record.address, record.attempt = address, self.attempt
        self._unregistered.discard(record.rank)
        self._emit("registered", record, f"registered from {record.node} at {record.address}")
        self._form_cluster_if_registered()

    def _form_cluster_if_registered(self) -> None:
        if self.phase is Phase.RENDEZVOUS and not self._unregistered:
            self._form_cluster()

    def _form_cluster(self) -> None:
        if not all(record.is_placed for record in self._members):
            self._spread_tasks()
        cluster = Cluster(tuple(map(_to_member, self._members)))
        present = [member for member in cluster.members if not member.is_lost]
        for member in present if len({member.node for member in present}) > 1 else ():
            if is_loopback(member.address.host):
                reason = f"{member.task} on {member.node} has the address {member.address.host}, which no other host "
                reason += "can reach. Choose a network with --interface."
                self._decide(Outcome(EXIT_NOT_FORMED, reason, member.task))
                return
        self.cluster = cluster
        self._move_on(Phase.CHECKING, "every task has registered")

    def _spread_tasks(self) -> None:
        """Place the tasks on the present ranks; those that are lost already become the last spares."""
        present = [record for record in self._members if not record.is_gone]
        lost = [record for record in self._members if record.is_gone]  # spares since `Spares.assign`
        counts = Counter(record.task.task_type for record in present)
        tasks = list(place_tasks(counts, SPREAD, [record.node for record in present]))
        tasks += [Task("spare", counts["spare"] + number) for number in range(len(lost))]
        for record, task in zip([*present, *lost], tasks, strict=True):
            role = role_of(task.task_type, has_chief="chief" in counts)
            record.task, record.role, record.is_placed = task, role, True
        self.task_records[: len(self._members)] = self._members

    def _start_children(self) -> None:
        for record in self._members:
            record.desired_start_count = int(not record.role.is_spare)
        self._phase_deadline, self._started_at = _NEVER, self._now
        self._guests.begin_training(self._now)
        self._move_on(Phase.TRAINING, "every address is reachable; starting the child processes")

    def _on_exit(self, record: TaskRecord, returncode: int) -> None:
        record.ended_at = self._now
        self._barriers.withdraw(record)
        self._note_shards(self._shards.release(record.rank))
        why = record.observed.detail or describe_end(returncode)
        self._emit("exited", record, why, returncode=returncode)
        if self.phase is Phase.STOPPING:
            record.is_done = True
            self._end_stop_if_saved()
        elif self.phase is Phase.TRAINING:
            self._apply_role(record, returncode, why)

    def _apply_role(self, record: TaskRecord, returncode: int, why: str) -> None:
        if returncode == 0 and not record.role.is_server:
            record.is_done = True
            self._complete_if_done()
        elif record.role.is_restarted and record.desired_start_count <= self.spec.max_worker_restarts:
            record.desired_start_count += 1
            self._changed.add(record.rank)
            number, most = record.desired_start_count - 1, self.spec.max_worker_restarts
            self._emit("restarting", record, f"{why}: restart {number} of at most {most}")
        elif record.role.is_wait_bounded or record.role.is_guest or (returncode == 0 and record.role.is_restarted):
            record.is_done = True
            self._emit("not_restarted", record, "is not restarted again; the job continues without it")
            self._complete_if_done()
        elif returncode == 0:
            self._note_early_exit(record)
        else:
            exit_code = EXIT_TASK_LOST if record.observed.detail else exit_code_of(returncode)
            self._fail(Outcome(exit_code, f"{record} {why}.", record.task, record.observed.tail))

    def _on_script_state(self, record: TaskRecord, before: ScriptState) -> None:
        script = record.observed.script
        if script.step is not None and script.step != before.step and not record.role.is_guest:
            self._last_step_at = self._now
            self.progress.note_step(script.step)
            if before.step is None:
                self._emit("first_step", record, f"reports step {script.step}, its first")
        if script.barrier is not None and record.role.is_guest:
            record.released_barrier = script.barrier.token  # guests do not wait at barriers
            self._changed.add(record.rank)
        elif script.barrier is not None and script.barrier != before.barrier:
            name, seconds = script.barrier.name, self._barriers.arrive(record, script.barrier, self._now)
            if seconds is not None and seconds >= _LONG_WAIT_SECONDS:
                text = f"arrived last at barrier {name!r}: the first had waited {seconds:.1f} s"
                self._emit("barrier", record, text, barrier=name, waited_seconds=round(seconds, 1))
        elif script.barrier is None:
            self._barriers.withdraw(record)
        if script.shards != before.shards and record.observed.state == "running":
            self._note_shards(self._shards.update(record.rank, script.shards))
        self._note_end_of_training()
        self._end_stop_if_saved()

    def _note_shards(self, changes: ShardChanges) -> None:
        self._changed.update(changes.ranks)
        for progress in changes.finished:
            self._emit("shards", None, str(progress))

    def _check_steps(self) -> None:
        """Fail if no task has reported a new step within the stall timeout.

        Steps arrive with heartbeats. This method therefore waits for a heartbeat of each task that reports steps, at
        most half a heartbeat interval older than the end of the timeout.
        """
        seconds = self.spec.stall_timeout_seconds
        if seconds is None or self._now - self._last_step_at <= seconds:
            return
        asked_at = self._last_step_at + seconds - self.spec.heartbeat_interval_seconds / 2
        reporting = (r for r in self._members if r.observed.script.step is not None and not r.is_gone)
        if not all(record.last_heartbeat_at > asked_at for record in reporting):
            return
        self._last_step_at = _NEVER
        if self.phase is Phase.TRAINING:
            furthest = max(self._members, key=lambda record: record.observed.script.step or 0)
            step = furthest.observed.script.step
            text = f"no task has reported a new step for {seconds:g} s; the last was step {step} of {furthest}."
            self._fail(Outcome(EXIT_TASK_LOST, f"Training has stalled: {text}", furthest.task))

    @property
    def _lacks_servers(self) -> bool:
        """Whether no task of a cluster spec of several tasks has started a TensorFlow server in any attempt."""
        tasks = self._server_tasks
        return not self._had_server and len(tasks) > 1 and all(record.owns_child for record in tasks)

    @property
    def _server_tasks(self) -> list[TaskRecord]:
        return [record for record in self.records if record.role.is_in_cluster]

    def _check_servers(self) -> None:
        if self.phase is not Phase.TRAINING or not self._lacks_servers:
            return
        seconds, limit = self._now - self._started_at, self.spec.start_timeout_seconds
        if self.spec.require_servers and seconds >= limit:
            self._decide(Outcome(EXIT_NOT_FORMED, self._no_server(f" within {limit:g} s")))
        elif seconds >= _SERVER_SECONDS and "servers" not in self._warnings:
            self._warn("servers", self._no_server(either="either TensorFlow is still being imported, or "))

    def _no_server(self, when: str = "", either: str = "") -> str:
        return (
            f"None of the {len(self._server_tasks)} tasks in the cluster spec has started a TensorFlow server{when}: "
            f"{either}each runs the script alone. Let the script read TF_CONFIG, by TensorFlow or "
            "tf4slurm.tensorflow, or run one copy: --ps 0 --workers 0."
        )

    def _check_idleness(self) -> None:
        if self._now >= self._idle_check_at:
            self._idle_check_at = self._now + _IDLE_CHECK_SECONDS
            text = self._idle_watch.check(self._members, self._now)
            if text is not None and "servers" not in self._warnings:  # tasks without servers have another cause
                self._warn("idle", text)
            elif self._idle_watch.is_active:
                self._warnings.pop("idle", None)

    def _warn(self, subject: str, text: str) -> None:
        self._warnings[subject] = text
        self._emit("warning", None, text)

    def _note_early_exit(self, record: TaskRecord) -> None:
        """Give the other tasks the finish timeout to end, after a ps has exited early with code 0."""
        record.is_done = True
        if self._exited_early is None and not self._desired.is_finishing:
            self._exited_early = record
            seconds = self.spec.finish_timeout_seconds
            self._phase_deadline = self._now + seconds
            self._emit("exited_early", record, f"exited before the job was done; the others have {seconds:g} s to end")

    def _fail(self, outcome: Outcome) -> None:
        """Begin a new attempt after the failure of a task; if no attempt is left, end the job.

        A disconnected task may be the cause, so the failure is held until the task has reconnected or is lost.
        """
        if any(r.has_registered and not (r.is_gone or r.is_connected) for r in self._members):
            self._held_failure = self._held_failure or outcome
            return
        early = self._exited_early
        if early is not None and early.task != outcome.cause:
            reason = f"{early} exited with code 0 before the job was done. Then: {outcome.reason}"
            outcome = Outcome(EXIT_TASK_LOST, reason, early.task, outcome.tail)
        self._spares.note_failure(outcome.cause)
        self.progress.end_attempt()
        is_last, is_stuck = self.attempt >= self.spec.max_attempts, self.progress.is_stuck
        if is_stuck and not is_last:
            reason = f"{self.progress} The last failure: {outcome.reason}"
            outcome = dataclasses.replace(outcome, exit_code=EXIT_NO_PROGRESS, reason=reason)
        if is_last or is_stuck or not self._spares.assign():
            self._decide(outcome)
        else:
            self._begin_attempt(outcome.reason)

    def _begin_attempt(self, reason: str) -> None:
        self.attempt += 1
        self.cluster = self._exited_early = self._held_failure = None
        self._last_step_at = _NEVER
        self._desired = DesiredState(attempt=self.attempt)
        self._barriers.clear()
        self._shards.clear()
        self._guests.begin_attempt()
        for rank in self._active:
            self.records[rank].begin_attempt(self.attempt)
        self._unregistered = {record.rank for record in self._members} & self._active
        self._not_ready = self._unregistered.copy()
        self._phase_deadline = self._now + self.spec.start_timeout_seconds
        self._emit("attempt", None, f"attempt {self.attempt} of {self.spec.max_attempts}, because: {reason}")
        self._move_on(Phase.RENDEZVOUS, "every task ends its child process and chooses a new port")

    def _end_stop_if_saved(self) -> None:
        """End the grace period when all tasks that the job waits for have saved or exited, or a ps has."""
        if self.phase is not Phase.STOPPING or self._stop is None:
            return
        waited = [r for r in self.records if r.role.is_waited_for and not r.role.is_wait_bounded]
        has_lost_ps = any(r.is_done and r.role.is_server and r.role.is_in_cluster for r in self.records)
        if has_lost_ps or all(r.is_done or r.observed.script.has_saved for r in waited):
            self._decide(self._stop)

    def _note_end_of_training(self) -> None:
        if not self._desired.is_training_over and not any(record.needs_others for record in self.records):
            failed = tuple(r.name for r in self._members if r.has_failed and not (r.role.is_server or r.role.is_spare))
            self._desire(is_training_over=True, failed_tasks=failed)

    def _complete_if_done(self) -> None:
        waited = [record for record in self.records if record.role.is_waited_for]
        if not all(record.is_done for record in waited if not record.role.is_wait_bounded):
            return
        if all(record.is_done for record in waited):
            self._complete("every task that the job waits for")
        else:
            self._exited_early = None
            self._phase_deadline = min(self._phase_deadline, self._now + self.spec.finish_timeout_seconds)
            self._desire(is_finishing=True)

    def _complete(self, what: str) -> None:
        if self._lacks_servers and self.spec.require_servers:
            self._decide(Outcome(EXIT_NOT_FORMED, self._no_server()))
            return
        if self._lacks_servers:
            if "servers" not in self._warnings:
                self._emit("warning", None, self._no_server())
            self._warnings["servers"] = self._no_server()  # an earlier warning may be less certain
        self._decide(Outcome(0, f"Training is done: {what} exited with code 0."))

    def _lose(self, record: TaskRecord, why: str) -> None:
        if record.is_gone:
            return
        self._mark_gone(record)
        self._changed.add(record.rank)  # it must terminate if it is connected again
        self._emit("lost", record, f"is lost: {why}")
        if record.role.is_guest:
            self._update_guests()
            self._end_if_all_gone()
            return
        outcome = Outcome(EXIT_TASK_LOST, f"{record} is lost: {why}.", record.task)
        if self.phase is Phase.RENDEZVOUS and self._spares.assign():
            self._unregistered.discard(record.rank)
            self._not_ready.discard(record.rank)
            self._form_cluster_if_registered()
        elif self._can_replace_worker(record) and self._spares.assign(only_lost=True):
            self._start_replacement()
        elif self.phase in (Phase.RENDEZVOUS, Phase.CHECKING) or (record.owns_child and not record.role.is_spare):
            if self.spec.spares and self.phase in _BEFORE_END:
                self._fail(outcome)
            else:
                self._decide(outcome)
        self._note_end_of_training()
        self._end_if_all_gone()

    def _can_replace_worker(self, lost: TaskRecord) -> bool:
        """Whether the chief can use another process in place of this lost worker, without another attempt."""
        is_worker = lost.task.task_type == "worker" and lost.role.is_restarted
        return is_worker and self.phase is Phase.TRAINING and self._accepts_workers

    def _start_replacement(self) -> None:
        """Start the child of the spare that has just become a worker."""
        self.cluster = Cluster(tuple(map(_to_member, self.records)))
        for record in self._members:
            if not (record.is_gone or record.role.is_spare or record.desired_start_count):
                record.desired_start_count = 1
                self._changed.add(record.rank)
        self._guests.note_replacement()
        self._update_guests()

    def _decide(self, outcome: Outcome) -> None:
        """Set the outcome and terminate all tasks. Later failures are consequences of the first, and have no effect."""
        if self.outcome is None:
            self.outcome = outcome
            self._desire(terminate=True, terminate_reason=outcome.reason, has_timed_out=outcome.has_timed_out)
            self._phase_deadline = self._now + self.spec.termination_seconds
            self._emit("outcome", None, outcome.reason)
            self._move_on(Phase.TERMINATING, "terminating every task")
            self._end_if_all_gone()

    def _end_if_all_gone(self) -> None:
        if self.phase not in (Phase.TRAINING, Phase.TERMINATING):
            return
        if not self._active:
            self.phase = Phase.ENDED
        elif self.phase is Phase.TERMINATING and all(self.records[rank].role.is_guest for rank in self._active):
            self._phase_deadline = min(self._phase_deadline, self._now + self.spec.kill_wait_seconds + _GUEST_SECONDS)

    def _not_formed(self) -> Outcome:
        present = [record for record in self._members if not record.is_gone]
        missing = [record for record in present if record.attempt != self.attempt]
        late = missing or [record for record in present if record.observed.state != "ready"]
        what = "did not register" if missing else "did not check the addresses of other tasks"
        return Outcome(
            EXIT_NOT_FORMED,
            f"The cluster did not form within {self.spec.start_timeout_seconds:g} s: {format_tasks(late)} {what}. "
            "Look at their logs, or raise --start-timeout.",
            late[0].task,
            has_timed_out=True,
        )

    def _advance(self, now: float) -> None:
        """Set the time; extend all deadlines by the time in which this process did not run."""
        lag = now - self._now - self.spec.heartbeat_interval_seconds
        self._now = now
        if lag > 0:
            self._phase_deadline += lag
            self._last_step_at += lag
            self._started_at += lag
            self._guests.extend_deadlines(lag)
            for record in self.records:
                record.last_heartbeat_at += lag
                record.disconnected_at += lag

    def _mark_gone(self, record: TaskRecord) -> None:
        record.is_gone = True
        self._active.discard(record.rank)
        self._barriers.withdraw(record)
        self._note_shards(self._shards.release(record.rank))
        if record.has_registered and record.ended_at is None:
            record.ended_at = self._now

    def _desire(self, **changes: Any) -> None:
        self._desired = dataclasses.replace(self._desired, **changes)
        self._changed.update(range(len(self.records)))

    def _move_on(self, phase: Phase, text: str) -> None:
        self.phase = phase
        self._changed.update(range(len(self.records)))
        self._emit(phase.value, None, text)

    def _emit(self, kind: str, record: TaskRecord | None, text: str, **facts: object) -> None:
        assert kind in EVENT_KINDS, kind
        self._on_event(kind, record.name if record else None, f"{record} {text}" if record else text, **facts)


def _to_member(record: TaskRecord) -> Member:
    address = record.address or Address("", 0)
    is_lost = record.is_gone and not record.role.is_guest  # the list of workers has no gaps
    return Member(record.rank, record.task, record.node, Address(address.host, 0) if is_lost else address)


def _refusal(reason: str) -> RendezvousClosedError:
    return RendezvousClosedError(f"The control service refused this task: {reason}.", reason=reason)
