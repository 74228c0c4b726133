"""Exits of children: their order, and that nothing of a child takes part in the job after its exit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from tests.jobs import TF4SLURM, Job

LEAVES_A_SERVER = """
import json, os, pathlib, socket, sys, time
config, marker = json.loads(os.environ["TF_CONFIG"]), pathlib.Path(sys.argv[1], "restarted")
host, port = config["cluster"]["worker"][0].rsplit(":", 1)
if config["task"]["type"] == "worker":
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((host, int(port)))
    server.listen(100)
    if not marker.exists():
        if os.fork() == 0:
            os.setsid()
            time.sleep(300)
        print("the previous child", flush=True)
        marker.touch()
        sys.exit("fails once")
    pathlib.Path(sys.argv[1], "serves").touch()
    while True:
        connection, _ = server.accept()
        connection.sendall(b"y")
        connection.close()
while not pathlib.Path(sys.argv[1], "serves").exists():
    time.sleep(0.02)
for _ in range(40):
    with socket.create_connection((host, int(port))) as client:
        client.settimeout(60)
        assert client.recv(1) == b"y"
"""

FAILS = """
import json, os, pathlib, subprocess, sys, time
marker = pathlib.Path(sys.argv[1], "failed")
def runs(process_id):
    try:
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
    while not marker.exists() or runs(int(marker.read_text())):
        time.sleep(0.005)
    time.sleep(0.15)
    sys.exit(4)
print("the first to fail", flush=True)
subprocess.Popen(["sleep", "300"], start_new_session=True)
draft = marker.with_suffix(".draft")
draft.write_text(str(os.getpid()))
draft.replace(marker)
os._exit(3)
"""


def test_restarted_child_gets_all_connections_to_its_port(job: Job) -> None:
    command = (sys.executable, "-c", LEAVES_A_SERVER, str(job.children))
    job.start("--ps", "0", "--workers", "1", command=command)
    assert job.wait(60) == 0, job.stderr
    assert [event["task"] for event in job.events if event["kind"] == "restarting"] == ["worker/0"]
    log = (job.run_directory / "logs" / "worker-0.1.log").read_text()
    assert "the previous child" in log
    assert "fails once" in log


def test_first_of_two_failures_is_the_cause_although_its_output_is_still_open(job: Job) -> None:
    job.start("--ps", "1", "--workers", "0", command=(sys.executable, "-c", FAILS, str(job.children)))
    assert job.wait() == 3, job.stderr
    assert (job.result["cause"], job.result["tail"]) == ("chief/0", ["the first to fail"])
    assert next(event["task"] for event in job.events if event["kind"] == "exited") == "chief/0"


def test_job_that_fails_before_its_tasks_start_has_a_result(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job.start("--ps", "1", "--workers", "1", "--control-port", str(port))
        assert job.wait() == 3, job.stderr
    assert f"None of the 1 ports {port} is free" in job.result["reason"]
    assert job.result["reason"] in job.stderr
    shown = subprocess.run([TF4SLURM, "status", "--json", job.run_directory], capture_output=True, text=True)
    (status,) = json.loads(shown.stdout)
    assert (status["state"], status["exit_code"], status["reason"]) == ("FAILED", 3, job.result["reason"])
    report = subprocess.run([TF4SLURM, "report", job.run_directory, "-o-"], capture_output=True, text=True)
    assert str(port) in report.stdout
