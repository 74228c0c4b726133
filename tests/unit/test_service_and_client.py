"""The control service and its client over gRPC on 127.0.0.1, in one event loop; and clients that send invalid data."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import random
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ParamSpec

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from tf4slurm import __version__
from tf4slurm.cluster import Address, Cluster, Task
from tf4slurm.control import client
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import TLS_NAME, ControlEndpoint, Credentials, ServiceCredentials, create_credentials
from tf4slurm.control.messages import (
    HEARTBEAT,
    MAX_STATE_BYTES,
    METHOD,
    SERVICE,
    TOKEN_METADATA,
    BarrierArrival,
    DesiredState,
    Message,
    ObservedState,
    Registration,
    ScriptState,
    Usage,
    decode,
    decode_cluster,
    encode,
    encode_cluster,
    is_encoded_cluster,
)
from tf4slurm.control.records import Phase
from tf4slurm.control.service import ControlService, max_gap_seconds
from tf4slurm.control.state import JobState
from tf4slurm.errors import PlacementError, RendezvousClosedError, RendezvousConnectionError
from tf4slurm.network.ports import HeldPort, hold_port
from tf4slurm.spec.job_spec import JobSpec

CREDENTIALS = create_credentials()
SHARED = CREDENTIALS.shared
OTHER_JOB = create_credentials()
WRONG_TOKEN = Credentials(SHARED.certificate, OTHER_JOB.shared.token)
INTERVAL = 0.05
HEARTBEAT_TIMEOUT, SHORT_TIMEOUT = 8.0, 2.0
"""Heartbeat timeouts in seconds: more than a busy machine needs, or as much as a test may wait."""
PAIR = "chief ps"
_Call = Any  # grpc.aio.StreamStreamCall[bytes, bytes], which is generic for type checkers only


_Arguments = ParamSpec("_Arguments")


def in_event_loop(test: Callable[_Arguments, Coroutine[Any, Any, None]]) -> Callable[_Arguments, None]:
    """Run a test in its own event loop; fail on errors that the loop or the collector reports."""

    @functools.wraps(test)
    def run(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        unseen: list[str] = []

        def on_error(_: object, context: dict[str, Any]) -> None:
            if "PollerCompletionQueue" not in context["message"]:  # gRPC's own, after an earlier test's loop is closed
                unseen.append(str(context))

        async def run_test() -> None:
            asyncio.get_running_loop().set_exception_handler(on_error)
            await asyncio.wait_for(test(*arguments, **keywords), 120)

        asyncio.run(run_test())
        gc.collect()  # asyncio reports the error of a task that was never awaited when the task is collected
        assert unseen == []

    return run


async def until(condition: Callable[[], object], timeout_seconds: float = 60) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.005)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel until the task ends: before Python 3.12, wait_for loses a cancellation that comes with the result."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors logged, but for those of gRPC's queue, which also wakes the closed loops of earlier tests."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR
        and str(record.exc_info[1] if record.exc_info else None) != "Event loop is closed"
    ]


def make_registration(rank: int, /, **changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "rank": rank,
        "node": f"n{rank}",
        "host": f"10.0.0.{rank}",
        "port": 4000 + rank,
        "incarnation": f"incarnation-{rank}",
        "version": __version__,
    }
    return Registration(**{**fields, **changes})


def make_client(
    *addresses: Address,
    credentials: Credentials = SHARED,
    registration: Callable[[Address], Registration] = lambda _: make_registration(0),
    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT,
    rendezvous_timeout_seconds: float = 60,
) -> ControlClient:
    """Return a client that has not started, with the service at one of these addresses."""
    limits = JobSpec(
        start_timeout_seconds=rendezvous_timeout_seconds,
        heartbeat_interval_seconds=INTERVAL,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )
    return ControlClient(lambda: ControlEndpoint(addresses, credentials), registration, limits)


class Job:
    """A control service that runs, and the clients of its tasks."""

    def __init__(self, roles: str, heartbeat_timeout_seconds: float, credentials: ServiceCredentials) -> None:
        limits = JobSpec(
            start_timeout_seconds=120,
            heartbeat_interval_seconds=INTERVAL,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            reconnect_seconds=heartbeat_timeout_seconds / 2,
            kill_wait_seconds=0.5,
        )
        counts: Counter[str] = Counter()
        tasks = []
        for task_type in roles.split():
            tasks.append(Task(task_type, counts[task_type]))
            counts[task_type] += 1
        self.events: list[tuple[str, str | None]] = []
        self.state = JobState(
            tasks, limits, time.monotonic(), lambda kind, task, _, **__: self.events.append((kind, task))
        )
        self.service = ControlService(self.state, credentials)
        self.port = 0
        self._running: list[asyncio.Task[None]] = []

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    def client(
        self,
        rank: int,
        /,
        *,
        port: int | None = None,
        credentials: Credentials = SHARED,
        rendezvous_timeout_seconds: float = 60,
        **changes: Any,
    ) -> ControlClient:
        """Return a client that has not started; `changes` replace fields of its registration."""
        return make_client(
            Address("127.0.0.1", port or self.port),
            credentials=credentials,
            registration=lambda _: make_registration(rank, **changes),
            heartbeat_timeout_seconds=self.state.spec.heartbeat_timeout_seconds,
            rendezvous_timeout_seconds=rendezvous_timeout_seconds,
        )

    def begin(self, client: ControlClient) -> asyncio.Task[None]:
        running = asyncio.create_task(client.run())
        self._running.append(running)
        return running

    async def start_children(self, ranks: int) -> list[ControlClient]:
        """Bring this many tasks up to the point where their children run."""
        members = [self.client(rank) for rank in range(ranks)]
        for member in members:
            self.begin(member)
        await until(lambda: all(member.cluster for member in members))
        for member in members:
            member.update(state="ready")
        await until(lambda: all(member.desired.start_count == 1 for member in members))
        for member in members:
            member.update(state="running", start_count=1)
        await until(lambda: self.state.tasks.count("running") == ranks)
        return members

    async def check_undisturbed(self, members: list[ControlClient]) -> None:
        """Check that no member lost its connection, then let the first end the job."""
        assert not {kind for kind, _ in self.events} & {"lost", "disconnected", "reconnected", "exited", "outcome"}
        members[0].update(state="exited", start_count=1, returncode=0)
        await until(lambda: all(member.desired.terminate for member in members))
        assert self.state.outcome is not None
        assert self.state.outcome.exit_code == 0

    async def close(self) -> None:
        await cancel(*self._running)
        await self.service.close()


@contextlib.asynccontextmanager
async def serving(
    roles: str = PAIR,
    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT,
    credentials: ServiceCredentials = CREDENTIALS,
) -> AsyncIterator[Job]:
    job = Job(roles, heartbeat_timeout_seconds, credentials)
    job.port = await job.service.start()
    try:
        yield job
    finally:
        await job.close()


@in_event_loop
async def test_age_of_an_exit_is_sent_with_each_change_and_causes_none() -> None:
    async with serving() as job:
        member = (await job.start_children(2))[1]
        observed = job.state.tasks[1]
        member.exited_at = time.monotonic() - 5
        member.update(state="exited", returncode=1)
        await until(lambda: observed.observed.state == "exited")
        first = observed.observed
        assert 5 <= first.exit_age_seconds < 60
        await asyncio.sleep(4 * INTERVAL)
        assert observed.observed is first
        member.update(tail=("last words",))
        await until(lambda: observed.observed.tail)
        assert first.exit_age_seconds + 4 * INTERVAL <= observed.observed.exit_age_seconds < 60


def is_registered(member: ControlClient) -> bool:
    """Return whether the member knows that it is registered; the service knows a moment earlier."""
    return member.service_address is not None


class RawClient:
    """One call to a service, with which a test sends what a `ControlClient` would not."""

    def __init__(self, call: _Call) -> None:
        self.call = call

    async def send(self, message: Message | bytes) -> None:
        """Send a message, unless the service has ended the call.

        If the service ends the call during a write, `write` of grpc.aio replaces the status that the service has sent.
        Therefore this function calls what `write` calls.
        """
        await self.call._metadata_sent.wait()
        with contextlib.suppress(cygrpc.InternalError):
            payload = message if isinstance(message, bytes) else encode(message)
            await self.call._cython_call.send_serialized_message(payload)

    async def receive(self, kind: type[Any]) -> Any:
        """Return the next message that is no heartbeat, which must be of this kind."""
        payload = HEARTBEAT
        while payload == HEARTBEAT:
            payload = await self.call.read()
        assert is_encoded_cluster(payload) == (kind is Cluster)
        return decode_cluster(payload)[1] if kind is Cluster else decode(payload, kind)

    async def end(self) -> tuple[grpc.StatusCode, str, int]:
        """Return the code and detail with which the call ended, and how many messages came before."""
        received = 0
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(await self.call.read(), bytes):
                received += 1
        return await self.call.code(), await self.call.details() or "", received


@contextlib.asynccontextmanager
async def raw_client(
    port: int, credentials: Credentials = SHARED, *, method: str = METHOD, **arguments: Any
) -> AsyncIterator[RawClient]:
    """Call the service; `arguments` of the call replace the metadata with the token, or add to it."""
    options = (
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.ssl_target_name_override", TLS_NAME),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, as each task has
    )
    arguments = {"metadata": ((TOKEN_METADATA, credentials.token),), **arguments}
    tls = grpc.ssl_channel_credentials(credentials.certificate.encode())
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", tls, options=options) as channel:
        call: _Call = channel.stream_stream(f"/{SERVICE}/{method}")(**arguments)
        yield RawClient(call)
        call.cancel()


class Relay:
    """Carries bytes between clients and a service, until it is paused (nothing moves) or cut (all is closed)."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.connections = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._flowing.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        self.cut()
        await until(lambda: not self._writers)

    def pause(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        both = {writer, far_writer}
        self._writers |= both
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        self._writers -= both

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


# A complete job


@in_event_loop
async def test_job_of_two_tasks_registers_trains_and_ends() -> None:
    async with serving() as job:
        chief, ps = job.client(0), job.client(1)
        running = [job.begin(chief), job.begin(ps)]
        await until(lambda: chief.cluster and ps.cluster)
        assert chief.cluster == ps.cluster == job.state.cluster
        assert chief.cluster is not None
        assert chief.cluster.to_dictionary() == {"chief": ["10.0.0.0:4000"], "ps": ["10.0.0.1:4001"]}
        assert chief.desired.start_count == 0
        chief.update(state="ready")
        ps.update(state="ready")
        await until(lambda: chief.desired.start_count == ps.desired.start_count == 1)
        chief.update(state="running", start_count=1, process_id=11)
        ps.update(state="running", start_count=1, process_id=12)
        await until(lambda: job.state.tasks.count("running") == 2)
        chief.update(state="exited", start_count=1, process_id=11, returncode=0)
        await until(lambda: chief.desired.terminate and ps.desired.terminate)
        assert ps.desired.terminate_reason.startswith("Training is done")
        chief.update(state="terminated", start_count=1, returncode=0)
        ps.update(state="terminated", start_count=1)
        await job.service.wait_for_end()
        await asyncio.gather(*running)
        assert job.state.phase is Phase.ENDED
        assert job.state.outcome is not None
        assert job.state.outcome.exit_code == 0
        kinds = Counter(kind for kind, _ in job.events)
        assert (kinds["registered"], kinds["started"], kinds["terminated"]) == (2, 2, 2)
        assert not kinds.keys() & {"lost", "disconnected", "reconnected", "not_terminated"}


@in_event_loop
async def test_changed_state_is_sent_at_once_and_not_with_the_next_heartbeat() -> None:
    slow = JobSpec(heartbeat_interval_seconds=300, heartbeat_timeout_seconds=1000, grace_period_seconds=0)
    state = JobState([Task("worker", 0)], slow, time.monotonic(), lambda *_, **__: None)
    service = ControlService(state, CREDENTIALS)
    member = make_client(Address("127.0.0.1", await service.start()), heartbeat_timeout_seconds=1000)
    running = asyncio.create_task(member.run())
    await until(lambda: member.cluster)  # each wait is shorter than the heartbeat interval
    member.update(state="ready")
    await until(lambda: member.desired.start_count == 1)
    member.update(state="running", start_count=1)
    await until(lambda: state.tasks.count("running") == 1)
    state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", time.monotonic())
    service.publish()
    await until(lambda: member.desired.terminate)
    member.update(state="terminated", start_count=1)
    await asyncio.gather(running, service.wait_for_end())
    await service.close()


@in_event_loop
async def test_terminated_task_is_not_refused_when_the_launcher_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_END_OF_CALL_SECONDS", 0.2)
    async with serving("worker") as job, Relay(job.port) as relay:
        receive = job.service._receive

        async def receive_and_hold(*arguments: Any) -> None:
            await receive(*arguments)
            await asyncio.sleep(60)  # the service does not end the call in time, so the task makes another

        monkeypatch.setattr(job.service, "_receive", receive_and_hold)
        member = job.client(0, port=relay.port)
        running = job.begin(member)
        await until(lambda: member.cluster)
        job.state.on_stop(signal.SIGTERM, "the launcher received SIGTERM", time.monotonic())
        job.service.publish()
        await until(lambda: member.desired.terminate)
        member.update(state="terminated")
        await running
        assert relay.connections >= 2
        assert ("terminated", "worker/0") in job.events


@in_event_loop
async def test_wait_for_change_returns_at_the_next_desired_state_and_not_at_heartbeats() -> None:
    async with serving("worker") as job:
        member = job.client(0)
        job.begin(member)
        while member.cluster is None:
            await member.wait_for_change()
        waiting = asyncio.create_task(member.wait_for_change())
        last_message_at = job.state.tasks[0].last_message_at
        await until(lambda: job.state.tasks[0].last_message_at > last_message_at + 3 * INTERVAL)
        assert not waiting.done()
        member.update(state="ready")
        await waiting
        assert member.desired.start_count == 1


@in_event_loop
async def test_members_that_send_only_heartbeats_are_not_lost() -> None:
    async with serving(heartbeat_timeout_seconds=SHORT_TIMEOUT) as job:
        await job.start_children(2)
        end = time.monotonic() + 1.5 * SHORT_TIMEOUT
        await until(lambda: time.monotonic() > end)
        assert job.state.phase is Phase.TRAINING


@in_event_loop
async def test_task_that_answers_with_empty_messages_is_lost_only_when_it_stops() -> None:
    async with (
        serving("worker worker", heartbeat_timeout_seconds=SHORT_TIMEOUT) as job,
        raw_client(job.port) as raw,
    ):
        job.begin(job.client(1))
        await raw.send(make_registration(0))
        end = time.monotonic() + 2 * SHORT_TIMEOUT
        while time.monotonic() < end:
            if await raw.call.read() == HEARTBEAT:
                await raw.send(HEARTBEAT)
        assert job.state.outcome is None
        while await raw.call.read() == HEARTBEAT:
            pass  # the service requests heartbeats until the task is lost
        assert job.state.outcome is not None
        assert job.state.outcome.cause == Task("worker", 0)


@in_event_loop
async def test_usage_and_step_are_sent_with_a_heartbeat() -> None:
    async with serving("worker") as job:
        (member,) = await job.start_children(1)
        for number in (1, 2):
            member.update_usage(Usage(memory_bytes=number))
            member.update_script(ScriptState(step=number))
            await until(lambda number=number: job.state.tasks[0].observed.script.step == number)  # type: ignore[misc]
            assert job.state.tasks[0].observed == member.observed


@in_event_loop
async def test_failed_child_with_the_longest_tail_is_reported() -> None:
    async with serving() as job:
        chief, _ = await job.start_children(2)
        tail = ("\U0001f600" * 500,) * 20  # the limit of the agent, in the longest characters
        chief.update(state="exited", start_count=1, returncode=3, tail=tail)
        await until(lambda: job.state.outcome)
        assert job.state.outcome is not None
        assert job.state.outcome.exit_code == 3
        assert job.state.outcome.tail == tail


METRICS = tuple((f"metric-with-a-rather-long-name-{number}", number / 7) for number in range(40_000))
LINES = ("\U0001f600" * 20_000,) * 20


@pytest.mark.parametrize(
    ("report", "tail"),
    [
        (ScriptState(step=7, metrics=METRICS), ()),
        (ScriptState(step=7), LINES),
        (ScriptState(step=7, metrics=METRICS), LINES),
    ],
    ids=["metrics", "lines", "both"],
)
@in_event_loop
async def test_status_above_the_limit_is_shrunk_with_a_warning_and_accepted(
    report: ScriptState, tail: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as job:
        chief, ps = await job.start_children(2)
        chief.update_script(report)
        chief.update(tail=tail)
        await until(lambda: job.state.tasks[0].observed.script.step == 7)
        found = job.state.tasks[0].observed
        assert found == chief.observed
        assert len(encode(found)) <= MAX_STATE_BYTES
        assert len(found.script.metrics) < len(METRICS)
        assert found.script.metrics == report.metrics[: len(found.script.metrics)]
        assert len(found.tail) < len(LINES)
        await job.check_undisturbed([chief, ps])
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and r.name == "tf4slurm.control.messages"]
    assert warnings
    assert f"exceeds {MAX_STATE_BYTES} bytes" in warnings[0].getMessage()


@in_event_loop
async def test_cluster_of_2000_tasks_arrives() -> None:
    chance = random.Random(7)

    async with serving(" ".join(["worker"] * 2000)) as job:
        now = time.monotonic()
        for rank in range(1, 2000):
            job.service.receiver.on_registration(make_registration(rank, node=chance.randbytes(70).hex()), now)
        member = job.client(0)
        job.begin(member)
        await until(lambda: member.cluster)
        assert member.cluster == job.state.cluster
        assert job.state.cluster is not None
        assert len(encode_cluster(1, job.state.cluster)) > 2 * 65536


# Refused tasks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"version": "0.0.9"},
            f"it runs tf4slurm 0.0.9, the launcher {__version__}; install one version for all tasks, on a file system "
            "that their hosts share",
        ),
        ({"rank": 7}, "rank 7 is not one of this job's 2 tasks"),
        ({"rank": -2}, "rank -2 is not one of this job's 2 tasks"),
        ({"rank": 0, "incarnation": "later"}, "rank 0 was taken by an earlier process, on n0"),
    ],
)
@in_event_loop
async def test_refused_task_gets_the_reason_and_does_not_retry(changes: dict[str, Any], reason: str) -> None:
    async with serving() as job, Relay(job.port) as relay:
        members = await job.start_children(2)
        late = job.client(1, port=relay.port, **changes)
        with pytest.raises(RendezvousClosedError) as caught:
            await late.run()
        assert caught.value.reason == reason
        assert f"127.0.0.1:{relay.port}" in str(caught.value)
        assert (late.desired, late.cluster) == (DesiredState(), None)
        assert relay.connections == 1
        await job.check_undisturbed(members)


