"""`tf4slurm run` on this host: reports, barriers, and how a script saves and stops."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import ROLES, Job
from tests.processes import child_of, press_later, wait_until

PREAMBLE = """
import json, os, pathlib, signal, sys, threading, time
import tf4slurm
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
directory = pathlib.Path(sys.argv[1])
def mark(what): (directory / f"{role}-{index}-{what}").touch()
"""
SERVE = """
if role != "chief":
    mark("ready")
    threading.Event().wait()
"""


def start(job: Job, script: str, *options: str) -> None:
    job.start(*ROLES, *options, command=(sys.executable, "-c", PREAMBLE + script, str(job.children)))


def wait_for(job: Job, *names: str) -> None:
    for name in names:
        path: Path = job.children / name
        assert wait_until(path.exists, 60), f"no {name}: {job.stderr}"


def send(job: Job, number: signal.Signals) -> None:
    assert job.process is not None
    job.process.send_signal(number)


ASKS = (
    SERVE
    + """
tf4slurm.should_stop()
mark("ready")
while not tf4slurm.should_stop():
    time.sleep(0.02)
"""
)
CHIEF_READY = ("chief-0-ready", "ps-0-ready", "worker-0-ready", "worker-1-ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_script_that_calls_should_stop_saves_and_stops(job: Job, number: signal.Signals) -> None:
    start(job, ASKS + 'time.sleep(1)\nmark("saved")\n')
    wait_for(job, *CHIEF_READY)
    send(job, number)
    assert job.wait() == 128 + number
    wait_for(job, "chief-0-saved")
    assert f"the launcher received {number.name}" in job.stderr
    assert {task["task"]: task["returncode"] for task in job.result["tasks"]}["chief/0"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_to_script_that_calls_should_stop_stops_job(job: Job, number: signal.Signals) -> None:
    start(job, ASKS + 'mark("saved")\n')
    wait_for(job, *CHIEF_READY)
    os.kill(child_of("chief/0"), number)
    assert job.wait() == 128 + number
    wait_for(job, "chief-0-saved")
    assert (
        f"chief/0 on {socket.gethostname()} received {number.name}" in job.stderr.partition("STOPPED with exit code")[2]
    )


def test_script_that_has_called_should_stop_is_terminated_at_once_when_its_job_fails(job: Job) -> None:
    script = """
tf4slurm.should_stop()
mark("ready")
while role == "worker" and index == 0 and not all((directory / f"worker-{each}-ready").exists() for each in range(2)):
    time.sleep(0.02)
sys.exit(3) if index == 0 and role == "worker" else threading.Event().wait()
"""
    start(job, script, "--no-chief")
    assert job.wait() == 3
    assert "did not end within" not in job.stdout + job.stderr


def test_callback_saves_before_job_ends(job: Job) -> None:
    script = (
        SERVE
        + """
def save():
    time.sleep(1)
    mark("saved")
tf4slurm.on_stop(save)
mark("ready")
threading.Event().wait()
"""
    )
    start(job, script, "--grace-period", "120")
    wait_for(job, *CHIEF_READY)
    send(job, signal.SIGTERM)
    assert job.wait() == 143
    wait_for(job, "chief-0-saved")


def test_script_without_tf4slurm_gets_the_signal_and_its_ps_continues(job: Job) -> None:
    script = (
        SERVE
        + """
def handle(number, frame):
    time.sleep(1)
    mark("saved")
    sys.exit(0)
signal.signal(signal.SIGUSR1, handle)
mark("ready")
while True:
    time.sleep(0.1)
"""
    )
    start(job, script, "--stop-signal", "SIGUSR1")
    wait_for(job, *CHIEF_READY)
    send(job, signal.SIGTERM)
    assert job.wait() == 143
    wait_for(job, "chief-0-saved")
    happened = [(event["task"], event["kind"]) for event in job.events]
    assert happened.index(("ps/0", "terminated")) > happened.index(("chief/0", "exited"))


def test_all_tasks_are_killed_after_the_grace_period(job: Job) -> None:
    start(job, SERVE + "tf4slurm.should_stop()\nmark('ready')\nthreading.Event().wait()", "--grace-period", "1")
    wait_for(job, *CHIEF_READY)
    asked = time.monotonic()
    send(job, signal.SIGTERM)
    job.wait()
    assert time.monotonic() - asked >= 1
    assert job.wait() == 143
    assert "the grace period of 1 s is over" in job.stderr


def test_second_ctrl_c_skips_the_grace_period(job: Job) -> None:
    start(job, SERVE + "tf4slurm.should_stop()\nmark('ready')\nthreading.Event().wait()", "--grace-period", "120")
    wait_for(job, *CHIEF_READY)
    send(job, signal.SIGINT)
    job.wait_for_event("stopping")
    press_later()
    send(job, signal.SIGINT)
    assert job.wait() == 130


def test_script_that_stalls_ends_its_job(job: Job) -> None:
    script = (
        SERVE
        + """
