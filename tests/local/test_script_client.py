"""`tf4slurm_client` in jobs whose script has a Python of its own, which lacks tf4slurm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROLES, Job
from tests.processes import wait_until
from tests.pythons import require_python
from tf4slurm import errors
from tf4slurm.script_client import tf4slurm_channel
from tf4slurm.system.variables import SCRIPT_CLIENT

PYTHONS = [
    *("3.6", "3.13"),
    *(pytest.param(version, marks=pytest.mark.long) for version in ("3.7", "3.8", "3.9", "3.12", "3.14")),
]

PREAMBLE = """
import json, os, pathlib, signal, sys, threading, time
import tf4slurm_client as tf4slurm
assert "tf4slurm" not in sys.modules
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
directory = pathlib.Path(sys.argv[1])
def mark(what): (directory / "{}-{}-{}".format(role, index, what)).touch()
def wait_for(name):
    deadline = time.monotonic() + 60
    while not (directory / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.02)
def serve():
    mark("ready")
    threading.Event().wait()
"""


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    """The path of another Python, without tf4slurm."""
    return require_python(request.param)


def start(job: Job, python: str, script: str, *options: str) -> None:
    job.start(*(options or ROLES), command=(python, "-c", PREAMBLE + script, str(job.children)))


def wait_for(job: Job, *names: str) -> None:
    for name in names:
        path: Path = job.children / name
        assert wait_until(path.exists, 60), f"no {name}: {job.stderr}"


TRAIN_UNTIL_STOP = """
if role == "ps":
    mark("before")
    tf4slurm.barrier("loaded")
    serve()
mark("before")
tf4slurm.barrier("loaded", timeout_seconds=60)
assert len(list(directory.glob("*-before"))) == 4
tf4slurm.barrier("trainers", roles=("chief", "worker"))
if role == "worker":
    serve()
step = 0
while not tf4slurm.should_stop():
    step += 1
    tf4slurm.report(step=step, loss=1 / step, accuracy="none")
    if step == 3:
        mark("trains")
    time.sleep(0.01)
mark("saved")
"""


@pytest.mark.filterwarnings("default")
def test_script_reports_waits_at_barriers_and_saves_before_it_stops(job: Job, python: str) -> None:
    start(job, python, TRAIN_UNTIL_STOP, *ROLES, "--grace-period", "60")
    wait_for(job, "chief-0-trains", "worker-0-ready", "worker-1-ready", "ps-0-ready")
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.stderr
    wait_for(job, "chief-0-saved")
    (chief,) = [task for task in job.result["tasks"] if task["task"] == "chief/0"]
    assert chief["returncode"] == 0
    lines = [json.loads(line) for line in (job.run_directory / "metrics" / "chief-0.1.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 1
    assert lines[0]["metrics"] == {"loss": 1.0}
    assert lines[-1]["step"] == chief["step"] == sum(line.get("calls", 1) for line in lines)
    log = (job.run_directory / "logs" / "chief-0.1.log").read_text()
    assert log.count("accuracy='none', which is not a number") == 1


SAVE_IN_CALLBACK = """
if role == "chief":
    def save():
        time.sleep(0.5)
        mark("saved")
    tf4slurm.on_stop(save)
serve()
"""


def test_callback_saves_before_the_job_ends(job: Job, python: str) -> None:
    start(job, python, SAVE_IN_CALLBACK, *ROLES, "--grace-period", "60")
    wait_for(job, "chief-0-ready")
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.stderr
    wait_for(job, "chief-0-saved")


FORK = """
if role != "chief":
    serve()
tf4slurm.should_stop()
child = os.fork()
if not child:
    mark("forked")
    time.sleep(60)
    os._exit(9)
wait_for("chief-0-forked")
os.kill(child, signal.SIGTERM)
mark("ended-by-{}".format(os.waitpid(child, 0)[1]))
assert not tf4slurm.should_stop()
"""


def test_signal_to_a_fork_ends_the_fork_and_not_the_job(job: Job, python: str) -> None:
    start(job, python, FORK)
    assert job.wait() == 0, job.stdout + job.stderr
    wait_for(job, f"chief-0-ended-by-{signal.SIGTERM.value}")


SIGNAL_DONE = f"""
if role == "ps":
    os.environ["PYTHONPATH"] = {str(SCRIPT_CLIENT.parents[1])!r}
    code = "import sys, pathlib, tf4slurm; tf4slurm.shutdown.wait_for_workers(); pathlib.Path(sys.argv[1]).touch()"
    os.execv({sys.executable!r}, [{sys.executable!r}, "-c", code, str(directory / "ps-0-done")])
tf4slurm.signal_done()
wait_for("ps-0-done")
"""


def test_completion_signals_of_all_workers_end_the_wait_of_a_ps(job: Job, python: str) -> None:
    start(job, python, SIGNAL_DONE, "--no-chief", "--ps", "1", "--workers", "2")
    assert job.wait() == 0, job.stdout + job.stderr


BROKEN_BARRIER = """
if role == "worker" and index == 1:
    serve()
if role == "chief":
    try:
        tf4slurm.barrier("some", timeout_seconds=0.5)
    except tf4slurm.BarrierError as error:
        print(error)
        sys.exit(0)
serve()
"""


def test_barrier_names_the_task_that_did_not_arrive(job: Job) -> None:
    start(job, require_python("3.6"), BROKEN_BARRIER)
    assert job.wait() == 0, job.stdout + job.stderr
    log = (job.run_directory / "logs" / "chief-0.1.log").read_text()
    assert "The barrier broke: " in log
    assert "worker/1" in log


OUTSIDE = """
import tf4slurm_client as tf4slurm
tf4slurm.report(step=1, loss=0.5)
tf4slurm.on_stop(print)
print(tf4slurm.should_stop())
for call in (lambda: tf4slurm.barrier("a"), tf4slurm.signal_done):
    try:
        call()
    except tf4slurm.Tf4SlurmError as error:
        print(type(error).__name__)
"""


def test_calls_outside_a_job_are_those_of_tf4slurm_outside_a_job(python: str, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(SCRIPT_CLIENT)}
    command = [python, "-W", "error", "-c", OUTSIDE]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (
        ["False", "RendezvousConnectionError", "SlurmEnvironmentError"],
        "",
    )


def test_errors_have_the_names_and_bases_of_those_of_tf4slurm() -> None:
    found = [kind for kind in vars(tf4slurm_channel).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(found) == 9
    for own in found:
        error = getattr(errors, own.__name__)
        assert [base.__name__ for base in own.__mro__] == [base.__name__ for base in error.__mro__]


def test_directory_has_no_other_names_to_import() -> None:
    names = {path.stem for path in SCRIPT_CLIENT.glob("*.py")} - {"__init__"}
    assert all(name.startswith("tf4slurm_") for name in names)
