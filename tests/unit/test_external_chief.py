"""Jobs with --external-chief: the roles of ranks, the number of started tasks, and the restart for another chief."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_state import LIMITS, Job
from tf4slurm.cluster import Task
from tf4slurm.control.messages import ObservedState
from tf4slurm.control.records import Phase, TaskRecord
from tf4slurm.control.rules import RESTART_SECONDS, awaits_restart
from tf4slurm.errors import EXIT_NOT_FORMED, OptionError, PlacementError, RendezvousClosedError
from tf4slurm.placement import SPREAD
from tf4slurm.roles import role_of
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.submission.batch_script import make_script

COMMAND = ("python", "server.py")


@pytest.mark.parametrize(
    ("placement", "others"),
    [
        ("pack", ["ps", "worker", "worker"]),
        (SPREAD, ["ps", "worker", "worker"]),
        ("worker,ps,worker", ["worker", "ps", "worker"]),
    ],
)
def test_external_chief_has_the_last_rank(placement: str, others: list[str]) -> None:
    spec = JobSpec(COMMAND, ps=1, workers=2, external_chief=True, placement=placement)
    tasks = spec.place(spec.counts, ["a", "a", "b", "notebook"])
    assert [task.task_type for task in tasks[:-1]] == others
    assert tasks[-1] == Task("chief", 0)
    assert (spec.num_tasks, spec.num_spawned) == (4, 3)


def test_workers_are_the_tasks_that_slurm_provides_beside_the_ps() -> None:
    spec = JobSpec(COMMAND, ps=1, external_chief=True)
    assert spec.for_tasks(5).counts == {"chief": 1, "ps": 1, "worker": 4, "evaluator": 0}
    with pytest.raises(PlacementError, match="1 ps \\+ 2 worker need 3 tasks, but Slurm gives 4"):
        JobSpec(COMMAND, ps=1, workers=2, external_chief=True).for_tasks(4)


def test_batch_script_requests_no_task_for_the_chief() -> None:
    text = make_script(BatchSpec(COMMAND, ps=1, workers=2, external_chief=True))
    assert "#SBATCH --ntasks=3\n" in text
    assert " --external-chief " in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chief": False}, "--external-chief and --no-chief exclude each other"),
        ({"max_attempts": 2}, "--external-chief and --max-attempts 2 exclude each other"),
        ({"requeue": 1}, "--external-chief and --requeue 1 exclude each other"),
        ({"stall_timeout_seconds": 60}, "--external-chief and --stall-timeout 60 exclude each other"),
        ({"ps": 0}, "--external-chief needs ps and workers"),
        ({"workers": 0}, "--external-chief needs ps and workers"),
    ],
)
def test_options_that_an_external_chief_excludes(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        JobSpec(COMMAND, **{"ps": 1, "workers": 1, "external_chief": True, **options})  # type: ignore[arg-type]


# The restart of ps and workers for another chief

NOTEBOOK = dataclasses.replace(LIMITS, ps=1, workers=2, external_chief=True)
ROLES = "ps worker worker chief"
CHIEF = 3
SERVERS = (0, 1, 2)


def notebook_job() -> Job:
    return Job(ROLES, NOTEBOOK).train()


def leave(job: Job, seconds: float = 100.0) -> None:
    """The chief's process has called `restart()`, and its sidecar has reported that and closed the connection."""
    job.send(CHIEF, "terminated", next_chief_seconds=seconds)
    job.receiver.on_disconnect(CHIEF, job.now)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"failed_seconds": RESTART_SECONDS - 1}, True),
        ({"failed_seconds": RESTART_SECONDS}, False),
        ({"spares_suffice": False}, False),
        ({"spec": LIMITS}, False),  # the job's own chief
        ({"state": "exited"}, False),  # the chief's own failure, or the end of its block
        ({"is_gone": True}, False),  # a killed kernel
    ],
)
def test_failed_attempt_waits_for_restart_of_a_present_external_chief(changes: dict[str, Any], expected: bool) -> None:
    facts: dict[str, Any] = {"spec": NOTEBOOK, "state": "running", "is_gone": False, "failed_seconds": 0.0}
    facts |= {"spares_suffice": True} | changes
    chief = TaskRecord(CHIEF, Task("chief", 0), role_of("chief", has_chief=True), is_gone=facts.pop("is_gone"))
    chief.observed = ObservedState(state=facts.pop("state"))
    assert awaits_restart(chief, facts.pop("spec"), **facts) is expected


