"""Who does not answer in time is named, and a constructor that hangs ends its process. No TensorFlow here."""

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
from tf4slurm.tensorflow.forming import describe_silent, find_silent, servers_of

HANG = """
import sys, threading
from tf4slurm.tensorflow.forming import given_up_after
with given_up_after(30, lambda: "never said"):
    print("formed", flush=True)
with given_up_after(0.1, lambda: "ps/0 is missing"):
    threading.Event().wait(60)
"""


def test_only_those_that_do_not_answer_are_missing() -> None:
    with http2_server() as answers, socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        ports = {"worker": [answers, silent.getsockname()[1], bound.getsockname()[1]]}
        cluster = {role: [f"127.0.0.1:{port}" for port in ports[role]] for role in ports}
        missing = find_silent(servers_of(cluster, ("ps", "worker")), 3)
    assert set(missing) == {Task("worker", 1), Task("worker", 2)}


def test_one_that_comes_late_is_waited_for() -> None:
    found: list[dict[Task, Address]] = []
    with socket.socket() as holder:  # bound, so that nobody else gets the port; the server may have it all the same
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        asking = threading.Thread(
            target=lambda: found.append(find_silent({Task("ps", 0): Address("127.0.0.1", port)}, 20)),
        )
        asking.start()
        with http2_server(port):
            asking.join(15)
    assert found == [{}]


def test_it_is_said_who_is_missing_and_where_its_log_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF4SLURM_ATTEMPT", "2")
    missing = {Task("ps", 0): Address("10.0.0.1", 4001), Task("worker", 3): Address("fe80::1", 4002)}
    assert describe_silent(missing, RunDirectory(Path("/runs/a")), 30) == (
        "ps/0 at 10.0.0.1:4001 and worker/3 at [fe80::1]:4002 did not answer within 30 s. Look at the log of each, "
        "such as /runs/a/logs/ps-0.2.log, or raise timeout_seconds."
    )
    assert "Look at the log of each, or raise" in describe_silent(missing, None, 30)


def test_what_hangs_ends_with_its_process_and_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (6, "formed\n", "tf4slurm: ps/0 is missing\n")