@pytest.mark.parametrize("changes", [{"version": "0.0.9"}, {"rank": 7}, {"incarnation": "later"}])
@in_event_loop
async def test_refused_task_gets_no_message(changes: dict[str, Any]) -> None:
    async with serving() as job:
        await job.start_children(2)
        async with raw_client(job.port) as raw:
            await raw.send(make_registration(0, **changes))
            code, reason, received = await raw.end()
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert reason
            assert received == 0


@pytest.mark.parametrize("character", ["n", "\U0001f600", "\x00", '"', "%", "\ud800"])
@in_event_loop
async def test_long_reason_in_any_characters_arrives(character: str) -> None:
    """The reason is metadata, which is encoded and limited in length."""
    async with serving() as job:
        members = await job.start_children(2)
        for length in (2000, 60):
            with pytest.raises(RendezvousClosedError) as caught:
                await job.client(0, version=character * length).run()
            assert caught.value.reason.startswith("it runs tf4slurm ")
        await job.check_undisturbed(members)


@in_event_loop
async def test_task_with_an_unreadable_registration_is_refused_with_the_reason() -> None:
    """A task of another version, whose registration has other fields."""
    async with serving() as job:
        members = await job.start_children(2)
        late = job.client(0, port=job.port)
        late._make_registration = lambda _: ObservedState()  # type: ignore[assignment, return-value]
        with pytest.raises(RendezvousClosedError, match="Install the same version"):
            await late.run()
        await job.check_undisturbed(members)


