"""Jobs on a file system that does not answer for a while, as parallel file systems do during a failover."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.disk import freezable_disk, freeze, thaw
from tests.jobs import NAMES, ROLES, Job
from tests.processes import wait_until

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a file system")

HEARTBEAT_TIMEOUT_SECONDS = 12
_RECORD = """
import os, sys
_record = os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_process_files = ("/proc/", "/sys/", "/dev/")

def _hook(event, arguments):
    get_running_loop = getattr(sys.modules.get("_asyncio"), "_get_running_loop", None)
    if get_running_loop is None or get_running_loop() is None:
        return
    if event == "open" or event == "import" or event == "subprocess.Popen" or event.startswith(("os.", "tempfile.")):
        what = arguments[0] if arguments else ""
        if event in ("os.putenv", "os.unsetenv") or isinstance(what, int) or str(what).startswith(_process_files):
            return
        frame, lines = sys._getframe(1), []
        while frame is not None and len(lines) < 12:
            lines.append(f"{{frame.f_code.co_filename}}:{{frame.f_lineno}}")
            frame = frame.f_back
        os.write(_record, f"{{event}} {{what}} < {{' < '.join(lines)}}\\n".encode())

sys.addaudithook(_hook)
"""


@pytest.fixture
def runs(job: Job) -> Iterator[Path]:
    """The job's runs directory, on its own file system."""
    path = job.directory / "runs"
    with freezable_disk(path):
        yield path


@needs_root
def test_job_survives_stall_longer_than_heartbeat_timeout(job: Job, runs: Path) -> None:
    job.start(*ROLES, "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_SECONDS))
    children = {name: job.wait_for_child(name) for name in NAMES}
    job.wait_for_event("started", "worker/1")
    freeze(runs)
    os.kill(children["worker-1"]["pid"], signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1.5 * HEARTBEAT_TIMEOUT_SECONDS)
    thaw(runs)
    job.wait_for_child("worker-1", number=2)
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    kinds = [event["kind"] for event in job.events]
    assert not {"lost", "disconnected"} & set(kinds)
    assert kinds.index("restarting") < kinds.index("outcome")
    seconds = [event["seconds"] for event in job.events]
    assert seconds == sorted(seconds)


@needs_root
def test_job_stopped_during_stall_ends_its_tasks_and_is_recorded_after_it(job: Job, runs: Path) -> None:
    job.start(*ROLES)
    children = {name: job.wait_for_child(name) for name in NAMES}
    job.wait_for_event("started", "worker/1")
    freeze(runs)
    os.kill(children["worker-1"]["pid"], signal.SIGKILL)  # the restart waits for a log file
    assert wait_until(lambda: "restart 1 of at most" in job.stderr, 60)
    assert job.process is not None
    job.process.terminate()
    assert wait_until(lambda: not psutil.pid_exists(children["chief-0"]["pid"]), 60)
    assert wait_until(lambda: not psutil.pid_exists(children["ps-0"]["pid"]), 60)
    assert wait_until(lambda: "does not answer: waiting for it" in job.stderr, 60)
    assert "FAILED" not in job.stderr
    thaw(runs)
    assert job.wait() == 128 + signal.SIGTERM
    assert job.result["exit_code"] == 128 + signal.SIGTERM
    assert job.events[-1]["kind"] in ("terminated", "outcome")


@needs_root
def test_job_whose_file_system_never_recovers_ends_at_a_signal(job: Job, runs: Path) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    job.wait_for_event("started", "worker/1")
    freeze(runs)
    job.end_child("chief-0")
    assert wait_until(lambda: "does not answer: waiting for it" in job.stderr, 60)
    assert job.process is not None
    job.process.terminate()
    assert wait_until(lambda: "COMPLETED" in job.stderr, 60), job.stderr
    assert "may be missing" in job.stderr
    thaw(runs)  # no process can exit while it waits in the kernel for the file system
    assert job.wait() == 0


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lists what event loops of a job do with files."""
    record, hook = tmp_path / "record", tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_RECORD.format(path=str(record)))
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=os.pathsep)
    return record


def test_no_event_loop_of_a_job_touches_a_file(job: Job, record: Path) -> None:
    job.start(*ROLES, "--max-attempts", "2")
    children = {name: job.wait_for_child(name) for name in NAMES}
    os.kill(children["worker-1"]["pid"], signal.SIGKILL)  # is restarted in place
    job.wait_for_child("worker-1", number=2)
    os.kill(children["ps-0"]["pid"], signal.SIGKILL)  # begins another attempt
    job.wait_for_child("chief-0", number=2)
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert record.read_text().splitlines() == []


def test_recording_reports_touches_no_file_in_an_event_loop(job: Job, record: Path) -> None:
    code = "import tf4slurm, time; [(tf4slurm.report(step=step, loss=1.0), time.sleep(0.01)) for step in range(300)]"
    job.start("--ps", "0", "--workers", "0", command=(sys.executable, "-c", code))
    assert job.wait() == 0, job.stderr
    assert (job.run_directory / "metrics" / "chief-0.1.jsonl").read_text().count("\n") == 300
    assert record.read_text().splitlines() == []
