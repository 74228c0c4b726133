"""Workers join a running job and leave it, in the state machine with a simulated clock."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.test_state import LIMITS, Job
from tf4slurm import __version__
from tf4slurm.cluster import Task
from tf4slurm.control.joined_workers import _LEAVE_SECONDS
from tf4slurm.control.messages import JOINING_RANK, BarrierArrival, Registration, ScriptState, ShardRequest
from tf4slurm.control.records import Phase, TaskRecord
from tf4slurm.errors import EXIT_NOT_FORMED, EXIT_TASK_LOST, RendezvousClosedError

ROLES = "chief ps worker worker"
ACCEPTS = ScriptState(workers=(0, 1))


def train(roles: str = ROLES, script: ScriptState = ACCEPTS, **limits: Any) -> Job:
    job = Job(roles, dataclasses.replace(LIMITS, **limits)).train()
    job.send(0, "running", script=script)
    job.state.desired.take_changed()
    return job


def join(job: Job, name: str = "joined worker-4", **changes: Any) -> TaskRecord:
    rank = len(job.state.tasks)
    registration = Registration(JOINING_RANK, "g", f"10.0.1.{rank}", 4000 + rank, name, __version__)
    record = job.receiver.on_registration(dataclasses.replace(registration, **changes), job.now)
    job.ranks = range(len(job.state.tasks))
    return record


def serve(job: Job, rank: int) -> None:
    """A joined worker has checked the ps, and its child's server answers."""
    job.send(rank, "ready")
    job.run_child(rank, job.desired(rank).start_count)
    job.send(rank, "running", has_server=True)


def is_gone(job: Job, rank: int) -> bool:
    """Whether a task is gone; a joined worker then leaves the table."""
    record = job.state.tasks.get(rank)
    return record is None or record.is_gone


def end_members(job: Job) -> None:
    """The chief is done, and the first four tasks have terminated."""
    job.end_child(0, 0)
    for rank in range(4):
        job.send(rank, "terminated")


def use(job: Job, *workers: int) -> None:
    job.send(0, "running", script=ScriptState(workers=workers))


def train_again(job: Job) -> None:
    """The first four tasks form another attempt's cluster, the chief accepts workers, and then the worker joins."""
    job.reregister(0, 1, 2, 3)
    assert job.phase() is Phase.CHECKING  # without the joined worker
    for rank in range(4):
        job.send(rank, "ready")
        job.run_child(rank)
    assert job.phase() is Phase.TRAINING
    assert (job.desired(0).workers, job.desired(4).start_count) == ((), 0)
    use(job, 0, 1)
    job.reregister(4)
    serve(job, 4)
    assert job.desired(0).workers[2] == (2, "10.0.1.4:5004")


def test_joined_worker_gets_rank_index_and_cluster_and_starts() -> None:
    job = train()
    record = join(job)
    assert (record.rank, record.name, job.desired(4).rank, job.desired(0).rank) == (4, "worker/2", 4, None)
    job.state.on_tick(job.now)
    assert 4 in job.state.desired.take_changed()
    assert job.state.cluster is not None
    assert job.state.cluster.members[4].task.task_index == 2
    assert job.desired(4).start_count == 0
    job.send(4, "ready")
    assert job.desired(4).start_count == 1
    assert [job.desired(rank).start_count for rank in range(4)] == [1, 1, 1, 1]


def test_chief_gets_the_workers_when_the_joined_worker_serves() -> None:
    job = train()
    join(job)
    job.send(4, "ready")
    job.run_child(4)
    assert job.desired(0).workers == ()
    job.send(4, "running", has_server=True)
    assert job.desired(0).workers == ((0, "10.0.0.2:4002"), (1, "10.0.0.3:4003"), (2, "10.0.1.4:4004"))
    assert [job.desired(rank).workers for rank in range(1, 5)] == [()] * 4
    use(job, 0, 1, 2)
    assert job.texts("joined") == ["worker/2 on g takes part in training"]


def test_joined_worker_waits_until_the_chief_accepts_workers() -> None:
    job = train(script=ScriptState())
    join(job)
    job.turn(LIMITS.start_timeout_seconds - 1)
    assert job.state.cluster is not None
    assert len(job.state.cluster.members) == 4
    job.send(0, "running", script=ACCEPTS)
    assert len(job.state.cluster.members) == 5
    assert not job.desired(4).terminate


