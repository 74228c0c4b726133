"""The rules for a server that could not listen on the port of its task."""

from __future__ import annotations

import dataclasses
import signal
from typing import get_args

import pytest

from tests.unit.test_rules import table_after
from tests.unit.test_state import GRACEFUL, LIMITS, TWO_ATTEMPTS, Job
from tf4slurm.cluster import Task
from tf4slurm.control.messages import PortFailure
from tf4slurm.control.records import Phase
from tf4slurm.control.rules import AFTER_PORT_FAILURE, MOST_OTHER_PORTS, AfterPortFailure, after_port_failure
from tf4slurm.spec.job_spec import HoldPorts, JobSpec


def lose_port(job: Job, rank: int, port_failure: PortFailure = "taken") -> None:
    job.send(rank, "exited", returncode=1, port_failure=port_failure, tail=("OSError",))


def form_again(job: Job) -> None:
    job.reregister(*job.ranks)
    job.check_and_run()


def test_documented_consequences_are_the_rules() -> None:
    documented = table_after("**A server cannot listen on its port**")
    assert documented.keys() == AFTER_PORT_FAILURE.keys() == set(get_args(PortFailure))
    for port_failure, cells in AFTER_PORT_FAILURE.items():
        assert documented[port_failure] == [each.value for each in cells]
        assert len(cells) == len(get_args(HoldPorts))


@pytest.mark.parametrize(
    ("port_failure", "hold_ports", "num_before", "are_released", "expected"),
    [
        ("taken", "auto", 0, False, AfterPortFailure.OTHER_PORTS),
        ("taken", "auto", MOST_OTHER_PORTS - 1, True, AfterPortFailure.OTHER_PORTS),
        ("taken", "auto", MOST_OTHER_PORTS, False, AfterPortFailure.FAILURE),
        ("held", "auto", 0, False, AfterPortFailure.RELEASED_PORTS),
        ("held", "auto", 0, True, AfterPortFailure.FAILURE),
        ("held", "auto", MOST_OTHER_PORTS, False, AfterPortFailure.FAILURE),
        ("held", "always", 0, False, AfterPortFailure.FAILURE),
    ],
)
def test_consequence_of_a_port_failure(
    port_failure: PortFailure, hold_ports: HoldPorts, num_before: int, are_released: bool, expected: AfterPortFailure
) -> None:
    found = after_port_failure(port_failure, hold_ports, num_before=num_before, are_released=are_released)
    assert found is expected


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("limits", [LIMITS, TWO_ATTEMPTS])
def test_taken_port_forms_the_cluster_again(rank: int, limits: JobSpec) -> None:
    job = Job(limits=limits).train()
    lose_port(job, rank)
    assert (job.phase(), job.state.attempt, job.state.outcome) == (Phase.RENDEZVOUS, 2, None)
    assert not any(job.desired(each).releases_ports for each in job.ranks)
    assert not {"attempt", "restarting"} & set(job.kinds)
    form_again(job)
    assert job.phase() is Phase.TRAINING
    assert job.state.cluster is not None
    assert {member.address.port for member in job.state.cluster.members} == {5000 + each for each in job.ranks}


def test_no_attempt_is_used() -> None:
    job = Job(limits=TWO_ATTEMPTS).train()
    lose_port(job, 1)
    form_again(job)
    job.end_child(1, 1)
    assert job.texts("attempt") == ["attempt 3 of 3, because: ps/0 on n1 exited with code 1."]
    form_again(job)
    job.end_child(1, 1)
    assert job.outcome.exit_code == 1


def test_held_port_is_released_in_all_later_attempts() -> None:
    job = Job(limits=dataclasses.replace(LIMITS, max_attempts=2)).train()
    lose_port(job, 2, "held")
    assert all(job.desired(each).releases_ports for each in job.ranks)
    form_again(job)
    job.end_child(0, 1)
    assert job.phase() is Phase.RENDEZVOUS
    assert all(job.desired(each).releases_ports for each in job.ranks)


def test_cluster_forms_five_times_on_other_ports() -> None:
    job = Job().train()
    for number in range(1, MOST_OTHER_PORTS + 1):
        lose_port(job, 1)
        assert job.texts("other_ports")[-1].endswith(f"({number} of at most 5)")
        form_again(job)
    lose_port(job, 1)
    assert (job.outcome.exit_code, job.outcome.cause) == (1, Task("ps", 0))
    assert job.outcome.reason == (
        "Another process listens on port 5001 of ps/0 on n1. The cluster has formed on other ports 5 times. Give "
        "--ports a range that no other program uses, or with TensorFlow 2.3 or newer --hold-ports always."
    )
    assert job.outcome.tail == ("OSError",)


@pytest.mark.parametrize("rank", range(4))
def test_always_ends_the_job_if_a_server_cannot_share_its_port(rank: int) -> None:
    job = Job(limits=dataclasses.replace(LIMITS, hold_ports="always")).train()
    lose_port(job, rank, "held")
    assert job.outcome.exit_code == 1
    assert job.outcome.reason.endswith("it needs TensorFlow 2.3 or newer. Give --hold-ports auto or never.")


def test_port_of_another_server_of_the_script_ends_the_job() -> None:
    job = Job().train()
    lose_port(job, 0, "held")
    form_again(job)
    lose_port(job, 0, "held")
    assert job.outcome.reason == (
        "The server of chief/0 on n0 could not listen on port 5000, on which no other process listens. The cluster has "
        "formed on other ports once. If the script opens another port, let it choose a free one: port 0."
    )


def test_port_failure_after_a_stop_request_forms_no_cluster() -> None:
    job = Job(limits=GRACEFUL).train()
    job.state.on_stop(signal.SIGTERM, "it was asked to", job.now)
    lose_port(job, 1)
    assert (job.state.attempt, job.kinds.count("other_ports")) == (1, 0)
