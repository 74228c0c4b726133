"""Reachability checks over real connections, and which task checks which."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.network.ports import HeldPort, hold_port
from tf4slurm.network.reachability import answer_checks, find_unreachable, is_answering, members_to_check

SECRET = "the secret of this job"


def member(rank: int, port: int) -> Member:
    return Member(rank, Task("worker", rank), f"n{rank}", Address("127.0.0.1", port))


@contextlib.asynccontextmanager
async def answering(rank: int, secret: str = SECRET) -> AsyncIterator[HeldPort]:
    """An agent of this rank that answers on a held port."""
    held = hold_port()
    server = await answer_checks(held.listen(), secret, rank)
    try:
        yield held
    finally:
        server.close()
        held.close()


def test_agents_of_this_job_are_reachable() -> None:
    async def run() -> list[str]:
        async with answering(0) as first, answering(1) as second:
            return await find_unreachable([member(0, first.port), member(1, second.port)], SECRET, 60)

    assert asyncio.run(run()) == []


def test_no_member_has_no_fault() -> None:
    assert asyncio.run(find_unreachable([], SECRET, 60)) == []


@pytest.mark.parametrize(("rank", "secret"), [(1, "another job's"), (2, SECRET)], ids=["secret", "rank"])
def test_agent_of_another_job_or_rank_is_a_fault(rank: int, secret: str) -> None:
    async def run() -> None:
        async with answering(rank, secret) as held:
            faults = await find_unreachable([member(1, held.port)], SECRET, 60)
            assert faults == [f"another process than worker/1 on n1 answers at 127.0.0.1:{held.port}"]

    asyncio.run(run())


def test_idle_connections_do_not_block_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.network.reachability._ANSWER_SECONDS", 120.0)  # it closes them sooner than that

    async def run() -> None:
        async with answering(1) as held:
            idle = [await asyncio.open_connection("127.0.0.1", held.port) for _ in range(300)]
            assert await find_unreachable([member(1, held.port)], SECRET, 60) == []
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(idle[0][0].read(1), 60) == b""
            for _, writer in idle:
                writer.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = psutil.Process().num_fds()  # other tests of this process may have left sockets open
    resource.setrlimit(resource.RLIMIT_NOFILE, (own + 450, hard))  # fewer than both ends of all connections
    try:
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closed_port_is_a_fault() -> None:
    with contextlib.closing(hold_port()) as held:
        faults = asyncio.run(find_unreachable([member(1, held.port)], SECRET, 60))
    assert len(faults) == 1
    assert faults[0].startswith(f"worker/1 on n1 is not reachable at 127.0.0.1:{held.port}: ")
    assert "refused" in faults[0] or "Connect call failed" in faults[0]


def test_server_without_an_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        faults = asyncio.run(find_unreachable([member(1, port)], SECRET, 0.1))
    assert faults == [f"worker/1 on n1 does not answer at 127.0.0.1:{port} within 0.1 s"]


def test_server_that_closes_the_connection_is_a_fault() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(16)
        writer.write(b"short")
        writer.close()

    async def run() -> list[str]:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with server:
            return await find_unreachable([member(1, server.sockets[0].getsockname()[1])], SECRET, 60)

    (fault,) = asyncio.run(run())
    assert fault.startswith("worker/1 on n1 is not reachable at 127.0.0.1:")


def test_only_unreachable_members_are_returned() -> None:
    async def run() -> list[str]:
        async with answering(0) as right, answering(1, "another job's") as wrong:
            return await find_unreachable([member(0, right.port), member(1, wrong.port)], SECRET, 60)

    (fault,) = asyncio.run(run())
    assert fault.startswith("another process than worker/1 on n1")


def test_invalid_request_does_not_stop_the_server() -> None:
    async def run() -> list[str]:
        async with answering(1) as held:
            with socket.create_connection(("127.0.0.1", held.port)) as other_client:
                other_client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with socket.create_connection(("127.0.0.1", held.port)):
                    return await find_unreachable([member(1, held.port)], SECRET, 60)

    assert asyncio.run(run()) == []


def test_closed_server_is_not_reachable() -> None:
    async def run() -> list[str]:
        with contextlib.closing(hold_port()) as held:
            (await answer_checks(held.listen(), SECRET, 1)).close()
            return await find_unreachable([member(1, held.port)], SECRET, 60)

    (fault,) = asyncio.run(run())
    assert "is not reachable" in fault


def test_checked_port_can_be_held_again_by_the_next_job() -> None:
    async def run() -> int:
        async with answering(1) as held:
            assert await find_unreachable([member(1, held.port)] * 3, SECRET, 60) == []
            return held.port

    port = asyncio.run(run())
    with contextlib.closing(hold_port([port])) as again:
        assert again.port == port


def cluster_on(nodes: list[str]) -> Cluster:
    address = Address("10.0.0.1", 4000)
    return Cluster(tuple(Member(rank, Task("worker", rank), node, address) for rank, node in enumerate(nodes)))


@pytest.mark.parametrize(
    ("nodes", "checkers"),
    [
        ("a", [None]),
        ("aaa", [None, None, None]),
        ("ab", [1, 0]),
        ("abc", [2, 0, 1]),
        ("aab", [2, 2, 1]),
        ("aba", [1, 0, 1]),
        ("abab", [3, 0, 1, 2]),
        ("aabbcc", [5, 5, 1, 1, 3, 3]),
    ],
)
def test_assignment_of_checks_to_tasks(nodes: str, checkers: list[int | None]) -> None:
    cluster = cluster_on(list(nodes))
    found: list[int | None] = [None] * len(nodes)
    for rank in range(len(nodes)):
        for checked in members_to_check(cluster, rank):
            found[checked.rank] = rank
    assert found == checkers


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20))
def test_every_member_is_checked_once_from_another_node(nodes: list[str]) -> None:
    cluster = cluster_on(nodes)
    pairs = [(rank, checked.rank) for rank in range(len(nodes)) for checked in members_to_check(cluster, rank)]
    counts = Counter(checked for _, checked in pairs)
    assert counts == ({} if len(set(nodes)) == 1 else dict.fromkeys(range(len(nodes)), 1))
    assert all(nodes[checker] != nodes[checked] for checker, checked in pairs)


def test_delay_of_the_own_event_loop_is_no_silence_of_a_server() -> None:
    """Three servers: one answers while the event loop of the check is blocked, one never, and one is not there."""
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(settings)
        connection.recv(100)  # until the check closes
        connection.close()

    async def run(addresses: list[Address]) -> list[bool | None]:
        checks = [asyncio.create_task(is_answering(address, 0.4)) for address in addresses]
        for _ in range(3):
            await asyncio.sleep(0)
            time.sleep(1)
        return await asyncio.gather(*checks)

    with socket.create_server(("127.0.0.1", 0)) as answers, socket.create_server(("127.0.0.1", 0)) as silent:
        gone = socket.create_server(("127.0.0.1", 0))
        addresses = [Address(*each.getsockname()) for each in (answers, silent, gone)]
        gone.close()
        thread = threading.Thread(target=answer, args=(answers,))
        thread.start()
        assert asyncio.run(run(addresses)) == [True, False, None]
        thread.join(10)
