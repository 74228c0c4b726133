"""Servers that do not answer are named, and a block that hangs ends its process. Without TensorFlow."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.servers import http2_server
from tf4slurm.cluster import Address, Task
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.tensorflow.servers import describe_missing, wait_for_servers

HANG = """
import sys, threading
from tf4slurm.tensorflow.servers import exit_after
with exit_after(30, lambda: "not printed"):
    print("formed", flush=True)
with exit_after(0.1, lambda: "ps/0 is missing"):
    threading.Event().wait(60)
"""


def test_only_servers_that_do_not_answer_are_missing() -> None:
    with http2_server() as answers, socket.create_server(("127.0.0.1", 0)) as unresponsive, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        ports = {"worker": [answers, unresponsive.getsockname()[1], bound.getsockname()[1]]}
        cluster = {role: [f"127.0.0.1:{port}" for port in ports[role]] for role in ports}
        missing = wait_for_servers(cluster, 3)
    assert set(missing) == {Task("worker", 1), Task("worker", 2)}


def test_late_server_is_waited_for() -> None:
    found: list[dict[Task, Address]] = []
    with socket.socket() as holder:  # bound, so that no other process takes the port; the server can share it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        asking = threading.Thread(
            target=lambda: found.append(wait_for_servers({"ps": [f"127.0.0.1:{port}"]}, 60)),
        )
        asking.start()
        with http2_server(port):
            asking.join(60)
    assert found == [{}]


def test_error_names_missing_servers_and_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF4SLURM_ATTEMPT", "2")
    missing = {Task("ps", 0): Address("10.0.0.1", 4001), Task("worker", 3): Address("fe80::1", 4002)}
    assert describe_missing(missing, RunDirectory(Path("/runs/a")), 30) == (
        "ps/0 at 10.0.0.1:4001 and worker/3 at [fe80::1]:4002 did not answer within 30 s. See the log of each, "
        "such as /runs/a/logs/ps-0.2.log, or raise timeout_seconds."
    )
    assert "See the log of each, or raise" in describe_missing(missing, None, 30)


def test_hanging_block_ends_the_process_with_a_reason() -> None:
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (6, "formed\n", "tf4slurm: ps/0 is missing\n")
