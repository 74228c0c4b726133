"""What a stranger learns of a job, and what a task says to a service that is none: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.security.flood import NONCE, PREFACE, SETTINGS_TAKEN, STREAM
from tests.unit.test_service_and_client import SECRET, cancel, live, make_hello, serving, stranger, until
from tf4slurm.cluster import Address
from tf4slurm.control import auth
from tf4slurm.control.client import Membership
from tf4slurm.control.messages import METHOD, SERVICE, Hello, encode
from tf4slurm.control.service import _make_room
from tf4slurm.errors import RendezvousConnectionError

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("words", [b"", b"n" * 15, b"n" * 17, b"n" * 5_000, b"n" * 16])
def test_a_refusal_says_nothing(words: bytes) -> None:
    """Neither does what comes before it: after a nonce, 48 bytes that look like any others."""

    async def story() -> None:
        async with serving() as job:
            await job.form(2)
            async with stranger(job.port) as other:
                await other.call.write(words)
                heard = []
                with contextlib.suppress(grpc.aio.AioRpcError):
                    heard.append(await other.call.read())
                    await other.call.write(b"x" * 100)
                    heard.append(await other.call.read())
                assert await other.call.code() is UNAUTHENTICATED
                assert [len(answer) for answer in heard] == ([48] if len(words) == 16 else [])
                assert not await other.call.details()
                assert not list(await other.call.trailing_metadata())

    live(story)


def test_a_hello_is_short() -> None:
    async def story() -> None:
        async with serving() as job:
            async with stranger(job.port) as other:
                await other.shake_hands()
                await other.say(make_hello(0, node="n" * 4096))
                assert await other.end() == (UNAUTHENTICATED, 0)
            assert job.events == []

    live(story)


def squeezed(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/{METHOD}")(compression=grpc.Compression.Gzip)


def with_much_metadata(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=[("x", "y" * 100_000)])


def of_another_method(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Secret")()


@pytest.mark.parametrize("call", [squeezed, with_much_metadata, of_another_method])
def test_what_is_no_call_of_a_task_is_refused_by_grpc(
    call: Callable[[grpc.aio.Channel], Any],
) -> None:
    async def story() -> None:
        async with serving() as job:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{job.port}") as channel:
                refused = call(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await refused.write(bytes(60_000_000))  # where it is compressed, 58 KB
                    await asyncio.wait_for(refused.read(), 10)
                assert await refused.code() in (
                    grpc.StatusCode.UNIMPLEMENTED,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.INTERNAL,
                    UNAUTHENTICATED,
                )
            await job.form(2)

    live(story)


def test_a_byte_a_second_of_a_hello_is_not_waited_for() -> None:
    async def story() -> None:
        async with serving() as job:
            members = await job.form(2)
            reader, writer = await asyncio.open_connection("127.0.0.1", job.port)
            writer.write(PREFACE + SETTINGS_TAKEN + STREAM + NONCE + bytes((0, 0, 200, 0, 0, 0, 0, 0, 1)))

            async def dribble() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(1)

            dribbling = asyncio.create_task(dribble())
            await asyncio.wait_for(reader.read(-1), 15)  # to the end that the service makes
            await cancel(dribbling)
            writer.close()
            members[0].report(state="exited", starts=1, returncode=0)
            await until(lambda: members[1].order.leave)

    live(story)


# A service that is none


Handler = Callable[[Any], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def impostor(handle: Handler) -> AsyncIterator[Address]:
    async def handler(_: object, context: Any) -> None:
        await handle(context)

    server = grpc.aio.server()
    handlers: Any = {METHOD: grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    address = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def join_at(*addresses: Address, asked: list[Address], seconds: float = 8) -> Membership:
    def hello(address: Address) -> Hello:
        asked.append(address)
        return make_hello(0)

    return Membership(lambda: (addresses, SECRET), hello, dead_after_seconds=seconds, join_seconds=seconds)


async def echo(context: Any) -> None:
    """Say back what is said, as a reflection of the task's own words."""
    while isinstance(words := await context.read(), bytes):
        await context.write(words)


async def answer_without_the_secret(context: Any) -> None:
    await context.write(auth.answer_task("another", await context.read())[0])
    await context.read()


async def answer_unsealed(context: Any) -> None:
    await context.read()
    await context.write(auth.new_nonce())
    await context.read()


async def refuse(context: Any) -> None:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "go away")


async def flood_the_task(context: Any) -> None:
    await context.read()
    await context.write(bytes(40_000_000))


async def say_a_recorded_answer(context: Any) -> None:
    await context.read()
    await context.write(auth.answer_task(SECRET, b"e" * 16)[0])  # of an earlier connection
    await context.read()


IMPOSTORS = [echo, answer_without_the_secret, answer_unsealed, refuse, flood_the_task, say_a_recorded_answer]


@pytest.mark.parametrize("handle", IMPOSTORS)
def test_a_task_tells_nothing_to_a_service_that_does_not_prove_itself(handle: Handler) -> None:
    heard: list[bytes] = []

    class Listening:
        def __init__(self, context: Any) -> None:
            self._context = context

        def __getattr__(self, name: str) -> Any:
            return getattr(self._context, name)

        async def read(self) -> Any:
            words = await self._context.read()
            if isinstance(words, bytes):
                heard.append(words)
            return words

    async def story() -> None:
        asked: list[Address] = []
        async with impostor(lambda context: handle(Listening(context))) as address:
            with pytest.raises(RendezvousConnectionError):
                await join_at(address, asked=asked, seconds=0.5).run()
        assert asked == []
        assert all(len(words) == 16 for words in heard)

    live(story)


@pytest.mark.parametrize("handle", IMPOSTORS)
def test_an_impostor_does_not_keep_a_task_from_its_job(handle: Handler) -> None:
    async def story() -> None:
        async with serving("worker") as job, impostor(handle) as address:
            right = Address("127.0.0.1", job.port)
            asked: list[Address] = []
            running = asyncio.create_task(join_at(address, right, asked=asked).run())
            await until(lambda: job.state.count("joined"))
            assert asked == [right]
            await cancel(running)

    live(story)


def test_a_hello_that_opens_but_is_none_is_told_why() -> None:
    """It knows the secret, so it is a task: of another version, most likely."""

    async def story() -> None:
        async with serving() as job, stranger(job.port) as other:
            await other.shake_hands()
            assert other.outgoing is not None
            await other.call.write(other.outgoing.seal(encode(make_hello(0)).replace(b'"rank"', b'"rung"')))
            assert other.incoming is not None
            assert b"Install the same version" in other.incoming.open(await other.call.read())

    live(story)


# Files


def test_room_for_many_tasks_is_made_within_the_hard_limit_only() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert _make_room(4) == 508
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, before[1])
        assert _make_room(1000) == 2500
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2500 + 4128, before[1])
        assert _make_room(10**6) >= 2 * 10**6  # more than there can be: the tasks come first
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
