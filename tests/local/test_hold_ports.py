"""`tf4slurm run --hold-ports`: servers with and without SO_REUSEPORT, and programs that take the port of a task."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import wait_until, wait_until_gone

SERVER = """
import json, os, pathlib, socket, sys, time

directory, *options = sys.argv[1:]
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
port = int(config["cluster"][role][index].rpartition(":")[2])
name = f"{role}-{index}.{os.environ['TF4SLURM_ATTEMPT']}"

def wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)

def answers(address):
    host, _, number = address.rpartition(":")
    try:
        socket.create_connection((host, int(number)), timeout=60).close()
    except OSError:
        return False
    return True

place = pathlib.Path(directory)
if role == "ps":
    draft = place / "draft"
    draft.write_text(str(port))
    draft.replace(place / f"{name}.port")
    wait((place / f"{name}.go").exists)
server = socket.socket()
for option in options:
    server.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
server.bind(("", port))
server.listen()
(place / f"{name}.serving").touch()
if role == "chief":
    names = [f"{role}-{index}" for role, hosts in config["cluster"].items() for index in range(len(hosts))]
    wait(lambda: all((place / f"{each}.{os.environ['TF4SLURM_ATTEMPT']}.serving").exists() for each in names))
    assert all(answers(each) for role in config["cluster"].values() for each in role)
    sys.exit(0)
time.sleep(1000)
"""
"""A program without TensorFlow. The ps waits until the test lets it open its server. The chief reaches all servers."""


class Taker:
    """Takes the port of ps/0 before its server is opened, in the first `times` attempts, and keeps these ports.

    Attributes:
        ports: The ports of ps/0, by attempt.
        errors: Why a port could not be taken.
    """

    def __init__(self, place: Path, times: int, *, reuse_address: bool = True) -> None:
        self.ports: list[int] = []
        self.errors: list[int] = []
        self._place, self._times, self._reuse_address = place, times, reuse_address
        self._taken: list[socket.socket] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Taker:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        for each in self._taken:
            each.close()

    def _run(self) -> None:
        while not self._is_over.wait(0.01):
            attempt = len(self.ports) + 1
            path = self._place / f"ps-0.{attempt}.port"
            if path.exists():
                self.ports.append(int(path.read_text()))
                if attempt <= self._times:
                    self._take(self.ports[-1])
                (self._place / f"ps-0.{attempt}.go").touch()

    def _take(self, port: int) -> None:
        server = socket.socket()
        self._taken.append(server)
        if self._reuse_address:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except OSError as error:
            self.errors.append(error.errno or 0)


def start(job: Job, *options: str, reuse: tuple[str, ...]) -> None:
    """Start a job of a chief, a ps and a worker, whose servers set the options `reuse` of their sockets."""
    job.start(
        *("--ps", "1", "--workers", "1", *options), command=(sys.executable, "-c", SERVER, str(job.children), *reuse)
    )


def texts(job: Job, kind: str) -> list[str]:
    return [event["text"] for event in job.events if event["kind"] == kind]


@pytest.mark.parametrize(
    ("hold_ports", "reuse"),
    [
        ("auto", ("SO_REUSEADDR",)),  # TensorFlow 1.15, and most programs
        ("auto", ("SO_REUSEADDR", "SO_REUSEPORT")),  # TensorFlow 2.3
        ("auto", ("SO_REUSEPORT",)),
        ("always", ("SO_REUSEADDR", "SO_REUSEPORT")),
        ("never", ()),
    ],
)
def test_servers_get_the_held_port(job: Job, hold_ports: str, reuse: tuple[str, ...], process_mark: str) -> None:
    with Taker(job.children, times=0) as taker:
        start(job, "--hold-ports", hold_ports, reuse=reuse)
        assert job.wait() == 0, job.stderr
    assert len(taker.ports) == 1
    assert not texts(job, "other_ports")
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_server_that_cannot_share_a_port_gets_one_that_is_not_held(job: Job) -> None:
    with Taker(job.children, times=0) as taker:
        start(job, reuse=())
        assert job.wait() == 0, job.stderr
    assert len(set(taker.ports)) == 2
    (text,) = texts(job, "other_ports")
    assert "on which no other process listens. The cluster forms again on other ports, and the agents do not" in text


def test_always_refuses_a_server_without_reuse_port(job: Job) -> None:
    with Taker(job.children, times=0) as taker:
        start(job, "--hold-ports", "always", reuse=("SO_REUSEADDR",))
        assert job.wait() == 1, job.stderr
    assert len(taker.ports) <= 1
    assert "With --hold-ports always it needs TensorFlow 2.3 or newer. Give --hold-ports auto or never." in job.stderr


def test_always_lets_no_other_program_take_the_port(job: Job) -> None:
    with Taker(job.children, times=1) as taker:
        start(job, "--hold-ports", "always", reuse=("SO_REUSEADDR", "SO_REUSEPORT"))
        assert job.wait() == 0, job.stderr
    assert taker.errors == [errno.EADDRINUSE]


@pytest.mark.parametrize(("hold_ports", "reuse_address"), [("auto", True), ("never", False)])
def test_taken_port_forms_the_cluster_again_without_an_attempt(
    job: Job, hold_ports: str, reuse_address: bool, process_mark: str
) -> None:
    with Taker(job.children, times=2, reuse_address=reuse_address) as taker:
        start(job, "--hold-ports", hold_ports, "--max-worker-restarts", "0", reuse=("SO_REUSEADDR",))
        assert job.wait() == 0, job.stderr
    assert not taker.errors
    assert len(set(taker.ports)) == 3
    first, second = texts(job, "other_ports")
    assert first.startswith(f"Another process listens on port {taker.ports[0]} of ps/0 on ")
    assert first.endswith("The cluster forms again on other ports (1 of at most 5)")
    assert second.endswith("(2 of at most 5)")
    assert not texts(job, "attempt")
    assert "forms again on other ports (1 of at most 5)" in job.stderr
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_sixth_taken_port_ends_the_job(job: Job, process_mark: str) -> None:
    with Taker(job.children, times=6) as taker:
        start(job, reuse=("SO_REUSEADDR",))
        assert job.wait() == 1, job.stderr
    assert len(taker.ports) == 6
    assert job.result["cause"] == "ps/0"
    reason = job.result["reason"]
    assert reason.startswith(f"Another process listens on port {taker.ports[-1]} of ps/0 on ")
    assert "formed on other ports 5 times. Give --ports a range that no other program uses, or with" in reason
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_shared_port_is_refused_to_programs_that_do_not_ask_for_it(job: Job) -> None:
    start(job, reuse=("SO_REUSEADDR",))
    place = job.children / "ps-0.1.port"
    assert wait_until(place.exists, 60), job.stderr
    port = int(place.read_text())
    with contextlib.ExitStack() as opened:
        for _ in range(1_000):
            other = opened.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("", 0))
            assert other.getsockname()[1] != port
        plain = opened.enter_context(socket.socket())
        with pytest.raises(OSError, match="in use"):
            plain.bind(("", port))
    (job.children / "ps-0.1.go").touch()
    assert job.wait() == 0, job.stderr
