"""The rules of a job: the tables of the documentation, and what the functions choose from them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tf4slurm.cluster import Task
from tf4slurm.control.messages import DesiredState, KilledBy
from tf4slurm.control.records import Phase, TaskRecord
from tf4slurm.control.rules import (
    AFTER_EXIT,
    AFTER_LOSS,
    AFTER_STOP,
    LEAVES_GRACE_PERIOD,
    AfterExit,
    AfterFailure,
    AfterLoss,
    StopRequest,
    after_exit,
    after_failure,
    after_loss,
    after_script_end,
    exit_code_after,
    loss_of,
    outcome_of_loss,
    stop_request_of,
)
from tf4slurm.roles import JOINED_WORKER, ROLES, Role, role_of
from tf4slurm.spec.job_spec import JobSpec

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "failures.md"
CHIEF, PS, WORKER = (role_of(name, has_chief=True) for name in ("chief", "ps", "worker"))
SPARE, EVALUATOR = (role_of(name, has_chief=True) for name in ("spare", "evaluator"))


def table_after(text: str) -> dict[str, list[str]]:
    """Return the rows of the first table after a text of the page, by their first cell, without the heading."""
    lines = PAGE.read_text().partition(text)[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines[start:] if line.startswith("|")]
    end = next(number for number, line in enumerate([*lines[start:], ""]) if not line.startswith("|"))
    return {name: cells for name, *cells in rows[2:end]}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_documented_consequences_are_the_rules(role: Role) -> None:
    exits, losses = table_after("**A child process exits**"), table_after("**A task is lost**")
    assert exits.keys() == losses.keys() == {each.name for each in ROLES}
    assert exits[role.name] == [each.value for each in AFTER_EXIT[role.name]]
    assert losses[role.name] == [", else ".join(each.value for each in cell) for cell in AFTER_LOSS[role.name]]


def test_documented_consequences_of_a_stop_are_the_rules() -> None:
    documented = table_after("**A stop is requested**")
    assert documented == {phase.value: [each.value for each in cells] for phase, cells in AFTER_STOP.items()}
    assert documented.keys() == {phase.value for phase in Phase}


def test_documented_requests_are_those_that_leave_a_grace_period() -> None:
    documented = table_after("**Who skips the grace period**")
    words = {True: "a grace period", False: "none"}
    assert documented == {each.value: [words[leaves] for leaves in LEAVES_GRACE_PERIOD[each]] for each in StopRequest}


@pytest.mark.parametrize(
    ("number", "has_person", "expected"),
    [
        (signal.SIGINT, True, StopRequest.CTRL_C),
        (signal.SIGINT, False, StopRequest.SIGNAL),  # `tf4slurm cancel` of a batch job
        (signal.SIGTERM, True, StopRequest.SIGNAL),  # `tf4slurm cancel` of a local job
        (signal.SIGHUP, True, StopRequest.SIGNAL),
        (signal.SIGUSR1, False, StopRequest.SIGNAL),
        (signal.SIGQUIT, True, StopRequest.NOW),
        (signal.SIGQUIT, False, StopRequest.NOW),
    ],
)
def test_signal_to_the_launcher_is_a_request(number: int, has_person: bool, expected: StopRequest) -> None:
    assert stop_request_of(number, has_person=has_person) is expected


@pytest.mark.parametrize(
    ("phase", "returncode", "is_left", "expected"),
    [
        (Phase.TRAINING, 0, True, AfterExit.FINISHED),
        (Phase.TRAINING, 1, True, AfterExit.RESTART),
        (Phase.TRAINING, -9, True, AfterExit.RESTART),
        (Phase.TRAINING, 1, False, AfterExit.FAILURE),
        (Phase.STOPPING, 0, True, AfterExit.FINISHED),
        (Phase.STOPPING, 1, True, AfterExit.FINISHED),
        (Phase.RENDEZVOUS, 1, True, AfterExit.NOTHING),
        (Phase.CHECKING, 1, True, AfterExit.NOTHING),
        (Phase.TERMINATING, 1, True, AfterExit.NOTHING),
        (Phase.ENDED, 1, True, AfterExit.NOTHING),
    ],
)
def test_exit_of_a_worker(phase: Phase, returncode: int, is_left: bool, expected: AfterExit) -> None:
    assert after_exit(WORKER, returncode, phase, is_restart_left=is_left, shared=DesiredState()) is expected


@pytest.mark.parametrize(
    ("returncode", "is_training_over", "is_finishing", "expected"),
    [
        (0, False, False, AfterExit.EARLY),
        (0, True, False, AfterExit.FINISHED),
        (0, True, True, AfterExit.FINISHED),
        (1, False, False, AfterExit.FAILURE),
        (1, True, False, AfterExit.FAILURE),
        (1, True, True, AfterExit.GO_ON),
    ],
)
def test_exit_of_a_ps(returncode: int, is_training_over: bool, is_finishing: bool, expected: AfterExit) -> None:
    found = after_exit(
        PS,
        returncode,
        Phase.TRAINING,
        is_restart_left=True,
        shared=DesiredState(is_training_over=is_training_over, is_finishing=is_finishing),
    )
    assert found is expected


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.STOPPING])
@pytest.mark.parametrize("fact", ["is_done", "is_finishing"])
def test_loss_that_disturbs_nothing_has_no_consequence(phase: Phase, fact: str) -> None:
    shared = DesiredState(is_finishing=fact == "is_finishing")
    found = after_loss(WORKER, phase, **dict.fromkeys(ALL, True), is_done=fact == "is_done", shared=shared)
    assert found is AfterLoss.GO_ON


ALL = {"is_replaceable", "accepts_workers", "owns_child"}


@pytest.mark.parametrize(
    ("role", "phase", "missing", "expected"),
    [
        (CHIEF, Phase.RENDEZVOUS, (), AfterLoss.REPLACE_BEFORE_TRAINING),
        (CHIEF, Phase.RENDEZVOUS, ("is_replaceable",), AfterLoss.FAILURE),
        (CHIEF, Phase.TRAINING, (), AfterLoss.FAILURE),
        (CHIEF, Phase.STOPPING, (), AfterLoss.END),
        (PS, Phase.CHECKING, (), AfterLoss.FAILURE),
        (WORKER, Phase.TRAINING, (), AfterLoss.REPLACE_IN_TRAINING),
        (WORKER, Phase.TRAINING, ("accepts_workers",), AfterLoss.FAILURE),
        (WORKER, Phase.TRAINING, ("is_replaceable",), AfterLoss.FAILURE),
        (WORKER, Phase.TRAINING, ("owns_child",), AfterLoss.GO_ON),
        (WORKER, Phase.STOPPING, ("owns_child",), AfterLoss.GO_ON),
        (WORKER, Phase.CHECKING, ("owns_child", "is_replaceable"), AfterLoss.FAILURE),
        (SPARE, Phase.RENDEZVOUS, (), AfterLoss.FORM_WITHOUT),
        (SPARE, Phase.TRAINING, (), AfterLoss.GO_ON),
        (SPARE, Phase.CHECKING, (), AfterLoss.FAILURE),
        (EVALUATOR, Phase.TRAINING, (), AfterLoss.FAILURE),
        (JOINED_WORKER, Phase.RENDEZVOUS, (), AfterLoss.GO_ON),
        (JOINED_WORKER, Phase.TRAINING, (), AfterLoss.GO_ON),
        (CHIEF, Phase.TERMINATING, (), AfterLoss.GO_ON),
        (CHIEF, Phase.ENDED, (), AfterLoss.GO_ON),
    ],
)
def test_loss_has_the_first_possible_consequence(
    role: Role, phase: Phase, missing: Iterable[str], expected: AfterLoss
) -> None:
    possible = {name: name not in missing for name in ALL}
    assert after_loss(role, phase, **possible, is_done=False, shared=DesiredState()) is expected


@pytest.mark.parametrize(
    ("is_left", "is_stuck", "suffice", "expected"),
    [
        (True, False, True, AfterFailure.NEXT_ATTEMPT),
        (True, False, False, AfterFailure.END),
        (True, True, True, AfterFailure.NO_PROGRESS),
        (True, True, False, AfterFailure.END),
        (False, True, True, AfterFailure.END),
        (False, False, False, AfterFailure.END),
    ],
)
def test_failure_of_an_attempt(is_left: bool, is_stuck: bool, suffice: bool, expected: AfterFailure) -> None:
    assert after_failure(is_attempt_left=is_left, is_stuck=is_stuck, spares_suffice=suffice) is expected


@pytest.mark.parametrize(
    ("returncode", "killed_by", "expected"),
    [(3, None, 3), (-9, None, 137), (-9, "liveness_probe", 7), (-9, "slurmstepd", 7), (-15, "guard", 7)],
)
def test_exit_code_after_a_failure(returncode: int, killed_by: KilledBy | None, expected: int) -> None:
    assert exit_code_after(returncode, killed_by) == expected


@pytest.mark.parametrize(
    ("role", "phase", "shared", "returncode", "expected"),
    [
        (PS, Phase.TRAINING, DesiredState(), None, AfterLoss.STOP),
        (PS, Phase.TRAINING, DesiredState(), 1, AfterLoss.STOP),
        (PS, Phase.TRAINING, DesiredState(), 0, AfterLoss.GO_ON),
        (PS, Phase.TRAINING, DesiredState(is_training_over=True), None, AfterLoss.GO_ON),
        (PS, Phase.STOPPING, DesiredState(), None, AfterLoss.GO_ON),
        (WORKER, Phase.TRAINING, DesiredState(), None, AfterLoss.GO_ON),
    ],
)
def test_end_of_a_script_of_plain_srun(
    role: Role, phase: Phase, shared: DesiredState, returncode: int | None, expected: AfterLoss
) -> None:
    assert after_script_end(role, phase, shared, returncode) is expected


@pytest.mark.parametrize(
    ("seconds_without_heartbeat", "seconds_without_connection", "expected"),
    [
        (9.0, None, None),
        (11.0, None, (False, "it sent no heartbeat for 10 s")),
        (1.0, 1.0, None),
        (2.0, 2.0, (True, "its connection broke and was not restored")),
    ],
)
def test_task_without_heartbeat_or_connection_is_lost(
    seconds_without_heartbeat: float, seconds_without_connection: float | None, expected: tuple[bool, str] | None
) -> None:
    record = TaskRecord(1, Task("worker", 0), WORKER, incarnation="x", node="n1", is_connected=True)
    record.last_message_at = 100.0 - seconds_without_heartbeat
    if seconds_without_connection is not None:
        record.is_connected, record.disconnected_at = False, 100.0 - seconds_without_connection
    loss = loss_of(record, JobSpec(heartbeat_timeout_seconds=10), 100.0)
    assert (None if loss is None else (loss.is_orphan, loss.why)) == expected
    assert outcome_of_loss(record, "it is gone").exit_code == 7
    record.is_gone = True
    assert loss_of(record, JobSpec(), 1000.0) is None
    assert loss_of(TaskRecord(1, Task("worker", 0), WORKER), JobSpec(), 1000.0) is None  # not registered