@in_event_loop
async def test_wrong_token_is_retried_until_the_rendezvous_timeout() -> None:
    async with serving() as job:
        wrong = job.client(0, credentials=WRONG_TOKEN, rendezvous_timeout_seconds=3)
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="does not accept this job's token"):
            await wrong.run()
        assert 3 <= time.monotonic() - before < 60
        assert job.events == []
        await job.check_undisturbed(await job.start_children(2))


@in_event_loop
async def test_wrong_certificate_is_retried_until_the_rendezvous_timeout() -> None:
    async with serving() as job:
        wrong = job.client(0, credentials=OTHER_JOB.shared, rendezvous_timeout_seconds=3)
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await wrong.run()
        assert caught.value.address == str(job.address)
        assert 3 <= time.monotonic() - before < 60
        assert job.events == []
        await job.check_undisturbed(await job.start_children(2))


@in_event_loop
async def test_last_attempt_cut_short_does_not_hide_the_reasons_of_the_others() -> None:
    async with serving() as job:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            member = make_client(
                job.address, Address(*mute.getsockname()), credentials=WRONG_TOKEN, rendezvous_timeout_seconds=3
            )
            with pytest.raises(RendezvousConnectionError, match="does not accept this job's token") as caught:
                await member.run()
        assert caught.value.address == str(job.address)


