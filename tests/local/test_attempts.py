"""`tf4slurm run` on this host: attempts after the loss of a ps or the chief, and unresponsive children."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from tests.jobs import NAMES, ROLES, Job
from tests.processes import child_of, wait_until, wait_until_gone
from tests.servers import free_ports


def addresses(child: dict[str, object]) -> set[str]:
    config = child["config"]
    assert isinstance(config, dict)
    return {address for role in config["cluster"].values() for address in role}


@pytest.mark.parametrize("victim", ["ps-0", "chief-0"])
def test_loss_of_ps_or_chief_starts_another_attempt(job: Job, victim: str, process_mark: str) -> None:
    job.start(*ROLES, "--max-attempts", "2")
    first = {name: job.wait_for_child(name) for name in NAMES}
    os.kill(first[victim]["pid"], signal.SIGKILL)
    second = {name: job.wait_for_child(name, number=2) for name in NAMES}
    assert not any(psutil.pid_exists(child["pid"]) for child in first.values())
    assert not addresses(first["chief-0"]) & addresses(second["chief-0"])
    assert all(addresses(child) == addresses(second["chief-0"]) for child in second.values())
    assert [child["environ"]["TF4SLURM_ATTEMPT"] for child in (*first.values(), *second.values())] == ["1"] * 4 + [
        "2"
    ] * 4
    assert second["ps-0"]["environ"]["TF4SLURM_RUN_DIRECTORY"] == str(job.run_directory)
    for name in NAMES:
        assert (job.run_directory / "logs" / f"{name}.2.log").exists()
    job.end_child("chief-0")
    assert job.wait() == 0
    assert job.result["attempts"] == 2
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_failure_of_last_attempt_ends_job_with_its_cause(job: Job) -> None:
    job.start(*ROLES, "--max-attempts", "2")
    os.kill(job.wait_for_child("ps-0")["pid"], signal.SIGKILL)
    os.kill(job.wait_for_child("ps-0", number=2)["pid"], signal.SIGSEGV)
    assert job.wait() == 139
    assert "attempt 2 of 2, because: ps/0" in job.stderr
    assert job.stderr.count("Root cause:") == 1
    assert "ps-0.2.log" in job.stderr


def test_narrow_range_of_ports_suffices_for_second_attempt(job: Job) -> None:
    first = free_ports(5)
    job.start(*ROLES, "--max-attempts", "2", "--ports", f"{first}-{first + 4}")
    children = {name: job.wait_for_child(name) for name in NAMES}
    os.kill(children["ps-0"]["pid"], signal.SIGKILL)
    job.wait_for_child("chief-0", number=2)
    job.end_child("chief-0")
    assert job.wait() == 0


@pytest.mark.parametrize(("victim", "code"), [("ps-0", 7), ("chief-0", 7)])
def test_stopped_child_counts_as_failed(job: Job, victim: str, code: int, process_mark: str) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "4", "--heartbeat-interval", "0.2")
    for name in NAMES:
        job.wait_for_child(name)
    os.kill(job.wait_for_child(victim)["pid"], signal.SIGSTOP)
    assert job.wait() == code
    assert "was stopped for 4 s." in job.stderr.partition("Root cause:")[2]
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_stopped_worker_is_restarted(job: Job) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "4", "--heartbeat-interval", "0.2")
    os.kill(job.wait_for_child("worker-1")["pid"], signal.SIGSTOP)
    assert job.wait_for_child("worker-1", number=2)
    job.end_child("chief-0")
    assert job.wait() == 0


ANSWERING = """
import json, os, select, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
port = int(config["cluster"][role][index].rpartition(":")[2])
listener = socket.create_server(("", port), reuse_port=True)
open(f"{sys.argv[1]}/{role}-{index}", "w").close()
while not (role == "ps" and os.path.exists(f"{sys.argv[1]}/unresponsive")):  # a server that answers as HTTP/2 does
    if select.select([listener], [], [], 0.05)[0]:
        connection, _ = listener.accept()
        if connection.recv(100):
            connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
time.sleep(1000)
"""


def test_server_that_stops_answering_counts_as_failed(job: Job) -> None:
    command = (sys.executable, "-c", ANSWERING, str(job.children))
    job.start("--ps", "1", "--workers", "1", "--heartbeat-timeout", "4", "--heartbeat-interval", "0.2", command=command)
    assert wait_until((job.children / "ps-0").exists, 60), job.stderr
    job.wait_for_event("serving", "ps/0")  # the liveness probe has succeeded
    (job.children / "unresponsive").touch()
    assert job.wait() == 7
    assert "did not answer at its port for 4 s." in job.stderr.partition("Root cause:")[2]


def test_task_without_server_fails_at_stall_timeout(job: Job) -> None:
    options = (
        "--stall-timeout",
        "5",
        "--start-timeout",
        "15",
    )
    job.start(
        *ROLES, *options, "--max-worker-restarts", "0", command=(sys.executable, "-c", "import time; time.sleep(1000)")
    )
    assert job.wait() == 7
    assert "had no server at its port 15 s after its start." in job.stderr.partition("Root cause:")[2]


FORKING = """
import os, signal, sys, threading, time
import tf4slurm
if os.environ["TF4SLURM_TASK"] == "chief/0":
    if os.environ["TF4SLURM_ATTEMPT"] == "2":
        time.sleep(2)
        sys.exit(0)
    tf4slurm.should_stop()
    if os.fork() == 0:
        os.setsid()
        memory = bytearray(200_000_000)  # so that it takes a while to end
        open(sys.argv[1] + "/ready", "w").close()
        time.sleep(1000)
threading.Event().wait()
"""


def test_signal_at_the_end_of_an_attempt_does_not_stop_the_next(job: Job) -> None:
    job.start(*ROLES, "--max-attempts", "2", command=(sys.executable, "-c", FORKING, str(job.children)))
    assert wait_until((job.children / "ready").exists, 60), job.stderr
    os.kill(child_of("ps/0"), signal.SIGKILL)
    assert job.wait() == 0, job.stderr
    assert job.result["attempts"] == 2
