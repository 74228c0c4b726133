"""The state of a job. `JobState` applies the rules (`rules.py`) to events, and decides how the job ends.

Its inputs are events and their job times (`clock.py`). Its outputs are the desired states of tasks and the outcome of
the job. It never waits, sends or reads a clock. `receiver.py`, `service.py` and the launcher call it.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tf4slurm.cluster import Address, Cluster, Task, format_tasks
from tf4slurm.control import rules
from tf4slurm.control.formation import (
    describe_port_failure,
    find_local_address,
    not_attached,
    not_formed,
    port_failure_cure,
    spread_tasks,
)
from tf4slurm.control.messages import CheckpointState
from tf4slurm.control.records import EVENT_KINDS, Failure, JobProgress, Outcome, Phase, TaskRecord
from tf4slurm.control.rules import (
    AfterExit,
    AfterFailure,
    AfterLeave,
    AfterLoss,
    AfterPortFailure,
    AfterStop,
    Completion,
    StopRequest,
)
from tf4slurm.control.script_calls import ScriptCalls
from tf4slurm.control.spares import NodeFailures, can_replace, plan_replacements
from tf4slurm.control.task_table import TaskTable
from tf4slurm.control.watches import Findings, Watches
from tf4slurm.errors import EXIT_NO_PROGRESS, EXIT_TASK_LOST, describe_end
from tf4slurm.placement import SPREAD
from tf4slurm.spec.job_spec import JobSpec

_MOST_NAMED = 10  # tasks in a sentence
_NEVER = float("inf")
_JOINED_SECONDS = 2.0  # for joined workers to terminate after all other tasks have
_REPEATED = "is not restarted again: it failed twice on the same line before its server ran"


class JobState:
    """The state of one job.

    Attributes:
        now: The job time in seconds of the latest event.
        tasks: All tasks.
        scripts: What the scripts ask of the launcher: barriers, data shards, joined workers.
        desired: The desired states of the tasks.
        watches: The checks that notice when the job does not train.
        cluster: The cluster of this attempt. None until it has formed.
        outcome: How the job ends. None until that is known.
    """

    def __init__(self, tasks: Sequence[Task], spec: JobSpec, now: float, on_event: Callable[..., None]) -> None:
        """Create the state of a job in which no task has registered.

        Args:
            tasks: The task of each rank. Placement "spread" assigns the tasks again when all ranks have registered.
            on_event: Called as `on_event(kind, task, text, **facts)` for each event of `EVENT_KINDS`.
        """
        self.spec = spec
        self.now = now
        self.phase = Phase.RENDEZVOUS
        self.attempt = 1
        self.cluster: Cluster | None = None
        self.outcome: Outcome | None = None
        self.tasks = TaskTable(tasks, is_placed=spec.placement != SPREAD)
        self.scripts = ScriptCalls(spec, self.tasks, self.emit)
        self.desired = self.scripts.desired
        self.watches = Watches(spec)
        self.progress = JobProgress()
        self._node_failures = NodeFailures()
        self._on_event = on_event
        self._phase_deadline = now + spec.start_timeout_seconds
        self._stop: Outcome | None = None
        self._num_stops: Counter[StopRequest] = Counter()
        self._ctrl_c_at = -_NEVER
        self._held_failure: Failure | None = None  # until each disconnected task has reconnected or is lost
        self._explained_by: TaskRecord | None = None  # the task whose last lines explain the outcome
        self._exited_early: TaskRecord | None = None
        self._num_other_ports = 0  # how many times the cluster has formed again after the loss of a port
        self._vacant_seconds: float | None = None  # for another chief to register; None if no chief has left

    def postpone_start(self, until: float) -> None:
        """Postpone the start timeout, the time limit for the cluster to form: it now begins at the job time `until`.

        With `math.inf` it does not expire before the next call of this function.
        """
        self._phase_deadline = until + self.spec.start_timeout_seconds

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """The nodes where attempts have failed repeatedly. Spares on other nodes should replace the tasks there."""
        return self._node_failures.excluded_nodes(self.tasks.members)

    # The cluster

    def on_address(self, record: TaskRecord, address: Address) -> None:
        """Handle the address of a task in this attempt. After the last task's address the cluster forms."""
        self.tasks.take_address(record, address, self.attempt)
        self.emit("registered", record, f"registered from {record.node} at {record.address}")
        self._form_cluster_if_registered()

    def _form_cluster_if_registered(self) -> None:
        if self.phase is not Phase.RENDEZVOUS or self._held_failure is not None or not self.tasks.are_all_registered:
            return
        if not all(record.is_placed for record in self.tasks.members):
            self.tasks.place(spread_tasks(self.tasks, self.spec))
        outcome = find_local_address(self.tasks)
        if outcome is not None:
            self.decide(outcome)
        else:
            self.cluster = self.tasks.to_members_cluster()
            self._move_on(Phase.CHECKING, "every task has registered")

    def on_ready(self, record: TaskRecord) -> None:
        """Handle the success of a reachability check. After the last check the members' children start."""
        self.tasks.mark_ready(record)
        if record.role.has_joined and self.phase is Phase.TRAINING:
            self.desired.start(record.rank, 1)
        elif self.phase is Phase.CHECKING and self.tasks.are_all_ready:
            for member in self.tasks.find_unstarted():
                self.desired.start(member.rank, 1)
            self._phase_deadline = _NEVER
            self.watches.servers.note_start(self.now)
            self.scripts.joined_workers.begin_training(self.now)
            self._move_on(Phase.TRAINING, "every address is reachable; starting the child processes")

    def update_joined_workers(self) -> None:
        """Update the joined workers. If the cluster lacks one that the chief's script accepts, make a new cluster.

        Do nothing except during training and while the scripts stop.
        """
        if self.phase is Phase.STOPPING:
            self.scripts.update_joined_workers(None, self.attempt, self.now)
        elif self.phase is Phase.TRAINING and self.scripts.update_joined_workers(self.cluster, self.attempt, self.now):
            self.cluster = self.tasks.to_cluster()

    # Exits, losses and failures: `rules.py` has the consequences

    def on_exit(self, record: TaskRecord) -> None:
        """Handle the exit of a child."""
        observed, returncode = record.observed, record.observed.returncode or 0
        exited_at = self.now - observed.exit_age_seconds
        record.ended_at = max(exited_at, record.started_at or 0.0)
        self.scripts.on_end(record)
        why = observed.detail or describe_end(returncode)
        self.emit("exited", record, why, returncode=returncode)
        is_allowed = record.desired_start_count <= self.spec.max_worker_restarts
        consequence = rules.after_exit(
            record.role,
            returncode,
            self.phase,
            is_restart_left=is_allowed and not record.repeats_failure,
            shared=self.desired.shared,
        )
        if consequence in (AfterExit.RESTART, AfterExit.FAILURE) and self._handle_port_failure(record, exited_at):
            return
        is_repeated = is_allowed and record.repeats_failure
        if is_repeated and consequence is AfterExit.FAILURE:
            self.emit("not_restarted", record, _REPEATED)
        if consequence is AfterExit.RESTART:
            number, most = record.desired_start_count, self.spec.max_worker_restarts
            self.desired.start(record.rank, record.desired_start_count + 1)
            self.emit("restarting", record, f"{why}: restart {number} of at most {most}")
        elif consequence is AfterExit.FAILURE:
            exit_code = rules.exit_code_after(returncode, observed.killed_by)
            self._fail(Failure(Outcome(exit_code, f"{record} {why}.", record.task), exited_at, record))
        elif consequence is AfterExit.EARLY:
            record.is_done = True
            if self._exited_early is None:
                self._exited_early, seconds = record, self.spec.finish_timeout_seconds
                self._phase_deadline = self.now + seconds
                text = f"exited before the job was done; the others have {seconds:g} s to end"
                self.emit("exited_early", record, text)
        elif consequence is not AfterExit.NOTHING:
            record.is_done = True
            if consequence is AfterExit.GO_ON:
                text = f"{_REPEATED}; " if is_repeated else "is not restarted again; "
                self.emit("not_restarted", record, f"{text}the job continues without it")
            self._complete_if_done()
            self.end_stop_if_saved()

    def _handle_port_failure(self, record: TaskRecord, exited_at: float) -> bool:
        """Handle the exit of a child whose server could not listen on its port. Return whether that is all.

        A joined worker has no part in the forming of the cluster, and an external chief cannot form it again.
        """
        port_failure = record.observed.port_failure
        is_unanswered = record.role.has_joined or self.spec.external_chief or self._held_failure is not None
        if port_failure is None or is_unanswered:
            return False
        consequence = rules.after_port_failure(
            port_failure,
            self.spec.hold_ports,
            num_before=self._num_other_ports,
            are_released=self.desired.shared.releases_ports,
        )
        what = describe_port_failure(record, port_failure)
        if consequence is AfterPortFailure.FAILURE:
            reason = f"{what} {port_failure_cure(port_failure, self.spec.hold_ports, self._num_other_ports)}"
            exit_code = rules.exit_code_after(record.observed.returncode or 0, record.observed.killed_by)
            self._fail(Failure(Outcome(exit_code, reason, record.task), exited_at, record))
            return True
        self._num_other_ports += 1
        releases = consequence is AfterPortFailure.RELEASED_PORTS
        how = ", and the agents do not hold them" if releases else ""
        number = f"{self._num_other_ports} of at most {rules.MOST_OTHER_PORTS}"
        self.emit("other_ports", None, f"{what} The cluster forms again on other ports{how} ({number})")
        self._begin_attempt(self.spec.start_timeout_seconds, releases_ports=releases)
        return True

    def on_terminated(self, record: TaskRecord) -> None:
        """Handle the end of an agent that the job has asked to terminate, or that terminates by itself."""
        if record.observed.next_chief_seconds is not None and self._leave(record, record.observed.next_chief_seconds):
            return
        is_asked = self.outcome is not None or bool(self.scripts.joined_workers.dismissal_of(record.rank)[0])
        if not is_asked and (record.owns_child or self.phase in (Phase.RENDEZVOUS, Phase.CHECKING)):
            why = "its agent terminated by itself" if record.owns_child else "its script has ended"
            self.lose(record, record.observed.detail or why)
        else:
            self.mark_gone(record)
            self.emit("terminated", record, "terminated")
            returncode, shared = record.observed.returncode, self.desired.shared
            if rules.after_script_end(record.role, self.phase, shared, returncode) is AfterLoss.STOP:
                self._stop_after_loss(record, record.observed.detail or "has ended before training was over")
            self.end_stop_if_saved()
            self._end_if_all_gone()

    def _leave(self, record: TaskRecord, seconds: float) -> bool:
        """Handle the end of an external chief's process that has called `restart()`. Return whether that is all.

        Another chief has `seconds` to register.
        """
        consequence = rules.AFTER_LEAVE.get(self.phase, AfterLeave.NOTHING)
        if consequence is AfterLeave.FINISHED:
            record.is_done = True
            self.end_stop_if_saved()
        if consequence is not AfterLeave.RESTART or plan_replacements(self.tasks, (), only_lost=True) is None:
            return False
        self._replace(only_lost=True)
        self.emit("vacant", None, f"{record} has left after restart(): another chief has {seconds:g} s to attach")
        self.scripts.on_end(record)
        self.tasks.vacate(record)
        self._begin_attempt(seconds)
        self._vacant_seconds = seconds
        return True

    def on_first_registration(self, record: TaskRecord) -> None:
        """Handle the first registration of a task. If another chief was awaited, the start timeout begins."""
        if self._vacant_seconds is not None and record is self.tasks.chief:
            self._vacant_seconds = None
            self._phase_deadline = self.now + self.spec.start_timeout_seconds

    def on_spawner_exit(self, outcome: Outcome, now: float) -> None:
        """Handle the exit of srun or, in a local job, of all agents. All tasks have ended with it.

        The job keeps an outcome that it already has. Otherwise it ends with the first of these causes that applies: a
        failure that still waits for disconnected tasks, a pause of the launcher that ended agents (if `outcome` has
        exit code 7), and `outcome`. If the job has ended by the loss of a task, `outcome.failure` explains it: Slurm's
        kill of the step, which srun prints at its end.
        """
        self.now = now
        if self._held_failure is not None:
            self._decide_failure(self._held_failure)
        elif outcome.exit_code == EXIT_TASK_LOST:
            outcome = self.watches.pauses.outcome_of_pause(now) or outcome
        failure = outcome.failure
        self.decide(outcome)
        if failure is not None and self.outcome is not None and self.outcome.is_loss and not self._may_explain_other():
            self.outcome = dataclasses.replace(self.outcome, failure=failure)
        for record in self.tasks.members:
            self.mark_gone(record)
        self._end_if_all_gone()

    def _may_explain_other(self) -> bool:
        """Return whether a kill that Slurm reports at the end of the step may be that of an earlier child process."""
        states = [record.observed for record in self.tasks.members]
        has_kill = any(each.returncode == -signal.SIGKILL and each.killed_by is None for each in states)
        return has_kill or self.attempt > 1 or any(each.start_count > 1 for each in states)

    def lose(self, record: TaskRecord, why: str, *, is_orphan: bool = False) -> None:
        """Handle the loss of a task. Idempotent.

        Args:
            record: The task.
            why: The reason, without the name of the task.
            is_orphan: The agent may have ended because it lost the launcher. If the launcher was paused, the outcome
                then names this pause instead of the task.
        """
        if record.is_gone:
            return
        at = record.lost_at(self.now, self.spec.task_loss_seconds)
        self.mark_gone(record)
        record.loss = why
        self.desired.note([record.rank])  # it must terminate if it is connected again
        self.emit("lost", record, f"is lost: {why}")
        outcome = rules.outcome_of_loss(record, why)
        if is_orphan and (excuse := self.watches.pauses.outcome_of_pause(self.now)) is not None:
            outcome, at = excuse, max(at, self.watches.pauses.noted_at)
        consequence = rules.after_loss(
            record.role,
            self.phase,
            is_replaceable=self._held_failure is None and can_replace(self.tasks, self.spec),
            accepts_workers=self.tasks.accepts_workers,
            owns_child=record.owns_child,
            is_done=record.is_done,
            shared=self.desired.shared,
        )
        if consequence in (AfterLoss.REPLACE_BEFORE_TRAINING, AfterLoss.FORM_WITHOUT):
            self.tasks.form_without(record)
            self._replace()
            self._form_cluster_if_registered()
        elif consequence is AfterLoss.REPLACE_IN_TRAINING:
            self._replace(only_lost=True)
            self.cluster = self.tasks.to_cluster()
            for each in self.tasks.find_unstarted():
                self.desired.start(each.rank, 1)
            self.scripts.joined_workers.note_replacement()
            self.update_joined_workers()
        elif consequence is AfterLoss.FAILURE:
            self._fail(Failure(outcome, at, record))
        elif consequence is AfterLoss.END:
            self.decide(outcome)
        elif consequence is AfterLoss.STOP:
            self._stop_after_loss(record, f"is lost: {why}")
        elif record.role.has_joined:
            self.update_joined_workers()
        elif self.desired.shared.is_finishing:
            record.is_done = True
            self._complete_if_done()
        self.scripts.note_end_of_training()
        self._end_if_all_gone()

    def _replace(self, *, only_lost: bool = False) -> None:
        """Let spares replace lost tasks and, unless `only_lost`, tasks on `excluded_nodes`."""
        for record, spare in plan_replacements(self.tasks, self.excluded_nodes, only_lost=only_lost) or ():
            self.emit("replaced", spare, f"takes the place of {record}")
            self.tasks.exchange(record, spare)

    def _fail(self, failure: Failure) -> None:
        """Begin a new attempt after a failure if the rules allow one. Otherwise end the job.

        A disconnected task may be the cause, so the failure is held until the task has reconnected or is lost. It is
        also held while an external chief may call `restart()`. Of several failures the earliest one counts.
        """
        if self.phase.is_ending or self.desired.shared.is_finishing:
            return
        self._held_failure = failure = rules.first_failure(self._held_failure, failure)
        outcome = rules.outcome_after(failure, self._exited_early)
        if self.tasks.is_disconnected or self._awaits_restart(failure, outcome):
            return
        self._node_failures.note(self.tasks.members, outcome.cause)
        self.progress.end_attempt()
        consequence = rules.after_failure(
            is_attempt_left=self.attempt - self._num_other_ports < self.spec.max_attempts,
            is_stuck=self.progress.is_stuck,
            spares_suffice=plan_replacements(self.tasks, ()) is not None,
        )
        if consequence is AfterFailure.NEXT_ATTEMPT:
            self._replace()
            number, most = self.attempt + 1, self.spec.max_attempts + self._num_other_ports
            self.emit("attempt", None, f"attempt {number} of {most}, because: {outcome.reason}")
            self._begin_attempt(self.spec.start_timeout_seconds)
        else:
            self._decide_failure(failure, has_no_progress=consequence is AfterFailure.NO_PROGRESS)

    def _decide_failure(self, failure: Failure, *, has_no_progress: bool = False) -> None:
        outcome = rules.outcome_after(failure, self._exited_early)
        if has_no_progress:
            reason = f"{self.progress} The last failure: {outcome.reason}"
            outcome = dataclasses.replace(outcome, exit_code=EXIT_NO_PROGRESS, reason=reason)
        self._explained_by = failure.record
        self.decide(_explain(outcome, failure.record))

    def _awaits_restart(self, failure: Failure, outcome: Outcome) -> bool:
        """Return whether the job waits for `restart()` of its external chief. If so, inform the chief once."""
        result = rules.awaits_restart(
            self.tasks.chief,
            self.spec,
            failed_seconds=self.now - failure.at,
            spares_suffice=plan_replacements(self.tasks, ()) is not None,
        )
        if result and not self.desired.shared.failure_reason:
            self.desired.change(failure_reason=outcome.reason)
            text = f"{outcome.reason} The job waits {rules.RESTART_SECONDS:g} s for restart() of its chief"
            self.emit("failed", None, text)
        return result

    def _begin_attempt(self, seconds: float, *, releases_ports: bool = False) -> None:
        """Begin another attempt, whose cluster must form within `seconds`."""
        self.attempt += 1
        self.cluster = self._exited_early = self._held_failure = None
        self.watches.steps.reset()
        self.desired.begin_attempt(self.attempt, releases_ports=releases_ports)
        self.scripts.begin_attempt()
        self.tasks.begin_attempt(self.attempt)
        self._phase_deadline = self.now + seconds
        self._move_on(Phase.RENDEZVOUS, "every task ends its child process and chooses a new port")

    # Stop requests and time

    def on_stop(self, number: signal.Signals, what: str, now: float, request: StopRequest = StopRequest.SIGNAL) -> None:
        """Stop the job after a signal. During training, the scripts first have the grace period. Idempotent.

        Only a request without a grace period cuts the time of scripts that save already.

        Args:
            number: The signal. The exit code of the job is 128 + its number.
            what: What happened, as a clause such as "worker/0 received SIGTERM".
            request: Who requests the stop.
        """
        self.now = now
        if request is StopRequest.CTRL_C:
            if now - self._ctrl_c_at < rules.FORWARDED_SECONDS:
                return
            self._ctrl_c_at = now
        self._num_stops[request] += 1
        leaves_grace_period = rules.LEAVES_GRACE_PERIOD[request][0 if self._num_stops[request] == 1 else 1]
        outcome = Outcome(128 + number, f"The job was stopped: {what}.", is_stop=True)
        self._request_stop(outcome, what, request, leaves_grace_period=leaves_grace_period)

    def _stop_after_loss(self, record: TaskRecord, why: str) -> None:
        """Stop the scripts of plain srun after the end or the loss of a ps, the task of `record`.

        Do nothing unless `JobSpec.cancels_step` is set.
        """
        if self.spec.cancels_step:
            what = f"{record} {why}, and with it the variables there"
            self._request_stop(Outcome(EXIT_TASK_LOST, f"{what}.", record.task), what)

    def _request_stop(
        self,
        outcome: Outcome,
        what: str,
        request: StopRequest = StopRequest.SIGNAL,
        *,
        leaves_grace_period: bool = True,
    ) -> None:
        seconds, left = self.spec.grace_period_seconds, self.grace_seconds_left(self.now)
        again = "; Ctrl-C again skips the rest and ends all tasks at once" if request is StopRequest.CTRL_C else ""
        consequence = rules.AFTER_STOP[self.phase][0 if seconds and leaves_grace_period else 1]
        if consequence is AfterStop.NOTHING:
            if again and left is not None:
                self.emit("stop_repeated", None, f"{what}: the scripts save already, and have {left:.0f} s left{again}")
            return
        if self._stop is None:
            self._held_failure = None
            self._stop = outcome
            self.desired.change(stop_reason=self._stop.reason, grace_period_seconds=seconds)
        if left is not None:
            text = f"{what} while the scripts save: the last {left:.0f} s of the grace period are skipped"
            self.emit("grace_period_over", None, text)
        if consequence is AfterStop.TERMINATE:
            self._decide_stop(self._stop)
            return
        self.tasks.mark_exited_as_done()
        self._phase_deadline = self.now + seconds
        self._move_on(Phase.STOPPING, f"{what}: the job has {seconds:g} s to save and stop{again}")
        self.end_stop_if_saved()

    def grace_seconds_left(self, now: float) -> float | None:
        """Return how many seconds of the grace period are left. None while no scripts save after a stop request."""
        return max(0.0, self._phase_deadline - now) if self.phase is Phase.STOPPING else None

    def on_checkpoint(self, record: TaskRecord, new: CheckpointState, before: CheckpointState | None) -> None:
        """Handle a change of the state of a script's checkpoints."""
        if new.num_saves == (0 if before is None else before.num_saves):
            return  # the script has created a `Checkpoints` object
        if new.error:
            self.emit("not_saved", record, f"could not save: {new.error}")
        else:
            self.emit("saved", record, f"saved {new}")
            self._act_on(self.watches.check_save(record, new))

    def on_tick(self, now: float) -> None:
        """Check heartbeats and deadlines at the job time `now`. Call this several times per heartbeat interval."""
        self.now = now
        lost = [(record, loss) for record in self.tasks if (loss := rules.loss_of(record, self.spec, now)) is not None]
        for record, loss in lost:
            self.lose(record, loss.why, is_orphan=loss.is_orphan)
        if self._held_failure is not None:
            self._fail(self._held_failure)
        self.scripts.check(now)
        found = self.watches.check(self.tasks.members, now, is_training=self.phase is Phase.TRAINING)
        if self.phase is Phase.TRAINING:
            self._note_vain_waits(found.vain_waits)
        self._act_on(found)
        self.update_joined_workers()
        if now >= self._phase_deadline:
            self._on_phase_deadline()

    def _act_on(self, found: Findings) -> None:
        for text in found.withdrawn:
            self.emit("withdrawn", None, f"This is not true any more: {text}")
        for text in found.warnings:
            self.emit("warning", None, text)
        if found.failure is not None:
            self._fail(found.failure)
        if found.outcome is not None:
            self.decide(found.outcome)

    def _note_vain_waits(self, waits: Mapping[int, tuple[str, ...]]) -> None:
        for record in self.tasks.members:
            before, record.vain_waits = record.vain_waits, waits.get(record.rank, ())
            if record.vain_waits and not before:
                self.emit("blocked", record, f"waits for {', '.join(record.vain_waits)}, which has ended")
            elif before and not record.vain_waits:
                self.emit("unblocked", record, f"does not wait for {', '.join(before)} any more")

    def _on_phase_deadline(self) -> None:
        if self.phase in (Phase.RENDEZVOUS, Phase.CHECKING):
            if self._held_failure is not None:
                self._decide_failure(self._held_failure)
            if self._vacant_seconds is not None:
                self.decide(not_attached(self.tasks, self._vacant_seconds))
            self.decide(not_formed(self.tasks, self.attempt, self.spec))
        elif self.phase is Phase.TRAINING:
            self._phase_deadline = _NEVER
            late = [record for record in self.tasks.members if record.role.is_waited_for and not record.is_done]
            seconds = self.spec.finish_timeout_seconds
            if self._exited_early is None:
                self._complete(f"all but {format_tasks(late)}, waited for {seconds:g} s")
            else:
                text = f"{format_tasks(late)} did not end within {seconds:g} s."
                self._fail(Failure(Outcome(EXIT_TASK_LOST, text, late[0].task), self.now, late[0]))
        elif self.phase is Phase.STOPPING and self._stop is not None:
            text = f"the grace period of {self.spec.grace_period_seconds:g} s is over"
            self.emit("grace_period_over", None, text)
            option = "grace_period_seconds" if self.spec.external_chief else "--grace-period"
            self._decide_stop(self._stop, f" Give it more time with {option}.")
        elif self.phase is Phase.TERMINATING:
            late = [record for record in self.tasks if record.has_registered and not record.is_gone]
            self.emit("not_terminated", None, f"{format_tasks(late)} did not terminate in time")
            self.phase = Phase.ENDED

    # The end of the job

    def end_stop_if_saved(self) -> None:
        if self.phase is Phase.STOPPING and self._stop is not None and rules.is_stop_over(self.tasks.members):
            self._decide_stop(self._stop)

    def _decide_stop(self, stop: Outcome, cure: str = "") -> None:
        """End the job after a stop request. The reason names the tasks that had not stopped by themselves, and `cure`.

        Such a task gets SIGTERM. It may still complete its checkpoint within `JobSpec.kill_wait_seconds`. An external
        chief goes on, without ps and workers.
        """
        late = [each.name for each in rules.not_stopped(self.tasks.members)]
        lost = self._describe_lost_steps()
        if late and self.spec.external_chief:
            text = f"{late[0]} had not closed its cluster: what it had not saved is lost.{lost}{cure}"
            stop = dataclasses.replace(stop, reason=f"{stop.reason} {text}")
        elif late:
            names = format_tasks(late[:_MOST_NAMED]) if len(late) <= _MOST_NAMED else f"{len(late)} tasks"
            had = "it had stopped by itself" if len(late) == 1 else "they had stopped by themselves"
            text = f"{names} got SIGTERM before {had}: a checkpoint that was being saved may be incomplete.{lost}{cure}"
            stop = dataclasses.replace(stop, reason=f"{stop.reason} {text}")
        self.decide(stop)

    def _describe_lost_steps(self) -> str:
        """Return which checkpoint is left, and which steps are lost, if a task had not saved before the stop ends it.

        "" if the job's scripts have no `Checkpoints`, or if nothing is lost.
        """
        for record in rules.not_stopped(self.tasks.members):
            script = record.observed.script
            if (found := script.checkpoint) is not None and script.step is not None and script.step > found.step:
                newest = f"The newest complete one is then {found.newest}" if found.newest else "No other is complete"
                return f" {newest}: the steps after {found.step}, until step {script.step}, are lost."
        return ""

    def _complete_if_done(self) -> None:
        if self.phase is not Phase.TRAINING:
            return
        if self._held_failure is not None and self.desired.shared.failure_reason:
            self._fail(self._held_failure)  # if the chief has ended, nothing calls restart() any more
            return
        completion = rules.completion_of(self.tasks.members)
        if completion is Completion.DONE:
            failed = [r for r in self.tasks.members if r.role.is_wait_bounded and r.has_failed]
            self._complete(f"all but {format_tasks(failed)}" if failed else "every task that the job waits for")
        elif completion is Completion.BOUNDED_WAIT:
            self._exited_early = None
            self._phase_deadline = min(self._phase_deadline, self.now + self.spec.finish_timeout_seconds)
            self.desired.change(is_finishing=True)

    def _complete(self, what: str) -> None:
        self._act_on(self.watches.check_at_completion(self.tasks.members))
        self.decide(Outcome(0, f"Training is done: {what} exited with code 0."))

    def decide(self, outcome: Outcome) -> None:
        """Set the outcome and terminate all tasks. Later calls have no effect: the first outcome stands."""
        if self.outcome is None:
            self.outcome = outcome
            self.desired.terminate(outcome)
            self._phase_deadline = self.now + self.spec.termination_seconds
            self.emit("outcome", None, outcome.reason)
            self._move_on(Phase.TERMINATING, "terminating every task")
            self._end_if_all_gone()

    def on_last_lines(self, record: TaskRecord) -> None:
        """Add the last lines of a child to a known outcome if they explain it. They arrive after the child's exit."""
        if self.outcome is not None and record is self._explained_by and record.observed.returncode is not None:
            self.outcome = _explain(self.outcome, record)

    def _end_if_all_gone(self) -> None:
        """End the job if all tasks are gone. The phase ENDED has one other cause: the deadline of TERMINATING."""
        if self.outcome is None:
            is_over = self.phase in (Phase.TRAINING, Phase.STOPPING) and not self.tasks.has_active
            if is_over and self._stop is None and self._held_failure is not None:
                self._fail(self._held_failure)
            elif is_over:
                self.decide(self._stop or Outcome(0, "All scripts have ended."))
        elif not self.tasks.has_active:
            self.phase = Phase.ENDED
        elif not self.tasks.has_active_members:
            self._phase_deadline = min(self._phase_deadline, self.now + self.spec.kill_wait_seconds + _JOINED_SECONDS)

    def mark_gone(self, record: TaskRecord) -> None:
        """Record that a task has terminated or is lost."""
        self.tasks.mark_gone(record, self.now)
        self.scripts.joined_workers.remove(record.rank)
        self.scripts.on_end(record)

    def _move_on(self, phase: Phase, text: str) -> None:
        self.phase = phase
        self.desired.note_all()
        self.emit(phase.value, None, text)

    def emit(self, kind: str, record: TaskRecord | None, text: str, **facts: object) -> None:
        """Call `on_event` with an event of a task, or with one of the job if `record` is None."""
        assert kind in EVENT_KINDS, kind
        self._on_event(kind, record.name if record else None, f"{record} {text}" if record else text, **facts)


def _explain(outcome: Outcome, record: TaskRecord) -> Outcome:
    """Return the outcome with the last lines of a task and, if the task is its cause, with what ended the script."""
    observed = record.observed
    has_failed = record.task == outcome.cause and observed.killed_by is None
    return dataclasses.replace(outcome, tail=observed.tail, failure=observed.failure if has_failed else None)
