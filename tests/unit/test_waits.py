"""Tasks in which TensorFlow waits for one that has ended: the warning, its withdrawal, and the failure."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.unit.test_rules import table_after
from tests.unit.test_state import LIMITS, Job
from tf4slurm.control.messages import Usage
from tf4slurm.control.records import Phase
from tf4slurm.control.rules import AFTER_WAIT, wait_limit_seconds
from tf4slurm.errors import EXIT_TASK_LOST

PATIENT = dataclasses.replace(LIMITS, start_timeout_seconds=10_000)
ROLES = "ps worker worker"
"""Ranks 0 to 2; without a chief, the job waits for both workers."""
BUSY = Usage(cpu_seconds=5.0)


def start(roles: str = ROLES, **options: Any) -> Job:
    job = Job(roles, dataclasses.replace(PATIENT, **options)).train()
    for rank in job.ranks:
        job.send(rank, "running", has_server=True, usage=BUSY)
    return job


def wait_for(job: Job, rank: int, *names: str) -> None:
    job.send(rank, "running", waits_for=names)


def blocked(job: Job) -> dict[str, tuple[str, ...]]:
    return {record.name: record.vain_waits for record in job.state.tasks.members if record.vain_waits}


def test_documented_consequences_are_the_rules() -> None:
    documented = table_after("**TensorFlow in a task waits for a task that has ended**")
    assert documented == {option: [each.value for each in cells] for option, cells in AFTER_WAIT.items()}


@pytest.mark.parametrize(
    ("stall", "is_final", "expected"),
    [(None, False, None), (None, True, 60), (600, False, 600), (600, True, 60), (20, True, 20), (20, False, 20)],
)
def test_limit_of_a_wait(stall: float | None, is_final: bool, expected: float | None) -> None:
    spec = dataclasses.replace(LIMITS, stall_timeout_seconds=stall)
    assert wait_limit_seconds(spec, is_final=is_final) == expected


def test_wait_that_begins_after_the_end_is_warned_of_at_once() -> None:
    job = start("ps worker worker worker")
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 2, "worker/0", "worker/2")
    job.turn(1, tick=1.0)
    (warning,) = job.state.watches.warnings
    assert warning == (
        "TensorFlow in worker/1 on n2 waits for worker/0 on n1 (exited with code 0), and would wait for ever. Give its "
        'session config=tf.compat.v1.ConfigProto(device_filters=["/job:ps", "/job:worker/task:1"]).'
    )
    assert job.texts("warning") == [warning]
    assert blocked(job) == {"worker/1": ("worker/0",)}
    job.turn(2000, tick=1.0)
    assert job.phase() is Phase.TRAINING  # worker/2 still runs
    assert job.texts("warning") == [warning]
    assert len(job.texts("blocked")) == 1


def test_many_tasks_that_wait_for_the_same_ones_have_one_warning() -> None:
    job = start("ps" + 16 * " worker")
    for rank in (1, 2, 3, 4, 5):
        job.end_child(rank, 0)
    job.turn(5, tick=1.0)
    names = tuple(f"worker/{index}" for index in range(5))
    for rank in range(6, 17):
        wait_for(job, rank, *names)
        job.turn(1, tick=1.0)
    (warning,) = job.state.watches.warnings
    assert warning.startswith(
        "TensorFlow in worker/5 on n6, worker/6 on n7, worker/7 on n8 and 8 others waits for worker/0 on n1 (exited "
        "with code 0), worker/1 on n2 (exited with code 0), worker/2 on n3 (exited with code 0) and 2 others, and "
        "would "
        "wait for ever. Give each session filters with /job:ps and itself, in worker/5 config="
    )
    assert len(blocked(job)) == 11
    assert len(job.texts("warning")) == 4  # for 1, 2, 4 and 8 tasks
    for rank in range(6, 17):
        wait_for(job, rank)
    job.turn(1, tick=1.0)
    assert not job.state.watches.warnings
    assert job.texts("withdrawn") == [f"This is not true any more: {warning}"]


def test_warning_that_names_another_ended_task_replaces_the_first() -> None:
    job = start("ps worker worker worker worker")
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 3, "worker/0", "worker/1")
    job.turn(3, tick=1.0)
    job.end_child(2, 0)
    job.turn(40, tick=1.0)
    (warning,) = job.state.watches.warnings
    assert "waits for worker/0 on n1 (exited with code 0) and worker/1 on n2 (exited with code 0)" in warning
    assert not job.texts("withdrawn")


def test_wait_that_ended_before_the_other_task_did_is_not_warned_of() -> None:
    """worker/1 waited while worker/0 started. The agent repeats the report for 30 s, and worker/0 ends before that."""
    job = start()
    wait_for(job, 2, "worker/0")
    job.turn(8, tick=1.0)
    job.end_child(1, 0)
    job.turn(29, tick=1.0)
    wait_for(job, 2)
    job.turn(20, tick=1.0)
    assert not job.state.watches.warnings
    assert "warning" not in job.kinds


def test_wait_that_began_before_the_end_is_warned_of_when_a_line_must_have_followed() -> None:
    job = start()
    wait_for(job, 2, "worker/0")
    job.turn(8, tick=1.0)
    job.end_child(1, 0)
    job.turn(33, tick=1.0)
    assert not job.state.watches.warnings
    job.turn(4, tick=1.0)
    assert len(job.state.watches.warnings) == 1


def test_warning_is_withdrawn_when_the_wait_is_over() -> None:
    job = start("ps worker worker worker")
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 2, "worker/0")
    job.turn(5, tick=1.0)
    (warning,) = job.state.watches.warnings
    wait_for(job, 2)
    job.turn(1, tick=1.0)
    assert not job.state.watches.warnings
    assert job.texts("withdrawn") == [f"This is not true any more: {warning}"]
    assert not blocked(job)
    assert job.texts("unblocked") == ["worker/1 on n2 does not wait for worker/0 any more"]


@pytest.mark.parametrize("others", ["worker/2", "ps/0", "worker/7", "master/0", "chief/0"])
def test_wait_for_a_task_that_runs_or_is_unknown_is_no_reason_for_a_warning(others: str) -> None:
    job = start("ps worker worker worker")
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 2, others)
    job.turn(50, tick=1.0)
    assert not job.texts("blocked")


def test_job_ends_when_all_other_tasks_have_ended() -> None:
    job = start()
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 2, "worker/0")
    job.turn(59, tick=1.0)
    assert job.state.outcome is None
    job.turn(3, tick=1.0)
    assert (job.outcome.exit_code, str(job.outcome.cause)) == (EXIT_TASK_LOST, "worker/1")
    assert re.search(r"worker/1 on n2 waits for worker/0 on n1 .*device_filters", job.outcome.reason)
    assert job.state.watches.warnings == (job.outcome.reason,)


def test_time_begins_when_the_last_other_task_has_ended() -> None:
    job = start("ps worker worker worker")
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 2, "worker/0")
    job.turn(500, tick=1.0)
    job.end_child(3, 0)
    job.turn(58, tick=1.0)
    assert job.state.outcome is None
    job.turn(4, tick=1.0)
    assert job.outcome.exit_code == EXIT_TASK_LOST


def test_two_tasks_that_wait_for_the_same_one_end_the_job() -> None:
    job = start("ps worker worker worker evaluator")
    job.end_child(1, 0)
    job.turn(5, tick=1.0)
    for rank in (2, 3):
        wait_for(job, rank, "worker/0")
    job.turn(62, tick=1.0)
    assert job.outcome.exit_code == EXIT_TASK_LOST


def test_stall_timeout_ends_the_job_while_others_run_and_another_attempt_may_follow() -> None:
    for attempts in (1, 2):
        job = start("ps worker worker worker", stall_timeout_seconds=20, max_attempts=attempts)
        job.end_child(1, 0)
        job.turn(5, tick=1.0)
        wait_for(job, 2, "worker/0")
        job.turn(18, tick=1.0)
        assert (job.state.attempt, job.phase()) == (1, Phase.TRAINING)
        job.turn(4, tick=1.0)
        if attempts == 1:
            assert job.outcome.exit_code == EXIT_TASK_LOST
        else:
            assert job.state.attempt == 2
            assert not blocked(job)


def test_wait_for_a_ps_that_has_exited_names_another_cure() -> None:
    job = start("ps ps worker worker")
    job.end_child(0, 0)
    job.turn(5, tick=1.0)
    wait_for(job, 2, "ps/0")
    job.turn(2, tick=1.0)
    (warning,) = job.state.watches.warnings
    assert "ps/0 must run until training is over" in warning
    assert "device_filters" not in warning


def test_worker_that_is_restarted_in_place_has_not_ended() -> None:
    job = start("chief ps worker worker")
    job.end_child(2, 1)
    job.turn(1, tick=1.0)
    wait_for(job, 3, "worker/0")
    job.turn(5, tick=1.0)
    assert not job.texts("blocked")
