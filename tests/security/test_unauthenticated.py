"""Clients without the job's token learn nothing and change nothing; tasks send nothing to other servers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tests.jobs import Job
from tests.unit.test_service_and_client import (
    CREDENTIALS,
    HTTP2_PREFACE,
    OTHER_JOB,
    SHARED,
    cancel,
    client_hello,
    errors_in,
    grpc_server,
    in_event_loop,
    make_client,
    make_registration,
    raw_client,
    serving,
    until,
)
from tf4slurm.cluster import Address
from tf4slurm.control.credentials import ServiceCredentials
from tf4slurm.control.messages import TOKEN_METADATA, Registration, encode
from tf4slurm.control.service import _UNAUTHENTICATED_CONNECTIONS, _raise_file_limit
from tf4slurm.errors import RendezvousClosedError, RendezvousConnectionError

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED

WITHOUT_TOKEN: dict[str, tuple[tuple[str, str | bytes], ...]] = {
    "no metadata": (),
    "empty": ((TOKEN_METADATA, ""),),
    "another job's": ((TOKEN_METADATA, OTHER_JOB.shared.token),),
    "a prefix": ((TOKEN_METADATA, SHARED.token[:-1]),),
    "a longer one": ((TOKEN_METADATA, SHARED.token + "0"),),
    "in capitals": ((TOKEN_METADATA, SHARED.token.upper()),),
    "two wrong ones": ((TOKEN_METADATA, SHARED.token[:32]), (TOKEN_METADATA, SHARED.token[32:])),
    "under another key": (("authorization", f"Bearer {SHARED.token}"),),
    "under a binary key": ((f"{TOKEN_METADATA}-bin", SHARED.token.encode()),),
}


@pytest.mark.parametrize("metadata", WITHOUT_TOKEN.values(), ids=WITHOUT_TOKEN)
@in_event_loop
async def test_call_without_the_token_is_refused_without_a_message(
    metadata: tuple[tuple[str, str | bytes], ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as job:
        members = await job.start_children(2)
        async with raw_client(job.port, metadata=metadata) as raw:
            await raw.send(make_registration(0))
            assert await raw.end() == (UNAUTHENTICATED, "", 0)
            assert not list(await raw.call.initial_metadata())
            assert not list(await raw.call.trailing_metadata())
        await job.check_undisturbed(members)
    assert errors_in(caplog) == []


async def call_without_token(
    port: int, message: bytes, compression: grpc.Compression = grpc.Compression.NoCompression
) -> tuple[grpc.StatusCode, str, int]:
    """Send one message without the token; return the call's code and detail, and how many messages came back."""
    async with raw_client(port, metadata=(), compression=compression) as raw:
        await raw.send(message)
        return await raw.end()


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
@pytest.mark.parametrize("compression", list(grpc.Compression))
@in_event_loop
async def test_message_of_a_call_without_the_token_is_not_read(size: int, compression: grpc.Compression) -> None:
    """A message that was read would be refused with another code, for its length or its content."""
    async with serving() as job:
        ended = await call_without_token(job.port, bytes(size), compression)
        assert ended == (UNAUTHENTICATED, "", 0)
        assert job.events == []


@pytest.mark.parametrize("first", [{"version": "0.0.9"}, {"rank": 7}, {"failure": "it has no GPU"}])
@in_event_loop
async def test_registration_without_the_token_does_not_end_the_job_during_rendezvous(first: dict[str, Any]) -> None:
    """With the token, each of these messages would end the job."""
    async with serving() as job:
        registration = make_registration(0, **first) if "rank" not in first else make_registration(first["rank"])
        assert await call_without_token(job.port, encode(registration)) == (UNAUTHENTICATED, "", 0)
        assert job.state.outcome is None
        await job.check_undisturbed(await job.start_children(2))


@pytest.mark.parametrize("method", ["Secret", "join", ""])
@pytest.mark.parametrize("has_token", [True, False], ids=["with token", "without"])
@in_event_loop
async def test_other_method_is_refused_with_and_without_the_token(method: str, has_token: bool) -> None:
    """Without the token, a client does not learn which methods there are."""
    async with serving() as job:
        arguments: dict[str, Any] = {} if has_token else {"metadata": ()}
        async with raw_client(job.port, method=method, **arguments) as raw:
            code, _, received = await raw.end()
            assert code is (grpc.StatusCode.UNIMPLEMENTED if has_token else UNAUTHENTICATED)
            assert received == 0
        await job.check_undisturbed(await job.start_children(2))


