"""The control service and real memberships, talking gRPC over 127.0.0.1 in one event loop; and strangers to both."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from tf4slurm import __version__
from tf4slurm.cluster import Address, Task
from tf4slurm.control import auth, client
from tf4slurm.control.client import Membership
from tf4slurm.control.limits import Limits
from tf4slurm.control.messages import (
    METHOD,
    NOTHING_NEW,
    SERVICE,
    Hello,
    Map,
    Message,
    Order,
    Refusal,
    Report,
    Status,
    Usage,
    decode,
    encode,
)
from tf4slurm.control.packed_map import unpack_map
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState, Phase
from tf4slurm.errors import AuthenticationError, RendezvousClosedError, RendezvousConnectionError

SECRET = "the secret of this job"
BEAT = 0.05
DEAD, SOON_DEAD = 8.0, 2.0
"""Seconds of silence that are death: more than a busy machine takes, or as much as a test may wait."""
PAIR = "chief ps"
_Call = Any  # grpc.aio.StreamStreamCall: grpcio ships no types


def live(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story in a loop of its own; an error that nobody would have seen fails it."""
    unseen: list[str] = []

    def on_error(_: object, context: dict[str, Any]) -> None:
        if "PollerCompletionQueue" not in context["message"]:  # grpc's own, when an earlier test's loop is closed
            unseen.append(str(context))

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(on_error)
        await asyncio.wait_for(story(), 20)

    asyncio.run(run())
    gc.collect()  # tasks whose errors nobody has asked for tell so when they are collected
    assert unseen == []


async def until(condition: Callable[[], object], timeout_seconds: float = 8) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.005)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel until it works: before Python 3.12, wait_for loses a cancellation that comes with the result."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)


def make_hello(rank: int, /, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "rank": rank,
        "node": f"n{rank}",
        "host": f"10.0.0.{rank}",
        "port": 4000 + rank,
        "incarnation": f"incarnation-{rank}",
        "version": __version__,
    }
    return Hello(**{**fields, **changes})


class Job:
    """A control service that runs, and the memberships of its tasks."""

    def __init__(self, roles: str, dead_after_seconds: float) -> None:
        limits = Limits(
            start_timeout_seconds=20,
            beat_seconds=BEAT,
            dead_after_seconds=dead_after_seconds,
            reconnect_seconds=dead_after_seconds / 2,
            leave_seconds=0.5,
        )
        counts: Counter[str] = Counter()
        tasks = []
        for task_type in roles.split():
            tasks.append(Task(task_type, counts[task_type]))
            counts[task_type] += 1
        self.events: list[tuple[str, str | None]] = []
        self.state = JobState(tasks, limits, time.monotonic(), lambda kind, task, _: self.events.append((kind, task)))
        self.service = ControlService(self.state, SECRET)
        self.port = 0
        self._running: list[asyncio.Task[None]] = []

    def membership(
        self, rank: int, /, *, port: int | None = None, secret: str = SECRET, join_seconds: float = 10, **changes: Any
    ) -> Membership:
        """Return a membership that has not begun; `changes` are what its hello says differently."""
        address = Address("127.0.0.1", port or self.port)
        return Membership(
            lambda: ([address], secret),
            lambda _: make_hello(rank, **changes),
            dead_after_seconds=self.state.limits.dead_after_seconds,
            join_seconds=join_seconds,
        )

    def begin(self, membership: Membership) -> asyncio.Task[None]:
        running = asyncio.create_task(membership.run())
        self._running.append(running)
        return running

    async def form(self, ranks: int) -> list[Membership]:
        """Bring this many tasks up to the point where their children run."""
        members = [self.membership(rank) for rank in range(ranks)]
        for member in members:
            self.begin(member)
        await until(lambda: all(member.map for member in members))
        for member in members:
            member.report(state="proved")
        await until(lambda: all(member.order.starts == 1 for member in members))
        for member in members:
            member.report(state="running", starts=1)
        await until(lambda: self.state.count("running") == ranks)
        return members

    async def close(self) -> None:
        await cancel(*self._running)
        await self.service.close()