def test_joined_worker_is_dismissed_if_the_chief_never_accepts_workers() -> None:
    job = train(script=ScriptState())
    join(job)
    job.turn(LIMITS.start_timeout_seconds + 1)
    assert "made no strategy" in job.desired(4).terminate_reason
    assert job.desired(4).exit_code == EXIT_NOT_FORMED
    assert [job.desired(rank).terminate for rank in job.ranks] == [False] * 4 + [True]
    job.send(4, "terminated")
    assert (job.phase(), is_gone(job, 4)) == (Phase.TRAINING, True)


@pytest.mark.parametrize(
    ("make_job", "changes", "reason"),
    [
        (lambda: train(script=ScriptState(workers_error="TensorFlow 9")), {}, "TensorFlow 9"),
        (lambda: train("chief worker worker"), {}, "only a job with a chief and ps"),
        (lambda: train("worker worker"), {}, "only a job with a chief and ps"),
        (train, {"version": "0.0.9"}, "it runs tf4slurm 0.0.9"),
        (train, {"failure": "no interface ib0."}, "no interface ib0"),
    ],
)
def test_joined_worker_is_refused_and_the_job_is_untouched(
    make_job: Callable[[], Job], changes: dict[str, str], reason: str
) -> None:
    job = make_job()
    num_events, num_tasks = len(job.events), len(job.state.tasks)
    with pytest.raises(RendezvousClosedError, match=reason):
        join(job, **changes)
    assert (len(job.events), len(job.state.tasks)) == (num_events, num_tasks)
    assert job.state.outcome is None


def test_joined_worker_is_refused_when_the_job_ends() -> None:
    job = train()
    job.end_child(0, 0)
    with pytest.raises(RendezvousClosedError, match="is ending"):
        join(job)


def test_reconnected_joined_worker_is_the_same_task() -> None:
    job = train()
    record = join(job)
    job.receiver.on_disconnect(4, job.now)
    assert join(job) is record
    assert len(job.state.tasks) == 5
    assert join(job, "another").name == "worker/3"


def test_joined_worker_leaves_after_the_chief_has_stopped_using_it() -> None:
    job = train()
    join(job)
    serve(job, 4)
    use(job, 0, 1, 2)
    job.send(4, "running", stop_signal="SIGTERM")
    assert job.desired(0).workers == ((0, "10.0.0.2:4002"), (1, "10.0.0.3:4003"))
    assert not job.desired(4).terminate
    use(job, 0, 1)
    assert job.desired(4).terminate
    assert (job.phase(), job.state.outcome) == (Phase.TRAINING, None)
    job.send(4, "terminated")
    end_members(job)
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)


def test_joined_worker_that_the_chief_does_not_release_leaves_after_the_timeout() -> None:
    job = train()
    join(job)
    serve(job, 4)
    use(job, 0, 1, 2)
    job.send(4, "running", stop_signal="SIGTERM")
    job.turn(_LEAVE_SECONDS - 1)
    assert not job.desired(4).terminate
    job.turn(2)
    assert job.desired(4).terminate


@pytest.mark.parametrize("event", ["agent exit", "no heartbeat", "rejected", "terminated"])
@pytest.mark.parametrize("phase", ["registered", "served", "used"])
def test_lost_joined_worker_does_not_affect_the_job(phase: str, event: str) -> None:
    job = train(max_attempts=2)
    join(job)
    if phase != "registered":
        serve(job, 4)
    if phase == "used":
        use(job, 0, 1, 2)
    if event == "agent exit":
        job.receiver.on_agent_exit(4, -9, job.now)
    elif event == "no heartbeat":
        job.turn(LIMITS.heartbeat_timeout_seconds + 1, sending=range(4))
    elif event == "rejected":
        job.receiver.on_rejected(4, "nonsense", job.now)
    else:
        job.send(4, "terminated", detail="its slurmstepd was killed")
    assert is_gone(job, 4)
    assert job.desired(0).workers in ((), ((0, "10.0.0.2:4002"), (1, "10.0.0.3:4003")))
    assert (job.phase(), job.state.attempt, job.state.outcome) == (Phase.TRAINING, 1, None)


def test_joined_worker_whose_child_fails_too_often_is_dismissed() -> None:
    job = train(max_worker_restarts=1)
    join(job)
    serve(job, 4)
    job.end_child(4, 1)
    assert job.desired(4).start_count == 2
    job.restart_and_end_child(4, 1)
    assert job.desired(4).terminate
    assert job.state.outcome is None


def test_joined_worker_without_reachable_ps_is_dismissed() -> None:
    job = train()
    join(job)
    job.send(4, "not_ready", detail="ps/0 does not answer")
    assert job.desired(4).terminate_reason == "ps/0 does not answer"
    assert job.state.outcome is None


