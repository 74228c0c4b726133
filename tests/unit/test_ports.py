"""Held ports, shared with the child only: on real sockets."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.errors import PlacementError
from tf4slurm.network.ports import HeldPort, count_free, format_ranges, has_listener, hold_port, parse_ports

PORT = st.integers(1, 65535)


@pytest.fixture
def held() -> Iterator[HeldPort]:
    port = hold_port()
    yield port
    port.close()


def listener(port: int, *, reuse: bool, host: str = "127.0.0.1") -> socket.socket:
    """Listen as TensorFlow's server does with TF_GRPC_REUSE_PORT=true, or as another program."""
    server = socket.socket()
    if reuse:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        server.bind((host, port))
    except OSError:
        server.close()
        raise
    server.listen()
    server.settimeout(60)
    return server


def assert_reached(server: socket.socket, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getpeername()[1] == client.getsockname()[1]


def test_kernel_picks_different_ports(held: HeldPort) -> None:
    with contextlib.closing(hold_port()) as other:
        assert 0 < other.port != held.port > 0


def test_held_port_cannot_be_held_twice(held: HeldPort) -> None:
    with pytest.raises(PlacementError) as caught:
        hold_port([held.port])
    assert (
        str(caught.value)
        == f"None of the 1 ports {held.port} is free on this host. Give another range, or a larger one."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_message_says_how_many_ports_other_tasks_hold(held: HeldPort) -> None:
    with contextlib.closing(hold_port()) as free:
        pass
    ports = [held.port, free.port]
    with contextlib.closing(hold_port(ports)), pytest.raises(PlacementError) as caught:
        hold_port(ports)
    assert "is free on this host. Tasks of tf4slurm hold 1 of them, and each task needs one. Give" in str(caught.value)


def test_free_ports_are_counted_up_to_a_limit(held: HeldPort) -> None:
    with contextlib.closing(hold_port()) as one, contextlib.closing(hold_port()) as two:
        ports = (held.port, one.port, two.port)
        assert count_free(ports, 3) == 0
    assert (count_free(ports, 3), count_free(ports, 1)) == (2, 1)


def test_holders_take_the_first_free_candidate(held: HeldPort) -> None:
    with contextlib.closing(hold_port()) as free:
        pass
    with contextlib.closing(hold_port([held.port, free.port])) as second:
        assert second.port == free.port


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_listening_port_is_not_held(host: str, reuse: bool) -> None:
    with listener(0, reuse=reuse, host=host) as server, pytest.raises(PlacementError):
        hold_port([server.getsockname()[1]])


def test_closed_port_can_be_held_again(held: HeldPort) -> None:
    held.close()
    with contextlib.closing(hold_port([held.port])) as again:
        assert again.port == held.port


def test_program_without_reuse_port_cannot_bind_a_held_port(held: HeldPort) -> None:
    with pytest.raises(OSError, match="in use"):
        listener(held.port, reuse=False)


def test_child_with_reuse_port_accepts_every_connection_while_the_port_is_held(held: HeldPort) -> None:
    with listener(held.port, reuse=True) as server:
        for _ in range(20):
            assert_reached(server, held.port)


def test_held_port_refuses_connections(held: HeldPort) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=60)


def test_holder_listens_on_its_port_and_stops_for_the_child(held: HeldPort) -> None:
    own = held.listen()
    assert own.getblocking() is False
    own.settimeout(60)
    with own:
        assert_reached(own, held.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=60)
    with listener(held.port, reuse=True) as server:
        assert_reached(server, held.port)


PLAIN, ADDRESS, PORT_ONLY = (), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)
BOTH = ADDRESS + PORT_ONLY  # as TensorFlow's server with TF_GRPC_REUSE_PORT=true


def open_server(port: int, options: tuple[int, ...], family: int = socket.AF_INET) -> socket.socket | None:
    """Listen on the port with these options. Return None if it is in use."""
    server = socket.socket(family)
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        server.bind(("", port))
        server.listen()
    except OSError:
        server.close()
        return None
    return server


