"""The state machine of a job, with a simulated clock: no test waits."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm import __version__
from tf4slurm.cluster import Address, Task
from tf4slurm.control.clock import JobClock
from tf4slurm.control.messages import (
    JOINING_RANK,
    BarrierArrival,
    CheckpointState,
    DesiredState,
    ObservedState,
    Registration,
    ScriptState,
    TaskState,
    Usage,
    cluster_to_entries,
)
from tf4slurm.control.receiver import Receiver
from tf4slurm.control.records import Outcome, Phase, TaskRecord
from tf4slurm.control.rules import StopRequest
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.control.state import JobState
from tf4slurm.errors import RendezvousClosedError
from tf4slurm.spec.job_spec import JobSpec

LIMITS = JobSpec(
    start_timeout_seconds=60,
    heartbeat_interval_seconds=1,
    heartbeat_timeout_seconds=10,
    reconnect_seconds=1.5,
    kill_wait_seconds=5,
    finish_timeout_seconds=30,
    grace_period_seconds=0,
    max_worker_restarts=2,
)
GRACEFUL = dataclasses.replace(LIMITS, grace_period_seconds=20)
INCOMPLETE = "a checkpoint that was being saved may be incomplete."
WAS_ENDED = f"got SIGTERM before it had stopped by itself: {INCOMPLETE}"
THEY_WERE_ENDED = f"got SIGTERM before they had stopped by themselves: {INCOMPLETE}"
CHIEF_WAS_ENDED = f"chief/0 {WAS_ENDED}"
TWO_ATTEMPTS = dataclasses.replace(LIMITS, max_attempts=2)
TICK = 0.2
FULL = "chief ps worker worker"
"""Ranks 0 to 3 of most jobs here."""
PHASES = list(Phase)


class Job:
    """A job's state, the clock, and tasks that follow their desired states; `roles` are in rank order."""

    def __init__(self, roles: str = FULL, limits: JobSpec = LIMITS, *, owns_child: bool = True) -> None:
        counts: Counter[str] = Counter()
        tasks = []
        for task_type in roles.split():
            tasks.append(Task(task_type, counts[task_type]))
            counts[task_type] += 1
        self.now = 1000.0
        self.events: list[tuple[str, str | None, str]] = []
        self.state = JobState(tasks, limits, self.now, lambda *event, **_: self.events.append(event))
        self.receiver = Receiver(self.state)
        self.owns_child = owns_child
        self.ranks = range(len(tasks))

    # Observations

    def phase(self) -> Phase:
        return self.state.phase

    @property
    def outcome(self) -> Outcome:
        assert self.state.outcome is not None
        return self.state.outcome

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def texts(self, kind: str) -> list[str]:
        return [text for found, _, text in self.events if found == kind]

    def desired(self, rank: int) -> DesiredState:
        return self.state.desired.of(rank)

    def times(self, rank: int) -> tuple[float | None, float | None]:
        return self.state.tasks[rank].started_at, self.state.tasks[rank].ended_at

    # Events

    def register(self, rank: int, **changes: Any) -> TaskRecord:
        registration = Registration(rank, f"n{rank}", f"10.0.0.{rank}", 4000 + rank, f"incarnation-{rank}", __version__)
        return self.receiver.on_registration(
            dataclasses.replace(registration, owns_child=self.owns_child, **changes), self.now
        )

    def send(self, rank: int, state: TaskState, **fields: Any) -> None:
        """A task sends its state with these fields changed."""
        record = self.state.tasks.get(rank)
        status = dataclasses.replace(record.observed if record else ObservedState(), state=state, **fields)
        self.receiver.on_observed_state(rank, status, self.now)

    def run_child(self, rank: int, start_count: int = 1) -> None:
        self.send(
            rank, "running", start_count=start_count, process_id=100 + rank, returncode=None, tail=(), failure=None
        )

    def end_child(
        self, rank: int, returncode: int, tail: tuple[str, ...] = (), failure: ScriptFailure | None = None
    ) -> None:
        self.send(rank, "exited", returncode=returncode, tail=tail, failure=failure)

    def restart_and_end_child(self, rank: int, returncode: int) -> None:
        self.run_child(rank, self.desired(rank).start_count)
        self.end_child(rank, returncode)

    def turn(self, seconds: float, sending: Iterable[int] | None = None, tick: float = TICK) -> None:
        """Let time pass in ticks, while these tasks (default: all registered) repeat their states."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(self.now + tick, end)
            for rank in self.ranks if sending is None else sending:
                record = self.state.tasks.get(rank)
                if record is not None and record.is_connected and not record.is_gone:
                    self.receiver.on_observed_state(rank, record.observed, self.now)
            self.state.on_tick(self.now)

    def pause(self, seconds: float) -> None:
        """The launcher is paused, which the job clock leaves out."""
        time = [0.0]
        clock = JobClock(self.state.spec.heartbeat_interval_seconds, lambda: time[0])
        clock.start(lambda paused, _: self.state.watches.pauses.note(paused, self.now))
        time[0] = seconds
        self.now += clock.now()

    # Sequences of events

    def register_tasks(self, *ranks: int) -> Job:
        for rank in ranks or self.ranks:
            self.register(rank)
        return self

    def reregister(self, *ranks: int) -> Job:
        """These tasks register a new port for the current attempt."""
        for rank in ranks:
            attempt = self.desired(rank).attempt
            self.receiver.on_observed_state(rank, ObservedState(attempt=attempt, port=5000 + rank), self.now)
        return self

    def check_and_run(self) -> Job:
        for rank in self.ranks:
            self.send(rank, "ready")
        for rank in self.ranks:
            self.run_child(rank)
        return self

    def train(self) -> Job:
        self.register_tasks()
        for rank in self.ranks:
            self.send(rank, "ready")
        for rank in self.ranks:
            self.run_child(rank)
        self.state.desired.take_changed()
        return self


# Rendezvous


def test_new_job_waits_for_its_tasks() -> None:
    job = Job()
    assert job.phase() is Phase.RENDEZVOUS
    assert job.state.outcome is None
    assert [job.desired(rank) for rank in job.ranks] == [DesiredState()] * 4


def test_registration_emits_one_event() -> None:
    job = Job().register_tasks(2)
    assert job.events == [("registered", "worker/0", "worker/0 on n2 registered from n2 at 10.0.0.2:4002")]
    assert (job.phase(), job.state.tasks.count("registered")) == (Phase.RENDEZVOUS, 1)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_when_every_task_has_registered_all_get_the_cluster(order: tuple[int, ...]) -> None:
    job = Job().register_tasks(*order[:3])
    assert job.state.cluster is None
    job.state.desired.take_changed()
    job.register_tasks(order[3])
    assert job.phase() is Phase.CHECKING
    assert job.state.cluster is not None
    assert cluster_to_entries(job.state.cluster) == [
        (0, "chief", 0, "n0", "10.0.0.0", 4000),
        (0, "ps", 0, "n1", "10.0.0.1", 4001),
        (0, "worker", 0, "n2", "10.0.0.2", 4002),
        (0, "worker", 1, "n3", "10.0.0.3", 4003),
    ]
    assert job.state.desired.take_changed() == {0, 1, 2, 3}
    assert [job.desired(rank) for rank in job.ranks] == [DesiredState()] * 4


def test_children_start_when_every_task_is_ready() -> None:
    job = Job().register_tasks()
    for rank in (0, 2, 3):
        job.send(rank, "ready")
    assert job.phase() is Phase.CHECKING
    job.state.desired.take_changed()
    job.send(1, "ready")
    assert job.phase() is Phase.TRAINING
    assert job.state.desired.take_changed() == {0, 1, 2, 3}
    assert [job.desired(rank) for rank in job.ranks] == [DesiredState(start_count=1)] * 4


def test_job_of_one_task_registers_and_completes() -> None:
    job = Job("worker").train()
    job.end_child(0, 0)
    job.send(0, "terminated")
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)


def test_changed_ranks_are_returned_once() -> None:
    job = Job().register_tasks()
    assert job.state.desired.take_changed() == {0, 1, 2, 3}
    assert job.state.desired.take_changed() == set()


@pytest.mark.parametrize(
    ("joined", "words"),
    [
        ((), "chief/0 (rank 0), ps/0 (rank 1), worker/0 (rank 2) and worker/1 (rank 3) did not register"),
        ((0, 1, 3), "worker/0 (rank 2) did not register"),
        ((1, 2), "chief/0 (rank 0) and worker/1 (rank 3) did not register"),
        ((0, 1, 2, 3), "ps/0 on n1 and worker/1 on n3 did not check the addresses of other tasks"),
    ],
)
def test_start_timeout_names_the_missing_tasks(joined: tuple[int, ...], words: str) -> None:
    job = Job()
    for rank in joined:
        job.register(rank)
    for rank in (0, 2) if len(joined) == 4 else ():
        job.send(rank, "ready")
    job.turn(59.9)
    assert job.phase() in (Phase.RENDEZVOUS, Phase.CHECKING)
    job.turn(0.2)
    assert job.outcome.exit_code == 6
    assert job.outcome.reason == (
        f"The cluster did not form within 60 s: {words}. Look at their logs, or raise --start-timeout."
    )


def test_training_has_no_deadline() -> None:
    job = Job().train()
    job.turn(500)
    assert job.phase() is Phase.TRAINING


ONE_VERSION = "install one version for all tasks, on a file system that their hosts share"
CANNOT_BE = [
    ({"version": "0.0.9"}, f"it runs tf4slurm 0.0.9, the launcher {__version__}; {ONE_VERSION}"),
    ({"rank": 4}, "rank 4 is not one of this job's 4 tasks"),
    ({"rank": -2}, "rank -2 is not one of this job's 4 tasks"),
]


@pytest.mark.parametrize(("changes", "reason"), CANNOT_BE)
def test_process_that_can_never_register_ends_the_job_during_rendezvous(changes: dict[str, Any], reason: str) -> None:
    job = Job().register_tasks(1)
    with pytest.raises(RendezvousClosedError) as caught:
        job.register(**{"rank": 2, **changes})
    assert caught.value.reason == reason
    rank = changes.get("rank", 2)
    assert job.outcome == Outcome(6, f"The process of rank {rank} on n{rank} cannot take part: {reason}.")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [*CANNOT_BE, ({"rank": 1, "incarnation": "later"}, "rank 1 was taken by an earlier process, on n1 (process 101)")],
)
def test_process_that_is_no_task_of_this_job_is_refused_without_effect(changes: dict[str, Any], reason: str) -> None:
    job = Job().train()
    before = repr(job.state.tasks), list(job.events)
    with pytest.raises(RendezvousClosedError) as caught:
        job.register(**{"rank": 2, **changes})
    assert caught.value.reason == reason
    assert str(caught.value) == f"The control service refused this task: {reason}."
    assert (repr(job.state.tasks), job.events) == before
    assert job.state.outcome is None


def test_terminated_or_lost_task_cannot_register_again() -> None:
    job = Job().train()
    job.receiver.on_agent_exit(2, 1, job.now)
    job.send(3, "terminated")
    for rank in (2, 3):
        with pytest.raises(RendezvousClosedError):
            job.register(rank)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1"])
def test_loopback_address_in_a_cluster_of_several_nodes_ends_the_job(host: str) -> None:
    job = Job().register_tasks(0, 1, 2)
    job.register(3, host=host)
    assert job.phase() is Phase.TERMINATING
    assert job.state.cluster is None
    assert job.outcome == Outcome(
        6,
        f"worker/1 on n3 has the address {host}, which no other host can reach. Choose a network with --interface.",
        Task("worker", 1),
    )


def test_loopback_address_is_accepted_on_a_single_node() -> None:
    job = Job()
    for rank in job.ranks:
        job.register(rank, node="laptop", host="127.0.0.1")
    assert job.phase() is Phase.CHECKING


def test_task_that_reports_a_failure_ends_the_job_with_its_text() -> None:
    job = Job().register_tasks(0)
    job.register(1, host="", port=0, failure="Interface 'ib0' does not exist.")
    assert job.phase() is Phase.TERMINATING
    assert job.outcome == Outcome(
        3, "ps/0 on n1 cannot take part in the job. Interface 'ib0' does not exist.", Task("ps", 0)
    )
    assert job.desired(0).terminate
    job.send(0, "terminated")
    assert job.phase() is Phase.ENDED


def test_failed_reachability_check_ends_the_job_with_its_detail() -> None:
    job = Job().register_tasks()
    job.send(2, "not_ready", detail="ps/0 on n1 is not reachable at 10.0.0.1:4001: refused")
    assert job.outcome == Outcome(
        6,
        "ps/0 on n1 is not reachable at 10.0.0.1:4001: refused. worker/0 on n2 checked it. "
        "Look at the network, or choose another with --interface.",
        Task("worker", 0),
    )


def test_process_of_another_incarnation_is_refused_with_a_reason() -> None:
    job = Job()
    job.receiver.on_agent_exit(2, 1, job.now)
    with pytest.raises(RendezvousClosedError) as caught:
        job.register(2)
    assert not caught.value.reason.endswith(" on ")


def test_addresses_are_those_of_the_registrations() -> None:
    record = Job().register(2)
    assert (record.node, record.address) == ("n2", Address("10.0.0.2", 4002))


# Missing heartbeats and broken connections


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("stage", ["register_tasks", "train"])
def test_task_without_heartbeat_is_lost_after_the_heartbeat_timeout(stage: str, rank: int) -> None:
    job = getattr(Job(), stage)()
    others = [other for other in job.ranks if other != rank]
    job.turn(9.9, sending=others)
    assert job.state.outcome is None
    job.turn(0.4, sending=others)
    record = job.state.tasks[rank]
    assert record.is_gone
    assert job.outcome == Outcome(7, f"{record} is lost: it sent no heartbeat for 10 s.", record.task)
    assert all(job.desired(other).terminate for other in others)


def test_heartbeat_without_a_state_keeps_a_task() -> None:
    job = Job().train()
    for _ in range(10):
        job.turn(9, sending=())
        job.turn(0.2)
    assert job.phase() is Phase.TRAINING


def test_task_that_reconnects_in_time_is_not_lost() -> None:
    job = Job().train()
    job.receiver.on_disconnect(2, job.now)
    job.turn(1.4)
    job.register(2)
    job.turn(30)
    assert job.phase() is Phase.TRAINING
    assert job.kinds[-2:] == ["disconnected", "reconnected"]


def test_task_that_does_not_reconnect_is_lost() -> None:
    job = Job().train()
    job.receiver.on_disconnect(2, job.now)
    job.turn(1.9)
    assert job.outcome.reason == "worker/0 on n2 is lost: its connection broke and was not restored."
    with pytest.raises(RendezvousClosedError):
        job.register(2)


def test_disconnection_does_not_extend_the_heartbeat_timeout() -> None:
    job = Job().train()
    others = (0, 1, 3)
    job.turn(9.5, sending=others)
    job.receiver.on_disconnect(2, job.now)
    job.turn(0.8, sending=others)
    assert job.outcome.cause == Task("worker", 0)


def test_disconnection_does_not_extend_a_short_heartbeat_timeout() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, heartbeat_interval_seconds=0.5, heartbeat_timeout_seconds=1))
    job.train()
    job.receiver.on_disconnect(2, job.now)
    job.turn(1.3)
    assert job.outcome.cause == Task("worker", 0)


def test_disconnection_emits_one_event_and_none_after_termination() -> None:
    job = Job().train()
    job.receiver.on_disconnect(2, job.now)
    job.receiver.on_disconnect(2, job.now)
    job.end_child(0, 0)
    job.send(3, "terminated")
    job.receiver.on_disconnect(3, job.now)
    assert job.kinds.count("disconnected") == 1


def test_lag_of_the_launcher_does_not_count_for_heartbeats() -> None:
    job = Job().train()
    job.pause(60)
    job.state.on_tick(job.now)
    assert job.phase() is Phase.TRAINING
    job.turn(8)
    assert job.phase() is Phase.TRAINING


def test_lag_of_the_launcher_extends_a_deadline_once() -> None:
    job = Job().train()
    job.pause(60)
    job.state.on_tick(job.now)
    job.turn(12, sending=(0, 1, 3))
    assert job.outcome.cause == Task("worker", 0)


@pytest.mark.parametrize(
    ("pause", "later", "returncode", "cause"),
    [
        (60, 0, 7, None),
        (60, 2, 7, None),
        (60, 40, 7, Task("ps", 0)),  # the agents have survived the pause
        (60, 0, -9, Task("ps", 0)),
        (5, 0, 7, Task("ps", 0)),
    ],
)
def test_agent_that_lost_a_paused_launcher_is_not_the_cause(
    pause: float, later: float, returncode: int, cause: Task | None
) -> None:
    job = Job().train()
    job.pause(pause)
    job.state.on_tick(job.now)
    job.turn(later, sending=job.ranks)
    job.receiver.on_agent_exit(1, returncode, job.now)
    assert (job.outcome.exit_code, job.outcome.cause) == (7, cause)
    assert job.outcome.reason.startswith("The launcher was paused for 60 s") == (cause is None)


def test_heartbeat_after_a_lag_starts_a_normal_timeout() -> None:
    job = Job().train()
    job.pause(60)
    job.send(2, "running")  # it was in the launcher's buffers
    job.state.on_tick(job.now)
    job.turn(12, sending=(0, 1, 3))
    assert job.outcome.cause == Task("worker", 0)


def test_tasks_have_time_to_terminate_when_the_outcome_follows_a_lag() -> None:
    job = Job().train()
    job.pause(60)
    job.end_child(0, 1)
    job.turn(4)
    assert job.phase() is Phase.TERMINATING
    for rank in job.ranks:
        job.send(rank, "terminated")
    assert job.phase() is Phase.ENDED
    assert "not_terminated" not in job.kinds


# Desired states are levels


def test_desired_state_is_the_same_after_a_reconnection() -> None:
    job = Job().train()
    before = job.desired(2)
    job.receiver.on_disconnect(2, job.now)
    job.register(2)
    job.run_child(2)
    assert job.desired(2) == before == DesiredState(start_count=1)
    assert job.texts("started").count("worker/0 on n2 started (process 102)") == 1


@pytest.mark.parametrize("repeats", [2, 5])
def test_repeated_messages_have_no_effect(repeats: int) -> None:
    job = Job().train()
    for _ in range(repeats):
        job.end_child(2, 1)
    assert job.desired(2).start_count == 2
    assert job.kinds.count("exited") == job.kinds.count("restarting") == 1


def test_start_that_was_never_reported_counts() -> None:
    job = Job().train()
    job.end_child(2, 1)
    job.send(2, "exited", start_count=2, returncode=1)
    assert job.desired(2).start_count == 3


# Exits of children


def test_worker_under_a_chief_is_restarted_in_place_up_to_the_limit() -> None:
    job = Job().train()
    job.end_child(3, -9)
    assert job.state.desired.take_changed() == {3}
    assert [job.desired(rank).start_count for rank in job.ranks] == [1, 1, 1, 2]
    job.restart_and_end_child(3, 1)
    assert job.desired(3).start_count == 3
    assert job.texts("restarting") == [
        "worker/1 on n3 was killed by signal 9 (SIGKILL): restart 1 of at most 2",
        "worker/1 on n3 exited with code 1: restart 2 of at most 2",
    ]
    assert job.phase() is Phase.TRAINING
    job.run_child(3, 3)
    job.end_child(3, 5, tail=("boom",))
    assert job.desired(3).start_count == 3
    assert job.outcome == Outcome(5, "worker/1 on n3 exited with code 5.", Task("worker", 1), ("boom",))


BAD_RATE = ScriptFailure("ValueError", "bad rate 1", "train.py", 7)


@pytest.mark.parametrize(
    ("first", "second", "has_server", "is_restarted"),
    [
        (BAD_RATE, dataclasses.replace(BAD_RATE, message="bad rate 2"), False, False),
        (BAD_RATE, dataclasses.replace(BAD_RATE, line=8), False, True),
        (BAD_RATE, BAD_RATE, True, True),
        (ScriptFailure("SIGKILL"), ScriptFailure("SIGKILL"), False, True),
        (None, BAD_RATE, False, True),
    ],
)
def test_worker_that_fails_twice_on_one_line_before_its_server_is_not_restarted(
    first: ScriptFailure | None, second: ScriptFailure, has_server: bool, is_restarted: bool
) -> None:
    job = Job().train()
    for number, failure in ((1, first), (2, second)):
        job.run_child(3, number)
        job.send(3, "running", has_server=has_server)
        job.end_child(3, 1, failure=failure)
    assert job.desired(3).start_count == (3 if is_restarted else 2)
    if not is_restarted:
        assert job.texts("not_restarted") == [
            "worker/1 on n3 is not restarted again: it failed twice on the same line before its server ran"
        ]
        assert job.outcome.failure == second


def test_worker_that_fails_late_on_one_line_is_restarted() -> None:
    job = Job().train()
    for number in (1, 2):
        job.run_child(3, number)
        job.now += 3_600
        job.end_child(3, 1, failure=BAD_RATE)
    assert job.desired(3).start_count == 3


def test_restart_limit_applies_per_worker() -> None:
    job = Job().train()
    for rank in (2, 3):
        job.end_child(rank, 1)
        job.restart_and_end_child(rank, 1)
    assert job.phase() is Phase.TRAINING
    assert [job.desired(rank).start_count for rank in job.ranks] == [1, 1, 3, 3]


def test_without_restarts_the_first_crash_ends_the_job() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, max_worker_restarts=0)).train()
    job.end_child(2, 1)
    assert job.outcome.cause == Task("worker", 0)


def test_worker_that_has_signalled_completion_may_exit() -> None:
    job = Job().train()
    for rank in (2, 3):
        job.send(rank, "running", script=ScriptState(completion="done"))
        job.end_child(rank, 0)
    assert job.phase() is Phase.TRAINING
    assert [job.desired(rank).start_count for rank in job.ranks] == [1, 1, 1, 1]


def test_worker_that_exits_with_0_before_its_chief_has_finished_and_is_not_restarted() -> None:
    job = Job().train()
    job.end_child(2, 0)
    assert job.desired(2).start_count == 1
    assert "restarting" not in job.kinds
    job.turn(LIMITS.finish_timeout_seconds + 1)
    assert job.phase() is Phase.TRAINING
    job.send(3, "running", script=ScriptState(completion="done"))
    job.send(0, "running", script=ScriptState(completion="done"))
    assert (job.desired(1).is_training_over, job.desired(1).failed_tasks) == (True, ())
    job.end_child(0, 0)
    assert job.outcome.is_success


def test_worker_that_exits_with_0_after_a_restart_has_finished() -> None:
    job = Job().train()
    job.end_child(2, 1)
    job.restart_and_end_child(2, 0)
    assert job.desired(2).start_count == 2
    assert job.phase() is Phase.TRAINING


def test_barrier_breaks_at_once_for_a_worker_that_has_finished() -> None:
    job = Job().train()
    arrive(job, 3, roles=("worker",))
    job.end_child(2, 0)
    job.turn(TICK)
    assert released(job, 3) == [("token-3", "worker/0 on n2 ended without arriving at barrier 'start'")]


@pytest.mark.parametrize(("returncode", "exit_code"), [(0, 0), (1, 1)])
def test_chief_may_continue_after_its_workers_and_is_the_cause_if_it_fails(returncode: int, exit_code: int) -> None:
    job = Job("chief ps worker worker").train()
    job.end_child(2, 0)
    job.end_child(3, 0)
    job.turn(LIMITS.finish_timeout_seconds + 1)
    assert job.phase() is Phase.TRAINING
    job.end_child(0, returncode)
    assert (job.outcome.exit_code, job.outcome.cause) == (exit_code, Task("chief", 0) if returncode else None)


@pytest.mark.parametrize("rank", [1, 2])
def test_ps_or_worker_that_exits_with_0_after_the_chief_does_not_change_the_wait_for_an_evaluator(rank: int) -> None:
    job = Job("chief ps worker evaluator").train()
    job.end_child(0, 0)
    job.turn(20)
    job.end_child(rank, 0)
    job.turn(10.4)
    assert job.outcome.is_success
    assert job.outcome.reason.startswith("Training is done: all but evaluator/0")


# A ps that exits by itself


def test_ps_may_exit_when_its_workers_are_done() -> None:
    job = Job("ps worker worker").train()
    job.end_child(1, 0)
    job.send(2, "running", script=ScriptState(completion="done"))
    assert job.desired(0).is_training_over
    job.end_child(0, 0)
    assert job.phase() is Phase.TRAINING
    job.end_child(2, 0)
    assert job.outcome.exit_code == 0


def test_ps_that_exited_early_is_the_cause_of_later_failures() -> None:
    job = Job().train()
    job.end_child(1, 0)
    job.end_child(0, 1, tail=("UnavailableError",))
    assert job.outcome == Outcome(
        7,
        "ps/0 on n1 exited with code 0 before the job was done. Then: chief/0 on n0 exited with code 1.",
        Task("ps", 0),
        ("UnavailableError",),
    )


def test_others_have_the_finish_timeout_after_a_ps_has_exited() -> None:
    job = Job("ps worker worker").train()
    job.end_child(0, 0)
    job.end_child(1, 0)
    job.turn(LIMITS.finish_timeout_seconds + 1)
    assert job.outcome.exit_code == 7
    assert job.outcome.cause == Task("ps", 0)
    assert "worker/1 on n2 did not end within 30 s" in job.outcome.reason


@pytest.mark.parametrize(("end", "failed"), [("done", ()), ("failed", ("worker/0",))])
def test_ps_is_sent_the_end_of_training_and_the_failed_tasks(
    end: Literal["done", "failed"], failed: tuple[str, ...]
) -> None:
    job = Job().train()
    for rank in (0, 3):
        job.send(rank, "running", script=ScriptState(completion="done"))
    assert not job.desired(1).is_training_over
    job.state.desired.take_changed()
    job.send(2, "running", script=ScriptState(completion=end))
    assert job.state.desired.take_changed() == {0, 1, 2, 3}
    assert (job.desired(1).is_training_over, job.desired(1).failed_tasks) == (True, failed)


# Tasks of sidecars


def free_job(limits: JobSpec = LIMITS) -> Job:
    job = Job("ps worker worker", limits, owns_child=False)
    job.register_tasks()
    for rank in job.ranks:
        job.send(rank, "ready")
    return job


def test_loss_of_a_task_whose_agent_does_not_own_its_child_ends_no_job() -> None:
    job = free_job()
    job.send(1, "terminated", script=ScriptState(completion="done"))
    job.receiver.on_disconnect(2, job.now)
    job.turn(LIMITS.reconnect_seconds + 1)
    assert job.texts("lost") == ["worker/1 on n2 is lost: its connection broke and was not restored"]
    assert (job.desired(0).is_training_over, job.desired(0).failed_tasks) == (True, ("worker/1",))
    assert job.state.outcome is None
    job.send(0, "terminated")
    assert job.phase() is Phase.ENDED


@pytest.mark.parametrize("num_ready", [0, 2])
def test_script_of_plain_srun_that_ends_before_the_cluster_has_formed_ends_the_job(num_ready: int) -> None:
    job = Job("ps worker worker", owns_child=False)
    job.register_tasks(*([0, 1, 2] if num_ready else [0, 1]))
    for rank in range(num_ready):
        job.send(rank, "ready")
    job.send(1, "terminated")
    assert (job.outcome.exit_code, job.outcome.cause) == (7, Task("worker", 0))


# Attempts


@pytest.mark.parametrize("rank", [0, 1])
def test_loss_of_a_ps_or_the_chief_costs_an_attempt(rank: int) -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    job.send(2, "running", script=ScriptState(step=7))
    job.end_child(rank, -9)
    assert (job.phase(), job.state.attempt, job.state.cluster) == (Phase.RENDEZVOUS, 2, None)
    assert [job.desired(each) for each in job.ranks] == [DesiredState(attempt=2)] * 4
    job.reregister(0, 1, 2)
    assert job.phase() is Phase.RENDEZVOUS
    job.reregister(3)
    assert job.phase() is Phase.CHECKING
    assert job.state.cluster is not None
    assert [member.address.port for member in job.state.cluster.members] == [5000, 5001, 5002, 5003]
    job.check_and_run()
    job.end_child(0, 0)
    assert job.outcome.exit_code == 0


def test_failure_in_the_last_attempt_ends_the_job() -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    job.end_child(1, -9)
    job.reregister(0, 1, 2, 3).check_and_run()
    job.end_child(0, 3, tail=("boom",))
    assert job.outcome == Outcome(3, "chief/0 on n0 exited with code 3.", Task("chief", 0), ("boom",))


def test_state_of_an_earlier_attempt_is_ignored() -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    job.end_child(1, -9)
    job.receiver.on_observed_state(0, ObservedState("exited", start_count=1, returncode=1), job.now)
    job.receiver.on_observed_state(2, ObservedState("ready"), job.now)
    job.reregister(0, 1, 2)
    assert (job.phase(), job.state.tasks.count("ready")) == (Phase.RENDEZVOUS, 0)
    job.receiver.on_observed_state(3, ObservedState("running", start_count=1, stop_signal="SIGTERM"), job.now)
    assert job.outcome.exit_code == 143


def test_attempt_without_rendezvous_ends_the_job() -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    job.end_child(1, -9)
    job.reregister(0, 1, 2)
    job.turn(LIMITS.start_timeout_seconds + 1)
    assert job.outcome.exit_code == 6
    assert job.outcome.cause == Task("worker", 1)


def test_loss_of_an_agent_ends_the_job_whatever_attempts_are_left() -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    job.receiver.on_agent_exit(1, -9, job.now)
    assert job.outcome.exit_code == 7


def test_worker_without_a_chief_costs_an_attempt() -> None:
    job = Job("ps worker worker", limits=TWO_ATTEMPTS).train()
    job.end_child(2, -9)
    assert job.state.attempt == 2


def test_child_killed_by_its_agent_ends_the_job_with_exit_code_7() -> None:
    job = Job().train()
    why: dict[str, Any] = {"killed_by": "liveness_probe", "detail": "was stopped for 10 s"}
    job.send(2, "exited", returncode=-9, **why)
    assert job.desired(2).start_count == 2
    job.send(1, "exited", returncode=-9, **why)
    job.send(1, "exited", returncode=-9, **why, tail=("last words",))
    assert job.outcome == Outcome(7, "ps/0 on n1 was stopped for 10 s.", Task("ps", 0), ("last words",))


def test_no_new_step_for_the_stall_limit_is_a_failure() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, stall_timeout_seconds=15)).train()
    job.turn(50)
    job.send(0, "running", script=ScriptState(step=1))
    job.turn(10)
    job.send(0, "running", script=ScriptState(step=2))
    job.turn(14)
    assert job.phase() is Phase.TRAINING
    job.turn(2)
    assert job.outcome.exit_code == 7
    assert job.outcome.reason == (
        "Training has stalled: no task has reported a new step for 15 s; the last was step 2 of chief/0 on n0."
    )


def test_steps_that_arrive_with_rare_heartbeats_are_no_stall() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, stall_timeout_seconds=1)).train()
    for step in range(5):
        job.send(0, "running", script=ScriptState(step=step))
        job.turn(LIMITS.heartbeat_interval_seconds + 2 * TICK, sending=[])
    assert job.state.outcome is None
    job.turn(TICK)
    assert "the last was step 4 of chief/0" in job.outcome.reason


def test_early_heartbeat_does_not_delay_a_stall() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, stall_timeout_seconds=3)).train()
    job.send(0, "running", script=ScriptState(step=1))
    for pause in (1, 1, 0.98):
        job.turn(pause, sending=[])
        job.turn(0.001)
    assert job.state.outcome is None
    job.turn(TICK, sending=[])
    assert job.outcome.exit_code == 7


@pytest.mark.parametrize(("reconnects", "exit_code", "cause"), [(True, 1, "chief"), (False, 7, "ps")])
def test_failure_waits_for_a_task_that_may_be_its_cause(reconnects: bool, exit_code: int, cause: str) -> None:
    job = Job().train()
    job.receiver.on_disconnect(1, job.now)
    job.turn(0.2)
    job.end_child(0, 1)
    assert job.state.outcome is None
    if reconnects:
        job.register(1)
    job.turn(LIMITS.reconnect_seconds + TICK)
    assert (job.outcome.exit_code, job.outcome.cause) == (exit_code, Task(cause, 0))


@pytest.mark.parametrize("age", [0.0, 0.7])
def test_first_of_two_failures_is_the_cause_by_the_time_of_the_exit(age: float) -> None:
    """The failure of the chief is held back while the ps is disconnected; the ps has failed before or after it."""
    job = Job().train()
    job.receiver.on_disconnect(1, job.now)
    job.turn(0.4)
    job.end_child(0, 3)
    job.turn(0.4)
    job.register(1)
    job.send(1, "exited", returncode=4, exit_age_seconds=age)
    assert (job.outcome.exit_code, job.outcome.cause) == ((4, Task("ps", 0)) if age else (3, Task("chief", 0)))


def test_failure_held_back_before_a_pause_is_the_cause_although_an_agent_was_then_lost() -> None:
    job = Job().train()
    job.receiver.on_disconnect(1, job.now)
    job.turn(TICK, sending=(0, 2, 3))
    job.end_child(0, 3)
    assert job.state.outcome is None
    job.pause(60)
    job.turn(2, sending=(0, 2, 3))
    assert (job.outcome.exit_code, job.outcome.cause) == (3, Task("chief", 0))


def test_failure_before_a_loss_is_the_cause_although_it_was_held_back() -> None:
    job = Job().train()
    job.receiver.on_disconnect(2, job.now)
    job.turn(TICK)
    job.end_child(0, 3)
    job.turn(TICK)
    job.receiver.on_agent_exit(3, -9, job.now)
    job.register(2)
    job.turn(TICK)
    assert (job.outcome.exit_code, job.outcome.cause) == (3, Task("chief", 0))


def test_task_does_not_end_before_it_has_started() -> None:
    job = Job().train()
    job.turn(1)
    job.run_child(2, 2)
    job.send(2, "exited", returncode=1, exit_age_seconds=0.4)
    started, ended = job.times(2)
    assert started == ended


@pytest.mark.parametrize("reports", ["with the exit", "later", "at the end"])
def test_last_lines_of_the_cause_may_arrive_after_its_exit(reports: str) -> None:
    job = Job().train()
    job.end_child(0, 3, tail=("boom",) if reports == "with the exit" else ())
    if reports == "later":
        job.send(0, "exited", tail=("boom",))
    job.send(0, "terminated", tail=("boom",))
    assert (job.outcome.exit_code, job.outcome.tail) == (3, ("boom",))


def test_ps_that_ends_after_training_is_not_the_cause_of_a_later_failure() -> None:
    job = Job().train()
    for rank in (0, 2, 3):
        job.send(rank, "running", script=ScriptState(completion="done"))
    assert job.desired(1).is_training_over
    job.end_child(1, 0)
    job.end_child(0, 1)
    assert (job.outcome.exit_code, job.outcome.cause) == (1, Task("chief", 0))


# Stop requests


def test_stopped_job_has_the_grace_period() -> None:
    job = Job(limits=GRACEFUL).train()
    job.state.desired.take_changed()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    assert job.phase() is Phase.STOPPING
    assert job.state.desired.take_changed() == {0, 1, 2, 3}
    desired = job.desired(0)
    assert (desired.stop_reason, desired.grace_period_seconds) == (
        "The job was stopped: the launcher received SIGTERM.",
        20,
    )
    assert not desired.terminate
    job.turn(19)
    assert job.phase() is Phase.STOPPING
    job.turn(2)
    assert job.phase() is Phase.TERMINATING
    cure = " Give it more time with --grace-period."
    reason = f"The job was stopped: the launcher received SIGTERM. {CHIEF_WAS_ENDED}{cure}"
    assert job.outcome == Outcome(143, reason, is_stop=True)


def test_stop_that_ends_a_save_names_the_newest_checkpoint_and_the_lost_steps() -> None:
    job = Job(limits=GRACEFUL).train()
    script = ScriptState(step=412, checkpoint=CheckpointState("saved/ckpt-300", 300))
    job.send(0, "running", script=script)
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.turn(21)
    lost = "The newest complete one is then saved/ckpt-300: the steps after 300, until step 412, are lost."
    assert f"{CHIEF_WAS_ENDED} {lost} Give it more time" in job.outcome.reason


def test_stop_that_ends_the_first_save_says_that_all_steps_are_lost() -> None:
    job = Job(limits=GRACEFUL).train()
    job.send(0, "running", script=ScriptState(step=12, checkpoint=CheckpointState()))
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.turn(21)
    assert "No other is complete: the steps after 0, until step 12, are lost." in job.outcome.reason


def test_stop_of_a_script_that_has_saved_its_last_step_names_no_lost_steps() -> None:
    job = Job(limits=GRACEFUL).train()
    job.send(0, "running", script=ScriptState(step=300, checkpoint=CheckpointState("saved/ckpt-300", 300)))
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.turn(21)
    assert "lost" not in job.outcome.reason


def test_saves_are_events_and_a_slow_one_warns_once() -> None:
    job = Job(limits=GRACEFUL).train()
    state = CheckpointState("saved/ckpt-100", 100)
    for seconds in (2.2, 10.5, 12.0):
        state = dataclasses.replace(state, num_saves=state.num_saves + 1, seconds=seconds, num_bytes=1_600_000_000)
        job.send(0, "running", script=ScriptState(checkpoint=state))
    job.send(0, "running", script=ScriptState(step=7, checkpoint=state))
    failed = dataclasses.replace(state, num_saves=4, error="The disk is full.")
    job.send(0, "running", script=ScriptState(checkpoint=failed))
    assert [text.partition(" saved ")[2] for text in job.texts("saved")] == [
        "saved/ckpt-100 (1,600.0 MB in 2.2 s)",
        "saved/ckpt-100 (1,600.0 MB in 10.5 s)",
        "saved/ckpt-100 (1,600.0 MB in 12.0 s)",
    ]
    assert job.texts("not_saved") == ["chief/0 on n0 could not save: The disk is full."]
    slow = "chief/0 on n0 took 10.5 s to save saved/ckpt-100. A stop leaves 20 s to save: give more with "
    assert job.texts("warning") == [f"{slow}--grace-period 42."]
    for rank in job.ranks:
        job.end_child(rank, 0)
    assert job.outcome.exit_code == 0
    assert f"{slow}--grace-period 42." in job.state.watches.warnings
    assert str(failed) == "saved/ckpt-100 (1,600.0 MB in 12.0 s). The last save failed: The disk is full"


def test_warning_of_a_save_of_minutes_names_an_earlier_signal() -> None:
    job = Job(limits=GRACEFUL).train()
    job.send(0, "running", script=ScriptState(checkpoint=CheckpointState("saved/ckpt-1", 1, 1, 60.0)))
    (text,) = job.texts("warning")
    options = "--grace-period 240, and if Slurm sends the stop request before the time limit, --signal USR1@300."
    assert text.endswith(f"give more with {options}")


def test_second_checkpoints_object_of_a_script_is_no_save() -> None:
    job = Job(limits=GRACEFUL).train()
    job.send(0, "running", script=ScriptState(checkpoint=CheckpointState("saved/ckpt-1", 1, 1, 1.0)))
    job.send(0, "running", script=ScriptState(checkpoint=CheckpointState("other/ckpt-7", 7, 1)))
    assert len(job.texts("saved")) == 1


def test_save_does_not_warn_without_a_grace_period() -> None:
    job = Job().train()
    job.send(0, "running", script=ScriptState(checkpoint=CheckpointState("saved/ckpt-1", 1, 1, 1000.0)))
    assert job.kinds[-1] == "saved"


@pytest.mark.parametrize("returncode", [0, 1, -15])
def test_stopped_job_terminates_when_its_chief_has_exited(returncode: int) -> None:
    job = Job(limits=GRACEFUL).train()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.end_child(2, -15)
    assert (job.phase(), job.desired(2).start_count) == (Phase.STOPPING, 1)
    job.end_child(0, returncode)
    assert (job.phase(), job.outcome.exit_code) == (Phase.TERMINATING, 143)


def test_stopped_job_terminates_when_all_awaited_tasks_have_saved() -> None:
    job = Job("ps worker worker", limits=GRACEFUL).train()
    job.send(1, "running", stop_signal="SIGTERM")
    job.send(1, "running", script=ScriptState(has_saved=True))
    assert job.phase() is Phase.STOPPING
    job.send(2, "running", script=ScriptState(has_saved=True))
    assert job.outcome == Outcome(143, "The job was stopped: worker/0 on n1 received SIGTERM.", is_stop=True)


def test_stopped_job_terminates_when_a_ps_is_gone() -> None:
    job = Job(limits=GRACEFUL).train()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.end_child(1, -9)
    assert (job.phase(), job.outcome.exit_code) == (Phase.TERMINATING, 143)


@pytest.mark.parametrize(
    ("requests", "phase"),
    [
        ("SIGNAL", Phase.STOPPING),
        ("SIGNAL SIGNAL SIGNAL", Phase.STOPPING),
        ("CTRL_C", Phase.STOPPING),
        ("CTRL_C SIGNAL", Phase.STOPPING),
        ("SIGNAL CTRL_C SIGNAL", Phase.STOPPING),
        ("CTRL_C CTRL_C", Phase.TERMINATING),
        ("SIGNAL CTRL_C CTRL_C", Phase.TERMINATING),
        ("CTRL_C SIGNAL CTRL_C", Phase.TERMINATING),
        ("NOW", Phase.TERMINATING),
        ("SIGNAL NOW", Phase.TERMINATING),
        ("CTRL_C NOW", Phase.TERMINATING),
    ],
)
def test_only_another_ctrl_c_and_now_skip_the_grace_period(requests: str, phase: Phase) -> None:
    job = Job(limits=GRACEFUL).train()
    for number, request in enumerate(requests.split(), 1):
        job.state.on_stop(signal.Signals(number), f"request {number} came", job.now, StopRequest[request])
        job.turn(1)
    assert job.phase() is phase
    left = job.state.grace_seconds_left(job.now)
    if phase is Phase.STOPPING:
        assert left == 20 - len(requests.split()), "no request prolongs the grace period"
        job.turn(20)
        assert job.phase() is Phase.TERMINATING
    else:
        assert left is None
    assert job.outcome.exit_code == 128 + 1, "the first request is the outcome"


@pytest.mark.parametrize(
    ("roles", "saved", "end"),
    [
        ("chief ps worker", (), f" {CHIEF_WAS_ENDED}"),
        ("chief ps worker", (0,), ""),
        (
            "ps worker worker",
            (),
            f" worker/0 and worker/1 {THEY_WERE_ENDED}",
        ),
        ("ps worker worker", (1,), f" worker/1 {WAS_ENDED}"),
        ("ps " + "worker " * 11, (), f" 11 tasks {THEY_WERE_ENDED}"),
    ],
)
@pytest.mark.parametrize("request_", [StopRequest.NOW, StopRequest.CTRL_C])
def test_reason_names_the_tasks_that_had_not_stopped(
    roles: str, saved: tuple[int, ...], end: str, request_: StopRequest
) -> None:
    job = Job(roles, limits=GRACEFUL).train()
    if request_ is StopRequest.CTRL_C:
        job.state.on_stop(signal.SIGINT, "it came", job.now, request_)
        job.turn(1)
    for rank in saved:
        job.end_child(rank, 0)
    job.state.on_stop(signal.SIGINT, "it came", job.now, request_)
    if request_ is StopRequest.NOW and saved == (0,):  # training was done before the stop
        assert job.outcome.exit_code == 0
    else:
        assert job.outcome.reason == f"The job was stopped: it came.{end}"


def test_forwarded_ctrl_c_is_the_same_request() -> None:
    """A terminal sends SIGINT to `timeout` and to the launcher, and `timeout --foreground` forwards its own."""
    job = Job(limits=GRACEFUL).train()
    for now in (0, 0.2, 0.4, 0.5):
        job.state.on_stop(signal.SIGINT, "it came", job.now + now, StopRequest.CTRL_C)
        assert job.phase() is (Phase.STOPPING if now < 0.3 else Phase.TERMINATING)


def test_stop_before_the_start_names_no_task() -> None:
    job = Job(limits=GRACEFUL)
    job.state.on_stop(signal.SIGTERM, "it came", job.now)
    assert job.outcome.reason == "The job was stopped: it came."


def test_first_ctrl_c_says_what_another_one_does() -> None:
    job = Job(limits=GRACEFUL).train()
    for request in (StopRequest.SIGNAL, StopRequest.CTRL_C, StopRequest.CTRL_C):
        job.state.on_stop(signal.SIGINT, "it came", job.now, request)
        job.turn(1)
    again = "; Ctrl-C again skips the rest and ends all tasks at once"
    told = [text for kind, _, text in job.events if kind in ("stopping", "stop_repeated", "grace_period_over")]
    assert told == [
        "it came: the job has 20 s to save and stop",
        f"it came: the scripts save already, and have 19 s left{again}",
        "it came while the scripts save: the last 18 s of the grace period are skipped",
    ]


@pytest.mark.parametrize("request_", StopRequest)
def test_job_without_a_grace_period_ends_at_once(request_: StopRequest) -> None:
    job = Job().train()
    job.state.on_stop(signal.SIGTERM, "it came", job.now, request_)
    assert (job.phase(), job.outcome.exit_code) == (Phase.TERMINATING, 143)


def test_stopped_job_begins_no_other_attempt() -> None:
    job = Job(limits=dataclasses.replace(GRACEFUL, max_attempts=2)).train()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.end_child(0, 1)
    assert (job.state.attempt, job.outcome.exit_code) == (1, 143)


@pytest.mark.parametrize("reconnects", [True, False])
@pytest.mark.parametrize("failed", [0, 1], ids=["chief", "ps"])
def test_failure_held_back_before_a_stop_does_not_override_the_stop(failed: int, reconnects: bool) -> None:
    """A worker is disconnected, so the failure of the chief or the ps is held back; then the job is asked to stop."""
    job = Job(limits=dataclasses.replace(GRACEFUL, max_attempts=2)).train()
    job.receiver.on_disconnect(2, job.now)
    job.turn(0.2)
    job.end_child(failed, 1)
    assert job.state.outcome is None
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    if reconnects:
        job.register(2)
    job.turn(LIMITS.reconnect_seconds + TICK)
    assert (job.state.attempt, job.outcome.exit_code) == (1, 143)
    assert job.phase() is Phase.TERMINATING  # at once: no task is left that could save


def test_worker_that_waits_for_its_restart_at_a_stop_is_not_done() -> None:
    job = Job(limits=GRACEFUL).train()
    job.end_child(2, 1)
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    assert not job.state.tasks[2].is_done


def test_ps_that_has_ended_after_training_does_not_end_the_grace_period() -> None:
    """The chief has signalled completion, and exports its model; the ps has ended as it should."""
    job = Job(limits=GRACEFUL).train()
    for rank in (0, 2, 3):
        job.send(rank, "running", script=ScriptState(completion="done"))
    job.end_child(1, 0)
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    assert job.phase() is Phase.STOPPING
    job.end_child(0, 0)
    assert (job.phase(), job.outcome.exit_code) == (Phase.TERMINATING, 143)


# When only evaluators are not done


@pytest.mark.parametrize("event", ["ps fails", "worker fails", "ps is lost", "chief is lost", "worker is lost"])
def test_failure_after_training_does_not_repeat_it(event: str) -> None:
    job = Job("chief ps worker evaluator", dataclasses.replace(TWO_ATTEMPTS, max_worker_restarts=0)).train()
    job.end_child(0, 0)
    rank = ("chief", "ps", "worker").index(event.split(maxsplit=1)[0])
    if event.endswith("lost"):
        job.receiver.on_agent_exit(rank, -9, job.now)
    else:
        job.end_child(rank, 1)
    assert (job.phase(), job.state.attempt, job.state.outcome) == (Phase.TRAINING, 1, None)
    job.end_child(3, 0)
    assert job.outcome.is_success


def test_job_completes_when_the_host_of_its_last_evaluator_is_lost() -> None:
    job = Job("chief ps worker evaluator").train()
    job.end_child(0, 0)
    job.receiver.on_agent_exit(3, -9, job.now)
    assert job.outcome.exit_code == 0
    assert job.outcome.reason == "Training is done: all but evaluator/0 on n3 exited with code 0."


@pytest.mark.parametrize(("rank", "roles"), [(2, FULL), (3, "chief ps worker evaluator")])
def test_loss_of_a_task_that_has_finished_has_no_consequence(rank: int, roles: str) -> None:
    job = Job(roles).train()
    job.end_child(rank, 0)
    job.receiver.on_agent_exit(rank, -9, job.now)
    assert (job.phase(), job.state.outcome) == (Phase.TRAINING, None)


# Jobs in which no task opens a TensorFlow server


def no_server(count: int, either: str = "") -> str:
    what = f"None of the {count} tasks in the cluster spec has started a TensorFlow server"
    return f"{what}: {either}each runs the script alone."


@pytest.mark.parametrize(
    ("roles", "count"), [(FULL, 4), ("ps worker worker", 3), ("chief worker evaluator data-dispatcher", 2)]
)
def test_job_that_ends_without_any_server_completes_with_a_warning(roles: str, count: int) -> None:
    job = Job(roles).train()
    for rank in job.ranks:
        job.end_child(rank, 0) if job.state.outcome is None else None
    assert job.outcome.is_success
    assert job.state.watches.warnings[0].startswith(no_server(count))
    assert job.texts("warning") == list(job.state.watches.warnings)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_server_of_any_task_is_enough_for_no_warning(rank: int) -> None:
    job = Job().train()
    job.send(rank, "running", has_server=True)
    job.turn(LIMITS.start_timeout_seconds + 61, tick=1.0)
    job.end_child(0, 0)
    assert (job.outcome.is_success, job.state.watches.warnings) == (True, ())


@pytest.mark.parametrize("roles", ["chief", "worker evaluator", "chief data-dispatcher data-worker"])
def test_single_task_in_the_cluster_spec_needs_no_server(roles: str) -> None:
    job = Job(roles, dataclasses.replace(LIMITS, require_servers=True)).train()
    job.turn(LIMITS.start_timeout_seconds + 61, tick=1.0)
    job.end_child(0, 0)
    assert "warning" not in job.kinds


def test_scripts_that_run_for_60_s_without_any_server_are_warned_of_once_until_one_comes() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, start_timeout_seconds=300)).train()
    job.turn(59, tick=1.0)
    assert not job.state.watches.warnings
    job.turn(30, tick=1.0)
    (warning,) = job.state.watches.warnings
    assert warning.startswith(no_server(4, "either TensorFlow is still being imported, or "))
    assert len(job.texts("warning")) == 1
    job.send(1, "running", has_server=True)
    assert job.state.watches.warnings == ()


def test_tasks_that_only_wait_are_warned_of_until_the_job_is_done() -> None:
    job = Job("ps worker").train()
    for rank in job.ranks:
        job.send(rank, "running", has_server=True, usage=Usage(cpu_seconds=5.0))
    job.turn(70, tick=1.0)
    (warning,) = job.state.watches.warnings
    assert warning.startswith("No task has shown a sign of work for 60 s")
    assert job.texts("warning") == [warning]
    job.end_child(1, 0)
    assert job.state.watches.warnings == ()
    assert job.texts("withdrawn") == [f"This is not true any more: {warning}"]


def test_warning_of_waiting_tasks_stays_if_the_job_is_stopped() -> None:
    job = Job("ps worker").train()
    for rank in job.ranks:
        job.send(rank, "running", has_server=True, usage=Usage(cpu_seconds=5.0))
    job.turn(70, tick=1.0)
    job.state.on_stop(signal.SIGTERM, "a test", job.now)
    job.turn(5, tick=1.0)
    assert len(job.state.watches.warnings) == 1


def test_warning_of_waiting_tasks_is_withdrawn_at_the_first_step() -> None:
    job = Job("ps worker").train()
    for rank in job.ranks:
        job.send(rank, "running", has_server=True, usage=Usage(cpu_seconds=5.0))
    job.turn(70, tick=1.0)
    assert len(job.state.watches.warnings) == 1
    job.send(1, "running", has_server=True, usage=Usage(cpu_seconds=5.0), script=ScriptState(step=1))
    job.turn(6, tick=1.0)
    assert not job.state.watches.warnings


def test_failure_before_any_server_is_no_reason_for_a_warning() -> None:
    job = Job().train()
    job.end_child(0, 1)
    assert job.state.watches.warnings == ()


def test_required_servers_that_never_come_are_a_failure() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, require_servers=True, max_attempts=2)).train()
    job.end_child(0, 0)
    assert job.outcome.exit_code == 6
    assert job.outcome.reason.startswith(no_server(4))
    assert job.state.watches.warnings == ()


def test_required_servers_have_the_start_timeout_to_come() -> None:
    limits = dataclasses.replace(LIMITS, require_servers=True, start_timeout_seconds=100)
    job = Job(limits=limits).train()
    job.turn(99, tick=1.0)
    assert job.phase() is Phase.TRAINING
    job.turn(2, tick=1.0)
    assert job.outcome.exit_code == 6
    assert "within 100 s" in job.outcome.reason


# Messages that are not accepted


def test_message_not_accepted_is_the_loss_of_its_task_with_the_reason() -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    job.receiver.on_rejected(2, "b'x' is not a control message.", job.now)
    reason = "worker/0 on n2 is lost: its message was not accepted: b'x' is not a control message."
    assert job.outcome == Outcome(7, reason, Task("worker", 0))


def test_task_that_reconnects_without_an_accepted_message_is_lost_after_the_heartbeat_timeout() -> None:
    job = Job().train()
    others, began = (0, 1, 3), job.now
    while job.state.outcome is None and job.now < began + 60:
        job.register(2)
        job.turn(0.6, sending=others)
        job.receiver.on_disconnect(2, job.now)
        job.turn(0.6, sending=others)
    assert began + 10 < job.now < began + 12
    assert job.outcome.reason == "worker/0 on n2 is lost: it sent no heartbeat for 10 s."


# Barriers


def arrive(job: Job, *ranks: int, name: str = "start", roles: tuple[str, ...] = (), seconds: float = 30) -> None:
    for rank in ranks:
        job.send(rank, "running", script=ScriptState(barrier=BarrierArrival(name, f"token-{rank}", seconds, roles)))


def released(job: Job, *ranks: int) -> list[tuple[str, str]]:
    return [(job.desired(rank).released_barrier, job.desired(rank).barrier_error) for rank in ranks]


def test_barrier_is_released_when_the_last_task_arrives() -> None:
    job = Job().train()
    arrive(job, 0, 1, 3)
    assert released(job, 0, 1, 3) == [("", "")] * 3
    job.state.desired.take_changed()
    arrive(job, 2)
    assert released(job, 0, 1, 2, 3) == [(f"token-{rank}", "") for rank in range(4)]
    assert job.state.desired.take_changed() == {0, 1, 2, 3}


def test_last_task_at_a_barrier_is_named_if_others_waited_long() -> None:
    job = Job().train()
    arrive(job, 0, 1, 3)
    job.turn(2.5)
    arrive(job, 2)
    text = "worker/0 on n2 arrived last at barrier 'start': the first had waited 2.5 s"
    assert job.events[-1] == ("barrier", "worker/0", text)
    arrive(job, 0, 1, 2, 3, name="short")
    assert job.events[-1][2] == text


def test_server_and_first_step_emit_one_event_per_start() -> None:
    job = Job().train()
    for step in (7, 8):
        job.send(2, "running", has_server=True, script=ScriptState(step=step))
    assert job.texts("serving") == ["worker/0 on n2 has a server that answers"]
    assert job.texts("first_step") == ["worker/0 on n2 reports step 7, its first"]
    job.end_child(2, -9)
    job.send(2, "running", start_count=2, has_server=False, script=ScriptState())
    job.send(2, "running", has_server=True, script=ScriptState(step=9))
    assert (len(job.texts("serving")), job.texts("first_step")[1:]) == (2, ["worker/0 on n2 reports step 9, its first"])


def test_barrier_of_some_roles_waits_for_no_others() -> None:
    job = Job().train()
    arrive(job, 2, 3, roles=("worker",))
    assert released(job, 2, 3) == [("token-2", ""), ("token-3", "")]
    arrive(job, 1, roles=("worker",))
    assert released(job, 1) == [("token-1", "barrier 'start' is not for a ps")]


def test_barrier_breaks_at_its_timeout() -> None:
    job = Job().train()
    arrive(job, 2, 3, seconds=30)
    job.turn(31)
    why = "chief/0 on n0 and ps/0 on n1 did not arrive at barrier 'start' in time"
    assert released(job, 2, 3) == [("token-2", why), ("token-3", why)]


def test_barrier_breaks_at_once_when_a_task_cannot_arrive() -> None:
    job = Job("ps worker worker").train()
    arrive(job, 1, roles=("worker",))
    job.end_child(2, 0)
    job.turn(TICK)
    assert released(job, 1) == [("token-1", "worker/1 on n2 ended without arriving at barrier 'start'")]
    arrive(job, 1, name="second", roles=("worker",))
    assert released(job, 1)[0][1] == "worker/1 on n2 ended without arriving at barrier 'second'"


def test_barrier_waits_for_a_worker_that_is_restarted() -> None:
    job = Job().train()
    arrive(job, 2, 3, roles=("worker", "chief"))
    job.end_child(2, -9)
    job.send(2, "running", start_count=2, script=ScriptState())
    arrive(job, 0, roles=("worker", "chief"))
    assert released(job, 0, 3) == [("", "")] * 2
    arrive(job, 2, roles=("worker", "chief"))
    assert [broke for _, broke in released(job, 0, 2, 3)] == [""] * 3
    assert released(job, 2)[0][0] == "token-2"


def test_task_waits_at_one_barrier_only() -> None:
    """The process that waited at the first barrier has ended; another process of the script waits at the second."""
    job = Job("worker worker").train()
    arrive(job, 0, name="first")
    arrive(job, 0, name="second")
    arrive(job, 1, name="first")
    assert released(job, 0, 1) == [("", "")] * 2
    arrive(job, 1, name="second")
    assert released(job, 0, 1) == [("token-0", ""), ("token-1", "")]


def test_barrier_that_nobody_waits_at_any_more_is_forgotten() -> None:
    job = Job("worker worker").train()
    arrive(job, 0)
    job.send(0, "running", script=ScriptState())
    job.turn(10)
    arrive(job, 0, 1)
    assert job.texts("barrier") == []


def test_pause_of_the_launcher_breaks_no_barrier() -> None:
    job = Job("worker worker").train()
    arrive(job, 0, seconds=20)
    job.pause(25)
    job.state.on_tick(job.now)
    assert released(job, 0) == [("", "")]
    arrive(job, 1)
    assert released(job, 0, 1) == [("token-0", ""), ("token-1", "")]


def test_pause_of_the_launcher_is_no_idle_job() -> None:
    job = Job("ps worker").train()
    for rank in job.ranks:
        job.send(rank, "running", has_server=True, usage=Usage(cpu_seconds=5.0))
    job.turn(10, tick=1.0)
    job.pause(100)
    job.turn(10, tick=1.0)
    assert not job.state.watches.warnings


def test_name_may_be_used_again() -> None:
    job = Job("worker worker").train()
    arrive(job, 0, 1)
    for rank in (0, 1):
        job.send(rank, "running", script=ScriptState(barrier=BarrierArrival("start", f"again-{rank}", 30)))
    assert released(job, 0, 1) == [("again-0", ""), ("again-1", "")]


@pytest.mark.parametrize(
    ("roles", "rank", "returncode", "exit_code", "words"),
    [
        (FULL, 0, 3, 3, "chief/0 on n0 exited with code 3."),
        (FULL, 0, -11, 139, "chief/0 on n0 was killed by signal 11 (SIGSEGV)."),
        (FULL, 1, -9, 137, "ps/0 on n1 was killed by signal 9 (SIGKILL)."),
        ("ps worker worker", 0, 1, 1, "ps/0 on n0 exited with code 1."),
        ("ps worker worker", 2, 4, 4, "worker/1 on n2 exited with code 4."),
    ],
)
def test_crash_of_a_critical_task_ends_the_job_with_its_exit_code(
    roles: str, rank: int, returncode: int, exit_code: int, words: str
) -> None:
    job = Job(roles).train()
    job.end_child(rank, returncode, tail=("Traceback", "boom"))
    assert job.phase() is Phase.TERMINATING
    assert job.outcome == Outcome(exit_code, words, job.state.tasks[rank].task, ("Traceback", "boom"))
    assert all(job.desired(rank).terminate for rank in job.ranks)
    assert job.state.desired.take_changed() == set(job.ranks)


def test_finished_chief_ends_the_job_with_success() -> None:
    job = Job().train()
    job.end_child(0, 0)
    assert job.phase() is Phase.TERMINATING
    assert job.outcome == Outcome(0, "Training is done: every task that the job waits for exited with code 0.")
    expected = DesiredState(1, 1, True, job.outcome.reason, have_leaders_ended=True)
    assert [job.desired(rank) for rank in job.ranks] == [expected] * 4
    for rank in job.ranks:
        assert job.phase() is Phase.TERMINATING
        job.send(rank, "terminated")
    assert job.phase() is Phase.ENDED
    assert job.kinds[-4:] == ["terminated"] * 4


def test_without_a_chief_every_worker_is_waited_for() -> None:
    job = Job("ps worker worker worker").train()
    for rank in (3, 1):
        job.end_child(rank, 0)
        assert job.phase() is Phase.TRAINING
    job.end_child(2, 0)
    assert (job.phase(), job.outcome.exit_code) == (Phase.TERMINATING, 0)


def test_exit_while_terminating_is_collateral() -> None:
    job = Job().train()
    job.end_child(0, 3)
    first = job.outcome
    job.end_child(1, -15)
    job.end_child(2, 1)
    job.end_child(3, 0)
    job.receiver.on_agent_exit(1, 1, job.now)
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    assert job.outcome is first
    assert job.kinds.count("outcome") == 1
    assert "restarting" not in job.kinds


def test_failure_after_success_changes_nothing() -> None:
    job = Job().train()
    job.end_child(0, 0)
    job.end_child(1, -11)
    assert job.outcome.is_success


def test_times_of_a_task_are_those_of_its_last_start() -> None:
    job = Job().train()
    assert job.times(2) == (1000, None)
    job.turn(2)
    job.end_child(2, 1)
    assert job.times(2) == (1000, 1002)
    job.turn(1)
    job.run_child(2, 2)
    assert job.times(2) == (1003, None)


# Evaluators


def test_evaluator_is_waited_for_after_the_chief() -> None:
    job = Job("chief ps evaluator").train()
    job.end_child(0, 0)
    job.turn(29)
    assert job.phase() is Phase.TRAINING
    job.end_child(2, 0)
    assert job.outcome.reason == "Training is done: every task that the job waits for exited with code 0."


@pytest.mark.parametrize("roles", ["chief ps worker evaluator", "worker evaluator"])
def test_evaluator_is_asked_to_finish_when_no_other_task_is_awaited(roles: str) -> None:
    job = Job(roles).train()
    evaluator = job.ranks[-1]
    assert not job.desired(evaluator).is_finishing
    job.end_child(0, 0)
    assert job.desired(evaluator).is_finishing
    assert evaluator in job.state.desired.take_changed()
    job.end_child(evaluator, 1)
    job.run_child(evaluator, 2)
    assert job.desired(evaluator).is_finishing


def test_evaluator_of_a_new_attempt_is_not_asked_to_finish() -> None:
    job = Job("chief ps worker evaluator", TWO_ATTEMPTS).train()
    job.end_child(1, 1)
    assert not job.desired(3).is_finishing


def test_evaluator_is_waited_for_no_longer_than_its_time() -> None:
    job = Job("chief ps evaluator evaluator").train()
    job.end_child(2, 0)
    job.end_child(0, 0)
    job.turn(29.9)
    assert job.phase() is Phase.TRAINING
    job.turn(0.4)
    assert job.outcome.exit_code == 0
    assert job.outcome.reason == "Training is done: all but evaluator/1 on n3, waited for 30 s exited with code 0."


def test_wait_for_an_evaluator_is_not_begun_again() -> None:
    job = Job("chief ps worker evaluator").train()
    job.end_child(0, 0)
    job.turn(20)
    job.end_child(2, 0)
    job.end_child(3, 1)
    job.run_child(3, 2)
    job.turn(10.4)
    assert job.phase() is Phase.TERMINATING


def test_without_a_chief_the_wait_begins_with_the_last_worker() -> None:
    job = Job("worker worker evaluator").train()
    job.end_child(0, 0)
    job.turn(100)
    assert job.phase() is Phase.TRAINING
    job.end_child(1, 0)
    job.turn(30.2)
    assert job.phase() is Phase.TERMINATING


@pytest.mark.parametrize("chief_is_done", [False, True])
def test_evaluator_is_restarted_up_to_the_limit_and_the_job_continues(chief_is_done: bool) -> None:
    job = Job("chief ps evaluator").train()
    if chief_is_done:
        job.end_child(0, 0)
    job.end_child(2, 1)
    job.restart_and_end_child(2, 1)
    assert job.desired(2).start_count == 3
    job.restart_and_end_child(2, 1)
    assert job.desired(2).start_count == 3
    assert job.texts("not_restarted") == ["evaluator/0 on n2 is not restarted again; the job continues without it"]
    assert job.phase() is (Phase.TERMINATING if chief_is_done else Phase.TRAINING)
    if not chief_is_done:
        job.end_child(0, 0)
    assert job.outcome.exit_code == 0


# Data services


def test_server_of_a_data_service_is_restarted_and_the_job_fails_without_it() -> None:
    job = Job("chief data-dispatcher data-worker").train()
    for rank in (1, 2):
        job.end_child(rank, -9)
        assert job.desired(rank).start_count == 2
        job.run_child(rank, 2)
    job.restart_and_end_child(2, 1)
    job.restart_and_end_child(2, 1)
    assert job.outcome.reason == "data-worker/0 on n2 exited with code 1."


def test_data_service_is_ended_when_the_chief_is_done() -> None:
    job = Job("chief data-dispatcher data-worker").train()
    job.end_child(0, 0)
    assert job.outcome.is_success
    assert job.desired(1).terminate


def test_data_service_that_exits_does_not_end_a_grace_period() -> None:
    job = Job("chief data-dispatcher data-worker", GRACEFUL).train()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.end_child(1, 1)
    job.end_child(2, 0)
    assert job.phase() is Phase.STOPPING
    job.end_child(0, 0)
    assert job.phase() is Phase.TERMINATING


def test_barrier_of_all_does_not_wait_for_a_data_service() -> None:
    job = Job("chief worker data-dispatcher data-worker").train()
    arrive(job, 0, 1)
    assert released(job, 0, 1) == [("token-0", ""), ("token-1", "")]


# Exits of agents and of the job


@pytest.mark.parametrize("stage", ["register_tasks", "train"])
def test_agent_that_ends_is_a_lost_task(stage: str) -> None:
    job = getattr(Job(), stage)()
    job.receiver.on_agent_exit(1, -9, job.now)
    assert job.outcome == Outcome(7, "ps/0 on n1 is lost: its agent was killed by signal 9 (SIGKILL).", Task("ps", 0))


def test_agent_that_exits_before_registration_is_named_by_rank() -> None:
    job = Job().register_tasks(0)
    job.receiver.on_agent_exit(2, 1, job.now)
    assert job.outcome.reason == "worker/0 (rank 2) is lost: its agent exited with code 1."
    job.send(0, "terminated")
    assert job.phase() is Phase.ENDED


def test_exit_of_a_terminated_agent_is_no_loss() -> None:
    job = Job().train()
    job.end_child(0, 0)
    for rank in job.ranks:
        job.send(rank, "terminated")
        job.receiver.on_agent_exit(rank, 0, job.now)
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)
    assert "lost" not in job.kinds


@pytest.mark.parametrize("stage", [None, "register_tasks", "train"])
def test_exit_of_the_spawner_ends_the_job(stage: str | None) -> None:
    job = Job() if stage is None else getattr(Job(), stage)()
    outcome = Outcome(7, "srun ended before the job did.")
    job.state.on_spawner_exit(outcome, job.now)
    assert (job.phase(), job.outcome) == (Phase.ENDED, outcome)


def test_exit_of_the_spawner_after_the_outcome_keeps_the_outcome() -> None:
    job = Job().train()
    job.end_child(0, 0)
    job.state.on_spawner_exit(Outcome(7, "srun ended."), job.now)
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)


KILL = ScriptFailure("Slurm's memory limit", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.")


@pytest.mark.parametrize("other", ["", "no kill", "restart", "another task", "failure"])
def test_kill_that_srun_prints_at_its_end_explains_the_loss_of_a_task(other: str) -> None:
    job = Job("chief ps worker worker").train()
    for rank in job.ranks:
        job.send(rank, "running", start_count=2 if other == "restart" and rank == 2 else 1)
    if other == "another task":
        job.end_child(2, -9)
    if other == "failure":
        job.end_child(0, 7)
    else:
        job.receiver.on_agent_exit(0, -9, job.now)
    assert job.outcome.failure is None
    job.state.on_spawner_exit(Outcome(7, "srun ended.", failure=None if other == "no kill" else KILL), job.now)
    assert str(job.outcome.cause) == "chief/0"
    assert job.outcome.failure == (KILL if other == "" else None)


def test_kill_that_srun_prints_explains_a_loss_that_is_held() -> None:
    job = Job("chief ps worker").train()
    job.receiver.on_disconnect(1, job.now)
    job.receiver.on_agent_exit(0, -9, job.now)
    assert job.state.outcome is None
    job.state.on_spawner_exit(Outcome(7, "srun ended.", failure=KILL), job.now)
    assert (str(job.outcome.cause), job.outcome.failure) == ("chief/0", KILL)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signal_to_the_launcher_stops_the_job(number: signal.Signals, exit_code: int) -> None:
    job = Job().train()
    job.state.on_stop(number, f"the launcher received {number.name}", job.now)
    reason = f"The job was stopped: the launcher received {number.name}. {CHIEF_WAS_ENDED}"
    assert job.outcome == Outcome(exit_code, reason, is_stop=True)
    assert all(job.desired(rank).terminate for rank in job.ranks)


def test_signal_to_an_agent_stops_the_job() -> None:
    job = Job().train()
    job.send(2, "running", stop_signal="SIGTERM")
    reason = f"The job was stopped: worker/0 on n2 received SIGTERM. {CHIEF_WAS_ENDED}"
    assert job.outcome == Outcome(143, reason, is_stop=True)


def test_stopped_job_without_registered_tasks_ends_at_once() -> None:
    job = Job()
    job.state.on_stop(signal.SIGINT, "the launcher received SIGINT", job.now)
    assert job.phase() is Phase.ENDED


def test_task_that_registers_while_terminating_is_terminated() -> None:
    job = Job().register_tasks(0)
    job.state.on_stop(signal.SIGINT, "the launcher received SIGINT", job.now)
    job.register(1)
    assert job.desired(1).terminate
    assert job.desired(1).start_count == 0
    job.send(0, "terminated")
    assert job.phase() is Phase.TERMINATING
    job.send(1, "terminated")
    assert job.phase() is Phase.ENDED


def test_tasks_that_do_not_terminate_are_named_and_not_awaited() -> None:
    job = Job().train()
    job.end_child(0, 0)
    job.send(0, "terminated")
    job.send(1, "terminated")
    job.turn(14.6)
    assert job.phase() is Phase.TERMINATING
    job.turn(0.6)
    assert job.phase() is Phase.ENDED
    assert job.texts("not_terminated") == ["worker/0 on n2 and worker/1 on n3 did not terminate in time"]
    assert job.outcome.exit_code == 0


def test_task_lost_while_terminating_is_not_awaited() -> None:
    job = Job().train()
    job.end_child(0, 0)
    for rank in (0, 1, 2):
        job.send(rank, "terminated")
    job.turn(10.4, sending=())
    assert job.phase() is Phase.ENDED
    assert job.outcome.exit_code == 0


@pytest.mark.parametrize("stage", ["register_tasks", "train"])
def test_task_that_terminates_by_itself_is_lost(stage: str) -> None:
    job = getattr(Job(), stage)()
    job.send(0, "terminated")
    assert job.outcome.cause == Task("chief", 0)
    assert job.outcome.exit_code == 7


# Arbitrary sequences of events

STATES: tuple[TaskState, ...] = ("registered", "ready", "not_ready", "running", "exited", "terminated")
RANKS = st.integers(0, 5)  # from 4 on joined workers, if there are any
STEPS = st.one_of(
    st.tuples(st.just("register"), RANKS, st.sampled_from(["", "again", "fails", "stale"])),
    st.tuples(st.just("send"), RANKS, st.sampled_from(STATES), st.integers(0, 3), st.sampled_from([0, 1, -9])),
    st.tuples(st.just("follow"), RANKS),
    st.tuples(st.just("disconnect"), RANKS),
    st.tuples(st.just("turn"), st.sampled_from([0.1, 1.0, 5.0, 20.0])),
    st.tuples(st.just("lag"), st.sampled_from([2.0, 50.0])),
    st.tuples(st.just("agent_exit"), RANKS, st.sampled_from([0, 1, -9])),
    st.tuples(st.just("spawner_exit")),
    st.tuples(st.just("stop")),
    st.tuples(st.just("join"), st.sampled_from(["g4", "g5"])),
    st.tuples(st.just("accept"), st.sampled_from([(), (0,), (0, 1, 2)])),
    st.tuples(st.just("leave"), RANKS),
)
LIKELY = st.lists(st.tuples(st.just("register"), RANKS, st.just("")) | st.tuples(st.just("follow"), RANKS), max_size=20)


class Trial(Job):
    """A job with arbitrary events, and the invariants that always hold."""

    def __init__(self, roles: str, limits: JobSpec = LIMITS) -> None:
        super().__init__(roles, limits)
        self.ever_ready: set[int] = set()
        self.seen_phase = (1, Phase.RENDEZVOUS)
        self.seen_outcome: Outcome | None = None

    def step(self, what: str, *details: Any) -> None:
        rank_first = what in ("register", "send", "follow", "disconnect", "agent_exit", "leave")
        if not rank_first or self.state.tasks.get(details[0]) is not None:
            getattr(self, f"do_{what}")(*details)
        self.check()

    def check(self) -> None:
        state = self.state
        attempt, phase = self.seen_phase
        assert (state.attempt, PHASES.index(state.phase)) >= (attempt, PHASES.index(phase))
        assert state.attempt <= state.spec.max_attempts
        if state.attempt != attempt:
            self.ever_ready.clear()
        if self.seen_outcome is not None:
            assert state.outcome is self.seen_outcome
        assert (state.outcome is not None) is (state.phase in (Phase.TERMINATING, Phase.ENDED))
        assert self.kinds.count("outcome") == (state.outcome is not None)
        present = {record.rank for record in state.tasks.present_members}
        members = [record.task for record in state.tasks.members]
        for record in state.tasks.joined_workers:
            assert record.role.has_joined
            assert record.task not in members
            assert state.outcome is None or self.desired(record.rank).terminate
            if state.outcome is not None:
                assert state.outcome.cause != record.task
        assert not state.desired.of(0).workers or state.phase is not Phase.RENDEZVOUS
        for rank in self.ranks:
            desired = self.desired(rank)
            assert desired.start_count == 0 or self.ever_ready >= present or rank not in present or state.outcome
            assert desired.start_count <= 1 + LIMITS.max_worker_restarts
            assert desired.terminate is (state.outcome is not None or state.tasks[rank].is_gone)
        self.seen_phase, self.seen_outcome = (state.attempt, state.phase), state.outcome

    def do_register(self, rank: int, how: str) -> None:
        changes = {
            "": {},
            "again": {"incarnation": "later"},
            "fails": {"failure": "It cannot."},
            "stale": {"version": "0"},
        }[how]
        try:
            self.register(rank, **changes)
        except RendezvousClosedError:
            record = self.state.tasks[rank]
            assert how in ("again", "stale") or record.has_registered or record.is_gone

    def do_join(self, incarnation: str) -> None:
        registration = Registration(JOINING_RANK, "g", "10.0.1.1", 4100, incarnation, __version__)
        with contextlib.suppress(RendezvousClosedError):
            self.receiver.on_registration(registration, self.now)

    def do_accept(self, workers: tuple[int, ...]) -> None:
        observed = self.state.tasks[0].observed
        if self.state.tasks[0].is_connected and observed.state == "running":
            script = dataclasses.replace(observed.script, workers=workers)
            self.receiver.on_observed_state(0, dataclasses.replace(observed, script=script), self.now)

    def do_leave(self, rank: int) -> None:
        record = self.state.tasks[rank]
        if record.role.has_joined and record.is_connected:
            observed = dataclasses.replace(record.observed, stop_signal="SIGTERM")
            self.receiver.on_observed_state(rank, observed, self.now)

    def do_send(self, rank: int, state: TaskState, start_count: int, returncode: int) -> None:
        if self.state.tasks[rank].is_connected:
            if state == "ready" and self.state.cluster is not None:
                self.ever_ready.add(rank)
            self.send(rank, state, start_count=start_count, returncode=returncode)

    def do_follow(self, rank: int) -> None:
        """Send the state that a correct agent would send now."""
        desired, status = self.desired(rank), self.state.tasks[rank].observed
        if desired.terminate:
            self.do_send(rank, "terminated", status.start_count, 0)
        elif desired.attempt > self.state.tasks[rank].attempt > 0:
            self.reregister(rank)
        elif desired.start_count > status.start_count:
            self.do_send(rank, "running", desired.start_count, 0)
        elif self.state.cluster is not None and status.state == "registered":
            self.do_send(rank, "ready", 0, 0)

    def do_disconnect(self, rank: int) -> None:
        self.receiver.on_disconnect(rank, self.now)

    def do_turn(self, seconds: float) -> None:
        self.turn(seconds)

    def do_lag(self, seconds: float) -> None:
        self.pause(seconds)
        self.state.on_tick(self.now)

    def do_agent_exit(self, rank: int, returncode: int) -> None:
        self.receiver.on_agent_exit(rank, returncode, self.now)

    def do_spawner_exit(self) -> None:
        self.state.on_spawner_exit(Outcome(7, "srun ended."), self.now)

    def do_stop(self) -> None:
        self.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", self.now)


@given(
    roles=st.sampled_from(
        [
            FULL,
            "ps worker worker worker",
            "chief ps worker evaluator",
            "chief ps worker data-worker",
            "chief ps worker spare",
            "worker worker spare spare",
        ]
    ),
    limits=st.sampled_from(
        [
            LIMITS,
            GRACEFUL,
            TWO_ATTEMPTS,
            dataclasses.replace(GRACEFUL, max_attempts=3),
            dataclasses.replace(GRACEFUL, max_attempts=3, spares=1),
            dataclasses.replace(GRACEFUL, max_attempts=3, spares=1, placement="spread"),
        ]
    ),
    beginning=LIKELY,
    steps=st.lists(STEPS, max_size=20),
)
def test_any_sequence_of_events_ends_the_job(
    roles: str, limits: JobSpec, beginning: list[tuple[Any, ...]], steps: list[tuple[Any, ...]]
) -> None:
    trial = Trial(roles, limits)
    for step in (*beginning, *steps):
        trial.step(*step)
    enough = LIMITS.start_timeout_seconds + LIMITS.finish_timeout_seconds + LIMITS.kill_wait_seconds + 100
    trial.turn(enough, sending=(), tick=0.9)  # no task sends anything any more
    trial.check()
    assert trial.phase() is Phase.ENDED


@given(st.permutations(range(4)), st.permutations(range(4)), st.permutations(range(4)))
def test_job_completes_in_any_order_of_its_tasks(joining: list[int], proving: list[int], leaving: list[int]) -> None:
    trial = Trial(FULL)
    for rank in joining:
        trial.step("register", rank, "")
    for rank in proving + leaving:
        trial.step("follow", rank)
    assert trial.phase() is Phase.TRAINING
    assert trial.state.tasks.count("running") == 4
    trial.end_child(0, 0)
    for rank in leaving:
        trial.step("follow", rank)
    assert (trial.phase(), trial.outcome.exit_code) == (Phase.ENDED, 0)


# Scripts of plain srun: a ps that ends takes its variables with it


@pytest.mark.parametrize("how", ["killed", "exception", "lost", "stopped"])
def test_end_of_a_ps_of_plain_srun_during_training_stops_the_scripts(how: str) -> None:
    job = free_job(GRACEFUL)
    for rank in job.ranks:
        job.send(rank, "running", start_count=1, script=ScriptState(handles_stop=rank == 1))
    if how == "lost":
        job.receiver.on_disconnect(0, job.now)
        job.turn(LIMITS.reconnect_seconds + 1)
    else:
        killed_by = "liveness_probe" if how == "stopped" else None
        job.send(0, "terminated", returncode=1 if how == "exception" else None, killed_by=killed_by)
    assert job.phase() is Phase.STOPPING
    assert "variables" in job.desired(1).stop_reason
    job.send(1, "running", start_count=1, script=ScriptState(handles_stop=True, has_saved=True))
    assert (job.outcome.exit_code, job.outcome.cause, job.outcome.is_stop) == (7, Task("ps", 0), False)
    assert job.desired(2).terminate


def test_scripts_of_plain_srun_that_ignore_stop_requests_are_not_awaited() -> None:
    job = free_job(GRACEFUL)
    for rank in job.ranks:
        job.send(rank, "running", start_count=1)
    job.send(0, "terminated")
    assert job.outcome.cause == Task("ps", 0)


@pytest.mark.parametrize("case", ["exits with 0", "training is over", "tolerated"])
def test_end_of_a_ps_of_plain_srun_that_is_not_needed_stops_nothing(case: str) -> None:
    job = free_job(dataclasses.replace(LIMITS, cancels_step=case != "tolerated"))
    if case == "training is over":
        for rank in (1, 2):
            job.send(rank, "running", script=ScriptState(completion="done"))
    job.send(0, "terminated", returncode=0 if case == "exits with 0" else None)
    assert (job.phase(), job.state.outcome) == (Phase.TRAINING, None)


def test_scripts_of_plain_srun_learn_which_tasks_have_failed_and_when_the_last_worker_has_ended() -> None:
    job = free_job()
    job.send(1, "terminated", script=ScriptState(completion="failed"))
    assert (job.desired(0).failed_tasks, job.desired(0).is_training_over) == (("worker/0",), False)
    job.send(2, "running", script=ScriptState(completion="done"))
    assert (job.desired(0).is_training_over, job.desired(0).have_leaders_ended) == (True, False)
    job.send(2, "terminated", script=ScriptState(completion="done"))
    assert job.desired(0).have_leaders_ended
    assert job.desired(0).failed_tasks == ("worker/0",)


@pytest.mark.parametrize(
    ("changes", "is_silent", "expected"),
    [
        ({"state": "terminated"}, False, False),
        ({"state": "terminated", "killed_by": "slurmstepd"}, False, True),
        ({"state": "terminated", "killed_by": "liveness_probe"}, False, True),
        ({"state": "running"}, True, True),
        ({"state": "running"}, False, False),
    ],
)
def test_slurm_may_miss_the_end_of_a_task_that_is_stopped_or_whose_host_or_slurmstepd_is_lost(
    changes: dict[str, Any], is_silent: bool, expected: bool
) -> None:
    job = free_job()
    job.send(1, **changes)
    if changes["state"] == "running" and is_silent:
        job.turn(LIMITS.task_loss_seconds + 1, [0, 2])
    elif changes["state"] == "running":
        job.receiver.on_disconnect(1, job.now)
        job.turn(LIMITS.reconnect_seconds + 1)
    record = job.state.tasks[1]
    assert (record.is_gone, record.is_hidden_from_slurm) == (True, expected)


@pytest.mark.parametrize(("killed_by", "expected"), [("slurmstepd", 7), ("guard", 0)])
def test_other_ranks_return_the_exit_code_of_the_job_if_slurm_misses_the_end_of_rank_0(
    killed_by: str, expected: int
) -> None:
    job = Job("chief ps worker")
    job.register_tasks()
    for rank in job.ranks:
        job.send(rank, "ready")
    job.send(0, "terminated", killed_by=killed_by, detail="was killed")
    assert job.outcome.exit_code == 7
    assert [job.desired(rank).exit_code for rank in (1, 2)] == [expected, expected]


def test_training_of_ps_alone_never_ends() -> None:
    job = Job("ps ps", owns_child=False)
    job.register_tasks()
    for rank in job.ranks:
        job.send(rank, "ready")
    job.send(1, "terminated", returncode=0)
    assert not job.desired(0).have_leaders_ended
