"""The warning that a job shows no sign of work, in real jobs of processes that sleep, print, compute or hang.

The limit of 60 s is 4 s here, and the allowances for processor time and traffic are smaller in proportion.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.jobs import Job

LIMIT_SECONDS = 4
SITECUSTOMIZE = f"""
try:
    from tf4slurm.control import idleness
    idleness.IdleWatch.__init__.__defaults__ = ({LIMIT_SECONDS}.0,)
    idleness._USAGE_SECONDS = 0.5
except ImportError:
    pass
"""
BEGIN = """
import json, os, socket, subprocess, sys, threading, time
name = os.environ["TF4SLURM_TASK"]
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
port = int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])
server = socket.create_server(("127.0.0.1", port), reuse_port=True)

def serve():
    while True:
        end = server.accept()[0]
        try:
            end.sendall(bytes(3) + bytes([4]) + bytes(5))  # the SETTINGS frame of an HTTP/2 server
        except OSError:
            continue
        threading.Thread(target=drain, args=(end,), daemon=True).start()

def drain(end):
    try:
        while end.recv(4096):
            pass
    except OSError:
        pass

threading.Thread(target=serve, daemon=True).start()
if name == "ps/0":
    threading.Event().wait()
end = time.monotonic() + 16

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
"""
HEALTHY = {
    "prints and sleeps": "while time.monotonic() < end: print('works', flush=True); time.sleep(1)",
    "prints dots": "while time.monotonic() < end: print('.', end='', flush=True); time.sleep(1)",
    "reports steps": (
        "import tf4slurm\nstep = 0\nwhile time.monotonic() < end: step += 1; tf4slurm.report(step=step); time.sleep(1)"
    ),
    "computes a bit and sleeps": "while time.monotonic() < end: burn(0.1); time.sleep(1)",
    "children compute": (
        "while time.monotonic() < end:\n"
        "    subprocess.run([sys.executable, '-c', 'sum(range(3_000_000))'])\n"
        "    time.sleep(1)"
    ),
    "orphans compute": (
        "while time.monotonic() < end:\n"
        "    subprocess.run(['sh', '-c', f'{sys.executable} -c \"sum(range(9_000_000))\" & exit'])\n"
        "    time.sleep(1)"
    ),
    "moves bytes at the port of the ps": (
        "peer = config['cluster']['ps'][0].rpartition(':')\n"
        "connection = None\n"
        "while connection is None:\n"
        "    try: connection = socket.create_connection((peer[0], int(peer[2])))\n"
        "    except ConnectionRefusedError: time.sleep(0.1)\n"
        "with connection:\n"
        "    while time.monotonic() < end: connection.sendall(bytes(500)); time.sleep(1)"
    ),
}
LINE = "I0000 00:00:1795737546.680967   16107 master.cc:278] CreateSession still waiting for response from worker: "
HANGS = {
    "deadlock": "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=16)",
    "waits for a file": "while time.monotonic() < end and not os.path.exists('x'): time.sleep(0.5)",
    "deadlock after output": "print('loaded', flush=True); threading.Event().wait(16)",
    "TensorFlow alone prints": (
        f"while time.monotonic() < end: print('{LINE}/job:evaluator/replica:0/task:0', flush=True); time.sleep(1)"
    ),
}


@pytest.fixture(autouse=True)
def short_limit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(job.directory), prepend=os.pathsep)


def run(job: Job, script: str) -> list[str]:
    """Run a job of a chief, which runs the script, and a ps. Return the warnings of its idleness."""
    path = job.directory / "train.py"
    path.write_text(f"{BEGIN}\n{script}\n")
    job.start("--ps", "1", "--workers", "0", command=(sys.executable, str(path)))
    assert job.wait(60) == 0, job.stdout + job.stderr
    return [event["text"] for event in job.events if event["kind"] == "warning" and "sign of work" in event["text"]]


@pytest.mark.parametrize("script", HEALTHY.values(), ids=HEALTHY)
def test_script_that_works_slowly_is_not_warned_of(job: Job, script: str) -> None:
    assert run(job, script) == []


@pytest.mark.parametrize("script", HANGS.values(), ids=HANGS)
def test_script_that_hangs_is_warned_of_until_it_ends(job: Job, script: str) -> None:
    (warning,) = run(job, script)
    assert f"WARNING: {warning}" not in job.stderr  # the chief exited with 0, so it did not hang for ever
    assert f"This is not true any more: {warning}" in job.stderr
    assert job.result["warnings"] == []