@in_event_loop
async def test_task_does_not_register_at_a_service_with_another_certificate() -> None:
    async with serving() as job, serving(credentials=OTHER_JOB) as impostor:
        job.begin(make_client(impostor.address, job.address))
        await until(lambda: job.state.tasks.count("registered"))
        assert impostor.events == []


# Clients that send invalid data, while the members of the job continue


async def send_nothing(raw: RawClient) -> None:
    await raw.call.done_writing()


async def send_heartbeat(raw: RawClient) -> None:
    await raw.send(HEARTBEAT)


async def send_text(raw: RawClient) -> None:
    await raw.send(b"nonsense")


async def send_truncated_registration(raw: RawClient) -> None:
    await raw.send(encode(make_registration(0))[:40])


async def send_status(raw: RawClient) -> None:
    await raw.send(ObservedState("terminated"))


async def send_large_registration(raw: RawClient) -> None:
    await raw.send(make_registration(0, node="n" * MAX_STATE_BYTES))


async def send_huge_registration(raw: RawClient) -> None:
    await raw.send(make_registration(0, node="n" * 10_000_000))


OK, INVALID, EXHAUSTED = (
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


@pytest.mark.parametrize(
    ("send", "code"),
    [
        (send_nothing, OK),
        (send_heartbeat, INVALID),
        (send_text, INVALID),
        (send_truncated_registration, INVALID),
        (send_status, INVALID),
        (send_large_registration, EXHAUSTED),
        (send_huge_registration, EXHAUSTED),
    ],
)
@in_event_loop
async def test_client_whose_first_message_is_no_registration_is_refused_and_members_continue(
    send: Callable[[RawClient], Coroutine[Any, Any, None]], code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as job:
        members = await job.start_children(2)
        async with raw_client(job.port) as raw:
            await send(raw)
            found, detail, received = await raw.end()
            assert found is code
            assert bool(detail) == (code is not OK)
            assert received == 0
        await job.check_undisturbed(members)
    assert errors_in(caplog) == []


@pytest.mark.parametrize(
    "payload",
    [
        encode(DesiredState(terminate=True)),
        encode(make_registration(0)),
        encode(ObservedState("terminated"))[:12],
        b"nonsense",
        b'["ObservedState",{"state":"dead"}]',
        b'["ObservedState",{"start_count":"one"}]',
        b'["ObservedState",{"more":1}]',
        b"[" * 50_000,
        bytes(100),
    ],
    ids=["order", "registration", "truncated", "text", "state", "type", "field", "nested", "zeros"],
)
@in_event_loop
async def test_task_whose_message_is_rejected_is_lost_at_once_and_others_are_notified(
    payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(heartbeat_timeout_seconds=100) as job:
        ps = job.client(1)
        job.begin(ps)
        async with raw_client(job.port) as raw:
            await raw.send(make_registration(0))
            await until(lambda: ps.cluster)
            before = time.monotonic()
            await raw.send(payload)
            code, detail, _ = await raw.end()
            assert code is INVALID
            assert "is not a control message of this version of tf4slurm" in detail
        await until(lambda: ps.desired.terminate)
        assert time.monotonic() - before < 60  # and not after the heartbeat timeout
        assert ("lost", "chief/0") in job.events
        assert job.state.outcome is not None
        assert job.state.outcome.cause == Task("chief", 0)
        assert "its message was not accepted: " in job.state.outcome.reason
        assert "is not a control message of this version of tf4slurm" in job.state.outcome.reason
        assert ps.desired.terminate_reason == job.state.outcome.reason
        async with raw_client(job.port) as raw:  # it stays lost
            await raw.send(make_registration(0))
            code, detail, _ = await raw.end()
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "rank 0 is lost: its message was not accepted: " in detail
            assert "is not a control message of this version of tf4slurm" in detail
    assert errors_in(caplog) == []


@in_event_loop
async def test_client_whose_every_state_is_rejected_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(heartbeat_timeout_seconds=100) as job:
        chief, ps = job.client(0), job.client(1)
        job.begin(ps)
        before = time.monotonic()
        monkeypatch.setattr(
            client, "encode", lambda message, *before: encode(message, *before).replace(b'"detail"', b'"detial"')
        )
        chief.update(detail="a field that the service does not know")
        with pytest.raises(RendezvousClosedError, match="detial"):
            await job.begin(chief)
        assert time.monotonic() - before < 60
        await until(lambda: ps.desired.terminate)
        assert ("lost", "chief/0") in job.events
        assert "detial" in ps.desired.terminate_reason


@in_event_loop
async def test_repeated_status_has_no_effect() -> None:
    async with serving() as job, raw_client(job.port) as raw:
        await raw.send(make_registration(0))
        await raw.send(ObservedState("running", start_count=1))
        await raw.send(ObservedState("running", start_count=1))
        await raw.send(ObservedState("running", start_count=2))
        await until(lambda: job.state.tasks[0].observed.start_count == 2)
        assert job.events.count(("started", "chief/0")) == 2


@pytest.mark.parametrize("size", [MAX_STATE_BYTES + 1, 10_000_000])
@in_event_loop
async def test_message_above_the_limit_ends_the_call_and_its_task_may_reconnect(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as job:
        ps = job.client(1)
        job.begin(ps)
        async with raw_client(job.port) as raw:
            await raw.send(make_registration(0))
            await until(lambda: ps.cluster)
            short = len(encode(ObservedState("terminated", detail="x")))
            await raw.send(ObservedState("terminated", detail="x" * (size - short + 1)))
            code, detail, _ = await raw.end()
            assert code is EXHAUSTED
            assert str(MAX_STATE_BYTES) in detail
            await until(lambda: ("disconnected", "chief/0") in job.events)
            assert job.state.tasks[0].observed.state == "registered"
        again = job.client(0)
        job.begin(again)
        await until(lambda: again.cluster)
        assert ("reconnected", "chief/0") in job.events
        assert ps.desired.terminate is False
    assert errors_in(caplog) == []


@in_event_loop
async def test_message_of_the_largest_size_is_accepted() -> None:
    async with serving() as job, raw_client(job.port) as raw:
        await raw.send(make_registration(0))
        short = len(encode(ObservedState(detail="x")))
        await raw.send(ObservedState(detail="x" * (MAX_STATE_BYTES - short + 1)))
        await until(lambda: job.state.tasks[0].observed.detail)


@in_event_loop
async def test_late_message_of_a_replaced_connection_is_ignored() -> None:
    async with serving() as job, raw_client(job.port) as old, raw_client(job.port) as new:
        for connection, event in ((old, "registered"), (new, "reconnected")):
            await connection.send(make_registration(0))
            await until(lambda event=event: (event, "chief/0") in job.events)  # type: ignore[misc]
        await new.send(ObservedState("running", start_count=1))
        await until(lambda: job.state.tasks[0].observed.state == "running")
        await old.send(ObservedState("exited", start_count=1, returncode=9))
        await asyncio.wait_for(old.end(), 60)  # the service has ended it
        assert job.state.tasks[0].is_connected
        assert job.state.tasks[0].observed.state == "running"


# Clients that do not complete TLS


def client_hello() -> bytes:
    """Return the first bytes that a TLS client sends."""
    context = ssl.create_default_context(cadata=SHARED.certificate)
    context.set_alpn_protocols(["h2"])
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=TLS_NAME)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
FIRST_BYTES = {
    "nothing": b"",
    "half of a TLS registration": client_hello()[: len(client_hello()) // 2],
    "a TLS registration": client_hello(),
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "plain-text HTTP/2": HTTP2_PREFACE,
    "noise": random.Random(7).randbytes(1000),
    "a TLS record of no registration": b"\x16\x03\x01\x00\x10" + bytes(16),
}


@pytest.mark.parametrize("first", FIRST_BYTES.values(), ids=FIRST_BYTES)
@pytest.mark.parametrize("closes", [True, False], ids=["and closes", "and waits"])
@in_event_loop
async def test_connection_without_tls_is_closed_and_members_continue(
    first: bytes, closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as job:
        members = await job.start_children(2)
        reader, writer = await asyncio.open_connection("127.0.0.1", job.port)
        writer.write(first)
        await writer.drain()
        if first == FIRST_BYTES["a TLS registration"]:
            assert await asyncio.wait_for(reader.read(1), 60) == b"\x16"  # the handshake is under way
        if not closes:
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(-1), 60)  # until the service closes the connection
        writer.close()
        await job.check_undisturbed(members)
    assert errors_in(caplog) == []


@in_event_loop
async def test_plain_text_grpc_client_gets_unavailable_and_members_continue() -> None:
    async with serving() as job:
        members = await job.start_children(2)
        async with grpc.aio.insecure_channel(str(job.address), options=(("grpc.enable_http_proxy", 0),)) as channel:
            call: _Call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=((TOKEN_METADATA, SHARED.token),))
            raw = RawClient(call)
            await raw.send(make_registration(0))
            code, _, _ = await raw.end()
            assert code is grpc.StatusCode.UNAVAILABLE
        await job.check_undisturbed(members)


# Connections that break or become unresponsive


@in_event_loop
async def test_lost_connection_is_restored_without_losing_state() -> None:
    async with serving() as job, Relay(job.port) as relay:
        chief, ps = job.client(0, port=relay.port), job.client(1)
        job.begin(chief)
        job.begin(ps)
        await until(lambda: chief.cluster)
        relay.cut()
        chief.update(state="ready")
        ps.update(state="ready")
        await until(lambda: chief.desired.start_count == 1)
        assert relay.connections >= 2
        chief.update(state="running", start_count=1)
        await until(lambda: job.state.tasks.count("running") == 1)
        relay.cut()
        await until(lambda: job.events.count(("disconnected", "chief/0")) == 2)
        chief.update(state="exited", start_count=1, returncode=0)
        await until(lambda: chief.desired.terminate)
        assert job.state.outcome is not None
        assert job.state.outcome.exit_code == 0
        assert job.events.count(("reconnected", "chief/0")) == 2
        assert job.events.count(("started", "chief/0")) == 1
        assert ("lost", "chief/0") not in job.events


@pytest.mark.parametrize("tail", [("x" * 250,) * 20, ("x" * 500,) * 20, ("\U0001f600" * 500,) * 20])
@in_event_loop
async def test_long_status_is_sent_on_the_next_connection(tail: tuple[str, ...]) -> None:
    """The heartbeat follows the registration at once, before the service has registered the task."""
    async with serving() as job, Relay(job.port) as relay:
        chief, ps = job.client(0, port=relay.port), job.client(1)
        job.begin(chief)
        job.begin(ps)
        await until(lambda: chief.cluster and ps.cluster)
        relay.cut()
        chief.update(state="exited", start_count=1, returncode=3, tail=tail)
        await until(lambda: job.state.tasks[0].observed.state == "exited")
        assert job.events.count(("disconnected", "chief/0")) == 1


@in_event_loop
async def test_task_that_reconnects_gets_a_heartbeat_request_at_once() -> None:
    """Little of the heartbeat timeout may be left."""
    slow = JobSpec(heartbeat_interval_seconds=30, heartbeat_timeout_seconds=100)
    state = JobState([Task("worker", 0), Task("worker", 1)], slow, time.monotonic(), lambda *_, **__: None)
    service = ControlService(state, CREDENTIALS)
    port = await service.start()
    for is_back in (False, True):
        async with raw_client(port) as task:
            await task.send(make_registration(0))
            if is_back:
                assert await asyncio.wait_for(task.call.read(), 60) == HEARTBEAT
            else:
                await until(lambda: state.tasks[0].is_connected)
        await until(lambda: not state.tasks[0].is_connected)
    await service.close()


@in_event_loop
async def test_task_that_has_just_exchanged_messages_gets_no_heartbeat_request() -> None:
    slow = JobSpec(heartbeat_interval_seconds=30, heartbeat_timeout_seconds=100)
    state = JobState([Task("worker", 0)], slow, time.monotonic(), lambda *_, **__: None)
    service = ControlService(state, CREDENTIALS)
    async with raw_client(await service.start()) as task:
        await task.send(make_registration(0))
        assert is_encoded_cluster(await asyncio.wait_for(task.call.read(), 60))
        connection = service._connections[0]
        await until(lambda: connection._sent_at)
        for recent_seconds, expected in ((0, HEARTBEAT), (60, None)):
            connection.request_heartbeat(recent_seconds)
            reading = asyncio.create_task(task.call.read())
            await asyncio.wait({reading}, timeout=60 if expected is not None else 0.2)
            assert (reading.result() if reading.done() else None) == expected
        await cancel(reading)
    await service.close()


@in_event_loop
async def test_pause_of_the_launcher_breaks_no_barrier() -> None:
    """The pause is longer than the barrier's timeout, in which the second task would have arrived."""
    async with serving() as job:
        members = await job.start_children(2)
        members[0].update_script(ScriptState(barrier=BarrierArrival("loaded", "first", 2)))
        await until(lambda: job.state.tasks[0].observed.script.barrier)
        time.sleep(3)  # stops the event loop, as SIGSTOP does
        await asyncio.sleep(2 * INTERVAL)
        members[1].update_script(ScriptState(barrier=BarrierArrival("loaded", "second", 2)))
        await until(lambda: all(member.desired.released_barrier for member in members))
        assert [member.desired.barrier_error for member in members] == ["", ""]
        await job.check_undisturbed(members)


@in_event_loop
async def test_task_that_reconnects_but_sends_nothing_is_lost_after_the_heartbeat_timeout() -> None:
    async with serving(heartbeat_timeout_seconds=SHORT_TIMEOUT) as job:
        ps = job.client(1)
        job.begin(ps)
        before, reconnections = time.monotonic(), 0
        while job.state.outcome is None:
            async with raw_client(job.port) as raw:
                await raw.send(make_registration(0))
                await until(lambda: job.state.tasks[0].is_connected or job.state.outcome)
            await until(lambda: not job.state.tasks[0].is_connected or job.state.outcome)
            reconnections += 1
            assert time.monotonic() - before < 60
        assert time.monotonic() - before >= SHORT_TIMEOUT
        assert reconnections > 2
        assert job.state.outcome.cause == Task("chief", 0)
        assert f"it sent no heartbeat for {SHORT_TIMEOUT:g} s" in job.state.outcome.reason
        await until(lambda: ps.desired.terminate)
        assert ps.desired.terminate_reason == job.state.outcome.reason


@in_event_loop
async def test_accepted_registration_is_not_made_again() -> None:
    async with serving() as job, Relay(job.port) as relay:
        asked: list[Address] = []

        def registration(address: Address) -> Registration:
            asked.append(address)
            return make_registration(0)

        address = Address("127.0.0.1", relay.port)
        member = make_client(address, registration=registration)
        job.begin(member)
        await until(lambda: is_registered(member))
        relay.cut()
        await until(lambda: ("reconnected", "chief/0") in job.events)
        assert asked == [address]


@in_event_loop
async def test_registration_is_made_for_each_address_until_one_is_accepted() -> None:
    async with serving() as job, serving(credentials=OTHER_JOB) as other, Relay(job.port) as relay:
        asked: list[Address] = []

        def registration(address: Address) -> Registration:
            asked.append(address)
            return make_registration(0, port=address.port)

        right = Address("127.0.0.1", relay.port)
        member = make_client(other.address, right, registration=registration)
        job.begin(member)
        await until(lambda: is_registered(member))
        assert job.state.tasks[0].address == Address("10.0.0.0", relay.port)
        relay.cut()
        await until(lambda: ("reconnected", "chief/0") in job.events)
        assert asked == [other.address, right]
        assert other.events == []


@in_event_loop
async def test_unresponsive_service_is_lost_after_the_heartbeat_timeout() -> None:
    async with serving(heartbeat_timeout_seconds=SHORT_TIMEOUT) as job, Relay(job.port) as relay:
        chief, ps = job.client(0, port=relay.port), job.client(1)
        before = time.monotonic()
        running = job.begin(chief)
        job.begin(ps)
        await until(lambda: chief.cluster)
        relay.pause()
        paused = time.monotonic()
        with pytest.raises(RendezvousConnectionError) as caught:
            await running
        assert before + SHORT_TIMEOUT <= time.monotonic() < paused + SHORT_TIMEOUT + 30
        assert caught.value.address == f"127.0.0.1:{relay.port}"
        assert "no address is known" not in str(caught.value)
        await until(lambda: ("lost", "chief/0") in job.events)
        await until(lambda: ps.desired.terminate)


@in_event_loop
async def test_pause_while_a_task_reconnects_does_not_end_it() -> None:
    """The whole job is suspended for longer than the heartbeat timeout while its connection is broken."""
    async with serving("worker", SHORT_TIMEOUT) as job, Relay(job.port) as relay:
        member = job.client(0, port=relay.port)
        running = job.begin(member)
        await until(lambda: is_registered(member))
        relay.pause()
        relay.cut()
        await asyncio.sleep(2 * INTERVAL)
        time.sleep(SHORT_TIMEOUT + 1)  # stops the event loop, as SIGSTOP does
        relay.resume()
        await until(lambda: ("reconnected", "worker/0") in job.events)
        assert not running.done()


@in_event_loop
async def test_unresponsive_service_is_not_tried_at_its_other_addresses() -> None:
    async with serving(heartbeat_timeout_seconds=2) as job, Relay(job.port) as relay, Relay(job.port) as other:
        other.pause()
        member = make_client(
            Address("127.0.0.1", relay.port), Address("127.0.0.1", other.port), heartbeat_timeout_seconds=2
        )
        running = job.begin(member)
        await until(lambda: is_registered(member))
        relay.pause()
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="it sent nothing for the heartbeat timeout"):
            await running
        assert time.monotonic() - before < 30
        assert other.connections == 0


@in_event_loop
async def test_closed_service_is_lost_after_the_heartbeat_timeout() -> None:
    async with serving(heartbeat_timeout_seconds=SHORT_TIMEOUT) as job:
        chief = job.client(0)
        running = job.begin(chief)
        await until(lambda: is_registered(chief))
        await job.service.close()
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="The launcher has ended or was not started"):
            await running
        assert time.monotonic() - before < SHORT_TIMEOUT + 30


@in_event_loop
async def test_unresponsive_task_is_lost_after_the_heartbeat_timeout() -> None:
    async with serving(heartbeat_timeout_seconds=SHORT_TIMEOUT) as job, Relay(job.port) as relay:
        chief, ps = job.client(0), job.client(1, port=relay.port)
        job.begin(chief)
        job.begin(ps)
        await until(lambda: chief.cluster and ps.cluster)
        relay.pause()
        await until(lambda: chief.desired.terminate)
        assert job.state.outcome is not None
        assert job.state.outcome.cause == Task("ps", 0)


# Finding the service


@pytest.mark.parametrize("find", ["no listener", "no address"])
@in_event_loop
async def test_run_without_a_service_ends_at_the_rendezvous_timeout(find: str) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    addresses = [Address("127.0.0.1", port)] if find == "no listener" else []
    member = make_client(*addresses, rendezvous_timeout_seconds=0.2)
    before = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="The launcher has ended or was not started"):
        await member.run()
    assert 0.2 <= time.monotonic() - before < 30