@contextlib.asynccontextmanager
async def serving(roles: str = PAIR, dead_after_seconds: float = DEAD) -> AsyncIterator[Job]:
    job = Job(roles, dead_after_seconds)
    job.port = await job.service.start()
    try:
        yield job
    finally:
        await job.close()


class Stranger:
    """A raw connection to a service, on which anything can be said."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.outgoing: auth.Seal | None = None
        self.incoming: auth.Seal | None = None

    async def shake_hands(self, secret: str = SECRET) -> None:
        nonce = auth.new_nonce()
        await self.call.write(nonce)
        answer = await self.call.read()
        key = auth.connection_key(secret, nonce, answer[auth.MAC_BYTES :])
        self.outgoing, self.incoming = auth.Seal(key, auth.TO_SERVICE), auth.Seal(key, auth.TO_TASK)
        with contextlib.suppress(AuthenticationError):  # where the secret is another
            self.incoming.open(answer)

    async def say(self, message: Message) -> bytes:
        """Say a sealed message; return what was sent."""
        assert self.outgoing is not None
        sealed = self.outgoing.seal(encode(message))
        await self.call.write(sealed)
        return sealed

    async def hear(self, kind: type[Any]) -> Any:
        """Return the next message, which must be of this kind; that the service asks is none."""
        assert self.incoming is not None
        payload = NOTHING_NEW
        while payload == NOTHING_NEW:
            payload = self.incoming.open(await self.call.read())
        return unpack_map(payload) if kind is Map else decode(payload, kind)

    async def end(self) -> tuple[grpc.StatusCode, int]:
        """Return how the service ended the connection, and how many messages it said before."""
        said = 0
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(await self.call.read(), bytes):
                said += 1
        return await self.call.code(), said


@contextlib.asynccontextmanager
async def stranger(port: int) -> AsyncIterator[Stranger]:
    options = (
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, as each task has
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call: _Call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        yield Stranger(call)
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


# The life of a job


def test_a_whole_life() -> None:
    async def story() -> None:
        async with serving() as job:
            chief, ps = job.membership(0), job.membership(1)
            running = [job.begin(chief), job.begin(ps)]
            await until(lambda: chief.map and ps.map)
            assert chief.map == ps.map == job.state.map
            assert chief.map is not None
            assert chief.map.to_cluster().to_dictionary() == {"chief": ["10.0.0.0:4000"], "ps": ["10.0.0.1:4001"]}
            assert chief.order.starts == 0
            chief.report(state="proved")
            ps.report(state="proved")
            await until(lambda: chief.order.starts == ps.order.starts == 1)
            chief.report(state="running", starts=1, process_id=11)
            ps.report(state="running", starts=1, process_id=12)
            await until(lambda: job.state.count("running") == 2)
            chief.report(state="exited", starts=1, process_id=11, returncode=0)
            await until(lambda: chief.order.leave and ps.order.leave)
            assert ps.order.leave_seconds == 0.5
            chief.report(state="left", starts=1, returncode=0)
            ps.report(state="left", starts=1)
            await job.service.wait_for_end()
            await asyncio.gather(*running)
            assert job.state.phase is Phase.ENDED
            assert job.state.verdict is not None
            assert job.state.verdict.exit_code == 0
            kinds = Counter(kind for kind, _ in job.events)
            assert (kinds["joined"], kinds["started"], kinds["left"]) == (2, 2, 2)
            assert not kinds.keys() & {"lost", "disconnected", "reconnected", "stragglers"}

    live(story)


def test_a_change_is_told_at_once_and_not_at_the_next_beat() -> None:
    async def story() -> None:
        slow = Limits(beat_seconds=30, dead_after_seconds=100, grace_seconds=0)
        state = JobState([Task("worker", 0)], slow, time.monotonic(), lambda *_: None)
        service = ControlService(state, SECRET)
        address = Address("127.0.0.1", await service.start())
        member = Membership(
            lambda: ([address], SECRET),
            lambda _: make_hello(0),
            dead_after_seconds=100,
            join_seconds=10,
        )
        running = asyncio.create_task(member.run())
        before = time.monotonic()
        await until(lambda: member.map)
        member.report(state="proved")
        await until(lambda: member.order.starts == 1)
        member.report(state="running", starts=1)
        await until(lambda: state.count("running") == 1)
        state.on_stop(signal.SIGTERM, "the launcher got SIGTERM", time.monotonic())
        service.publish()
        await until(lambda: member.order.leave)
        member.report(state="left", starts=1)
        await asyncio.gather(running, service.wait_for_end())
        assert time.monotonic() - before < 5
        await service.close()

    live(story)


def test_who_has_left_is_not_refused_when_the_launcher_was_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_GOODBYE_SECONDS", 0)  # so the launcher's last word comes later than that

    async def story() -> None:
        async with serving("worker") as job:
            member = job.membership(0)
            running = job.begin(member)
            await until(lambda: member.map)
            job.state.on_stop(signal.SIGTERM, "the launcher got SIGTERM", time.monotonic())
            job.service.publish()
            await until(lambda: member.order.leave)
            member.report(state="left")
            await running
            assert ("left", "worker/0") in job.events

    live(story)


def test_waiting_for_a_change_ends_with_the_next_order() -> None:
    async def story() -> None:
        async with serving("worker") as job:
            member = job.membership(0)
            job.begin(member)
            while member.map is None:
                await member.wait_for_change()
            waiting = asyncio.create_task(member.wait_for_change())
            await asyncio.sleep(4 * BEAT)  # beats are no change
            assert not waiting.done()
            member.report(state="proved")
            await waiting
            assert member.order.starts == 1

    live(story)


def test_members_that_only_beat_stay_alive() -> None:
    async def story() -> None:
        async with serving(dead_after_seconds=SOON_DEAD) as job:
            await job.form(2)
            end = time.monotonic() + 1.5 * SOON_DEAD
            await until(lambda: time.monotonic() > end)
            assert job.state.phase is Phase.TRAINING

    live(story)


def test_who_has_no_news_lives_by_the_shortest_answer() -> None:
    async def story() -> None:
        async with serving("worker worker", dead_after_seconds=SOON_DEAD) as job, stranger(job.port) as raw:
            silent = job.membership(1)
            job.begin(silent)
            await raw.shake_hands()
            await raw.say(make_hello(0))
            assert raw.incoming is not None
            assert raw.outgoing is not None
            end = time.monotonic() + 2 * SOON_DEAD
            while time.monotonic() < end:
                if raw.incoming.open(await raw.call.read()) == NOTHING_NEW:
                    await raw.call.write(raw.outgoing.seal(NOTHING_NEW))
            assert job.state.verdict is None
            while raw.incoming.open(await raw.call.read()) == NOTHING_NEW:
                pass  # it asks until it has given up
            assert job.state.verdict is not None
            assert job.state.verdict.cause == Task("worker", 0)

    live(story)


def test_what_changes_all_the_time_is_told_when_the_service_asks() -> None:
    async def story() -> None:
        async with serving("worker") as job:
            (member,) = await job.form(1)
            for number in (1, 2):
                member.mention(Usage(memory_bytes=number))
                member.note(Report(step=number))
                await until(lambda number=number: job.state.records[0].status.report.step == number)  # type: ignore[misc]
                assert job.state.records[0].status == member.status

    live(story)


def test_the_longest_tail_of_a_failed_child_arrives() -> None:
    async def story() -> None:
        async with serving() as job:
            chief, _ = await job.form(2)
            tail = ("\U0001f600" * 500,) * 20  # as the agent cuts it, in the longest characters
            chief.report(state="exited", starts=1, returncode=3, tail=tail)
            await until(lambda: job.state.verdict, timeout_seconds=3)
            assert job.state.verdict is not None
            assert job.state.verdict.exit_code == 3

    live(story)


def test_a_map_of_many_tasks_arrives() -> None:
    async def story() -> None:
        async with serving(" ".join(["worker"] * 2000)) as job:
            now = time.monotonic()
            for rank in range(1, 2000):
                job.state.on_hello(make_hello(rank, node="a-node-with-a-rather-long-name-" + str(rank)), now)
            member = job.membership(0)
            job.begin(member)
            await until(lambda: member.map)
            assert member.map is not None
            assert len(encode(member.map)) > 2 * 65536
            assert len(member.map.entries) == 2000

    live(story)


# Who is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.0.9"}, f"it runs tf4slurm 0.0.9, the launcher {__version__}"),
        ({"rank": 7}, "rank 7 is not one of this job's 2 tasks"),
        ({"rank": -1}, "rank -1 is not one of this job's 2 tasks"),
        ({"rank": 0, "incarnation": "later"}, "rank 0 was taken by an earlier process, on n0"),
    ],
)
def test_who_is_refused_is_told_why_and_does_not_try_again(changes: dict[str, Any], reason: str) -> None:
    async def story() -> None:
        async with serving() as job:
            await job.form(2)
            late = job.membership(1, **changes)
            with pytest.raises(RendezvousClosedError) as caught:
                await late.run()
            assert caught.value.reason == reason
            assert f"127.0.0.1:{job.port}" in str(caught.value)
            assert (late.order, late.map) == (Order(), None)
            assert job.state.phase is Phase.TRAINING

    live(story)


@pytest.mark.parametrize("changes", [{"version": "0.0.9"}, {"rank": 7}, {"incarnation": "later"}])
def test_who_is_refused_hears_nothing_but_the_refusal(changes: dict[str, Any]) -> None:
    async def story() -> None:
        async with serving() as job:
            await job.form(2)
            async with stranger(job.port) as other:
                await other.shake_hands()
                await other.say(make_hello(0, **changes))
                await other.hear(Refusal)
                assert await other.end() == (grpc.StatusCode.OK, 0)

    live(story)


def test_a_wrong_secret_is_refused_until_the_time_to_join_is_over() -> None:
    async def story() -> None:
        async with serving() as job:
            wrong = job.membership(0, secret="another", join_seconds=1)
            before = time.monotonic()
            with pytest.raises(RendezvousConnectionError, match="is another job's"):
                await wrong.run()
            assert 1 <= time.monotonic() - before < 4
            assert job.events == []
            await job.form(2)

    live(story)


def test_a_last_try_without_enough_time_does_not_hide_why_the_others_failed() -> None:
    async def story() -> None:
        async with serving() as job:
            with socket.create_server(("127.0.0.1", 0)) as mute:
                addresses = [Address("127.0.0.1", job.port), Address(*mute.getsockname())]
                member = Membership(
                    lambda: (addresses, "another"),
                    lambda _: make_hello(0),
                    dead_after_seconds=DEAD,
                    join_seconds=1,
                )
                with pytest.raises(RendezvousConnectionError, match="is another job's") as caught:
                    await member.run()
            assert caught.value.address == f"127.0.0.1:{job.port}"

    live(story)


def test_a_service_with_another_secret_is_not_believed() -> None:
    """Whoever answers at the address but has not the secret gives no order."""

    async def story() -> None:
        async with serving() as job, serving() as impostor:
            impostor.service._secret = "another"
            addresses = [Address("127.0.0.1", impostor.port), Address("127.0.0.1", job.port)]
            member = Membership(
                lambda: (addresses, SECRET),
                lambda _: make_hello(0),
                dead_after_seconds=DEAD,
                join_seconds=10,
            )
            job.begin(member)
            await until(lambda: job.state.count("joined"))
            assert impostor.state.count("joined") == 0

    live(story)


# Strangers, while the members of the job go on


async def send_nothing(other: Stranger) -> None:
    await other.call.done_writing()


async def send_a_short_nonce(other: Stranger) -> None:
    await other.call.write(b"short")


async def send_an_unsealed_hello(other: Stranger) -> None:
    await other.call.write(auth.new_nonce())
    await other.call.read()
    await other.call.write(encode(make_hello(0)))


async def send_a_truncated_hello(other: Stranger) -> None:
    await other.shake_hands()
    assert other.outgoing is not None
    await other.call.write(other.outgoing.seal(encode(make_hello(0)))[:40])


async def send_a_hello_of_another_job(other: Stranger) -> None:
    await other.shake_hands("another")
    await other.say(make_hello(0))


async def send_a_status_first(other: Stranger) -> None:
    await other.shake_hands()
    await other.say(Status("left"))


async def send_a_huge_nonce(other: Stranger) -> None:
    await other.call.write(b"x" * 10_000_000)


async def send_a_huge_hello(other: Stranger) -> None:
    await other.shake_hands()
    await other.say(make_hello(0, node="n" * 10_000_000))


UNAUTHENTICATED, EXHAUSTED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("send", "code"),
    [
        (send_nothing, UNAUTHENTICATED),
        (send_a_short_nonce, UNAUTHENTICATED),
        (send_an_unsealed_hello, UNAUTHENTICATED),
        (send_a_truncated_hello, UNAUTHENTICATED),
        (send_a_hello_of_another_job, UNAUTHENTICATED),
        (send_a_status_first, grpc.StatusCode.OK),  # it has the secret, so it is told what is wrong
        (send_a_huge_nonce, EXHAUSTED),
        (send_a_huge_hello, EXHAUSTED),
    ],
)
def test_a_stranger_is_refused_and_the_members_go_on(
    send: Callable[[Stranger], Coroutine[Any, Any, None]], code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with serving() as job:
            members = await job.form(2)
            before = list(job.events)
            async with stranger(job.port) as other:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await send(other)
                found, _ = await other.end()
                assert found in (code, UNAUTHENTICATED)
            assert job.events == before
            members[0].report(state="exited", starts=1, returncode=0)
            await until(lambda: members[1].order.leave)

    live(story)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def say_it_twice(other: Stranger) -> None:
    sealed = await other.say(Status("joined"))
    await other.call.write(sealed)


async def say_it_unsealed(other: Stranger) -> None:
    await other.call.write(encode(Status("left")))


async def say_half_of_it(other: Stranger) -> None:
    assert other.outgoing is not None
    await other.call.write(other.outgoing.seal(encode(Status("left")))[:20])


async def say_something_else(other: Stranger) -> None:
    await other.say(Order(leave=True))


async def say_nonsense(other: Stranger) -> None:
    assert other.outgoing is not None
    await other.call.write(other.outgoing.seal(b"nonsense"))


async def say_too_much(other: Stranger) -> None:
    await other.say(Status("joined", detail="x" * 10_000_000))


@pytest.mark.parametrize(
    "say", [say_it_twice, say_it_unsealed, say_half_of_it, say_something_else, say_nonsense, say_too_much]
)
def test_a_connection_that_goes_wrong_ends_and_its_task_may_connect_again(
    say: Callable[[Stranger], Coroutine[Any, Any, None]], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with serving() as job:
            other_member = job.membership(1)
            job.begin(other_member)
            async with stranger(job.port) as wrong:
                await wrong.shake_hands()
                await wrong.say(make_hello(0))
                await until(lambda: other_member.map)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await say(wrong)
                await wrong.end()
                await until(lambda: ("disconnected", "chief/0") in job.events)
                assert job.state.records[0].status.state == "joined"
            again = job.membership(0)
            job.begin(again)
            await until(lambda: again.map)
            assert ("reconnected", "chief/0") in job.events
            assert other_member.order.leave is False

    live(story)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_connection_recorded_whole_opens_nothing_when_it_is_played_again() -> None:
    async def story() -> None:
        async with serving() as job:
            nonce = auth.new_nonce()
            async with stranger(job.port) as first:
                await first.call.write(nonce)
                _, outgoing = auth.check_service(SECRET, nonce, await first.call.read())
                hello = outgoing.seal(encode(make_hello(0)))
                await first.call.write(hello)
                await until(lambda: job.state.count("joined") == 1)
            await until(lambda: ("disconnected", "chief/0") in job.events)
            async with stranger(job.port) as second:
                await second.call.write(nonce)
                await second.call.read()
                await second.call.write(hello)
                assert await second.end() == (UNAUTHENTICATED, 0)
            assert ("reconnected", "chief/0") not in job.events

    live(story)


def test_what_comes_late_on_a_connection_that_was_replaced_does_not_count() -> None:
    async def story() -> None:
        async with serving() as job, stranger(job.port) as old, stranger(job.port) as new:
            for connection, event in ((old, "joined"), (new, "reconnected")):
                await connection.shake_hands()
                await connection.say(make_hello(0))
                await until(lambda event=event: (event, "chief/0") in job.events)  # type: ignore[misc]
            await new.say(Status("running", starts=1))
            await until(lambda: job.state.records[0].status.state == "running")
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await old.say(Status("exited", starts=1, returncode=9))
            await asyncio.wait_for(old.end(), 3)  # the service has ended it
            assert job.state.records[0].is_connected
            assert job.state.records[0].status.state == "running"

    live(story)


# Connections that break or fall silent


def test_a_connection_that_breaks_is_made_again_and_nothing_is_lost() -> None:
    async def story() -> None:
        async with serving() as job, Relay(job.port) as relay:
            chief, ps = job.membership(0, port=relay.port), job.membership(1)
            job.begin(chief)
            job.begin(ps)
            await until(lambda: chief.map)
            relay.cut()
            chief.report(state="proved")
            ps.report(state="proved")
            await until(lambda: chief.order.starts == 1)
            assert relay.connections >= 2
            chief.report(state="running", starts=1)
            await until(lambda: job.state.count("running") == 1)
            relay.cut()
            await until(lambda: job.events.count(("disconnected", "chief/0")) == 2)
            chief.report(state="exited", starts=1, returncode=0)
            await until(lambda: chief.order.leave)
            assert job.state.verdict is not None
            assert job.state.verdict.exit_code == 0
            assert job.events.count(("reconnected", "chief/0")) == 2
            assert job.events.count(("started", "chief/0")) == 1
            assert ("lost", "chief/0") not in job.events

    live(story)


@pytest.mark.parametrize("tail", [("x" * 250,) * 20, ("x" * 500,) * 20, ("\U0001f600" * 500,) * 20])
def test_a_long_status_is_said_on_the_next_connection(tail: tuple[str, ...]) -> None:
    """It comes right behind the hello, when the service does not know yet from whom it is."""

    async def story() -> None:
        async with serving() as job, Relay(job.port) as relay:
            chief, ps = job.membership(0, port=relay.port), job.membership(1)
            job.begin(chief)
            job.begin(ps)
            await until(lambda: chief.map and ps.map)
            relay.cut()
            chief.report(state="exited", starts=1, returncode=3, tail=tail)
            await until(lambda: job.state.records[0].status.state == "exited")
            assert job.events.count(("disconnected", "chief/0")) == 1

    live(story)


def test_who_connects_again_hears_of_the_service_at_once() -> None:
    """And not at the next beat: it may have little of the dead time left."""

    async def story() -> None:
        slow = Limits(beat_seconds=30, dead_after_seconds=100)
        state = JobState([Task("worker", 0), Task("worker", 1)], slow, time.monotonic(), lambda *_: None)
        service = ControlService(state, SECRET)
        port = await service.start()
        for is_back in (False, True):
            async with stranger(port) as task:
                await task.shake_hands()
                await task.say(make_hello(0))
                assert task.incoming is not None
                if is_back:
                    assert task.incoming.open(await asyncio.wait_for(task.call.read(), 5)) == NOTHING_NEW
                else:
                    await until(lambda: state.records[0].is_connected)
            await until(lambda: not state.records[0].is_connected)
        await service.close()

    live(story)


def test_the_hello_is_made_once() -> None:
    async def story() -> None:
        async with serving() as job, Relay(job.port) as relay:
            asked: list[Address] = []

            def hello_once(address: Address) -> Hello:
                asked.append(address)
                return make_hello(0)

            address = Address("127.0.0.1", relay.port)
            member = Membership(
                lambda: ([address], SECRET),
                hello_once,
                dead_after_seconds=DEAD,
                join_seconds=10,
            )
            job.begin(member)
            await until(lambda: job.state.count("joined"))
            relay.cut()
            await until(lambda: ("reconnected", "chief/0") in job.events)
            assert asked == [address]

    live(story)


def test_a_service_that_falls_silent_is_gone_after_the_dead_time() -> None:
    async def story() -> None:
        async with serving(dead_after_seconds=SOON_DEAD) as job, Relay(job.port) as relay:
            chief, ps = job.membership(0, port=relay.port), job.membership(1)
            before = time.monotonic()
            running = job.begin(chief)
            job.begin(ps)
            await until(lambda: chief.map)
            relay.pause()
            paused = time.monotonic()
            with pytest.raises(RendezvousConnectionError) as caught:
                await running
            assert before + SOON_DEAD <= time.monotonic() < paused + SOON_DEAD + 1
            assert caught.value.address == f"127.0.0.1:{relay.port}"
            assert "no address is known" not in str(caught.value)
            await until(lambda: ("lost", "chief/0") in job.events)
            await until(lambda: ps.order.leave)

    live(story)


def test_a_silent_service_is_not_looked_for_at_its_other_addresses() -> None:
    async def story() -> None:
        async with serving(dead_after_seconds=2) as job, Relay(job.port) as relay, Relay(job.port) as other:
            other.pause()
            addresses = [Address("127.0.0.1", relay.port), Address("127.0.0.1", other.port)]
            member = Membership(
                lambda: (addresses, SECRET), lambda _: make_hello(0), dead_after_seconds=2, join_seconds=10
            )
            running = job.begin(member)
            await until(lambda: job.state.count("joined"))
            relay.pause()
            before = time.monotonic()
            with pytest.raises(RendezvousConnectionError, match="it fell silent"):
                await running
            assert time.monotonic() - before < 3
            assert other.connections == 0

    live(story)


def test_a_service_that_is_closed_is_gone_after_the_dead_time() -> None:
    async def story() -> None:
        async with serving(dead_after_seconds=SOON_DEAD) as job:
            chief = job.membership(0)
            running = job.begin(chief)
            await until(lambda: job.state.count("joined"))
            await job.service.close()
            before = time.monotonic()
            with pytest.raises(RendezvousConnectionError, match="The launcher is gone, or was never there"):
                await running
            assert time.monotonic() - before < SOON_DEAD + 1

    live(story)


def test_a_task_that_falls_silent_is_lost_to_the_service() -> None:
    async def story() -> None:
        async with serving(dead_after_seconds=SOON_DEAD) as job, Relay(job.port) as relay:
            chief, ps = job.membership(0), job.membership(1, port=relay.port)
            job.begin(chief)
            job.begin(ps)
            await until(lambda: chief.map and ps.map)
            relay.pause()
            await until(lambda: chief.order.leave)
            assert job.state.verdict is not None
            assert job.state.verdict.cause == Task("ps", 0)

    live(story)


@pytest.mark.parametrize("find", ["nobody listens", "nothing is known"])
def test_without_a_service_the_time_to_join_ends(find: str) -> None:
    async def story() -> None:
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        addresses = [Address("127.0.0.1", port)] if find == "nobody listens" else []
        member = Membership(
            lambda: (addresses, SECRET),
            lambda _: make_hello(0),
            dead_after_seconds=DEAD,
            join_seconds=0.2,
        )
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="The launcher is gone, or was never there"):
            await member.run()
        assert 0.2 <= time.monotonic() - before < 2

    live(story)


def test_who_takes_the_connection_and_says_nothing_is_told_as_such() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = Address(*mute.getsockname())
            member = Membership(
                lambda: ([address], SECRET),
                lambda _: make_hello(0),
                dead_after_seconds=DEAD,
                join_seconds=0.3,
            )
            with pytest.raises(RendezvousConnectionError, match=r"\(it does not answer\)"):
                await member.run()

    live(story)


def test_a_service_that_starts_later_is_found() -> None:
    async def story() -> None:
        async with serving() as job:
            known: list[Address] = []
            member = Membership(
                lambda: (known, SECRET),
                lambda _: make_hello(0),
                dead_after_seconds=DEAD,
                join_seconds=10,
            )
            job.begin(member)
            await asyncio.sleep(0)
            known.append(Address("127.0.0.1", job.port))
            await until(lambda: job.state.count("joined"))

    live(story)


def test_the_first_address_that_answers_is_taken() -> None:
    async def story() -> None:
        async with serving() as job:
            addresses = [Address("127.0.0.1", 1), Address("127.0.0.1", job.port)]
            member = Membership(
                lambda: (addresses, SECRET),
                lambda _: make_hello(0),
                dead_after_seconds=DEAD,
                join_seconds=10,
            )
            job.begin(member)
            await until(lambda: job.state.count("joined"))

    live(story)


def test_who_connects_again_does_so_where_it_was() -> None:
    """And not first where nobody answers: a lost connection has 1.5 s, and each try has 3 s."""

    async def story() -> None:
        async with serving() as job, Relay(job.port) as relay:
            tries: list[asyncio.StreamWriter] = []
            mute = await asyncio.start_server(lambda _, writer: tries.append(writer), "127.0.0.1", 0)
            addresses = [Address(*mute.sockets[0].getsockname()), Address("127.0.0.1", relay.port)]
            member = Membership(
                lambda: (addresses, SECRET),
                lambda _: make_hello(0),
                dead_after_seconds=DEAD,
                join_seconds=10,
            )
            member._connect_seconds = 2
            job.begin(member)
            await until(lambda: job.state.count("joined"))
            relay.cut()
            await until(lambda: ("reconnected", "chief/0") in job.events)
            assert len(tries) == 1
            tries[0].close()
            mute.close()

    live(story)


@pytest.mark.parametrize("words", [0, 1, 2], ids=["hangs up", "hangs up after its nonce", "hangs up after the hello"])
def test_a_service_that_hangs_up_early_is_an_unreachable_one(words: int) -> None:
    async def handler(_: object, context: Any) -> None:
        for number in range(words):
            said = await context.read()
            if number == 0:
                await context.write(auth.answer_task(SECRET, said)[0])

    async def story() -> None:
        server = grpc.aio.server()
        handlers: Any = {METHOD: grpc.stream_stream_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        member = Membership(
            lambda: ([address], SECRET),
            lambda _: make_hello(0),
            dead_after_seconds=DEAD,
            join_seconds=0.4,
        )
        with pytest.raises(RendezvousConnectionError):
            await member.run()
        await server.stop(None)

    live(story)


def test_the_map_comes_before_any_order() -> None:
    async def story() -> None:
        async with serving("worker") as job, stranger(job.port) as raw:
            await raw.shake_hands()
            await raw.say(make_hello(0))
            assert isinstance(await raw.hear(Map), Map)
            await raw.say(Status("proved"))
            assert await raw.hear(Order) == Order(starts=1, leave_seconds=0.5)

    live(story)
