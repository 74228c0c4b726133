"""The rules of a job's life, as a pure state machine: events and the time go in, orders and a outcome come out.

Nothing here waits, sends or reads a clock. `service.py` feeds it with what the tasks say; the launcher with what it
knows of processes and signals; every rule can be tested by a table.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Callable, Sequence

from tf4slurm import __version__
from tf4slurm.cluster import Address, Cluster, Member, Task, format_tasks
from tf4slurm.control.barriers import Barriers
from tf4slurm.control.messages import DesiredState, ObservedState, Registration, ScriptState
from tf4slurm.control.outcome import Outcome, describe_end, exit_code_of
from tf4slurm.control.task_record import TaskRecord
from tf4slurm.errors import EXIT_NOT_FORMED, EXIT_PREFLIGHT, EXIT_TASK_LOST, RendezvousClosedError
from tf4slurm.network.interfaces import is_loopback
from tf4slurm.roles import role_of
from tf4slurm.spec import JobSpec


class Phase(enum.Enum):
    """Where the job stands. It only ever moves on, but for a new attempt, which is forming again."""

    RENDEZVOUS = "rendezvous"  # not all tasks have registered
    CHECKING = "checking"  # every task checks that the addresses of other tasks are reachable
    TRAINING = "training"  # the children run
    STOPPING = "stopping"  # the scripts are asked to save and stop
    TERMINATING = "terminating"  # there is an outcome, and every task is told to terminate
    ENDED = "ended"


_EVER = float("inf")
_SERVER_SECONDS = 60.0  # to import TensorFlow and open a server, before a warning that there is none
_LONG_WAIT_SECONDS = 1.0  # at a barrier: shorter ones, of which there may be one per step, are not told


class JobState:
    """The life of one job. Every `on_…` method takes the time of its event on a monotonic clock, in seconds."""

    def __init__(
        self,
        tasks: Sequence[Task],
        limits: JobSpec,
        now: float,
        on_event: Callable[[str, str | None, str], None],
        place: Callable[[Sequence[str]], Sequence[Task]] | None = None,
    ) -> None:
        """`tasks[rank]` is the task of a rank. `on_event(kind, task, text)` is told of each change of life.

        `place(nodes_by_rank)` replaces `tasks` once every task has registered. The job goes
        on without a task whose agent does not own its child: the others only learn that it is lost.
        """
        has_chief = any(task.task_type == "chief" for task in tasks)
        self.limits = limits
        self.phase = Phase.RENDEZVOUS
        self.outcome: Outcome | None = None
        self.cluster: Cluster | None = None
        self.attempt = 1
        self.records = [
            TaskRecord(rank, task, role_of(task.task_type, has_chief=has_chief), is_placed=place is None)
            for rank, task in enumerate(tasks)
        ]
        self._on_event = on_event
        self._place = place
        self._changed: set[int] = set()
        self._active: set[int] = set()  # ranks that have joined and are not gone
        self._awaited = set(range(len(tasks)))  # ranks that have no address in this attempt
        self._not_ready = set(range(len(tasks)))  # ranks that have not proved the map
        self._now = now
        self._phase_deadline = now + limits.start_timeout_seconds
        self._stop: Outcome | None = None
        self._exited_early: TaskRecord | None = None
        self._held: Outcome | None = None
        self._stepped_at: float | None = None
        self._is_training_over = False
        self._failed: tuple[str, ...] = ()
        self._is_finishing = False
        self._has_served = False
        self._children_at: float | None = None  # when the children of this attempt were told to start
        self.warnings: tuple[str, ...] = ()
        self._barriers = Barriers(self.records, lambda record: self._changed.add(record.rank), self._on_barrier)

    # What goes out

    @property
    def initial_desired_state(self) -> DesiredState:
        """Return what a task does that has been told nothing: it waits for the map."""
        return DesiredState(kill_wait_seconds=self.limits.kill_wait_seconds)

    def desired_state_of(self, rank: int) -> DesiredState:
        """Return what the task of this rank should do now."""
        record = self.records[rank]
        return DesiredState(
            attempt=self.attempt,
            starts=record.wanted_starts,
            terminate=self.outcome is not None,
            kill_wait_seconds=self.limits.kill_wait_seconds,
            terminate_reason=self.outcome.reason if self.outcome is not None else "",
            has_timed_out=self.outcome is not None and self.outcome.has_timed_out,
            stop_reason=self._stop.reason if self._stop is not None else "",
            grace_period_seconds=self.limits.grace_period_seconds if self._stop is not None else 0.0,
            released_barrier=record.released_barrier,
            barrier_error=record.barrier_error,
            is_training_over=self._is_training_over,
            failed_tasks=self._failed,
            is_finishing=self._is_finishing,
        )

    def take_changed(self) -> set[int]:
        """Return the ranks whose order has changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def was_stopped(self) -> bool:
        """Whether the job ends because someone asked for it."""
        return self.outcome is not None and self.outcome is self._stop

    def count(self, *states: str) -> int:
        """Return how many tasks that have joined are in one of these states."""
        return sum(record.has_registered and record.observed.state in states for record in self.records)

    # What comes in

    def on_registration(self, registration: Registration, now: float) -> TaskRecord:
        """A task has connected, for the first time or again.

        Raises:
            RendezvousClosedError: It cannot be a task of this job.
        """
        self._advance(now)
        record = self._checked_record(registration)
        record.owns_child = registration.owns_child
        self.on_disconnect(record.rank, now)  # where the end of the call before was not noticed yet
        record.is_connected = True
        if record.has_registered:  # no heartbeat: a task whose messages are never accepted is lost
            self._emit("reconnected", record, "is connected again")
            return record
        if registration.failure is not None:
            record.incarnation, record.node, record.is_gone = registration.incarnation, registration.node, True
            self._decide(Outcome(EXIT_PREFLIGHT, f"{record} cannot take part. {registration.failure}", record.task))
            return record
        record.incarnation, record.node, record.last_heartbeat_at = registration.incarnation, registration.node, now
        self._active.add(record.rank)
        self._changed.add(record.rank)
        self._take_address(record, Address(registration.host, registration.port))
        return record

    def on_heartbeat(self, rank: int, now: float) -> None:
        """A task lives, and has no news."""
        self._advance(now)
        self.records[rank].last_heartbeat_at = now

    def on_observed_state(self, rank: int, status: ObservedState, now: float) -> None:
        """A task says what it is doing."""
        self._advance(now)
        record = self.records[rank]
        record.last_heartbeat_at = now
        before = record.observed
        if status.attempt == self.attempt or status.state == "terminated":
            record.observed = status
        else:  # what becomes of an earlier attempt is of no interest any more
            record.observed = dataclasses.replace(before, stop_signal=status.stop_signal)
        if status.stop_signal is not None and status.stop_signal != before.stop_signal:
            self.on_stop(signal.Signals[status.stop_signal], f"{record} got {status.stop_signal}", now)
        passed_on = record.observed.script.stop_signal
        if passed_on is not None and passed_on != before.script.stop_signal and record.owns_child:
            self.on_stop(signal.Signals[passed_on], f"the script of {record} got {passed_on}", now)
        if record.observed.script != before.script:
            self._on_report(record, before.script, now)
        if record.observed.has_server and not before.has_server:
            self._has_served, self.warnings = True, ()
            self._emit("serving", record, "has a server that answers")
        if record.attempt < status.attempt == self.attempt and record.address is not None and status.port:
            self._take_address(record, Address(record.address.host, status.port))
        if (record.observed.state, record.observed.starts) == (before.state, before.starts):
            return
        if status.state == "not_ready":
            reason = (
                f"{status.detail}. That was tried from {record}. Look at the network, or name another with --interface."
            )
            self._decide(Outcome(EXIT_NOT_FORMED, reason, record.task))
        elif status.state == "ready":
            self._not_ready.discard(rank)
            if self.phase is Phase.CHECKING and not self._not_ready:
                self._start_children()
        elif status.state == "running":
            record.started_at, record.ended_at = now, None
            self._emit("started", record, f"started (process {status.process_id})")
        elif status.state == "exited":
            self._on_exit(record, status.returncode or 0, now)
        elif status.state == "terminated" and self.outcome is None and record.owns_child:
            self._lose(record, status.detail or "it left without being told to")
        elif status.state == "terminated":
            self._set_gone(record)
            self._emit("terminated", record, "terminated")
            self._end_if_all_gone()
        self._note_end_of_training()

    def on_disconnect(self, rank: int, now: float) -> None:
        """A task's connection has ended. It may come back."""
        self._advance(now)
        record = self.records[rank]
        if record.is_connected and not record.is_gone:
            self._emit("disconnected", record, "lost its connection")
            record.is_connected, record.disconnected_at = False, now

    def on_rejected(self, rank: int, reason: str, now: float) -> None:
        """The service cannot accept a message of an authenticated task: it would never learn that task's state."""
        self._advance(now)
        self._lose(self.records[rank], f"its message was not accepted: {reason.removesuffix('.')}")

    def on_agent_exit(self, rank: int, returncode: int, now: float) -> None:
        """The launcher has seen the end of a task's agent."""
        self._advance(now)
        self._lose(self.records[rank], f"its agent {describe_end(returncode)}")

    def on_spawner_exit(self, outcome: Outcome, now: float) -> None:
        """Whatever started the agents is gone, and so are they."""
        self._advance(now)
        self._decide(outcome)
        for record in self.records:
            self._set_gone(record)
        self._end_if_all_gone()

    def finish(self, now: float) -> None:
        """All that was wanted is done: terminating every task."""
        self._advance(now)
        self._decide(Outcome(0, "Every task has the map."))

    def on_stop(self, number: signal.Signals, what: str, now: float) -> None:
        """Someone asks the whole job to stop: it is told so once, and has its grace."""
        self._advance(now)
        if self._stop is not None or self.outcome is not None:
            return
        self._stop = Outcome(128 + number, f"The job was stopped: {what}.")
        if self.phase is not Phase.TRAINING or not self.limits.grace_period_seconds:
            self._decide(self._stop)
            return
        for record in self.records:  # whose failure is held back: nothing more comes of these children
            if record.observed.state == "exited" and record.observed.starts >= record.wanted_starts:
                record.is_done = True
        self._phase_deadline = now + self.limits.grace_period_seconds
        self._move_on(Phase.STOPPING, f"{what}: the job has {self.limits.grace_period_seconds:g} s to save and stop")
        self._leave_if_saved()

    def skip_grace_period(self, now: float) -> None:
        """Who has asked the job to stop asks again: it has no grace any more."""
        self._advance(now)
        if self._stop is not None:
            self._decide(self._stop)

    def on_tick(self, now: float) -> None:
        """Time has passed: judge silence and deadlines. Call it several times per beat."""
        self._advance(now)
        for record in self.records:
            if not record.has_registered or record.is_gone:
                continue
            if not record.is_connected and now - record.disconnected_at > self.limits.reconnect_seconds:
                self._lose(record, "its connection broke and did not come back")
            elif now - record.last_heartbeat_at > self.limits.heartbeat_timeout_seconds:
                self._lose(record, f"it sent no heartbeat for {self.limits.heartbeat_timeout_seconds:g} s")
        self._release()
        self._barriers.settle(now)
        if self._has_stalled(now):
            self._on_stall()
        self._judge_servers(now)
        if now < self._phase_deadline:
            return
        if self.phase in (Phase.RENDEZVOUS, Phase.CHECKING):
            self._decide(self._not_formed())
        elif self.phase is Phase.TRAINING:
            self._phase_deadline = _EVER
            waiting = [r for r in self.records if r.role.is_waited_for and not r.is_done]
            if self._exited_early is not None:
                late = f"{format_tasks(waiting)} did not end within {self.limits.finish_timeout_seconds:g} s"
                self._fail(Outcome(EXIT_TASK_LOST, f"{late}.", waiting[0].task))
            else:
                self._complete(f"all but {format_tasks(waiting)}, waited for {self.limits.finish_timeout_seconds:g} s")
        elif self.phase is Phase.STOPPING and self._stop is not None:
            self._emit("grace_period_over", None, f"the grace of {self.limits.grace_period_seconds:g} s is over")
            self._decide(self._stop)
        elif self.phase is Phase.TERMINATING:
            stragglers = [record for record in self.records if record.has_registered and not record.is_gone]
            self._emit("not_terminated", None, f"{format_tasks(stragglers)} did not terminate in time")
            self.phase = Phase.ENDED

    # The rules

    def _release(self) -> None:
        """Judge the failure that was held back; once the job is asked to stop, its outcome is the stop."""
        held, self._held = self._held, None
        if held is not None and self.phase is Phase.TRAINING:
            self._fail(held)

    def _checked_record(self, registration: Registration) -> TaskRecord:
        if registration.version != __version__:
            raise self._refuse_for_good(
                registration, f"it runs tf4slurm {registration.version}, the launcher {__version__}"
            )
        if not 0 <= registration.rank < len(self.records):
            raise self._refuse_for_good(
                registration, f"rank {registration.rank} is not one of this job's {len(self.records)} tasks"
            )
        record = self.records[registration.rank]
        if record.is_gone:
            raise _refusal(f"rank {registration.rank} counts as lost, or has left")
        if record.has_registered and record.incarnation != registration.incarnation:
            raise _refusal(f"rank {registration.rank} was taken by an earlier process, on {record.node}")
        return record

    def _refuse_for_good(self, registration: Registration, reason: str) -> RendezvousClosedError:
        """While the cluster forms, a task that can never be in it ends the job: waiting for it would not help."""
        if self.phase is Phase.RENDEZVOUS:
            text = f"The process of rank {registration.rank} on {registration.node} cannot take part: {reason}."
            self._decide(Outcome(EXIT_NOT_FORMED, text))
        return _refusal(reason)

    def _take_address(self, record: TaskRecord, address: Address) -> None:
        record.address, record.attempt = address, self.attempt
        self._awaited.discard(record.rank)
        self._emit("registered", record, f"registered from {record.node} at {record.address}")
        if self.phase is Phase.RENDEZVOUS and not self._awaited:
            self._complete_cluster()

    def _complete_cluster(self) -> None:
        if self._place is not None:
            has_chief = any(record.task.task_type == "chief" for record in self.records)
            for record, task in zip(self.records, self._place([r.node for r in self.records]), strict=True):
                record.task, record.role, record.is_placed = task, role_of(task.task_type, has_chief=has_chief), True
        members = tuple(Member(r.rank, r.task, r.node, r.address) for r in self.records if r.address is not None)
        cluster = Cluster(members)
        for member in members if len(cluster.nodes) > 1 else ():
            if is_loopback(member.address.host):
                why = f"{member.task} on {member.node} gave the address {member.address.host}, which only it can reach"
                self._decide(Outcome(EXIT_NOT_FORMED, f"{why}. Name a network with --interface.", member.task))
                return
        self.cluster = cluster
        self._move_on(Phase.CHECKING, "every task has registered")

    def _start_children(self) -> None:
        for record in self.records:
            record.wanted_starts = 1
        self._phase_deadline, self._children_at = _EVER, self._now
        self._move_on(Phase.TRAINING, "every address is reachable; starting the child processes")

    def _on_exit(self, record: TaskRecord, returncode: int, now: float) -> None:
        record.ended_at = now
        self._barriers.depart(record)
        why = record.observed.detail or describe_end(returncode)
        self._emit("exited", record, why)
        if self.phase is Phase.STOPPING:
            record.is_done = True
            self._leave_if_saved()
        if self.phase is not Phase.TRAINING:
            return
        if returncode == 0 and not record.role.serves:
            record.is_done = True
            self._complete_if_done(now)
        elif record.role.is_restarted and record.wanted_starts <= self.limits.max_worker_restarts:
            record.wanted_starts += 1
            self._changed.add(record.rank)
            self._emit("restarting", record, f"restart {record.wanted_starts - 1} in place")
        elif record.role.is_wait_bounded or (returncode == 0 and record.role.is_restarted):
            record.is_done = True
            self._emit("not_restarted", record, "is not restarted again; the job goes on without it")
            self._complete_if_done(now)
        elif returncode == 0:
            self._depart(record, now)
        else:
            exit_code = EXIT_TASK_LOST if record.observed.detail else exit_code_of(returncode)
            self._fail(Outcome(exit_code, f"{record} {why}.", record.task, record.observed.tail))

    def _on_report(self, record: TaskRecord, before: ScriptState, now: float) -> None:
        script = record.observed.script
        if script.step is not None and script.step != before.step:
            self._stepped_at = now
            if before.step is None:
                self._emit("first_step", record, f"reports step {script.step}, its first")
        if script.barrier is not None and script.barrier != before.barrier:
            self._barriers.arrive(record, script.barrier, now)
        elif script.barrier is None:
            self._barriers.depart(record)
        self._note_end_of_training()
        self._leave_if_saved()

    def _on_barrier(self, name: str, last: TaskRecord, seconds: float) -> None:
        if seconds >= _LONG_WAIT_SECONDS:
            self._emit("barrier", last, f"came last to barrier {name!r}: the first had waited {seconds:.1f} s")

    def _has_stalled(self, now: float) -> bool:
        """Whether no new step was told for the limit, and all that tell steps were asked once it was over.

        A beat is not to the millisecond, so those that were asked up to half of one before count too.
        """
        seconds = self.limits.stall_timeout_seconds
        if seconds is None or self._stepped_at is None or now - self._stepped_at <= seconds:
            return False
        asked_at = self._stepped_at + seconds - self.limits.heartbeat_interval_seconds / 2
        stepping = (r for r in self.records if r.observed.script.step is not None and not r.is_gone)
        return all(record.last_heartbeat_at > asked_at for record in stepping)

    def _on_stall(self) -> None:
        self._stepped_at = None
        if self.phase is Phase.TRAINING:
            furthest = max(self.records, key=lambda record: record.observed.script.step or 0)
            what = f"no task has reported a new step for {self.limits.stall_timeout_seconds:g} s"
            what += f"; the last was step {furthest.observed.script.step}"
            self._fail(Outcome(EXIT_TASK_LOST, f"Training has stalled: {what} of {furthest}.", furthest.task))

    @property
    def _lacks_servers(self) -> bool:
        """Whether several tasks should have a TensorFlow server, and none has had one in any attempt."""
        tasks = self._server_tasks
        return not self._has_served and len(tasks) > 1 and all(record.owns_child for record in tasks)

    @property
    def _server_tasks(self) -> list[TaskRecord]:
        return [record for record in self.records if record.role.is_in_cluster]

    def _judge_servers(self, now: float) -> None:
        if self.phase is not Phase.TRAINING or self._children_at is None or not self._lacks_servers:
            return
        seconds, limit = now - self._children_at, self.limits.start_timeout_seconds
        if self.limits.require_servers and seconds >= limit:
            self._decide(Outcome(EXIT_NOT_FORMED, self._no_server(f" within {limit:g} s")))
        elif seconds >= _SERVER_SECONDS:
            self._warn(self._no_server("", ", unless it still imports TensorFlow"))

    def _no_server(self, when: str = "", unless: str = "") -> str:
        what = f"None of the {len(self._server_tasks)} tasks in the cluster spec has opened a TensorFlow server{when}"
        todo = "Let it read TF_CONFIG, by TensorFlow or tf4slurm.tensorflow, or run one copy: --ps 0 --workers 0."
        return f"{what}: each has run the script by itself{unless}. {todo}"

    def _warn(self, text: str) -> None:
        if not self.warnings:
            self.warnings = (text,)
            self._emit("warning", None, text)

    def _depart(self, record: TaskRecord, now: float) -> None:
        """A ps has left by itself. If all are done, the others soon end too."""
        record.is_done = True
        if self._exited_early is None and not self._is_finishing:
            self._exited_early = record
            seconds = self.limits.finish_timeout_seconds
            self._phase_deadline = now + seconds
            self._emit("exited_early", record, f"exited before the job was done; the others have {seconds:g} s to end")

    def _fail(self, outcome: Outcome) -> None:
        """A task on which the job depends has failed: form the cluster anew if an attempt is left.

        While another is disconnected that may be the cause, and is told apart when it is back, or lost.
        """
        if any(r.has_registered and not (r.is_gone or r.is_connected) for r in self.records):
            self._held = self._held or outcome
            return
        departed = self._exited_early
        if departed is not None and departed.task != outcome.cause:
            reason = f"{departed} exited with code 0 before the job was done. Then: {outcome.reason}"
            outcome = Outcome(EXIT_TASK_LOST, reason, departed.task, outcome.tail)
        if self.attempt >= self.limits.max_attempts:
            self._decide(outcome)
            return
        self.attempt += 1
        self.cluster = self._exited_early = self._stepped_at = None
        self._is_training_over, self._failed, self._held, self._is_finishing = False, (), None, False
        self._barriers.forget()
        for record in self.records:
            record.begin_attempt(self.attempt)
        self._awaited.update(range(len(self.records)))
        self._not_ready.update(range(len(self.records)))
        self._phase_deadline = self._now + self.limits.start_timeout_seconds
        self._emit("attempt", None, f"attempt {self.attempt} of {self.limits.max_attempts}, because: {outcome.reason}")
        self._move_on(Phase.RENDEZVOUS, "every task ends its child and takes a new port")

    def _leave_if_saved(self) -> None:
        """Once those that the job waits for have saved or ended, or nothing can be saved any more, the rest may go."""
        if self.phase is not Phase.STOPPING or self._stop is None:
            return
        waited = [r for r in self.records if r.role.is_waited_for and not r.role.is_wait_bounded]
        are_saved = all(r.is_done or r.observed.script.has_saved for r in waited)
        if are_saved or any(
            record.is_done and record.role.serves and record.role.is_in_cluster for record in self.records
        ):
            self._decide(self._stop)

    def _note_end_of_training(self) -> None:
        if not self._is_training_over and not any(record.needs_others for record in self.records):
            self._is_training_over = True
            self._failed = tuple(r.name for r in self.records if r.has_failed and not r.role.serves)
            self._changed.update(range(len(self.records)))

    def _complete_if_done(self, now: float) -> None:
        waited = [record for record in self.records if record.role.is_waited_for]
        if not all(record.is_done for record in waited if not record.role.is_wait_bounded):
            return
        if all(record.is_done for record in waited):
            self._complete("all that the job waits for")
        else:
            self._exited_early = None
            self._phase_deadline = min(self._phase_deadline, now + self.limits.finish_timeout_seconds)
            if not self._is_finishing:
                self._is_finishing = True
                self._changed.update(range(len(self.records)))

    def _complete(self, what: str) -> None:
        if self._lacks_servers and self.limits.require_servers:
            self._decide(Outcome(EXIT_NOT_FORMED, self._no_server()))
            return
        if self._lacks_servers:
            self._warn(self._no_server())
        self._decide(Outcome(0, f"Training is done: {what} exited with code 0."))

    def _lose(self, record: TaskRecord, why: str) -> None:
        if record.is_gone:
            return
        self._set_gone(record)
        self._emit("lost", record, f"is lost: {why}")
        self._barriers.depart(record)
        if record.owns_child or self.phase in (Phase.RENDEZVOUS, Phase.CHECKING):
            self._decide(Outcome(EXIT_TASK_LOST, f"{record} is lost: {why}.", record.task))
        self._note_end_of_training()
        self._end_if_all_gone()

    def _decide(self, outcome: Outcome) -> None:
        """The first outcome stands; what follows from it is collateral."""
        if self.outcome is None:
            self.outcome = outcome
            self._phase_deadline = self._now + self.limits.kill_wait_seconds + self.limits.heartbeat_timeout_seconds
            self._emit("outcome", None, outcome.reason)
            self._move_on(Phase.TERMINATING, "terminating every task")
            self._end_if_all_gone()

    def _end_if_all_gone(self) -> None:
        if self.phase in (Phase.TRAINING, Phase.TERMINATING) and not self._active:
            self.phase = Phase.ENDED

    def _not_formed(self) -> Outcome:
        missing = [record for record in self.records if record.attempt != self.attempt]
        late = missing or [record for record in self.records if record.observed.state != "ready"]
        what = "did not register" if missing else "did not check the addresses of other tasks"
        return Outcome(
            EXIT_NOT_FORMED,
            f"The cluster did not form within {self.limits.start_timeout_seconds:g} s: {format_tasks(late)} {what}. "
            "Look at the log of each, or raise --start-timeout.",
            late[0].task,
            has_timed_out=True,
        )

    def _advance(self, now: float) -> None:
        """Take the time; silence while this process itself did not run (stopped, or starved) is nobody's fault."""
        lag = now - self._now - self.limits.heartbeat_interval_seconds
        self._now = now
        if lag > 0:
            self._phase_deadline += lag
            if self._stepped_at is not None:
                self._stepped_at += lag
            if self._children_at is not None:
                self._children_at += lag
            for record in self.records:
                record.last_heartbeat_at += lag
                record.disconnected_at += lag

    def _set_gone(self, record: TaskRecord) -> None:
        record.is_gone = True
        self._active.discard(record.rank)
        if record.has_registered and record.ended_at is None:
            record.ended_at = self._now

    def _move_on(self, phase: Phase, text: str) -> None:
        self.phase = phase
        self._changed.update(range(len(self.records)))
        self._emit(phase.value, None, text)

    def _emit(self, kind: str, record: TaskRecord | None, text: str) -> None:
        self._on_event(kind, record.name if record else None, f"{record} {text}" if record else text)


def _refusal(reason: str) -> RendezvousClosedError:
    return RendezvousClosedError(f"The control service refused this task: {reason}.", reason=reason)