@in_event_loop
async def test_address_that_accepts_and_sends_nothing_is_reported_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        member = make_client(Address(*mute.getsockname()), rendezvous_timeout_seconds=0.3)
        with pytest.raises(RendezvousConnectionError, match=r"\(it does not answer\)"):
            await member.run()


@in_event_loop
async def test_service_that_starts_later_is_found() -> None:
    async with serving() as job:
        known: list[Address] = []
        member = ControlClient(lambda: ControlEndpoint(tuple(known), SHARED), lambda _: make_registration(0), JobSpec())
        job.begin(member)
        await asyncio.sleep(0)
        known.append(job.address)
        await until(lambda: job.state.tasks.count("registered"))


@in_event_loop
async def test_task_registers_at_the_address_that_answers_after_one_that_does_not() -> None:
    async with serving() as job:
        job.begin(make_client(Address("127.0.0.1", 1), job.address))
        await until(lambda: job.state.tasks.count("registered"))


@in_event_loop
async def test_task_reconnects_first_at_the_address_that_answered() -> None:
    """A lost connection has 1.5 s, and each try has 3 s."""
    async with serving() as job, Relay(job.port) as relay:
        tries: list[asyncio.StreamWriter] = []
        mute = await asyncio.start_server(lambda _, writer: tries.append(writer), "127.0.0.1", 0)
        member = make_client(Address(*mute.sockets[0].getsockname()), Address("127.0.0.1", relay.port))
        member._connect_seconds = 2
        job.begin(member)
        await until(lambda: is_registered(member))
        relay.cut()
        await until(lambda: ("reconnected", "chief/0") in job.events)
        assert len(tries) == 1
        tries[0].close()
        mute.close()


