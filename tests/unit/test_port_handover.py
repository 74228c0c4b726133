"""How an agent shares the port of its task with its child, and what it reports if the child cannot have it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tf4slurm.agent.port_handover import PortHandover
from tf4slurm.network.ports import HeldPort, hold_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports are shared in this way on Linux only")

LOAD = "import mmap, sys; file = open(sys.argv[1]); map = mmap.mmap(file.fileno(), 0, access=1); print(1); input()"
"""Map a library into memory, as a program that imports TensorFlow does."""
IN_USE = "OSError: [Errno 98] Address already in use"


@pytest.fixture
def held() -> Iterator[HeldPort]:
    port = hold_port()
    yield port
    port.close()


def can_listen(port: int) -> bool:
    """Return whether a server with only SO_REUSEADDR can listen on the port."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def begin(held: HeldPort, hold_ports: str = "auto", *, releases_ports: bool = False) -> PortHandover:
    handover = PortHandover(hold_ports)  # type: ignore[arg-type]
    handover.begin(held, releases_ports=releases_ports)
    return handover


@pytest.mark.parametrize(("hold_ports", "is_shared"), [("auto", True), ("always", False), ("never", True)])
def test_port_is_shared_from_the_start_of_the_child_on(held: HeldPort, hold_ports: str, is_shared: bool) -> None:
    assert not can_listen(held.port)
    handover = begin(held, hold_ports)
    assert can_listen(held.port) is is_shared
    handover.end()
    assert can_listen(held.port) is (hold_ports == "never")


def test_port_is_released_on_request(held: HeldPort) -> None:
    begin(held, "auto", releases_ports=True)
    with socket.socket() as plain:
        plain.bind(("", held.port))


PACKAGES = [
    (("tensorflow/libtensorflow_framework.so.2", "tensorflow-2.21.0.dist-info"), True),
    (("tensorflow/libtensorflow_framework.so.2", "tensorflow_cpu-2.3.0.dist-info"), True),
    (("tensorflow/libtensorflow_framework.so.2", "tf_nightly-2.22.0.dev20261101.dist-info"), True),
    (("tensorflow/libtensorflow_framework.so.2", "intel_tensorflow_avx512-2.12.0.dist-info"), True),
    (("tensorflow/libtensorflow_framework.so.2", "tensorflow-2.2.3.dist-info"), False),
    (("tensorflow_core/libtensorflow_framework.so.2", "tensorflow-2.0.4.dist-info"), False),
    (("tensorflow_core/libtensorflow_framework.so.1", "tensorflow-1.15.5.dist-info"), False),
    (("tensorflow/libtensorflow_framework.so.2", "tensorflow_estimator-2.15.0.dist-info"), False),  # unknown
    (("tensorflow/libtensorflow_framework.so.2",), False),
]


@pytest.mark.parametrize(("names", "is_restricted"), PACKAGES, ids=[names[-1] for names, _ in PACKAGES])
@pytest.mark.parametrize("prefix", [(), ("sh", "-c", '"$@"; exit', "sh")])
def test_other_servers_are_refused_when_the_child_has_loaded_tensorflow(
    held: HeldPort, tmp_path: Path, names: tuple[str, ...], is_restricted: bool, prefix: tuple[str, ...]
) -> None:
    packages = tmp_path / "lib of python" / "site-packages"
    for name in names:
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "dist-info" in name:
            path.mkdir()
        else:
            path.write_bytes(b"library")
    handover = begin(held)
    command = [*prefix, sys.executable, "-u", "-c", LOAD, str(packages / names[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        asyncio.run(asyncio.wait_for(handover.restrict(child.pid, is_forked=False), 60))
        child.communicate("\n")
    assert can_listen(held.port) is not is_restricted
    assert handover.may_fail is not is_restricted


def test_other_servers_are_refused_at_once_for_a_forked_child(held: HeldPort) -> None:
    handover = begin(held)
    asyncio.run(handover.restrict(os.getpid(), is_forked=True))
    assert not can_listen(held.port)
    assert not handover.may_fail


def test_port_that_was_taken_before_the_restriction_may_fail(held: HeldPort) -> None:
    handover = begin(held)
    with socket.create_server(("", held.port)):
        asyncio.run(handover.restrict(os.getpid(), is_forked=True))
        assert handover.find_failure((IN_USE,)) == "taken"


@pytest.mark.parametrize(
    ("line", "is_failure"),
    [
        (IN_USE, True),
        ("tensorflow.python.framework.errors_impl.UnknownError: Could not start gRPC server", True),
        ("Error: listen EADDRINUSE: address already in use :::4000", True),
        ("ValueError: no data", False),
    ],
)
@pytest.mark.parametrize(
    ("hold_ports", "expected"), [("auto", ("taken", "held")), ("always", ("taken", "held")), ("never", ("taken", None))]
)
def test_failure_of_a_server_is_recognised(
    held: HeldPort, hold_ports: str, expected: tuple[str, str | None], line: str, is_failure: bool
) -> None:
    handover = begin(held, hold_ports)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("", held.port))
        other.listen()
        assert handover.find_failure(("Traceback", line)) == (expected[0] if is_failure else None)
    assert handover.find_failure(("Traceback", line)) == (expected[1] if is_failure else None)


def test_task_without_a_server_has_no_port_failure() -> None:
    handover = PortHandover("auto")
    handover.begin(None, releases_ports=False)
    assert not handover.may_fail
    assert handover.find_failure((IN_USE,)) is None
