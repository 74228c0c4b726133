"""Spares take the place of lost tasks, in the state machine with a simulated clock."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.test_state import LIMITS, TICK, Job
from tf4slurm.cluster import Cluster, Task
from tf4slurm.control.messages import BarrierArrival, ScriptState
from tf4slurm.control.records import JobProgress, Outcome, Phase
from tf4slurm.errors import EXIT_NO_PROGRESS, EXIT_TASK_LOST, OptionError
from tf4slurm.network.reachability import members_to_check
from tf4slurm.roles import SCRIPT_TASK_TYPES
from tf4slurm.spec.job_spec import JobSpec

SPARES = dataclasses.replace(LIMITS, max_attempts=3, spares=2, max_worker_restarts=0)
ROLES = "chief ps worker spare spare"


def start(roles: str = ROLES, limits: JobSpec = SPARES) -> Job:
    job = Job(roles, limits).register_tasks()
    for rank in job.ranks:
        job.send(rank, "ready")
    return run(job)


def run(job: Job) -> Job:
    for rank in job.ranks:
        if job.desired(rank).start_count:
            job.run_child(rank)
    return job


def form_again(job: Job, *lost: int) -> Job:
    """All but the lost ranks register for the current attempt, and run their children."""
    present = [rank for rank in job.ranks if rank not in lost]
    job.reregister(*present)
    for rank in present:
        job.send(rank, "ready")
    return run(job)


def cluster_of(job: Job) -> Cluster:
    assert job.state.cluster is not None
    return job.state.cluster


def names(job: Job) -> list[str]:
    return [str(record.task) for record in job.state.tasks]


def test_spares_do_not_run_the_script() -> None:
    job = start()
    assert "spare" not in SCRIPT_TASK_TYPES
    assert [job.desired(rank).start_count for rank in job.ranks] == [1, 1, 1, 0, 0]
    assert cluster_of(job).to_dictionary().keys() == {"chief", "ps", "worker"}
    job.end_child(0, 0)
    for rank in job.ranks:
        job.send(rank, "terminated")
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, 0)


@pytest.mark.parametrize("roles", ["chief ps worker spare spare", "ps worker worker spare spare"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_spare_takes_the_place_of_any_lost_task(roles: str, lost: int) -> None:
    job = start(roles)
    before, record = names(job), job.state.tasks[lost]
    job.receiver.on_agent_exit(lost, -9, job.now)
    assert (job.state.attempt, job.phase()) == (2, Phase.RENDEZVOUS)
    assert job.texts("replaced") == [f"spare/0 on n3 takes the place of {before[lost]} on n{lost}"]
    form_again(job, lost)
    assert job.phase() is Phase.TRAINING
    assert names(job)[3] == before[lost]
    assert (str(record.task), record.is_gone) == ("spare/0", True)
    task = job.state.tasks[3].task
    spec = cluster_of(job).to_dictionary()
    assert spec[task.task_type][task.task_index] == "10.0.0.3:5003"
    assert sum(map(len, spec.values())) == 3
    assert [str(record.task) for record in job.state.tasks.in_order()] == before
    assert [job.desired(rank).start_count for rank in job.ranks if rank != lost] == [
        int(not job.state.tasks[rank].role.is_spare) for rank in job.ranks if rank != lost
    ]


def test_lost_task_stays_in_the_cluster_but_nobody_checks_it() -> None:
    job = start()
    job.receiver.on_agent_exit(2, -9, job.now)
    form_again(job, 2)
    members = cluster_of(job).members
    assert [member.rank for member in members] == list(job.ranks)
    assert [member.is_lost for member in members] == [False, False, True, False, False]
    checked = [each.rank for rank in job.ranks if rank != 2 for each in members_to_check(cluster_of(job), rank)]
    assert sorted(checked) == [0, 1, 3, 4]


def test_silent_host_is_replaced_after_the_heartbeat_timeout() -> None:
    job = start()
    job.turn(SPARES.heartbeat_timeout_seconds + 1, sending=(0, 1, 3, 4))
    assert (job.state.attempt, job.phase()) == (2, Phase.RENDEZVOUS)
    assert names(job)[3] == "worker/0"


def test_second_task_of_a_lost_host_needs_no_further_attempt() -> None:
    job = start()
    job.receiver.on_agent_exit(1, -9, job.now)
    job.reregister(0, 3, 4)
    assert job.phase() is Phase.RENDEZVOUS
    job.receiver.on_agent_exit(2, -9, job.now)
    assert (job.state.attempt, job.phase()) == (2, Phase.CHECKING)
    assert names(job) == ["chief/0", "spare/0", "spare/1", "ps/0", "worker/0"]
    for rank in (0, 3, 4):
        job.send(rank, "ready")
    assert job.phase() is Phase.TRAINING


def test_lost_spare_does_not_disturb_training() -> None:
    job = start()
    job.receiver.on_agent_exit(3, -9, job.now)
    assert (job.state.attempt, job.phase()) == (1, Phase.TRAINING)
    job.receiver.on_agent_exit(2, -9, job.now)
    assert names(job)[4] == "worker/0"
    form_again(job, 2, 3)
    job.receiver.on_agent_exit(1, -9, job.now)
    assert job.outcome.exit_code == EXIT_TASK_LOST
    assert "ps/0 on n1 is lost" in job.outcome.reason


def test_spare_on_another_host_comes_first() -> None:
    job = Job(ROLES, SPARES)
    for rank, node in enumerate("abcca"):
        job.register(rank, node=node)
    for rank in job.ranks:
        job.send(rank, "ready")
    run(job)
    job.receiver.on_agent_exit(2, -9, job.now)  # on c, as spare/0
    assert job.texts("replaced") == ["spare/1 on a takes the place of worker/0 on c"]


def test_task_lost_while_addresses_are_checked_is_replaced() -> None:
    job = Job(ROLES, SPARES).register_tasks()
    assert job.phase() is Phase.CHECKING
    job.receiver.on_agent_exit(3, -9, job.now)
    assert (job.state.attempt, job.phase()) == (2, Phase.RENDEZVOUS)
    assert form_again(job, 3).phase() is Phase.TRAINING


def test_task_lost_before_the_first_cluster_is_replaced() -> None:
    job = Job(ROLES, SPARES).register_tasks(0, 1, 2)
    job.receiver.on_agent_exit(2, -9, job.now)
    job.register_tasks(3, 4)
    assert (job.state.attempt, job.phase()) == (1, Phase.CHECKING)
    assert names(job)[3] == "worker/0"
    for rank in (0, 1, 3, 4):
        job.send(rank, "ready")
    assert job.phase() is Phase.TRAINING


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_task_lost_before_the_ps_are_spread_is_replaced(lost: int) -> None:
    job = Job(ROLES, dataclasses.replace(SPARES, placement="spread"))
    others = [rank for rank in job.ranks if rank != lost]
    job.register(lost)
    job.receiver.on_agent_exit(lost, -9, job.now)
    job.register_tasks(*others)
    for rank in others:
        job.send(rank, "ready")
    assert (job.state.attempt, job.phase()) == (1, Phase.TRAINING)
    assert names(job)[lost] == "spare/1"
    assert sorted(names(job)) == ["chief/0", "ps/0", "spare/0", "spare/1", "worker/0"]
    assert sum(job.desired(rank).start_count for rank in others) == 3


def test_task_lost_before_it_registers_counts_as_no_node() -> None:
    job = Job(ROLES, SPARES)
    job.receiver.on_agent_exit(2, 1, job.now)
    for rank in (0, 1, 3, 4):
        job.register(rank, node="n", host="127.0.0.1")
    assert job.phase() is Phase.CHECKING


def test_loss_beside_a_broken_connection_is_handled_after_it() -> None:
    job = Job(ROLES, SPARES).register_tasks()
    job.receiver.on_disconnect(4, job.now)
    job.receiver.on_agent_exit(2, -9, job.now)
    assert job.phase() is Phase.CHECKING
    job.turn(2, sending=(0, 1, 3))  # spare/1 does not reconnect in time
    assert (job.state.attempt, job.phase()) == (2, Phase.RENDEZVOUS)
    assert form_again(job, 2, 4).phase() is Phase.TRAINING


def wait_at_barrier(job: Job, *ranks: int) -> list[str]:
    """These tasks arrive at a barrier for all; return the errors with which they were released, "" for none."""
    for rank in ranks:
        script = dataclasses.replace(
            job.state.tasks[rank].observed.script, barrier=BarrierArrival("loaded", f"token-{rank}", 30)
        )
        job.send(rank, "running", script=script)
    job.turn(TICK)
    desired = [job.desired(rank) for rank in ranks]
    return [each.barrier_error for each in desired if each.released_barrier]


def test_barrier_does_not_wait_for_spares() -> None:
    assert wait_at_barrier(start(), 0, 1, 2) == ["", "", ""]


def test_barrier_does_not_wait_for_a_task_whose_place_a_spare_has_taken() -> None:
    job = start()
    job.receiver.on_agent_exit(2, -9, job.now)
    form_again(job, 2)
    assert wait_at_barrier(job, 0, 1) == []
    assert wait_at_barrier(job, 3) == [""]
    assert job.desired(0).released_barrier == "token-0"


def test_open_barrier_waits_for_the_spare_that_takes_the_place_of_a_worker() -> None:
    job = start()
    job.send(0, "running", script=ScriptState(workers=(0,)))
    assert wait_at_barrier(job, 0, 1) == []
    job.receiver.on_agent_exit(2, -9, job.now)
    job.turn(TICK)
    assert (job.state.attempt, job.desired(0).released_barrier) == (1, "")
    run(job)
    assert wait_at_barrier(job, 3) == [""]
    assert job.desired(0).released_barrier == "token-0"


@pytest.mark.parametrize("last", [0, 1, 2, 3, 4])
def test_loss_of_all_tasks_ends_the_job_with_the_first_failure(last: int) -> None:
    """The failure of the first lost task is held back while others are disconnected, until none is left."""
    job = start()
    for rank in job.ranks:
        job.receiver.on_disconnect(rank, job.now)
    for rank in (*(rank for rank in job.ranks if rank != last), last):
        job.receiver.on_agent_exit(rank, -9, job.now)
        job.now += 0.01
    assert (job.phase(), job.outcome.exit_code) == (Phase.ENDED, EXIT_TASK_LOST)
    first = 1 if last == 0 else 0
    assert job.outcome.cause == (Task("ps", 0) if first else Task("chief", 0))


def test_exit_of_srun_while_a_failure_is_held_back_names_the_failure() -> None:
    job = start()
    job.receiver.on_disconnect(4, job.now)
    job.end_child(1, 3)
    assert job.state.outcome is None
    job.state.on_spawner_exit(Outcome(EXIT_TASK_LOST, "srun ended before the job did: killed by signal 9."), job.now)
    assert (job.phase(), job.outcome.exit_code, job.outcome.cause) == (Phase.ENDED, 3, Task("ps", 0))


def test_loss_of_ps_and_worker_at_once_is_not_mended_within_the_attempt() -> None:
    """The loss of the ps is held back while the worker is disconnected; then the worker is lost, too."""
    job = start()
    job.send(0, "running", script=ScriptState(workers=(0,)))
    job.receiver.on_disconnect(2, job.now)
    job.receiver.on_agent_exit(1, -9, job.now)
    job.receiver.on_agent_exit(2, -9, job.now)
    assert (job.state.attempt, job.phase()) == (2, Phase.RENDEZVOUS)
    assert names(job) == ["chief/0", "spare/0", "spare/1", "ps/0", "worker/0"]


@pytest.mark.parametrize("lost", [0, 1])
def test_no_role_is_lost_when_the_spares_do_not_suffice_before_the_ps_are_spread(lost: int) -> None:
    """The spare has replaced a worker; then the chief or the ps is lost while another task is disconnected."""
    spec = dataclasses.replace(SPARES, placement="spread", spares=1, max_attempts=2)
    job = Job("chief ps worker worker spare", spec).register_tasks(0, 1, 2, 3)
    job.receiver.on_agent_exit(3, 9, job.now)
    job.receiver.on_disconnect(2, job.now)
    job.receiver.on_agent_exit(lost, 9, job.now)
    job.register(4)
    assert job.phase() is Phase.RENDEZVOUS
    job.register(2)
    job.turn(2 * TICK)
    assert (job.outcome.exit_code, job.state.attempt) == (EXIT_TASK_LOST, 1)


def test_children_do_not_start_without_a_lost_task() -> None:
    """The loss of the worker is held back while the ps is disconnected; the others finish their checks."""
    job = Job("chief ps worker worker spare", SPARES).register_tasks()
    for rank in (0, 1, 4):
        job.send(rank, "ready")
    job.receiver.on_disconnect(1, job.now)
    job.receiver.on_agent_exit(2, 9, job.now)
    job.send(3, "ready")
    assert job.phase() is Phase.CHECKING


def test_task_that_was_disconnected_before_a_failure_is_its_cause() -> None:
    job = start()
    job.receiver.on_disconnect(1, job.now)
    job.turn(TICK, sending=())
    job.end_child(0, 1)
    job.turn(LIMITS.reconnect_seconds + TICK, sending=(0, 2, 3, 4))
    assert job.state.attempt == 2
    assert "because: ps/0 on n1 is lost" in job.texts("attempt")[0]


def test_last_lines_of_a_failure_that_is_held_back_are_kept() -> None:
    job = start()
    job.receiver.on_disconnect(4, job.now)
    job.end_child(1, 3, tail=("boom",))
    job.state.on_spawner_exit(Outcome(EXIT_TASK_LOST, "srun ended."), job.now)
    assert (job.outcome.exit_code, job.outcome.tail) == (3, ("boom",))


def test_late_message_of_a_replaced_task_is_no_progress() -> None:
    job = start()
    job.receiver.on_agent_exit(2, -9, job.now)
    job.send(2, "terminated", script=ScriptState(step=50))
    assert (job.state.progress.furthest_step, job.texts("first_step")) == (None, [])


def test_start_timeout_while_a_failure_is_held_back_names_the_failure() -> None:
    job = Job(ROLES, SPARES).register_tasks()
    for rank in (0, 1, 2, 4):
        job.send(rank, "ready")
    job.turn(LIMITS.start_timeout_seconds - 1)
    job.receiver.on_disconnect(4, job.now)
    job.receiver.on_agent_exit(3, -9, job.now)
    job.turn(1.2, sending=(0, 1, 2))
    assert (job.outcome.exit_code, job.outcome.cause) == (EXIT_TASK_LOST, Task("spare", 0))


def test_worker_that_has_finished_is_not_replaced() -> None:
    job = start()
    job.send(0, "running", script=ScriptState(workers=(0,)))
    job.end_child(2, 0)
    job.receiver.on_agent_exit(2, -9, job.now)
    assert (job.phase(), job.state.attempt, job.texts("replaced")) == (Phase.TRAINING, 1, [])


def test_node_that_failed_twice_is_not_used_again() -> None:
    job = start()
    for attempt in (1, 2):
        assert job.state.attempt == attempt
        job.send(2, "running", script=dataclasses.replace(job.state.tasks[2].observed.script, step=attempt))
        job.end_child(1, 1)
        form_again(job)
    assert job.state.excluded_nodes == ("n1",)
    assert job.phase() is Phase.TRAINING
    assert names(job) == ["chief/0", "spare/0", "worker/0", "ps/0", "spare/1"]
    job.receiver.on_agent_exit(2, -9, job.now)
    assert job.outcome.exit_code == EXIT_TASK_LOST  # no attempt is left


def test_spare_on_a_node_that_failed_twice_is_better_than_none() -> None:
    job = start("chief ps worker spare", dataclasses.replace(SPARES, spares=1, max_attempts=5))
    for attempt in (1, 2):
        job.send(2, "running", script=dataclasses.replace(job.state.tasks[2].observed.script, step=attempt))
        job.end_child(1, 1)
        form_again(job)
    assert names(job) == ["chief/0", "spare/0", "worker/0", "ps/0"]
    job.receiver.on_agent_exit(2, -9, job.now)
    assert names(job) == ["chief/0", "worker/0", "spare/0", "ps/0"]
    assert form_again(job, 2).phase() is Phase.TRAINING


def test_only_node_of_a_job_is_always_used() -> None:
    job = Job(ROLES, SPARES)
    for rank in job.ranks:
        job.register(rank, node="n")
    for rank in job.ranks:
        job.send(rank, "ready")
    for _ in range(2):
        run(job)
        job.end_child(1, 1)
        form_again(job)
    assert job.state.excluded_nodes == ()
    assert job.phase() is Phase.TRAINING


def test_two_attempts_without_a_new_step_end_the_job() -> None:
    limits = dataclasses.replace(LIMITS, max_attempts=9)
    job = start("chief ps worker", limits)
    for step in (10, 10, 8):
        assert job.state.outcome is None
        job.send(0, "running", script=dataclasses.replace(job.state.tasks[0].observed.script, step=step))
        job.end_child(0, 3, tail=("boom",))
        if job.state.outcome is None:
            form_again(job)
    assert job.outcome.exit_code == EXIT_NO_PROGRESS
    assert job.outcome.cause == Task("chief", 0)
    assert job.outcome.tail == ("boom",)
    assert "2 times in a row no step after step 10 was reported. The last failure: chief/0 on n0" in job.outcome.reason


def test_attempts_of_a_script_without_steps_are_not_limited() -> None:
    job = start("chief ps worker", dataclasses.replace(LIMITS, max_attempts=5))
    for attempt in range(1, 6):
        assert job.state.attempt == attempt
        job.end_child(0, 3)
        if attempt < 5:
            form_again(job)
    assert job.outcome.exit_code == 3


@pytest.mark.parametrize(
    ("steps", "is_stuck"),
    [
        ([None, None, None], False),
        ([5, 5], False),
        ([5, 5, None], True),
        ([None, 5, 3, 6, 6], False),
        ([5, 9, 9, 8], True),
    ],
)
def test_progress_is_stuck_after_two_runs_without_a_new_step(steps: list[int | None], is_stuck: bool) -> None:
    progress = JobProgress()
    for step in steps:
        progress.note_step(step)
        progress.end_attempt()
    assert progress.is_stuck is is_stuck


def test_spares_need_further_attempts() -> None:
    with pytest.raises(OptionError, match=r"--spares 2 needs further attempts.* Give --max-attempts 3"):
        JobSpec(("python", "a.py"), workers=1, spares=2)
    assert JobSpec(("python", "a.py"), workers=1, spares=2, max_attempts=2).num_tasks == 5