@pytest.mark.parametrize("has_token", [True, False], ids=["with token", "without"])
@in_event_loop
async def test_metadata_above_the_limit_is_refused_by_grpc(has_token: bool) -> None:
    async with serving() as job:
        token = ((TOKEN_METADATA, SHARED.token),) if has_token else ()
        async with raw_client(job.port, metadata=(*token, ("x", "y" * 100_000))) as raw:
            await raw.send(make_registration(0))
            code, _, received = await raw.end()
            assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, UNAUTHENTICATED)
            assert received == 0
        assert job.events == []
        await job.check_undisturbed(await job.start_children(2))


@in_event_loop
async def test_compressed_message_is_limited_by_its_full_length() -> None:
    """A client with the token sends 60 MB of zeros, compressed to 58 KB, which is below the limit of a message."""
    async with serving() as job:
        members = await job.start_children(2)
        async with raw_client(job.port, compression=grpc.Compression.Gzip) as raw:
            await raw.send(bytes(60_000_000))
            code, _, received = await raw.end()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert received == 0
        await job.check_undisturbed(members)


@in_event_loop
async def test_registration_with_other_fields_is_refused_with_the_reason() -> None:
    """A client with the token is a task, most likely of another version."""
    async with serving() as job, raw_client(job.port) as raw:
        await raw.send(encode(make_registration(0)).replace(b'"rank"', b'"rung"'))
        code, reason, received = await raw.end()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Install the same version" in reason
        assert received == 0


# Slow connections


async def open_tls(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as any client can, without the job's certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


@pytest.mark.parametrize("first", [b"", HTTP2_PREFACE], ids=["nothing", "settings"])
@in_event_loop
async def test_tls_connection_without_a_call_is_closed(first: bytes) -> None:
    async with serving() as job:
        members = await job.start_children(2)
        reader, writer = await open_tls(job.port)
        writer.write(first)
        with contextlib.suppress(OSError):
            await asyncio.wait_for(reader.read(-1), 15)  # until the service closes the connection
        writer.close()
        await job.check_undisturbed(members)


@pytest.mark.parametrize("inside_tls", [False, True], ids=["TLS", "HTTP/2 in TLS"])
@in_event_loop
async def test_connection_that_sends_a_byte_per_second_is_closed(inside_tls: bool) -> None:
    async with serving() as job:
        members = await job.start_children(2)
        if inside_tls:
            (reader, writer), data = await open_tls(job.port), HTTP2_PREFACE
        else:
            (reader, writer), data = await asyncio.open_connection("127.0.0.1", job.port), client_hello()

        unsent = list(data)

        async def dribble() -> None:
            with contextlib.suppress(OSError):
                while unsent:
                    byte = unsent.pop(0)
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(1)

        dribbling = asyncio.create_task(dribble())
        with contextlib.suppress(OSError):
            await asyncio.wait_for(reader.read(-1), 15)  # until the service closes the connection
        assert unsent
        await cancel(dribbling)
        writer.close()
        await job.check_undisturbed(members)


def test_failed_tls_handshakes_are_not_written_to_the_launchers_stderr(tmp_path: Path) -> None:
    """Otherwise any client on the network could fill the disk with the launcher's log."""
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "1")
    assert job.process is not None
    job.wait_for_child("chief-0")
    connections = psutil.Process(job.process.pid).net_connections()
    (port,) = (each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as other, contextlib.suppress(OSError):
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while other.recv(65536):
                pass  # until the service closes the connection
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert "SSL" not in job.stderr


# Another server instead of the service


Received = list[bytes]
Impostor = Callable[[Received], contextlib.AbstractAsyncContextManager[Address]]


def grpc_impostor(
    credentials: ServiceCredentials | None, answer: Callable[[Any], Coroutine[Any, Any, None]]
) -> Impostor:
    """Return a gRPC server that records the metadata and messages that it receives."""

    def start(received: Received) -> contextlib.AbstractAsyncContextManager[Address]:
        async def handle(context: Any) -> None:
            received.append(repr(context.invocation_metadata()).encode())
            await answer(Recording(context, received))

        return grpc_server(handle, credentials)

    return start


class Recording:
    """The context of a call, which also records the messages read."""

    def __init__(self, context: Any, received: Received) -> None:
        self._context = context
        self._received = received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        payload = await self._context.read()
        if isinstance(payload, bytes):
            self._received.append(payload)
        return payload


async def echo(context: Any) -> None:
    while isinstance(payload := await context.read(), bytes):
        await context.write(payload)


async def refuse(context: Any) -> None:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "go away")


async def order_to_leave(context: Any) -> None:
    await context.read()
    await context.write(b'["DesiredState",{"terminate":true}]')
    await context.read()


async def send_much(context: Any) -> None:
    await context.read()
    await context.write(bytes(40_000_000))


def tcp_impostor(answer: bytes | None) -> Impostor:
    """Return a TCP server that records the received bytes and answers; it echoes them if `answer` is None."""

    @contextlib.asynccontextmanager
    async def start(received: Received) -> AsyncIterator[Address]:
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    received.append(data)
                    writer.write(data if answer is None else answer)
                    if answer:
                        break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield Address(*server.sockets[0].getsockname())
        finally:
            server.close()
            for writer in writers:
                writer.close()

    return start


