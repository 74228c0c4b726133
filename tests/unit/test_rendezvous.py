"""A task's identity, the endpoint of its control service, and its rendezvous at a real service."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.captures import capture_of
from tests.unit.test_service_and_client import CREDENTIALS, OTHER_JOB, SHARED, cancel, serving, until
from tf4slurm.agent.rendezvous import (
    LocalTask,
    Rendezvous,
    TaskIdentity,
    is_under_launcher,
    read_identity,
    spec_from_environ,
    spec_to_environ,
)
from tf4slurm.cluster import Address, Cluster, Task
from tf4slurm.control import credentials
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint, Credentials
from tf4slurm.control.messages import Registration
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState
from tf4slurm.errors import (
    AuthenticationError,
    InterfaceError,
    PlacementError,
    RendezvousConnectionError,
    SlurmEnvironmentError,
)
from tf4slurm.network.interfaces import is_loopback, list_interfaces
from tf4slurm.network.ports import hold_port
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.variables import AGENT_VARIABLES, RANK_VARIABLE

STEP = capture_of("sbatch-srun").environs[1]
SERVICE = ControlEndpoint((Address("10.0.0.1", 5000), Address("fd00::1", 5000)), SHARED)
HERE = LocalTask(0, "laptop")
LIMITS = JobSpec(heartbeat_interval_seconds=0.05, heartbeat_timeout_seconds=2)


# The identity


def test_place_of_a_local_task_is_read_from_the_launchers_variables() -> None:
    assert read_identity({RANK_VARIABLE: "3"}) == LocalTask(3, socket.gethostname())


def test_place_in_a_step_is_read_from_slurms_variables() -> None:
    identity = read_identity(STEP)
    assert isinstance(identity, SlurmStep)
    assert identity.rank == int(STEP["SLURM_PROCID"])
    assert identity.port_candidates == (23164, 23165, 23166, 23167, 23168, 23163)


def test_local_launcher_inside_a_step_takes_precedence() -> None:
    assert read_identity({**STEP, RANK_VARIABLE: "5"}) == LocalTask(5, "r1-n9")


def test_place_without_variables_is_an_error() -> None:
    with pytest.raises(SlurmEnvironmentError, match="this process is not a task of a Slurm step"):
        read_identity({})


# The endpoint and the spec


def test_endpoint_survives_the_environment() -> None:
    environ = SERVICE.to_environ()
    assert set(environ) < set(AGENT_VARIABLES)
    assert is_under_launcher({**environ, **spec_to_environ(JobSpec(workers=1), Path("/runs/x"))})
    assert not is_under_launcher(environ)  # an unrelated variable
    for missing in environ:
        rest = {name: value for name, value in environ.items() if name != missing}
        assert not is_under_launcher({**rest, **spec_to_environ(JobSpec(workers=1), Path("/runs/x"))})
    assert not is_under_launcher(STEP)
    assert ControlEndpoint.from_environ(environ) == SERVICE


@pytest.mark.parametrize(
    ("launch_address", "hosts"),
    [
        ("10.9.9.9", ["10.9.9.9", "10.0.0.1", "fd00::1"]),
        ("fd00::1", ["fd00::1", "10.0.0.1"]),
        (None, ["10.0.0.1", "fd00::1"]),
    ],
)
def test_launch_address_of_slurm_comes_first(launch_address: str | None, hosts: list[str]) -> None:
    identity = read_identity({**STEP, "SLURM_LAUNCH_NODE_IPADDR": launch_address or ""})
    assert isinstance(identity, SlurmStep)
    found = ControlEndpoint.from_environ(SERVICE.to_environ(), identity.launch_address)
    assert found.addresses == tuple(Address(host, 5000) for host in hosts)


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(("python", "train.py"), workers=2),
        JobSpec(
            ("python", "train.py"),
            workers=2,
            interface="ib0",
            ports=(40000, 40002),
            heartbeat_interval_seconds=0.5,
            heartbeat_timeout_seconds=7.5,
            start_timeout_seconds=9,
            stop_signal="SIGUSR1",
        ),
    ],
)
def test_spec_survives_the_environment(spec: JobSpec) -> None:
    environ = spec_to_environ(spec, Path("/runs/x y"))
    assert spec_from_environ(spec.command, environ) == (spec, Path("/runs/x y"))


def test_endpoint_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    assert ControlEndpoint.from_file(path) is None
    path.write_text(json.dumps(SERVICE.to_json()))
    assert ControlEndpoint.from_file(path) == SERVICE


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "null", "[]", "{}", '{"addresses": []'),
        '{"addresses": ["x"], "credentials": {"certificate": "c", "token": "t"}}',
        '{"credentials": {"certificate": "c", "token": "t"}}',
        '{"addresses": ["n1:1"]}',
        '{"addresses": ["n1:1"], "secret": "of an earlier version"}',
        '{"addresses": ["n1:1"], "credentials": "t"}',
        '{"addresses": ["n1:1"], "credentials": null}',
        '{"addresses": ["n1:1"], "credentials": {"token": "t"}}',
        '{"addresses": ["n1:1"], "credentials": {"certificate": "c", "token": "t", "private_key": "k"}}',
    ],
)
def test_file_with_other_content_is_no_endpoint(tmp_path: Path, text: str) -> None:
    path = tmp_path / "control.json"
    path.write_text(text)
    assert ControlEndpoint.from_file(path) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_no_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    path.write_text(json.dumps(SERVICE.to_json()))
    assert ControlEndpoint.from_file(path) == SERVICE
    os.chown(path, 12345, -1)
    assert ControlEndpoint.from_file(path) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_may_write_is_no_endpoint(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "control.json"
    path.write_text(json.dumps(SERVICE.to_json()))
    path.chmod(mode)
    assert ControlEndpoint.from_file(path) is None


def test_link_or_named_pipe_is_no_endpoint_and_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(SERVICE.to_json()))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert ControlEndpoint.from_file(tmp_path / "file") == SERVICE
    assert ControlEndpoint.from_file(tmp_path / "link") is None
    assert ControlEndpoint.from_file(tmp_path / "pipe") is None


def test_credentials_sealed_with_munge_need_munge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "control.json"
    path.write_text(json.dumps({"addresses": ["n1:1"], "munge": "MUNGE:nonsense:"}))
    path.chmod(0o600)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AuthenticationError, match="must run on every host of the job or on none"):
        ControlEndpoint.from_file(path)
    assert set(SERVICE.to_json()) == {"addresses", "credentials"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "3",
        "[]",
        "{}",
        '{"token": "t"}',
        '{"certificate": "c", "key": "k"}',
        pytest.param(SHARED.token, id="token"),
    ],
)
def test_file_whose_sealed_text_has_no_credentials_is_no_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "control.json"
    path.write_text(json.dumps({"addresses": ["n1:1"], "munge": "MUNGE:sealed:"}))
    monkeypatch.setattr(credentials, "open_from_this_user", lambda _: text)
    assert ControlEndpoint.from_file(path) is None


def test_munge_seals_certificate_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed: list[str] = []

    def seal(text: str) -> str:
        sealed.append(text)
        return "MUNGE:sealed:"

    monkeypatch.setattr(credentials, "seal_for_this_user", seal)
    monkeypatch.setattr(credentials, "open_from_this_user", lambda _: sealed[0])
    content = SERVICE.to_json()
    assert content == {"addresses": ["10.0.0.1:5000", "[fd00::1]:5000"], "munge": "MUNGE:sealed:"}
    assert json.loads(sealed[0]) == {"certificate": SHARED.certificate, "token": SHARED.token}
    path = tmp_path / "control.json"
    path.write_text(json.dumps(content))
    assert ControlEndpoint.from_file(path) == SERVICE


def test_credentials_beside_sealed_ones_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = json.dumps({"certificate": SHARED.certificate, "token": SHARED.token})
    monkeypatch.setattr(credentials, "open_from_this_user", lambda _: sealed)
    path = tmp_path / "control.json"
    planted = {"certificate": OTHER_JOB.shared.certificate, "token": "planted"}
    path.write_text(json.dumps({"addresses": ["n1:1"], "munge": "MUNGE:sealed:", "credentials": planted}))
    assert ControlEndpoint.from_file(path) == ControlEndpoint((Address("n1", 1),), SHARED)


def test_repr_of_an_endpoint_does_not_show_the_token() -> None:
    assert SHARED.token not in repr(SERVICE)
    assert SHARED.token not in str(SERVICE)


@pytest.mark.parametrize(
    "certificate",
    ["", "c", SHARED.certificate[:200], SHARED.certificate.replace("\n", "")],
    ids=["empty", "text", "truncated", "one line"],
)
def test_task_with_an_unusable_certificate_does_not_register(certificate: str) -> None:
    async def run() -> None:
        async with serving("worker") as job:
            service = ControlEndpoint((job.address,), Credentials(certificate, SHARED.token))
            rendezvous = Rendezvous(HERE, JobSpec(workers=1, start_timeout_seconds=0.5), lambda: service)
            with pytest.raises(RendezvousConnectionError):
                await asyncio.wait_for(rendezvous.client.run(), 60)
            assert job.events == []
            if rendezvous.held_port is not None:
                rendezvous.held_port.close()

    asyncio.run(run())


def test_registration_made_for_several_addresses_holds_one_port() -> None:
    async def run() -> None:
        async with serving("worker") as job, serving("worker", credentials=OTHER_JOB) as other:
            service = ControlEndpoint((Address("127.0.0.1", 1), other.address, job.address), SHARED)
            rendezvous = Rendezvous(HERE, JobSpec(workers=1), lambda: service)
            ports: list[int] = []
            make = rendezvous.client._make_registration

            def record(address: Address) -> Registration:
                ports.append(make(address).port)
                return make(address)

            rendezvous.client._make_registration = record
            running = asyncio.create_task(rendezvous.client.run())
            await until(lambda: job.state.tasks[0].has_registered)
            assert len(ports) == 3
            assert len(set(ports)) == 1
            assert job.state.tasks[0].address == Address("127.0.0.1", ports[0])
            assert other.events == []
            await cancel(running)
            assert rendezvous.listener is not None
            assert rendezvous.held_port is not None
            rendezvous.listener.close()
            rendezvous.held_port.close()

    asyncio.run(run())


# The rendezvous


@contextlib.asynccontextmanager
async def registered(spec: JobSpec, identity: TaskIdentity) -> AsyncIterator[tuple[Rendezvous, JobState]]:
    """A rendezvous with a real service of one task, up to its registration."""
    state = JobState([Task("worker", 0)], LIMITS, time.monotonic(), lambda *_, **__: None)
    control = ControlService(state, CREDENTIALS)
    service = ControlEndpoint((Address("127.0.0.1", await control.start()),), SHARED)
    rendezvous = Rendezvous(identity, spec, lambda: service)
    running = asyncio.create_task(rendezvous.client.run())
    try:
        deadline = time.monotonic() + 60
        while not state.tasks[0].has_registered:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        yield rendezvous, state
    finally:
        await cancel(running)
        await control.close()
        if rendezvous.listener is not None:
            rendezvous.listener.close()
        if rendezvous.held_port is not None:
            rendezvous.held_port.close()


def check_registered(spec: JobSpec, identity: TaskIdentity, check: Callable[[Rendezvous, JobState], None]) -> None:
    async def run() -> None:
        async with registered(spec, identity) as (rendezvous, state):
            check(rendezvous, state)

    asyncio.run(run())


def test_task_registers_the_address_of_its_route_and_the_port_it_holds() -> None:
    def check(rendezvous: Rendezvous, state: JobState) -> None:
        assert rendezvous.failure is None
        assert rendezvous.client.token == SHARED.token
        assert rendezvous.held_port is not None
        record = state.tasks[0]
        assert record.address == Address("127.0.0.1", rendezvous.held_port.port)
        assert record.node == "laptop"
        assert record.incarnation.startswith(f"{os.getpid()}-")
        with pytest.raises(PlacementError):
            hold_port([rendezvous.held_port.port])
        with socket.create_connection(record.address, timeout=60):
            pass  # it listens already, for reachability checks

    check_registered(JobSpec(workers=1), HERE, check)


@pytest.mark.parametrize("requested", [True, False], ids=["requested", "reserved by Slurm"])
def test_requested_ports_take_precedence_over_those_that_slurm_reserves(requested: bool) -> None:
    with contextlib.ExitStack() as held:
        free = tuple(held.enter_context(contextlib.closing(hold_port())).port for _ in range(8))
    mine, reserved = free[:4], free[4:]  # several, since another process may take one

    def check(rendezvous: Rendezvous, state: JobState) -> None:
        assert state.tasks[0].address in [Address("127.0.0.1", port) for port in (mine if requested else reserved)]

    identity = read_identity(
        {
            **STEP,
            "SLURM_PROCID": "0",
            "SLURM_GTIDS": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_RESV_PORTS": ",".join(map(str, reserved)),
        }
    )
    check_registered(JobSpec(workers=1, ports=mine if requested else ()), identity, check)


def test_missing_interface_is_reported_to_the_launcher() -> None:
    def check(rendezvous: Rendezvous, state: JobState) -> None:
        assert isinstance(rendezvous.failure, InterfaceError)
        assert state.outcome is not None
        assert state.outcome.exit_code == 3
        assert state.outcome.reason == f"worker/0 on laptop cannot take part in the job. {rendezvous.failure}"

    check_registered(JobSpec(workers=1, interface="ib-nowhere"), HERE, check)


def test_range_without_a_free_port_is_reported_to_the_launcher() -> None:
    with contextlib.closing(hold_port()) as taken:

        def check(rendezvous: Rendezvous, state: JobState) -> None:
            assert isinstance(rendezvous.failure, PlacementError)
            assert state.outcome is not None
            assert "None of the 1 ports" in state.outcome.reason

        check_registered(JobSpec(workers=1, ports=(taken.port,)), HERE, check)


def test_two_processes_of_a_rank_have_different_incarnations() -> None:
    incarnations = []
    for _ in range(2):
        check_registered(JobSpec(workers=1), HERE, lambda _, state: incarnations.append(state.tasks[0].incarnation))
    assert len(set(incarnations)) == 2


def outer_interface() -> str:
    """Return the name of an interface that other hosts can reach; skip the test without one."""
    for each in list_interfaces():
        if each.addresses and not is_loopback(each.addresses[0]):
            return each.name
    pytest.skip("this host has no address but loopback")


def test_tasks_on_several_nodes_have_the_same_cluster_after_checking_its_addresses() -> None:
    spec = JobSpec(workers=1, interface=outer_interface())

    async def run() -> None:
        state = JobState([Task("chief", 0), Task("ps", 0)], LIMITS, time.monotonic(), lambda *_, **__: None)
        control = ControlService(state, CREDENTIALS)
        service = ControlEndpoint((Address("127.0.0.1", await control.start()),), SHARED)
        both = [Rendezvous(LocalTask(rank, f"n{rank}"), spec, lambda: service) for rank in range(2)]
        running = [asyncio.create_task(rendezvous.client.run()) for rendezvous in both]
        first, second = await asyncio.wait_for(asyncio.gather(*(each.wait_for_cluster() for each in both)), 60)
        assert first == second
        assert first is not None
        assert [member.address for member in first.members] == [record.address for record in state.tasks]
        for rendezvous in both:
            assert rendezvous.held_port is not None
            with pytest.raises(ConnectionRefusedError):  # the agent does not listen any more: the port is the child's
                socket.create_connection(("127.0.0.1", rendezvous.held_port.port), timeout=60)
            rendezvous.held_port.close()
        await cancel(*running)
        await control.close()

    asyncio.run(run())


def test_terminated_task_does_not_wait_for_the_others() -> None:
    async def run() -> None:
        state = JobState([Task("chief", 0), Task("ps", 0)], LIMITS, time.monotonic(), lambda *_, **__: None)
        control = ControlService(state, CREDENTIALS)
        service = ControlEndpoint((Address("127.0.0.1", await control.start()),), SHARED)
        rendezvous = Rendezvous(HERE, JobSpec(workers=1), lambda: service)
        running = asyncio.create_task(rendezvous.client.run())
        waiting = asyncio.create_task(rendezvous.wait_for_cluster())
        await rendezvous.client.wait_for_change()
        state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", time.monotonic())
        control.publish()
        assert await asyncio.wait_for(waiting, 60) is None
        rendezvous.client.update(state="terminated")
        await asyncio.wait_for(running, 60)
        assert rendezvous.held_port is not None
        rendezvous.held_port.close()
        await control.close()

    asyncio.run(run())


def test_task_looks_for_the_endpoint_until_it_exists() -> None:
    async def run() -> None:
        state = JobState([Task("worker", 0)], LIMITS, time.monotonic(), lambda *_, **__: None)
        control = ControlService(state, CREDENTIALS)
        port = await control.start()
        answers = [None, None, ControlEndpoint((Address("127.0.0.1", port),), SHARED)]
        rendezvous = Rendezvous(HERE, JobSpec(workers=1), lambda: answers.pop(0) if len(answers) > 1 else answers[0])
        running = asyncio.create_task(rendezvous.client.run())
        deadline = time.monotonic() + 60
        while not state.tasks[0].has_registered:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert len(answers) == 1
        await cancel(running)
        await control.close()
        assert rendezvous.listener is not None
        assert rendezvous.held_port is not None
        rendezvous.listener.close()
        rendezvous.held_port.close()

    asyncio.run(run())


# Reachability checks


@pytest.mark.parametrize(("pauses", "state"), [((0.0, 0.0), "not_ready"), ((0.0, 30.0, 30.0), "ready")])
def test_addresses_are_checked_again_after_a_pause(
    pauses: tuple[float, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answers = iter(pauses), iter([["worker/1 does not answer"], []])

    async def find_unreachable(*_: object) -> list[str]:
        return next(answers)

    monkeypatch.setattr(ControlClient, "paused_seconds", property(lambda _: next(clock)))
    monkeypatch.setattr(Rendezvous, "_find_unreachable", find_unreachable)
    rendezvous = Rendezvous(HERE, dataclasses.replace(LIMITS, workers=1), lambda: SERVICE)
    asyncio.run(rendezvous._check_addresses(Cluster(())))
    assert rendezvous.client.observed.state == state