def test_joined_worker_that_the_chief_cannot_reach_is_dismissed() -> None:
    job = train()
    join(job)
    serve(job, 4)
    job.turn(LIMITS.start_timeout_seconds + 1)
    assert (job.desired(4).exit_code, job.desired(4).terminate) == (EXIT_NOT_FORMED, True)
    assert "did not connect to 10.0.1.4:4004" in job.desired(4).terminate_reason


def test_joined_worker_on_which_the_first_closure_failed_is_dismissed_with_the_error() -> None:
    job = train()
    join(job)
    serve(job, 4)
    job.send(0, "running", script=ScriptState(workers=(0, 1), unusable_workers=((2, "NotFoundError: no data"),)))
    assert (job.desired(4).terminate, job.desired(4).exit_code) == (True, EXIT_NOT_FORMED)
    assert job.desired(4).terminate_reason == "the first closure on it failed: NotFoundError: no data"
    assert (job.phase(), job.state.outcome) == (Phase.TRAINING, None)


@pytest.mark.parametrize("rank", [3, 4])
def test_shards_of_a_task_that_terminates_by_itself_go_to_others(rank: int) -> None:
    job = train(max_attempts=1)
    join(job)
    serve(job, 4)

    def lease(task: int, capacity: int) -> tuple[int, ...]:
        request = ShardRequest("data", f"t{task}", 2, 1, "hash", capacity=capacity)
        job.send(task, "running", script=dataclasses.replace(job.state.tasks[task].observed.script, shards=(request,)))
        return job.desired(task).shards[0].held

    assert (lease(rank, 2), lease(2, 2)) == ((0, 1), ())
    job.send(rank, "terminated", detail="its slurmstepd was killed")
    assert job.texts("lost")[0].endswith("is lost: its slurmstepd was killed")
    assert job.desired(2).shards[0].held == (0, 1)


def test_stop_signal_of_a_lost_worker_does_not_stop_the_job() -> None:
    job = train_with_spare()
    job.receiver.on_agent_exit(2, -9, job.now)
    job.send(2, "terminated", stop_signal="SIGTERM")
    assert (job.phase(), job.state.outcome) == (Phase.TRAINING, None)


def test_time_in_which_the_launcher_was_stopped_does_not_count_for_joined_workers() -> None:
    job = train(script=ScriptState())
    join(job)
    job.turn(1)
    job.pause(10 * LIMITS.start_timeout_seconds)
    job.state.on_tick(job.now)
    assert not job.desired(4).terminate


def test_stall_does_not_name_a_joined_worker() -> None:
    job = train(stall_timeout_seconds=30.0)
    job.send(0, "running", script=ScriptState(step=1, workers=(0, 1)))
    join(job)
    serve(job, 4)
    job.send(4, "running", script=ScriptState(step=1000))
    job.turn(40)
    assert job.outcome.reason.endswith("the last was step 1 of chief/0 on n0.")


def test_counts_of_tasks_do_not_include_joined_workers() -> None:
    job = train()
    join(job)
    serve(job, 4)
    assert job.state.tasks.count("running") == 4


@pytest.mark.parametrize("rank", [2, 4])
def test_lost_task_that_sends_again_must_terminate_and_has_no_effect(rank: int) -> None:
    job = train("chief ps worker worker spare", spares=1, max_attempts=2) if rank == 2 else train()
    if rank == 4:
        join(job)
        serve(job, 4)
        use(job, 0, 1, 2)
    job.turn(LIMITS.heartbeat_timeout_seconds + 1, sending=[each for each in job.ranks if each != rank])
    assert is_gone(job, rank)
    assert rank in job.state.desired.take_changed()
    assert job.desired(rank).terminate
    assert job.desired(rank).exit_code == (EXIT_TASK_LOST if rank == 4 else 0)
    job.send(rank, "exited", returncode=1)
    assert (job.phase(), job.state.attempt, job.state.outcome) == (Phase.TRAINING, 1, None)


@pytest.mark.parametrize("source", ["agent", "script"])
@pytest.mark.parametrize("phase", [Phase.RENDEZVOUS, Phase.TRAINING, Phase.STOPPING])
def test_joined_worker_that_is_not_used_leaves_at_once(phase: Phase, source: str) -> None:
    job = train(max_attempts=2, grace_period_seconds=60.0)
    join(job)
    if phase is Phase.RENDEZVOUS:
        job.end_child(1, 1)
    elif phase is Phase.STOPPING:
        job.state.on_stop(signal.SIGTERM, "a test", job.now)
    if source == "agent":
        job.send(4, "registered", stop_signal="SIGTERM")
    elif phase is not Phase.RENDEZVOUS:  # no script runs
        job.send(4, "registered", script=ScriptState(stop_signal="SIGTERM"))
    assert job.desired(4).terminate or (source, phase) == ("script", Phase.RENDEZVOUS)
    assert (job.phase(), job.state.outcome) == (phase, None)