def test_job_waits_for_another_chief_after_restart_and_trains_with_it() -> None:
    job = notebook_job()
    leave(job)
    assert (job.state.attempt, job.phase(), job.state.outcome) == (2, Phase.RENDEZVOUS, None)
    job.reregister(*SERVERS)
    job.turn(99)
    assert job.phase() is Phase.RENDEZVOUS
    assert not any(job.desired(rank).start_count for rank in SERVERS)
    job.register(CHIEF, incarnation="another kernel", node="elsewhere", host="10.0.0.9", port=7000)
    assert job.phase() is Phase.RENDEZVOUS  # its port is that of attempt 1
    job.reregister(CHIEF)
    assert job.phase() is Phase.CHECKING
    cluster = job.state.cluster
    assert cluster is not None
    assert str(cluster.member(CHIEF).address) == f"10.0.0.9:{5000 + CHIEF}"
    job.check_and_run()
    job.turn(2 * NOTEBOOK.start_timeout_seconds)
    assert (job.phase(), job.state.outcome) == (Phase.TRAINING, None)
    job.end_child(CHIEF, 0)
    assert job.outcome.exit_code == 0


def test_restart_may_be_repeated_and_counts_as_no_attempt() -> None:
    job = notebook_job()
    for number in range(3):
        leave(job)
        job.reregister(*SERVERS)
        job.register(CHIEF, incarnation=f"kernel {number}")
        job.reregister(CHIEF)
        job.check_and_run()
        assert (job.phase(), job.state.attempt) == (Phase.TRAINING, number + 2)


def test_job_without_another_chief_ends_after_the_time_for_it() -> None:
    job = notebook_job()
    leave(job, 100)
    job.reregister(*SERVERS)
    job.turn(99)
    assert job.state.outcome is None
    job.turn(2)
    assert job.outcome.exit_code == EXIT_NOT_FORMED
    assert job.outcome.reason == "No other chief has attached within 100 s after restart()."


def test_another_chief_has_the_start_timeout_for_the_rendezvous() -> None:
    job = notebook_job()
    leave(job, 5)
    job.turn(4)
    job.register(CHIEF, incarnation="another kernel")
    job.turn(NOTEBOOK.start_timeout_seconds - 1)
    assert job.state.outcome is None
    job.turn(2)
    assert "did not form within 60 s" in job.outcome.reason


def test_second_process_and_the_one_that_has_left_are_refused_as_chief() -> None:
    job = notebook_job()
    with pytest.raises(RendezvousClosedError, match=r"rank 3 was taken by an earlier process, on n3 \(process 103\)"):
        job.register(CHIEF, incarnation="second")
    leave(job)
    with pytest.raises(RendezvousClosedError, match="this process has left rank 3"):
        job.register(CHIEF)
    job.register(CHIEF, incarnation="second")
    with pytest.raises(RendezvousClosedError, match="rank 3 was taken by an earlier process, on n3"):
        job.register(CHIEF, incarnation="third")
    assert job.state.outcome is None


def test_lost_ps_waits_for_restart() -> None:
    job = notebook_job()
    job.end_child(0, -9)
    assert job.state.outcome is None
    assert "ps/0 on n0 was killed by signal 9" in job.desired(CHIEF).failure_reason
    job.turn(RESTART_SECONDS - 1)
    assert job.kinds.count("failed") == 1
    leave(job)
    assert (job.phase(), job.state.attempt) == (Phase.RENDEZVOUS, 2)
    assert not job.desired(0).failure_reason
    job.turn(50)
    assert job.state.outcome is None


def test_lost_ps_without_restart_ends_the_job() -> None:
    job = notebook_job()
    job.end_child(0, -9)
    job.turn(RESTART_SECONDS + 1)
    assert (job.outcome.exit_code, job.outcome.cause) == (137, Task("ps", 0))


@pytest.mark.parametrize("end", ["closed", "exception", "killed", "connection"])
def test_end_of_the_chief_after_the_loss_of_a_ps_ends_the_job(end: str) -> None:
    job = notebook_job()
    job.end_child(0, -9)
    if end == "killed":
        job.send(CHIEF, "terminated", detail="process 103 ended")
    elif end == "connection":
        job.receiver.on_disconnect(CHIEF, job.now)
        job.turn(NOTEBOOK.reconnect_seconds + 1)
    else:
        job.end_child(CHIEF, int(end == "exception"))
    assert (job.outcome.exit_code, job.outcome.cause) == (137, Task("ps", 0))


def test_lost_agent_of_a_ps_ends_the_job_at_once() -> None:
    job = notebook_job()
    job.receiver.on_agent_exit(0, -9, job.now)
    assert (job.outcome.exit_code, job.outcome.cause) == (7, Task("ps", 0))


def test_spare_takes_the_place_of_a_lost_ps_after_restart() -> None:
    job = Job("ps worker worker spare chief", dataclasses.replace(NOTEBOOK, spares=1)).train()
    job.receiver.on_agent_exit(0, -9, job.now)
    assert job.state.outcome is None
    assert job.desired(4).failure_reason
    job.send(4, "terminated", next_chief_seconds=100.0)
    assert (job.phase(), job.state.attempt) == (Phase.RENDEZVOUS, 2)
    assert job.texts("replaced") == ["spare/0 on n3 takes the place of ps/0 on n0"]
    assert [str(record.task) for record in job.state.tasks.members][3] == "ps/0"


