"""The held port of a task with servers of TensorFlow 2, and of TensorFlow 1.15, which do not set SO_REUSEPORT."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import wait_until
from tests.servers import free_ports

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

OLD_PYTHON = Path(__file__).parents[2] / ".tensorflow-1.15" / "bin" / "python"
MONITORED_SESSION = Path(__file__).with_name("unchanged_scripts") / "monitored_session.py"
NUM_STARTS, NUM_BLOCKS = 20, 10
NUM_PORTS = 20
SECONDS = 170

SERVERS = """
import json
import os
import sys
import time

import tensorflow as tf

config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
if role == "ps" and len(sys.argv) > 1:
    with open(sys.argv[1] + "/draft", "w") as draft:
        draft.write(config["cluster"][role][index].rpartition(":")[2])
    os.rename(sys.argv[1] + "/draft", sys.argv[1] + "/port")
    deadline = time.time() + 60
    while not os.path.exists(sys.argv[1] + "/go"):
        assert time.time() < deadline
        time.sleep(0.05)
server = tf.compat.v1.train.Server(tf.train.ClusterSpec(config["cluster"]), job_name=role, task_index=index)
if role != "chief":
    server.join()
with tf.Graph().as_default():
    with tf.device("/job:ps/task:0"):
        number = tf.constant(42)
    with tf.compat.v1.Session(server.target) as session:
        print("the ps computes", session.run(number), flush=True)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF2_BEHAVIOR", raising=False)  # an import of TensorFlow 2 in this process sets it
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture
def old_python() -> str:
    """The Python of an environment with TensorFlow 1.15."""
    if not OLD_PYTHON.exists():
        pytest.skip(f"there is no {OLD_PYTHON.parent.parent.name}")
    return str(OLD_PYTHON)


def is_refused(port: int) -> bool:
    """Return whether a server with only SO_REUSEADDR cannot have the port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return True
    return False


@pytest.mark.parametrize("preload", ["always", "never"])
def test_other_servers_are_refused_before_tensorflow_2_opens_its_server(job: Job, preload: str) -> None:
    script = job.directory / "servers.py"
    script.write_text(SERVERS)
    job.start(
        "--ps", "1", "--workers", "0", "--preload", preload, command=(sys.executable, str(script), str(job.children))
    )
    assert wait_until((job.children / "port").exists, SECONDS), job.stderr
    port = int((job.children / "port").read_text())
    assert wait_until(lambda: is_refused(port), 60)
    (job.children / "go").touch()
    assert job.wait(SECONDS) == 0, job.stderr
    assert "the ps computes 42" in job.stdout


@pytest.mark.parametrize("hold_ports", ["auto", "never"])
def test_unchanged_script_trains_with_tensorflow_1(job: Job, old_python: str, hold_ports: str) -> None:
    options = ("--no-chief", "--ps", "1", "--workers", "2", "--hold-ports", hold_ports)
    job.start(*options, command=(old_python, str(MONITORED_SESSION), str(job.directory / "checkpoints")))
    assert job.wait(SECONDS) == 0, job.stderr
    for index in range(2):
        assert f"worker {index} trained to step" in job.stdout
    assert not [event for event in job.events if event["kind"] == "other_ports"]


def test_always_refuses_the_server_of_tensorflow_1(job: Job, old_python: str) -> None:
    options = ("--ps", "1", "--workers", "0", "--hold-ports", "always")
    script = job.directory / "servers.py"
    script.write_text(SERVERS)
    job.start(*options, command=(old_python, str(script)))
    assert job.wait(SECONDS) == 1
    assert "Could not start gRPC server" in job.stderr
    assert "With --hold-ports always it needs TensorFlow 2.3 or newer. Give --hold-ports auto or never." in job.stderr


@contextlib.contextmanager
def taking_free_ports(first: int, count: int) -> Iterator[list[int]]:
    """Take each port of a range as soon as it is free, and any others, again and again. The value is the taken ones.

    Half of the ports of the range are left to the job.
    """
    is_over = threading.Event()
    taken: list[int] = []

    def take() -> None:
        while not is_over.wait(0.001):
            with contextlib.ExitStack() as opened:
                for port in (*range(first, first + count // 2), *[0] * 50):
                    server = opened.enter_context(socket.socket())
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port == 0)
                    with contextlib.suppress(OSError):
                        server.bind(("", port))
                        server.listen()
                        taken.append(server.getsockname()[1])

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield taken
    finally:
        is_over.set()
        thread.join(60)


@pytest.mark.long
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
@pytest.mark.parametrize("has_range", [False, True])
def test_no_port_of_tensorflow_1_is_lost_to_another_program(
    tmp_path: Path, old_python: str, has_range: bool, block: int
) -> None:
    script = tmp_path / "servers.py"
    script.write_text(SERVERS)
    first = free_ports(NUM_PORTS)
    ports = ("--ports", f"{first}-{first + NUM_PORTS - 1}") if has_range else ()
    with taking_free_ports(first, NUM_PORTS) as taken:
        for number in range(NUM_STARTS // 2):
            directory = tmp_path / str(number)
            directory.mkdir()
            with Job(directory) as job:
                job.start("--ps", "1", "--workers", "0", *ports, command=(old_python, str(script)))
                assert job.wait(SECONDS) == 0, job.stderr
                assert "the ps computes 42" in job.stdout
                assert not [event for event in job.events if event["kind"] == "other_ports"]
    assert taken