for step in range(5):
    tf4slurm.report(step=step, loss=1 / (step + 1))
    time.sleep(0.1)
threading.Event().wait()
"""
    )
    start(job, script, "--stall-timeout", "15")
    assert job.wait() == 7
    assert "no task has reported a new step for 15 s; the last was step 4 of chief/0" in job.stderr


def test_report_of_an_earlier_start_does_not_count_for_the_next(job: Job) -> None:
    script = """
def wait_for(name):
    while not (directory / name).exists():
        time.sleep(0.02)
if (role, index) == ("chief", 0):
    events = pathlib.Path(os.environ["TF4SLURM_RUN_DIRECTORY"], "events.jsonl")
    while "reports step 3" not in events.read_text():
        time.sleep(0.02)
    sys.exit(0)
if (role, index) == ("worker", 0):
    if not (directory / "forked").exists():
        tf4slurm.report(step=7)
        if os.fork() == 0:
            os.setsid()
            (directory / "forked").touch()
            threading.Event().wait()  # it holds the script channel until it is killed, before the restart
        wait_for("forked")
        sys.exit(1)
    tf4slurm.report(step=3)
threading.Event().wait()
"""
    start(job, script)
    assert job.wait() == 0, job.stderr
    texts = [event["text"] for event in job.events if event["kind"] == "first_step"]
    assert [text.partition(" reports ")[2] for text in texts] == ["step 7, its first", "step 3, its first"]


BARRIER = """
for turn in range(3):
    tf4slurm.barrier("turn", timeout_seconds=100)
    mark(turn)
tf4slurm.barrier("all have marked")
if role != "chief":
    threading.Event().wait()
tf4slurm.barrier("end", roles=("chief",))
"""


def test_scripts_wait_for_each_other_at_barriers(job: Job) -> None:
    start(job, BARRIER)
    assert job.wait() == 0
    wait_for(job, *(f"{name}-2" for name in ("chief-0", "ps-0", "worker-0", "worker-1")))


@pytest.mark.parametrize(
    ("absent", "timeout_seconds", "words"),
    [
        ("threading.Event().wait()", 2, "did not arrive at barrier 'start' in time"),
        ("sys.exit(0)", 100, "ended without arriving"),
    ],
)
def test_barrier_breaks_when_a_task_does_not_arrive(job: Job, absent: str, timeout_seconds: int, words: str) -> None:
    script = f"""
if role == "ps":
    {absent}
try:
    tf4slurm.barrier("start", timeout_seconds={timeout_seconds})
except tf4slurm.errors.BarrierError as error:
    print(error, flush=True)
    mark("broke")
if role != "chief":
    threading.Event().wait()
while not all((directory / f"worker-{{number}}-broke").exists() for number in range(2)):  # its end is that of all
    time.sleep(0.02)
"""
    start(job, script, "--finish-timeout", "100")
    wait_for(job, "chief-0-broke", "worker-0-broke", "worker-1-broke")
    job.wait()
    assert words in job.stdout


def test_without_an_agent_report_does_nothing_and_barrier_is_refused() -> None:
    import tf4slurm
    from tf4slurm.errors import RendezvousConnectionError

    tf4slurm.report(step=1)
    tf4slurm.on_stop(lambda: None)
    assert tf4slurm.should_stop() is False
    with pytest.raises(RendezvousConnectionError, match="needs an agent"):
        tf4slurm.barrier("start")


def test_fork_of_a_script_that_calls_should_stop_is_killed_by_a_signal_and_its_job_continues(job: Job) -> None:
    script = (
        SERVE
        + """
