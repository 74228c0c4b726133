"""Handle the messages of tasks: compare each state with the previous one, and report the changes to `JobState`."""

from __future__ import annotations

import dataclasses
import signal

from tf4slurm.cluster import Address
from tf4slurm.control.admission import Refusal, admit_joined_worker, admit_member
from tf4slurm.control.messages import JOINING_RANK, ObservedState, Registration, ScriptState
from tf4slurm.control.records import Outcome, Phase, TaskRecord
from tf4slurm.control.state import JobState
from tf4slurm.errors import EXIT_NOT_FORMED, EXIT_PREFLIGHT, EXIT_TASK_LOST, describe_end


class Receiver:
    """Handles the messages of a job's tasks, and the ends of connections and agents. `now` is always the job time."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._tasks = state.tasks

    def on_registration(self, registration: Registration, now: float) -> TaskRecord:
        """Handle the registration in a task's first connection or in a later one. Return the task's record.

        Raises:
            RendezvousClosedError: The process cannot be a task of this job.
        """
        state = self._state
        state.now = now
        record = self._admit(registration)
        record.owns_child = registration.owns_child
        self.on_disconnect(record.rank, now)  # in case the end of the previous call has not been noticed
        record.is_connected = True
        if record.has_registered:  # a reconnect does not count as a heartbeat
            state.emit("reconnected", record, "is connected again")
            return record
        self._tasks.register(record, registration, now)
        if registration.failure is not None:
            state.mark_gone(record)
            reason = f"{record} cannot take part in the job. {registration.failure}"
            state.decide(Outcome(EXIT_PREFLIGHT, reason, record.task))
            return record
        state.desired.note([record.rank])
        state.on_first_registration(record)
        address = Address(registration.host, registration.port)
        if state.attempt > 1:  # a joined worker, or another chief: it reports attempt 1 until it knows the current
            record.address = address
        else:
            state.on_address(record, address)
        return record

    def _admit(self, registration: Registration) -> TaskRecord:
        state = self._state
        if registration.rank != JOINING_RANK:
            answer: TaskRecord | Refusal | None = admit_member(registration, self._tasks)
        else:
            answer = admit_joined_worker(
                registration, self._tasks, is_ending=state.phase.is_ending, workers_error=self._tasks.workers_error
            )
        if answer is None:
            answer = self._tasks.add_joined_worker()
            state.scripts.joined_workers.add(answer, state.now)
        if isinstance(answer, TaskRecord):
            return answer
        if answer.is_mismatch and state.phase is Phase.RENDEZVOUS:
            process = f"The process of rank {registration.rank} on {registration.node}"
            state.decide(Outcome(EXIT_NOT_FORMED, f"{process} cannot take part: {answer.reason}."))
        raise answer.to_error()

    def on_heartbeat(self, rank: int, now: float) -> None:
        if (record := self._tasks.get(rank)) is not None:
            record.last_message_at = now

    def on_disconnect(self, rank: int, now: float) -> None:
        """Handle the end of a connection. The task may reconnect."""
        record = self._tasks.get(rank)
        if record is not None and record.is_connected and not record.is_gone:
            self._state.emit("disconnected", record, "lost its connection")
            record.is_connected, record.disconnected_at = False, now

    def on_agent_exit(self, rank: int, returncode: int, now: float) -> None:
        self._state.now = now
        if (record := self._tasks.get(rank)) is not None:
            is_orphan = returncode == EXIT_TASK_LOST  # the agent has lost the launcher
            self._state.lose(record, f"its agent {describe_end(returncode)}", is_orphan=is_orphan)

    def on_rejected(self, rank: int, reason: str, now: float) -> None:
        """Count a task as lost after an invalid message, because its state is unknown."""
        self._state.now = now
        if (record := self._tasks.get(rank)) is not None:
            self._state.lose(record, f"its message was not accepted: {reason.removesuffix('.')}")

    def on_observed_state(self, rank: int, observed: ObservedState, now: float) -> None:
        state = self._state
        state.now = now
        record = self._tasks.get(rank)
        if record is None:  # a joined worker that has left
            return
        record.last_message_at = now
        if record.is_gone and observed.state != "terminated":
            return
        before = record.observed
        if record.is_gone:  # the record may have the role of a spare now
            record.observed = dataclasses.replace(before, state="terminated")
        elif observed.attempt == state.attempt or observed.state == "terminated":
            record.observed = observed
        else:  # the other fields describe an earlier attempt
            record.observed = dataclasses.replace(before, stop_signal=observed.stop_signal)
        self._note_stop_signals(record, before)
        if record.observed.script != before.script:
            self._on_script_state(record, before.script)
        if record.observed.has_server and not before.has_server:
            state.watches.note_server()
            record.serving_at = state.now
            state.emit("serving", record, "has a server that answers")
        if record.attempt < observed.attempt == state.attempt and record.address is not None and observed.port:
            state.on_address(record, Address(record.address.host, observed.port))
        start, start_before = (observed.start_count, observed.failure), (before.start_count, before.failure)
        if record.observed is observed and start != start_before:
            record.note_failure(now)
        if (record.observed.state, record.observed.start_count) != (before.state, before.start_count):
            self._on_task_state(record)
            state.scripts.note_end_of_training()
        if (record.observed.tail and record.observed.tail != before.tail) or record.observed.failure != before.failure:
            state.on_last_lines(record)
        if record.role.has_joined or record.task.task_type == "chief":
            state.update_joined_workers()

    def _note_stop_signals(self, record: TaskRecord, before: ObservedState) -> None:
        """Stop the job after a new stop signal to an agent or its script. A joined worker leaves the job instead."""
        name, script = record.observed.stop_signal, record.observed.script.stop_signal
        is_new, is_new_in_script = name != before.stop_signal, script != before.script.stop_signal
        if record.is_gone:
            return
        if record.role.has_joined:
            if (is_new or is_new_in_script) and (name or script):
                state = self._state
                state.scripts.apply(
                    state.scripts.joined_workers.leave(record, f"it received {name or script}", state.now)
                )
            return
        if name is not None and is_new:
            self._state.on_stop(signal.Signals[name], f"{record} received {name}", self._state.now)
        if script is not None and is_new_in_script:
            what = f"the script of {record} received {script}"
            self._state.on_stop(signal.Signals[script], what, self._state.now)

    def _on_task_state(self, record: TaskRecord) -> None:
        state, observed = self._state, record.observed
        if observed.state == "not_ready":
            self._on_unreachable(record)
        elif observed.state == "ready":
            state.on_ready(record)
        elif observed.state == "running":
            record.started_at, record.ended_at = state.now, None
            state.emit("started", record, f"started (process {observed.process_id}{_describe_start(observed)})")
        elif observed.state == "exited":
            state.on_exit(record)
        elif observed.state == "terminated":
            state.on_terminated(record)

    def _on_unreachable(self, record: TaskRecord) -> None:
        """Handle a task that is not ready: its reachability check has failed, or it has no port."""
        state, detail = self._state, record.observed.detail
        if record.role.has_joined:
            state.scripts.apply(state.scripts.joined_workers.dismiss(record, detail or "", EXIT_NOT_FORMED))
        else:
            reason = f"{detail}. {record} checked it. Look at the network, or choose another with --interface."
            state.decide(Outcome(EXIT_NOT_FORMED, reason, record.task))

    def _on_script_state(self, record: TaskRecord, before: ScriptState) -> None:
        state, script = self._state, record.observed.script
        if script.step is not None and script.step != before.step and not record.role.has_joined:
            state.watches.steps.note_step(state.now)
            state.progress.note_step(script.step)
            if before.step is None:
                state.emit("first_step", record, f"reports step {script.step}, its first")
        if script.checkpoint is not None and script.checkpoint != before.checkpoint:
            state.on_checkpoint(record, script.checkpoint, before.checkpoint)
        state.scripts.on_script_state(record, before, state.now)
        state.scripts.note_end_of_training()
        state.end_stop_if_saved()


def _describe_start(observed: ObservedState) -> str:
    if observed.is_forked:
        return ", with TensorFlow preloaded"
    return f"; TensorFlow is not preloaded, because {observed.not_forked}" if observed.not_forked else ""
