"""Connections end from below, and no others do."""

from __future__ import annotations

import socket

import pytest

from tf4slurm.network.connections import hang_up


def pair(family: socket.AddressFamily, listen: str, host: str) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection: ours, and the one at which it was accepted."""
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server:
        ours = socket.create_connection((host, server.getsockname()[1]), timeout=5)
        return ours, server.accept()[0]


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    ("family", "listen", "host", "name"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{port}"),
        (socket.AF_INET6, "::", "127.0.0.1", "ipv4:127.0.0.1:{port}"),
        (socket.AF_INET6, "::1", "::1", "ipv6:%5B::1%5D:{port}"),
        (socket.AF_INET6, "::1", "::1", "ipv6:[::1]:{port}"),
    ],
)
def test_one_connection_ends_and_no_other(family: socket.AddressFamily, listen: str, host: str, name: str) -> None:
    pairs = [pair(family, listen, host) for _ in range(3)]
    hang_up([name.format(port=pairs[1][0].getsockname()[1])])
    assert [is_open(ours) for ours, _ in pairs] == [True, False, True]
    for both in pairs:
        for end in both:
            end.close()


@pytest.mark.parametrize("peers", [[], ["unix:/x"], ["ipv4:127.0.0.1:1"], ["nonsense", ""]])
def test_a_peer_that_is_not_there_is_nothing(peers: list[str]) -> None:
    ours, theirs = pair(socket.AF_INET, "127.0.0.1", "127.0.0.1")
    hang_up(peers)
    assert is_open(ours)
    ours.close()
    theirs.close()