import multiprocessing
tf4slurm.should_stop()
fork = multiprocessing.get_context("fork")
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) * 10:  # SIGUSR2 after a while, the others at once
    helper = fork.Process(target=time.sleep, args=(1000,), daemon=True)
    helper.start()
    time.sleep(0.05 if number == signal.SIGUSR2 else 0)
    os.kill(helper.pid, number)
    helper.join(60)
    assert helper.exitcode == -number, helper
with fork.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
def ask():
    tf4slurm.should_stop()
    mark("asks")
    while not tf4slurm.should_stop():
        time.sleep(0.02)
helper = fork.Process(target=ask)
helper.start()
while not (directory / "chief-0-asks").exists():
    time.sleep(0.02)
assert not tf4slurm.should_stop()
helper.terminate()
helper.join(60)
assert helper.exitcode == 0, helper
mark("ended")
"""
    )
    start(job, script)
    assert job.wait() == 143, job.stderr
    wait_for(job, "chief-0-ended")


HELP = """
import multiprocessing
fork = multiprocessing.get_context("fork")
def wait_for(name):
    while not (directory / name).exists():
        time.sleep(0.02)
def help_training():
    for shard in tf4slurm.data_shards(20, shard_size=10, epochs=1):
        tf4slurm.report(rows=len(shard.rows))
    mark("helped")
"""


def test_barrier_passes_while_other_processes_of_the_script_report_and_exit(job: Job) -> None:
    script = (
        HELP
        + """
if role in ("chief", "worker"):
    waiting = threading.Thread(target=tf4slurm.barrier, args=("loaded",), kwargs={"timeout_seconds": 100})
    waiting.start()
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        helper = context.Process(target=tf4slurm.report, kwargs={"step": 3})
        helper.start()
        helper.join()
        assert helper.exitcode == 0
    helper = fork.Process(target=help_training)
    helper.start()
    helper.join()
    mark("helpers-ended")
    waiting.join()
    mark("passed")
else:
    for name in ("chief-0", "worker-0", "worker-1"):
        wait_for(f"{name}-helpers-ended")
    tf4slurm.barrier("loaded", timeout_seconds=100)
    threading.Event().wait()
while not all((directory / f"{name}-passed").exists() for name in ("chief-0", "worker-0", "worker-1")):
    time.sleep(0.02)
"""
    )
    start(job, script)
    assert job.wait() == 0, job.stdout
    wait_for(job, "chief-0-passed", "worker-0-passed", "worker-1-passed")


@pytest.mark.parametrize(
    "handle", ["while not tf4slurm.should_stop(): time.sleep(0.02)\nmark('saved')", "tf4slurm.on_stop(save)\nwait()"]
)
def test_stop_request_is_no_signal_for_a_script_whose_other_process_only_reports(job: Job, handle: str) -> None:
    script = (
        SERVE
        + HELP
        + f"""
def save():
    time.sleep(0.5)
    mark("saved")
def wait():
    while True:
        time.sleep(0.02)
def report():
    for step in range(100_000):
        tf4slurm.report(step=step)
        if step == 50:
            mark("ready")
        time.sleep(0.01)
tf4slurm.should_stop()
signal.signal(signal.SIGTERM, lambda *_: mark("signal") if not (directory / "chief-0-saved").exists() else sys.exit())
fork.Process(target=report, daemon=True).start()
{handle}
"""
    )
    start(job, script, "--grace-period", "120")
    wait_for(job, *CHIEF_READY)
    send(job, signal.SIGTERM)
    assert job.wait() == 143
    wait_for(job, "chief-0-saved")
    assert not (job.children / "chief-0-signal").exists()


def test_completion_signal_of_a_fork_does_not_end_the_ps(job: Job) -> None:
    script = (
        HELP
        + """
from tf4slurm import shutdown
if role == "ps":
    shutdown.wait_for_workers(timeout_seconds=100)
    mark("ended")
    threading.Event().wait()
shutdown.signal_at_exit()
helper = fork.Process(target=shutdown.signal_done)
helper.start()
helper.join()
if role == "worker":
    shutdown.signal_done()
    threading.Event().wait()
time.sleep(2)
assert not (directory / "ps-0-ended").exists()
shutdown.signal_done()
wait_for("ps-0-ended")
"""
    )
    start(job, script)
    assert job.wait() == 0, job.stdout