def test_agent_lost_while_the_job_waits_for_another_chief_ends_the_job() -> None:
    job = notebook_job()
    leave(job)
    job.receiver.on_agent_exit(1, -9, job.now)
    assert (job.outcome.exit_code, job.outcome.cause) == (7, Task("worker", 0))


def test_other_chief_that_is_killed_ends_the_job() -> None:
    job = notebook_job()
    leave(job)
    job.reregister(*SERVERS)
    job.register(CHIEF, incarnation="another kernel")
    job.send(CHIEF, "terminated", detail="process 103 ended")
    assert (job.outcome.exit_code, job.outcome.cause) == (7, Task("chief", 0))


def test_notebook_that_keeps_its_cluster_after_a_stop_request_is_named_without_a_false_alarm() -> None:
    job = Job(ROLES, dataclasses.replace(NOTEBOOK, grace_period_seconds=20)).train()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    job.turn(21)
    assert job.outcome.is_stop
    assert "chief/0 had not closed its cluster: what it had not saved is lost." in job.outcome.reason
    assert "Give it more time with grace_period_seconds." in job.outcome.reason
    assert "SIGTERM before" not in job.outcome.reason


def test_restart_while_the_scripts_stop_ends_the_stop() -> None:
    job = Job(ROLES, dataclasses.replace(NOTEBOOK, grace_period_seconds=20)).train()
    job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", job.now)
    leave(job)
    assert job.outcome.is_stop


def test_restart_after_the_outcome_changes_nothing() -> None:
    job = notebook_job()
    job.receiver.on_agent_exit(0, -9, job.now)
    leave(job)
    assert (job.state.attempt, job.phase()) == (1, Phase.TERMINATING)


def chief_of(job: Job) -> TaskRecord:
    return job.state.tasks[CHIEF]


def leave_if_running(job: Job) -> None:
    if chief_of(job).observed.state == "running" and not chief_of(job).is_gone:
        leave(job, 30)


def end_if_running(job: Job, rank: int, returncode: int) -> None:
    if job.state.tasks[rank].observed.state == "running" and not job.state.tasks[rank].is_gone:
        job.end_child(rank, returncode)


def run_if_desired(job: Job, rank: int) -> None:
    if job.desired(rank).start_count > job.state.tasks[rank].observed.start_count:
        job.run_child(rank, job.desired(rank).start_count)


def attach_if_vacant(job: Job) -> None:
    record = chief_of(job)
    number = len(record.former_incarnations)
    with contextlib.suppress(RendezvousClosedError):
        job.register(CHIEF, incarnation=f"kernel {number}")
        assert record.incarnation == f"kernel {number}"


def follow(job: Job, ranks: Iterable[int]) -> None:
    """Let these tasks begin the current attempt, if they have not."""
    for rank in ranks:
        record = job.state.tasks[rank]
        if record.has_registered and not record.is_gone and record.attempt < job.state.attempt:
            job.reregister(rank)


EVENTS: dict[str, Callable[[Job], object]] = {
    "ps fails": lambda job: end_if_running(job, 0, -9),
    "worker fails": lambda job: end_if_running(job, 1, 1),
    "worker is started again": lambda job: run_if_desired(job, 1),
    "chief leaves": leave_if_running,
    "chief attaches": attach_if_vacant,
    "chief closes": lambda job: end_if_running(job, CHIEF, 0),
    "chief loses its connection": lambda job: job.receiver.on_disconnect(CHIEF, job.now),
    "servers choose ports": lambda job: follow(job, SERVERS),
    "chief chooses a port": lambda job: follow(job, (CHIEF,)),
    "cluster is checked": lambda job: job.phase() is Phase.CHECKING and job.check_and_run(),
    "time passes": lambda job: job.turn(1),
    "much time passes": lambda job: job.turn(25),
}


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=40))
def test_cluster_of_a_notebook_always_ends_once_nobody_uses_it(names: list[str]) -> None:
    job = notebook_job()
    for name in names:
        EVENTS[name](job)
        attempts, phase = job.state.attempt, job.phase()
        assert attempts == 1 + len(chief_of(job).former_incarnations)  # only restart() begins one
        if phase is Phase.TRAINING:
            assert chief_of(job).has_registered
    job.receiver.on_disconnect(CHIEF, job.now)  # the kernel is killed, or there is none
    job.turn(NOTEBOOK.start_timeout_seconds + NOTEBOOK.termination_seconds + 30, tick=1)
    assert job.state.outcome is not None
    assert job.kinds.count("outcome") == 1