def test_joined_workers_leave_when_the_chief_is_done() -> None:
    job = train("chief ps worker evaluator")
    join(job)
    serve(job, 4)
    use(job, 0, 1)
    job.end_child(0, 0)
    job.state.on_tick(job.now)
    assert (job.desired(4).terminate_reason, job.desired(4).exit_code) == ("training is over", 0)


def test_steps_of_a_joined_worker_do_not_reset_the_stall_timeout() -> None:
    job = train(stall_timeout_seconds=30.0)
    job.send(0, "running", script=ScriptState(step=1, workers=(0, 1)))
    join(job)
    serve(job, 4)
    for step in range(8):
        job.send(4, "running", script=ScriptState(step=step))
        job.turn(5)
    assert job.state.outcome is not None


def test_replacement_leaves_healthy_tasks_on_excluded_nodes_alone() -> None:
    job = Job(
        "chief ps worker worker worker spare spare spare spare", dataclasses.replace(LIMITS, spares=4, max_attempts=2)
    )
    for rank in job.ranks:
        job.register(rank, node="n0" if rank < 4 else f"n{rank}")
    job.check_and_run()
    use(job, 0, 1, 2)
    for rank in (2, 3, 4):
        job.receiver.on_agent_exit(rank, -9, job.now)
    assert (job.phase(), job.state.attempt) == (Phase.TRAINING, 1)
    assert str(job.state.tasks[0].task) == "chief/0"
    assert job.state.excluded_nodes == ()


def test_ended_job_waits_only_briefly_for_a_joined_worker_that_does_not_answer() -> None:
    job = train()
    join(job)
    serve(job, 4)
    end_members(job)
    job.turn(LIMITS.kill_wait_seconds + 2.5, sending=())
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)


def test_joined_worker_joins_again_in_another_attempt() -> None:
    job = train(max_attempts=2)
    join(job)
    serve(job, 4)
    use(job, 0, 1, 2)
    job.end_child(1, 1)
    assert (job.phase(), job.state.attempt) == (Phase.RENDEZVOUS, 2)
    train_again(job)


def test_joined_worker_that_joins_in_a_later_attempt_registers_a_port_for_it() -> None:
    job = train(max_attempts=2)
    job.end_child(1, 1)
    join(job)
    assert job.phase() is Phase.RENDEZVOUS
    train_again(job)


def test_joined_worker_passes_barriers_at_once_and_others_do_not_wait_for_it() -> None:
    job = train()
    join(job)
    serve(job, 4)
    job.send(4, "running", script=ScriptState(barrier=BarrierArrival("data", "t4", 60.0)))
    assert (job.desired(4).released_barrier, job.desired(4).barrier_error) == ("t4", "")
    for rank in range(4):
        script = ScriptState(barrier=BarrierArrival("data", f"t{rank}", 60.0), workers=(0, 1))
        job.send(rank, "running", script=script)
    assert [job.desired(rank).released_barrier for rank in range(4)] == ["t0", "t1", "t2", "t3"]
    assert [job.desired(rank).barrier_error for rank in range(4)] == [""] * 4


def test_ended_job_waits_for_joined_workers_to_terminate() -> None:
    job = train()
    join(job)
    serve(job, 4)
    end_members(job)
    assert (job.phase(), job.desired(4).terminate) == (Phase.TERMINATING, True)
    job.send(4, "terminated")
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)


def train_with_spare(script: ScriptState = ACCEPTS) -> Job:
    return train("chief ps worker worker spare", script, spares=1, max_attempts=2)


def test_spare_replaces_a_lost_worker_without_another_attempt() -> None:
    job = train_with_spare()
    assert job.desired(4).start_count == 0
    job.receiver.on_agent_exit(2, -9, job.now)
    assert (job.phase(), job.state.attempt) == (Phase.TRAINING, 1)
    assert job.texts("replaced") == ["spare/0 on n4 takes the place of worker/0 on n2"]
    assert job.desired(0).workers == ((0, "10.0.0.4:4004"), (1, "10.0.0.3:4003"))
    assert [job.desired(rank).start_count for rank in range(5)] == [1, 1, 1, 1, 1]
    assert job.state.cluster is not None
    assert job.state.cluster.to_dictionary()["worker"] == ["10.0.0.4:4004", "10.0.0.3:4003"]
    job.run_child(4)
    join(job)
    serve(job, 5)
    assert job.desired(0).workers[2] == (2, "10.0.1.5:4005")