@contextlib.asynccontextmanager
async def grpc_server(
    handle: Callable[[Any], Coroutine[Any, Any, None]], credentials: ServiceCredentials | None = CREDENTIALS
) -> AsyncIterator[Address]:
    """Run another gRPC server in place of the control service: with these credentials, or without TLS."""

    async def handler(_: object, context: Any) -> None:
        await handle(context)

    server = grpc.aio.server()
    handlers: Any = {METHOD: grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (credentials.private_key, credentials.shared.certificate.encode())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("messages", [0, 1, 2])
@in_event_loop
async def test_service_that_ends_the_call_early_counts_as_unreachable(messages: int) -> None:
    async def handle(context: Any) -> None:
        for _ in range(messages):
            await context.read()

    async with grpc_server(handle) as address:
        with pytest.raises(RendezvousConnectionError):
            await make_client(address, rendezvous_timeout_seconds=0.4).run()


@in_event_loop
async def test_service_that_sends_foreign_messages_counts_as_unreachable() -> None:
    async def handle(context: Any) -> None:
        await context.read()
        await context.write(b'["Bogus",{}]')
        await context.read()

    async with grpc_server(handle) as address:
        member = make_client(address, heartbeat_timeout_seconds=5, rendezvous_timeout_seconds=3)
        with pytest.raises(RendezvousConnectionError, match="is not a control message of this version"):
            await asyncio.wait_for(member.run(), 60)


@pytest.mark.parametrize(
    ("foreign_messages", "then", "reason"),
    [
        (1, "silence", "is not a control message of this version"),
        (0, "silence", "it sent nothing until the start timeout"),
        (1, "internal error", "is not a control message of this version"),
        (0, "internal error", "INTERNAL: Internal error from Core"),
    ],
)
@in_event_loop
async def test_call_that_gives_no_reason_does_not_replace_an_earlier_reason(
    foreign_messages: int, then: str, reason: str
) -> None:
    calls = itertools.count(1)

    async def handle(context: Any) -> None:
        await context.read()
        if next(calls) <= foreign_messages:
            await context.write(b'["Bogus",{}]')
        elif then == "silence":
            await context.send_initial_metadata(())
        else:
            await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
        await context.read()
        await context.read()

    async with grpc_server(handle) as address:
        member = make_client(address, heartbeat_timeout_seconds=60, rendezvous_timeout_seconds=3)
        with pytest.raises(RendezvousConnectionError, match=reason):
            await asyncio.wait_for(member.run(), 60)
    assert next(calls) > foreign_messages + 1


@in_event_loop
async def test_task_that_is_not_registered_yet_waits_until_the_rendezvous_timeout() -> None:
    """A service registers many tasks one after the other: until then, the heartbeat timeout does not apply."""
    is_registered = asyncio.Event()

    async def handle(context: Any) -> None:
        await context.read()
        await is_registered.wait()
        await context.send_initial_metadata(())
        await context.read()

    async with grpc_server(handle) as address:
        member = make_client(address, heartbeat_timeout_seconds=0.3)
        running = asyncio.create_task(member.run())
        waiting = asyncio.create_task(member.wait_for_change())
        await asyncio.wait({running, waiting}, timeout=1)
        assert not running.done()
        assert not waiting.done()
        is_registered.set()
        await asyncio.wait_for(waiting, 60)
        await cancel(running)


@in_event_loop
async def test_cluster_is_sent_before_any_desired_state() -> None:
    async with serving("worker") as job, raw_client(job.port) as raw:
        await raw.send(make_registration(0))
        assert isinstance(await raw.receive(Cluster), Cluster)
        await raw.send(ObservedState("ready"))
        assert await raw.receive(DesiredState) == DesiredState(start_count=1)


class FakeContext:
    """The service's end of a call; a test decides when each await returns."""

    def __init__(self, registration: Registration) -> None:
        self.messages: asyncio.Queue[object] = asyncio.Queue()
        self.messages.put_nowait(encode(registration))
        self.may_confirm = asyncio.Event()

    async def read(self) -> object:
        return await self.messages.get()

    async def write(self, _: bytes) -> None:
        pass

    async def send_initial_metadata(self, _: object) -> None:
        await self.may_confirm.wait()

    async def abort(self, *_: object) -> None:
        raise grpc.aio.AbortError


@in_event_loop
async def test_end_of_a_replaced_call_is_not_taken_for_the_end_of_the_new_one() -> None:
    """Also when the old call ends before the service has confirmed the new one."""
    async with serving() as job:
        contexts: list[Any] = [FakeContext(make_registration(0)) for _ in range(2)]
        contexts[0].may_confirm.set()
        calls = []
        for context, event in zip(contexts, ("registered", "reconnected"), strict=True):
            calls.append(asyncio.create_task(job.service._serve(context, context)))
            await until(lambda event=event: (event, "chief/0") in job.events)  # type: ignore[misc]
        contexts[0].messages.put_nowait(grpc.aio.EOF)
        await asyncio.wait({calls[0]})
        contexts[1].may_confirm.set()
        assert job.state.tasks[0].is_connected
        calls[1].cancel()
        await asyncio.wait(calls)
        assert not job.state.tasks[0].is_connected
        assert [kind for kind, _ in job.events].count("disconnected") == 2
        calls[0].exception()


@in_event_loop
async def test_call_that_ends_before_its_confirmation_is_a_disconnection() -> None:
    async with serving() as job:
        context: Any = FakeContext(make_registration(0))
        call = asyncio.create_task(job.service._serve(context, context))
        await until(lambda: ("registered", "chief/0") in job.events)
        call.cancel()
        await asyncio.wait({call})
        assert ("disconnected", "chief/0") in job.events


@in_event_loop
async def test_error_of_the_service_in_a_message_is_the_loss_of_its_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the task would reconnect for ever and fail at the same message."""
    async with serving() as job:
        members = await job.start_children(2)

        def fail(*_: object) -> None:
            raise KeyError("no such key")

        monkeypatch.setattr(job.service.receiver, "on_observed_state", fail)
        members[1].update(state="exited", returncode=0)
        await until(lambda: members[0].desired.terminate)
        assert "ps/0 on n1 is lost: its message was not accepted: 'no such key'" in members[0].desired.terminate_reason
    assert "a message could not be handled" in caplog.text


# The port of the service


def service_with(spec: JobSpec) -> ControlService:
    return ControlService(JobState([Task("worker", 0)], spec, 0.0, lambda *_, **__: None), CREDENTIALS)


@in_event_loop
async def test_service_listens_on_the_first_free_one_of_its_ports() -> None:
    with hold_free_ports(2) as (busy, free):
        free.close()
        service = service_with(JobSpec(ports=(free.port, busy.port)))  # the last one is tried first
        assert await service.start() == free.port
        await service.close()


@in_event_loop
async def test_service_without_a_free_port_is_refused() -> None:
    with hold_free_ports(1) as (busy,):
        service = service_with(JobSpec(control_port=busy.port))
        with pytest.raises(PlacementError, match=f"{busy.port} is free on this host"):
            await service.start("127.0.0.1")
        await service.close()


@contextlib.contextmanager
def hold_free_ports(number: int) -> Iterator[list[HeldPort]]:
    held = [hold_port() for _ in range(number)]
    try:
        yield held
    finally:
        for each in held:
            each.close()


@pytest.mark.parametrize(("interval", "seconds"), [(0.05, 0.05), (1, 0.75), (2, 0.8), (10, 4)])
def test_a_pause_leaves_time_to_reconnect(interval: float, seconds: float) -> None:
    spec = JobSpec(heartbeat_interval_seconds=interval, heartbeat_timeout_seconds=50)
    assert max_gap_seconds(spec) == pytest.approx(seconds)
