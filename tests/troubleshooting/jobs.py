"""Local jobs whose tasks fail, wait or are stopped; no script imports TensorFlow."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from tests.faults.disk import fill, small_disk
from tests.jobs import Job
from tests.processes import wait_until
from tests.troubleshooting.workplace import Producer, Table, Workplace

QUICK = ("--heartbeat-timeout", "2", "--heartbeat-interval", "0.5")
ROLE = "import os, signal, sys, threading, time; role = os.environ['TF4SLURM_TASK'].partition('/')[0]\n"
"""Begins a script that does different things in its roles."""
SERVER = """
import json, socket
config = json.loads(os.environ["TF_CONFIG"])
port = config["cluster"][role][config["task"]["index"]].rpartition(":")[2]
server = socket.create_server(("", int(port)), reuse_port=True)
"""
TAKEN = """
import json, socket
config = json.loads(os.environ["TF_CONFIG"])
address = "", int(config["cluster"][role][0].rpartition(":")[2])
if role == "ps":
    server = socket.create_server(address)
    reading, writing = os.pipe()
    if os.fork() == 0:  # this process has the port
        os.setsid()
        os.write(writing, b"x")
        time.sleep(60)
    os.read(reading, 1)
    socket.create_server(address)
time.sleep(60)
"""
FAILS_TWICE = """
if role == "worker":
    open("failures", "a").write("x")
    sys.exit(3)
while not os.path.exists("failures") or os.path.getsize("failures") < 2:
    time.sleep(0.02)
"""
IDLE = """
import os, time
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
time.sleep(90)
os._exit(0)
"""


def script(text: str, *options: str, is_long: bool = False) -> Producer:
    return Producer(lambda place: place.run_script(ROLE + text, *options), is_long)


def python(text: str) -> Producer:
    return Producer(lambda place: place.shell(sys.executable, "-c", f"import tf4slurm; {text}"))


def during(make_mistake: Callable[[Job], None], *options: str, is_long: bool = False) -> Producer:
    """Make a mistake while the tasks of a job run."""

    def produce(place: Workplace) -> str:
        place.job.start("--ps", "1", "--workers", "1", *options)
        for name in ("chief-0", "ps-0", "worker-0"):
            place.job.wait_for_child(name)
        make_mistake(place.job)
        place.job.wait()
        return place.job.stderr

    return Producer(produce, is_long)


def agent_of(job: Job, name: str) -> int:
    """Return the process id of the agent above a child."""
    with open(f"/proc/{job.wait_for_child(name)['pid']}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def kill_child(job: Job) -> None:
    os.kill(job.wait_for_child("ps-0")["pid"], signal.SIGKILL)


def kill_agent(job: Job) -> None:
    os.kill(agent_of(job, "worker-0"), signal.SIGKILL)


def stop_agent(job: Job) -> None:
    os.kill(agent_of(job, "worker-0"), signal.SIGSTOP)


def stop(job: Job) -> None:
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)


def ignored_stop(place: Workplace) -> str:
    place.write("train.py", f"{ROLE}signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('trains')\ntime.sleep(60)\n")
    command = (sys.executable, str(place.directory / "train.py"))
    place.job.start("--ps", "0", "--workers", "0", "--grace-period", "1", command=command)
    assert wait_until(lambda: "trains" in place.job.stdout, 60)
    stop(place.job)
    place.job.wait()
    return place.job.stderr


def cut_save(place: Workplace) -> str:
    save = "signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))"
    place.write("train.py", f"{ROLE}{save}\nprint('trains')\ntime.sleep(60)\n")
    place.job.start("--ps", "0", "--workers", "0", command=(sys.executable, str(place.directory / "train.py")))
    assert wait_until(lambda: "trains" in place.job.stdout, 60)
    stop(place.job)
    place.job.wait_for_event("stopping")
    place.tf4slurm("cancel", "--now", str(place.job.run_directory))
    place.job.wait()
    return place.job.stderr


def killed_launcher(place: Workplace) -> str:
    during(lambda job: job.process.kill() if job.process else None, *QUICK).produce(place)
    run_directory = place.job.run_directory
    wait_until(lambda: "LOST" in place.tf4slurm("status", str(run_directory)), 60)
    return place.tf4slurm("status", str(run_directory))


def running(*arguments: str) -> Producer:
    """Run a command about a job that is running."""

    def produce(place: Workplace) -> str:
        place.job.start("--ps", "1", "--workers", "1")
        place.job.wait_for_child("chief-0")
        output = place.tf4slurm(*arguments, str(place.job.run_directory))
        stop(place.job)
        place.job.wait()
        return output

    return Producer(produce)


def full_disk(place: Workplace) -> str:
    with small_disk(place.job.directory / "runs"):
        place.job.start("--ps", "0", "--workers", "0")
        place.job.wait_for_child("chief-0")
        fill(place.job.directory / "runs")
        assert wait_until(lambda: "is not recorded" in place.job.stderr, 60)
        place.job.end_child("chief-0")
        place.job.wait()
        return place.job.stderr


JOBS: Table = {
    "ModuleNotFoundError": script("import no_such_package\n"),
    "FileNotFoundError": script("open('data/train.csv')\n"),
    "has started a TensorFlow server": script("print('trains')\n"),
    "No task has shown a sign of work": Producer(
        lambda place: place.run_script(IDLE, timeout_seconds=160), is_long=True
    ),
    "did not arrive at barrier": script(
        "import tf4slurm\nif role == 'ps': threading.Event().wait()\ntf4slurm.barrier('loaded', timeout_seconds=1)\n",
        is_long=True,
    ),
    "Training has stalled": script(
        f"{SERVER}\nimport tf4slurm\nif role == 'chief': tf4slurm.report(step=7)\nthreading.Event().wait()\n",
        *("--stall-timeout", "2", "--start-timeout", "20"),
        is_long=True,
    ),
    "Another process listens on port": script(TAKEN, is_long=True),
    "could not listen on port": script(SERVER.replace("True", "False") + "time.sleep(60)\n", "--hold-ports", "always"),
    "was killed by signal 9": during(kill_child),
    "restart 1 of at most": script(FAILS_TWICE, "--max-worker-restarts", "1"),
    "exited with code 0 before the job was done": script(
        "if role == 'ps': sys.exit(0)\ntime.sleep(1 if role == 'chief' else 60)\nsys.exit(3)\n",
        is_long=True,
    ),
    "its agent was killed": during(kill_agent, is_long=True),
    "it sent no heartbeat": during(stop_agent, *QUICK, is_long=True),
    "The launcher was killed": Producer(killed_launcher, is_long=True),
    "The job was stopped": during(stop, "--grace-period", "1"),
    "the grace period of": Producer(ignored_stop, is_long=True),
    "while the scripts save": Producer(cut_save, is_long=True),
    "is still": running("resume"),
    "did not end within": running("wait", "--timeout", "1"),
    "No space left on device": Producer(full_disk, is_long=True),
    "This process has no cluster": python("tf4slurm.shutdown.wait_for_workers()"),
    "needs an agent": python("tf4slurm.barrier('start')"),
    "is named twice": python("tf4slurm.share_of(['a', 'a'], 0, 2)"),
    "files are too few for": python("tf4slurm.share_of(['a'], 0, 2)"),
    "This job has no data service": python("tf4slurm.data_service()"),
}
