"""Faults that are put back into the real code, one by one: each must violate an invariant within 10,000 seeds."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple
from unittest import mock

from tests.simulation.agent import SimulatedChild
from tests.simulation.job import Job
from tests.simulation.run import run_seeds
from tests.simulation.script import Script
from tf4slurm.agent.script_processes import ScriptProcesses
from tf4slurm.control import barriers, rules
from tf4slurm.control.client import ControlClient
from tf4slurm.control.desired_states import DesiredStates
from tf4slurm.control.messages import DesiredState
from tf4slurm.control.receiver import Receiver
from tf4slurm.control.records import Phase, TaskRecord
from tf4slurm.control.script_calls import ScriptCalls
from tf4slurm.control.shard_leases import _Shards
from tf4slurm.control.state import JobState
from tf4slurm.control.task_table import TaskTable
from tf4slurm.errors import exit_code_of

MOST_SEEDS = 10_000
_BLOCK = 20


class Found(NamedTuple):
    """The number of seeds until a mutation violated an invariant; None if it did not."""

    mutation: str
    seeds: int | None
    invariant: str


def find(name: str, first: int = 0) -> Found:
    """Run seeds with one mutation until an invariant is violated that holds without it."""
    target, attribute, replacement = MUTATIONS[name]
    for begin in range(first, first + MOST_SEEDS, _BLOCK):
        with mock.patch.object(target, attribute, replacement):
            violations = run_seeds(range(begin, begin + _BLOCK))
        for violation in violations:
            if not run_seeds([violation.seed]):
                return Found(name, violation.seed - first + 1, violation.invariant)
    return Found(name, None, "")


class Mutation(NamedTuple):
    """The attribute of a class or module that is replaced, and by what."""

    target: Any
    attribute: str
    replacement: Any


def _paused_seconds() -> float:
    assert Job.latest is not None
    return Job.latest.service.clock._paused


def _expect_spares(members: Any, roles: tuple[str, ...]) -> frozenset[int]:
    return frozenset(r.rank for r in members if (r.task.task_type in roles if roles else not r.role.program))


def _expect_lost(members: Any, roles: tuple[str, ...], expected: Any = barriers._expected) -> frozenset[int]:
    return expected(members, roles) | {record.rank for record in members if record.is_gone}  # type: ignore[no-any-return]


def _end_without_outcome(self: JobState) -> None:
    if self.phase in (Phase.TRAINING, Phase.TERMINATING) and not self.tasks.has_active:
        self.phase = Phase.ENDED


def _check_barriers_in_real_time(self: ScriptCalls, now: float, check: Any = ScriptCalls.check) -> None:
    check(self, now + _paused_seconds())


def _loss_in_real_time(record: Any, spec: Any, now: float, loss_of: Any = rules.loss_of) -> Any:
    return loss_of(record, spec, now + _paused_seconds())


def _overwrite(self: ScriptProcesses, process: Any, state: Any, update: Any = ScriptProcesses.update) -> Any:
    merged = update(self, process, state)
    return dataclasses.replace(state, shards=merged.shards, workers=merged.workers)


def _refuse_position(self: _Shards, request: Any, find_error: Any = _Shards.find_error) -> str:
    if request.start is not None and self.request.start is None:
        return "a position was given after another task had begun without one"
    return find_error(self, request)  # type: ignore[no-any-return]


def _let_text_decide(self: JobState, record: TaskRecord, on_exit: Any = JobState.on_exit) -> None:
    if record.observed.detail:
        record.observed = dataclasses.replace(record.observed, killed_by="stop")
    on_exit(self, record)


def _keep_joined_workers(self: TaskTable, record: TaskRecord, now: float, mark_gone: Any = TaskTable.mark_gone) -> None:
    joined_workers = dict(self._joined_workers)
    mark_gone(self, record, now)
    self._joined_workers = joined_workers


def _do_not_end_lost(self: DesiredStates, rank: int, of: Any = DesiredStates.of) -> Any:
    desired, record = of(self, rank), self._tasks.get(rank)
    if record is not None and record.is_gone and not self.shared.terminate:
        return dataclasses.replace(desired, terminate=False)
    return desired


def _release_at_disconnect(self: Receiver, rank: int, now: float, on_disconnect: Any = Receiver.on_disconnect) -> None:
    on_disconnect(self, rank, now)
    if (record := self._tasks.get(rank)) is not None and record.observed.state == "running":
        self._state.scripts.on_end(record)


def _any_has_saved(records: Any) -> bool:
    return any(record.is_done or record.observed.script.has_saved for record in records)


def _real_time(self: ControlClient) -> float:
    return self._clock._read()


def _fail_after_port_failure(*_: Any, **__: Any) -> Any:
    return rules.AfterPortFailure.FAILURE


def _hold_ports_again(self: DesiredStates, attempt: int, *, releases_ports: bool = False) -> None:
    self.shared = dataclasses.replace(DesiredState(), attempt=attempt, releases_ports=releases_ports)
    self.note_all()


MUTATIONS = {
    "a barrier waits for spares": Mutation(barriers, "_expected", _expect_spares),
    "a lost member counts as ended at barriers": Mutation(barriers, "_expected", _expect_lost),
    "the loss of all tasks ends the job without an outcome": Mutation(
        JobState, "_end_if_all_gone", _end_without_outcome
    ),
    "pauses count for barriers": Mutation(ScriptCalls, "check", _check_barriers_in_real_time),
    "pauses count for heartbeats": Mutation(rules, "loss_of", _loss_in_real_time),
    "pauses count for an agent that reconnects": Mutation(ControlClient, "_now", _real_time),
    "a second process overwrites the state of the first": Mutation(ScriptProcesses, "update", _overwrite),
    "a position is refused after a restart": Mutation(_Shards, "find_error", _refuse_position),
    "a text decides the exit code": Mutation(JobState, "on_exit", _let_text_decide),
    "a kill by tf4slurm has the exit code of the child": Mutation(
        rules, "exit_code_after", lambda returncode, _: exit_code_of(returncode)
    ),
    "an exit is reported 0.4 s late": Mutation(Script, "report_seconds", property(lambda _: 0.4)),
    "a failure is not held while a task is disconnected": Mutation(
        TaskTable, "is_disconnected", property(lambda _: False)
    ),
    "workers that have left stay in the cluster": Mutation(TaskTable, "mark_gone", _keep_joined_workers),
    "a restart leaves processes of the earlier child": Mutation(SimulatedChild, "clean_up", lambda _: None),
    "lost tasks are not asked to end": Mutation(DesiredStates, "of", _do_not_end_lost),
    "shards are given back when a connection breaks": Mutation(Receiver, "on_disconnect", _release_at_disconnect),
    "a second stop request ends the grace period": Mutation(
        rules, "LEAVES_GRACE_PERIOD", dict.fromkeys(rules.StopRequest, (True, False))
    ),
    "a lost port fails the attempt": Mutation(rules, "after_port_failure", _fail_after_port_failure),
    "the cluster forms again on other ports for ever": Mutation(rules, "MOST_OTHER_PORTS", 1_000),
    "released ports are held in a later attempt": Mutation(DesiredStates, "begin_attempt", _hold_ports_again),
    "a stop is over when one script has saved": Mutation(rules, "is_stop_over", _any_has_saved),
}
"""Each mutation restores one fault that the code had, or would have without one of its rules."""