def test_lost_worker_needs_another_attempt_if_the_chief_accepts_no_workers() -> None:
    job = train_with_spare(ScriptState())
    job.receiver.on_agent_exit(2, -9, job.now)
    assert (job.phase(), job.state.attempt) == (Phase.RENDEZVOUS, 2)


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_chief_or_ps_needs_another_attempt_with_the_spare(lost: int) -> None:
    job = train_with_spare()
    job.receiver.on_agent_exit(lost, -9, job.now)
    assert (job.phase(), job.state.attempt) == (Phase.RENDEZVOUS, 2)
    assert job.desired(4).workers == ()


def test_second_lost_worker_without_a_spare_ends_the_job() -> None:
    job = train_with_spare()
    job.receiver.on_agent_exit(2, -9, job.now)
    job.receiver.on_agent_exit(3, -9, job.now)
    assert job.state.outcome is not None


def test_workers_that_have_left_leave_the_state_of_the_job() -> None:
    job = train()
    for number in range(50):
        record = join(job, f"joined worker-{number}")
        assert (record.rank, record.task) == (4 + number, Task("worker", 2 + number))
        job.send(record.rank, "running", stop_signal="SIGTERM")
        job.send(record.rank, "terminated")
        job.ranks = range(4)
    tasks = job.state.tasks
    assert (len(tasks), tasks.num_joined, tasks.num_left, len(tasks.in_order())) == (4, 50, 50, 4 + 20)
    last = join(job, "last")
    serve(job, last.rank)
    cluster = job.state.cluster
    assert cluster is not None
    assert len(cluster.members) == 5
    assert cluster.member(last.rank).task == Task("worker", 52)
    workers = cluster.to_dictionary()["worker"]
    assert (len(workers), set(workers[2:52]), workers[52]) == (53, {"0:0"}, str(last.address))


def test_worker_that_has_left_is_not_admitted_as_another_one() -> None:
    job = train()
    record = join(job)
    job.state.lose(record, "test")
    with pytest.raises(RendezvousClosedError, match="this worker has left the job"):
        join(job, joined_rank=record.rank)
    assert job.state.tasks.num_joined == 1


# Why a worker cannot join, or waits

SAID_NOTHING = ScriptState(step=100)


def obstacle(job: Job) -> str:
    return job.state.tasks.find_workers_obstacle(job.state.now)


def wait_of(job: Job, rank: int) -> str:
    return job.state.scripts.joined_workers.describe_wait(rank, job.state.tasks.chief, obstacle(job))


@pytest.mark.parametrize(
    ("script", "has_server", "seconds", "words"),
    [
        (SAID_NOTHING, True, 21, "without parameter_server_strategy() or job_strategy() of tf4slurm.tensorflow"),
        (SAID_NOTHING, True, 10, ""),
        (SAID_NOTHING, False, 100, ""),
        (ACCEPTS, True, 100, ""),
        (ScriptState(workers_error="TensorFlow 9"), True, 0, "TensorFlow 9"),
        (ScriptState(workers_error="TensorFlow 9"), False, 0, "TensorFlow 9"),
    ],
)
def test_chief_with_a_strategy_of_tensorflow_can_use_no_workers(
    script: ScriptState, has_server: bool, seconds: float, words: str
) -> None:
    job = train(script=script)
    job.send(0, "running", script=script, has_server=has_server)
    job.turn(seconds)
    assert (words in obstacle(job), bool(obstacle(job))) == (True, bool(words))
    job.send(0, "running", script=ACCEPTS, has_server=has_server)  # it only needed longer
    assert obstacle(job) == ""


def test_joined_worker_has_the_reason_of_its_wait() -> None:
    job = train(script=SAID_NOTHING)
    join(job)
    assert wait_of(job, 4) == "the script of the chief has made no strategy with tf4slurm.tensorflow yet"
    job.send(0, "running", script=SAID_NOTHING, has_server=True)
    job.turn(21)
    assert "has started its TensorFlow server without" in wait_of(job, 4)
    job.send(0, "running", script=ACCEPTS, has_server=True)
    assert wait_of(job, 4) == "its script has not started its TensorFlow server yet"
    serve(job, 4)
    assert wait_of(job, 4) == "the chief has not connected to it yet"
    job.send(0, "running", script=ScriptState(workers=(0, 1, 2)), has_server=True)
    assert [wait_of(job, rank) for rank in job.ranks] == [""] * 5
    job.send(4, "running", stop_signal="SIGTERM", has_server=True)
    use(job, 0, 1)
    assert wait_of(job, 4) == "it must leave: it leaves"