IMPOSTORS = {
    "another certificate, echo": grpc_impostor(OTHER_JOB, echo),
    "another certificate, refusal": grpc_impostor(OTHER_JOB, refuse),
    "another certificate, order": grpc_impostor(OTHER_JOB, order_to_leave),
    "another certificate, much": grpc_impostor(OTHER_JOB, send_much),
    "plain gRPC, echo": grpc_impostor(None, echo),
    "plain gRPC, refusal": grpc_impostor(None, refuse),
    "TCP, echo": tcp_impostor(None),
    "TCP, HTTP/1.1": tcp_impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "TCP, plain-text HTTP/2": tcp_impostor(HTTP2_PREFACE),
    "TCP, TLS alert": tcp_impostor(b"\x15\x03\x03\x00\x02\x02\x28"),
}


def check_no_secret(received: Received) -> None:
    """Check that neither the token nor a registration was sent."""
    everything = b"".join(received)
    for secret in (SHARED.token.encode(), b"Registration", b"incarnation", make_registration(0).host.encode()):
        assert secret not in everything


@pytest.mark.parametrize("impostor", IMPOSTORS.values(), ids=IMPOSTORS)
@in_event_loop
async def test_server_without_the_jobs_key_gets_neither_registration_nor_token(impostor: Impostor) -> None:
    received: Received = []

    async with impostor(received) as address:
        member = make_client(address, rendezvous_timeout_seconds=0.5)
        with pytest.raises(RendezvousConnectionError) as caught:
            await member.run()
        assert caught.value.address == str(address)
        assert (member.desired.terminate, member.cluster) == (False, None)
    check_no_secret(received)


@pytest.mark.parametrize("impostor", [each for name, each in IMPOSTORS.items() if "gRPC" in name or "cert" in name])
@in_event_loop
async def test_grpc_server_without_the_jobs_key_gets_no_call(impostor: Impostor) -> None:
    received: Received = []

    async with impostor(received) as address:
        with pytest.raises(RendezvousConnectionError):
            await make_client(address, rendezvous_timeout_seconds=0.5).run()
    assert received == []


@in_event_loop
async def test_impostor_that_has_the_key_gets_the_registration() -> None:
    """Control experiment for the tests above."""
    received: Received = []

    async with grpc_impostor(CREDENTIALS, refuse_after_hello)(received) as address:
        with pytest.raises(RendezvousClosedError, match="go away"):
            await make_client(address, rendezvous_timeout_seconds=5).run()
    assert SHARED.token.encode() in received[0]
    assert received[1] == encode(make_registration(0))


async def refuse_after_hello(context: Any) -> None:
    await context.read()
    await refuse(context)


@pytest.mark.parametrize("impostor", IMPOSTORS.values(), ids=IMPOSTORS)
@in_event_loop
async def test_task_registers_at_another_address_despite_an_impostor(impostor: Impostor) -> None:
    received: Received = []

    async with serving("worker") as job, impostor(received) as address:
        asked: list[Address] = []

        def registration(service: Address) -> Registration:
            asked.append(service)
            return make_registration(0, port=service.port)

        running = asyncio.create_task(make_client(address, job.address, registration=registration).run())
        await until(lambda: job.state.tasks.count("registered"))
        assert asked[-1] == job.address
        assert job.state.tasks[0].address == Address("10.0.0.0", job.port)
        await cancel(running)
    check_no_secret(received)


@in_event_loop
async def test_token_of_one_job_is_not_sent_to_another_job_of_the_same_user() -> None:
    """A stale address, where the service of another job listens now."""
    async with serving() as job, serving(credentials=OTHER_JOB) as other:
        with pytest.raises(RendezvousConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await other.client(0, credentials=SHARED, rendezvous_timeout_seconds=0.5).run()
        assert job.events == other.events == []


# Files


def test_file_limit_is_raised_as_far_as_needed_and_never_above_the_hard_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        for num_tasks in (4, 1000):
            connections = _UNAUTHENTICATED_CONNECTIONS + 2 * num_tasks
            assert _raise_file_limit(num_tasks) == connections
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (connections + 128 + 4 * num_tasks, before[1])
        found = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert _raise_file_limit(4) == _UNAUTHENTICATED_CONNECTIONS + 8
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == found  # it is never lowered
        assert _raise_file_limit(10**6) >= 2 * 10**6  # above the hard limit: the tasks have priority
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_are_refused_before_files_run_out() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        for num_tasks in (1, 10, 1000):
            connections = _raise_file_limit(num_tasks)
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert connections + 128 + 4 * num_tasks <= soft
            assert connections >= 2 * num_tasks
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