@pytest.mark.skipif(sys.platform != "linux", reason="the rules of Linux")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize(
    ("options", "is_restricted", "is_shared"),
    [(PLAIN, False, False), (ADDRESS, False, True), (PORT_ONLY, True, True), (BOTH, True, True)],
)
def test_which_servers_can_listen_on_a_held_port(
    held: HeldPort, family: int, options: tuple[int, ...], is_restricted: bool, is_shared: bool
) -> None:
    held.listen().close()  # as before each child starts
    for is_possible in (is_restricted, is_shared, is_restricted, is_shared):
        server = open_server(held.port, options, family)
        assert (server is not None) is is_possible
        if server is not None:
            assert has_listener(held.port)
            client = socket.create_connection(("::1" if family == socket.AF_INET6 else "127.0.0.1", held.port))
            server.accept()[0].close()  # the server's side stays in TIME_WAIT
            client.close()
            assert open_server(held.port, ADDRESS, family) is None
            server.close()
        assert not has_listener(held.port)
        held.share(with_every_server=is_possible is is_restricted and is_restricted is not is_shared)


@pytest.mark.skipif(sys.platform != "linux", reason="the rules of Linux")
def test_kernel_gives_a_shared_port_to_no_program_that_asks_for_any(held: HeldPort) -> None:
    held.share(with_every_server=True)
    with contextlib.ExitStack() as opened:
        for _ in range(1_000):
            other = opened.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("", 0))
            assert other.getsockname()[1] != held.port


def test_released_port_is_free_but_not_for_other_tasks() -> None:
    with contextlib.closing(hold_port()) as free:
        pass
    with contextlib.closing(hold_port([free.port])) as held:
        held.release()
        held.share(with_every_server=True)  # no effect
        server = open_server(held.port, PLAIN)
        assert server is not None
        server.close()
        if sys.platform == "linux":
            with pytest.raises(PlacementError):
                hold_port([held.port])


def test_listening_on_the_held_port_does_not_admit_another_holder(held: HeldPort) -> None:
    with held.listen(), pytest.raises(PlacementError):
        hold_port([held.port])


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("23000", (23000,)),
        ("23000-23002", (23000, 23001, 23002)),
        ("23000-23001,23500,23900-23900", (23000, 23001, 23500, 23900)),
        ("65535,1", (65535, 1)),
    ],
)
def test_ports_are_parsed(text: str, ports: tuple[int, ...]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("23000,", ""),
        ("23002-23000", "23002-23000"),
        ("1-2,0-5", "0-5"),
        ("65535-65536", "65535-65536"),
        ("-5", "-5"),
        ("5-", "5-"),
        ("1-2-3", "1-2-3"),
        ("http", "http"),
        ("23000 - 23002", "23000 - 23002"),
    ],
)
def test_invalid_range_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match='expected "first-last" within 1 to 65535') as caught:
        parse_ports(text)
    assert str(caught.value).startswith(repr(part))


@pytest.mark.parametrize(
    ("ports", "text"),
    [((5,), "5"), ((5, 6, 7), "5-7"), ((5, 7, 8), "5,7-8"), ((8, 7), "8,7"), ((5, 5), "5,5"), ((), "")],
)
def test_ports_are_formatted(ports: tuple[int, ...], text: str) -> None:
    assert format_ranges(ports) == text


def test_ports_too_many_for_a_variable_are_refused() -> None:
    with pytest.raises(ValueError, match="32,767 single ports and ranges are too many"):
        parse_ports(format_ranges(range(1, 65535, 2)))


@given(st.lists(PORT, min_size=1))
def test_ports_survive_the_round_trip(ports: list[int]) -> None:
    assert parse_ports(format_ranges(ports)) == tuple(ports)


@given(st.lists(st.tuples(st.integers(1, 60000), st.integers(1, 50)), min_size=1, max_size=5))
def test_ranges_survive_the_round_trip(ranges: list[tuple[int, int]]) -> None:
    ports = [port for start, count in ranges for port in range(start, start + count)]
    assert parse_ports(format_ranges(ports)) == tuple(ports)


def leave_in_time_wait() -> int:
    """Serve one connection and close it from our side; return the port, which is now in TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    return port


def test_port_in_time_wait_is_held_by_one_holder() -> None:
    port = leave_in_time_wait()
    with contextlib.closing(hold_port([port])) as held:
        assert held.port == port
        with pytest.raises(PlacementError):
            hold_port([port])
        with held.listen() as listener:
            listener.setblocking(True)
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            listener.accept()[0].close()
