"""The verbs about existing jobs, from another directory: status, list, logs, wait, cancel, resume."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import wait_until, wait_until_gone

SCRIPT = """
import os, pathlib, sys, time, tf4slurm
task = os.environ["TF4SLURM_TASK"]
print("hello from", task)
tf4slurm.barrier("all have printed")
if task.startswith("ps"):
    time.sleep(1000)
for step in range(10**6):
    tf4slurm.report(step=step, loss=1 / (step + 1))
    time.sleep(0.05)
    if tf4slurm.should_stop():
        print("saved at the stop")
        break
    if task == "chief/0" and pathlib.Path(sys.argv[1]).exists():
        print("done")
        break
"""


class Watched:
    """A running job, and the verbs from another directory."""

    def __init__(self, job: Job, directory: Path, *options: str) -> None:
        self.job = job
        self.end = directory / "end"
        self._elsewhere = directory / "elsewhere"
        self._elsewhere.mkdir()
        script = directory / "reports.py"
        script.write_text(SCRIPT)
        job.start("--ps", "1", "--workers", "1", *options, command=(sys.executable, str(script), str(self.end)))
        assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 60)
        assert wait_until(lambda: self.status()["tasks"][0].get("steps_per_second"), 60)

    @property
    def name(self) -> str:
        return self.job.run_directory.name

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [TF4SLURM, *arguments], cwd=self._elsewhere, capture_output=True, text=True, timeout=timeout, check=False
        )

    def status(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json").stdout)
        return found[0]


@pytest.fixture
def watched(job: Job, tmp_path: Path) -> Watched:
    return Watched(job, tmp_path)


def test_status_list_and_wait_from_another_directory(watched: Watched) -> None:
    status = watched.status()
    assert (status["name"], status["state"], status["phase"]) == (watched.name, "RUNNING", "training")
    assert [task["task"] for task in status["tasks"]] == ["chief/0", "ps/0", "worker/0"]
    assert status["tasks"][0]["metrics"]["loss"] > 0
    shown = watched.run("status", watched.name).stdout
    assert re.search(r"^chief/0 .*127\.0\.0\.1:\d+ +running +\d", shown, re.MULTILINE)
    assert "\x1b" not in shown
    listed = watched.run("list").stdout
    assert re.search(rf"{watched.name} +RUNNING +- ", listed)
    late = watched.run("wait", watched.name, "--timeout", "0.1")
    assert late.returncode == 124
    watched.end.touch()
    waited = watched.run("wait")
    assert (waited.returncode, waited.stdout) == (0, "")
    assert f"{watched.name} COMPLETED, exit code 0" in waited.stderr
    assert watched.status()["exit_code"] == 0


def test_notebook_without_ipywidgets_shows_progress_as_lines(watched: Watched, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbformat nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbformat nbclient ipykernel")
    hidden = "import sys; sys.modules['ipywidgets'] = None"
    waiting = f"import tf4slurm; job = tf4slurm.Job.find({str(watched.job.run_directory)!r})\n"
    waiting += "try:\n    job.wait(2)\nexcept TimeoutError as error:\n    print('TimeoutError', error)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (hidden, waiting)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    first, *_, last = "".join(output.text for output in notebook.cells[1].outputs).splitlines()
    assert re.fullmatch(rf"{watched.name} RUNNING step [\d,]+", first)
    assert last.startswith("TimeoutError")
    watched.end.touch()
    assert watched.job.wait() == 0


def test_logs_of_some_tasks_and_of_all(watched: Watched) -> None:
    watched.end.touch()
    assert watched.job.wait() == 0
    assert watched.run("logs", watched.name, "chief/0").stdout == "hello from chief/0\ndone\n"
    assert watched.run("logs", watched.name, "*/0", "--grep", "^hello").stdout.splitlines() == [
        "chief/0 | hello from chief/0",
        "ps/0 | hello from ps/0",
        "worker/0 | hello from worker/0",
    ]
    merged = watched.run("logs", "--merged", "--since", "1h").stdout.splitlines()
    assert sorted(merged[:3])[1] == "ps/0 | hello from ps/0"
    assert merged[3:] == ["chief/0 | done"]
    assert watched.run("logs", watched.name, "chief/0", "-n", "1").stdout == "done\n"
    assert watched.run("logs", watched.name, "--since", "0s").stdout == ""
    unknown = watched.run("logs", watched.name, "chef/0")
    assert unknown.returncode == 2
    assert "It has: chief/0, ps/0, worker/0" in unknown.stderr


def test_logs_are_followed_until_the_job_has_ended(watched: Watched, tmp_path: Path) -> None:
    with (tmp_path / "followed").open("w") as output:
        following = subprocess.Popen([TF4SLURM, "logs", "-f", watched.name, "chief/0"], stdout=output)
    try:
        assert wait_until(lambda: "hello from chief/0" in (tmp_path / "followed").read_text(), 60)
        watched.end.touch()
        assert following.wait(60) == 0
    finally:
        following.kill()
        following.wait()
    assert (tmp_path / "followed").read_text().endswith("done\n")


def test_cancelled_job_saves_and_a_second_cancel_is_no_error(watched: Watched) -> None:
    done = watched.run("cancel", watched.name)
    assert (done.returncode, watched.job.wait()) == (0, 143)
    assert "has ended: STOPPED, exit code 143" in done.stderr
    assert "saved at the stop" in watched.run("logs", watched.name, "chief/0").stdout
    again = watched.run("cancel", watched.name)
    assert again.returncode == 0
    assert "has ended already" in again.stderr
    waited = watched.run("wait", watched.name)
    assert waited.returncode == 143
    assert f"{watched.name} STOPPED, exit code 143" in waited.stderr


def test_job_with_a_killed_launcher_is_lost(job: Job, tmp_path: Path, process_mark: str) -> None:
    watched = Watched(job, tmp_path, "--heartbeat-timeout", "10")
    assert watched.job.process is not None
    watched.job.process.kill()
    watched.job.wait()
    status = watched.status()
    assert (status["state"], status["exit_code"]) == ("LOST", 1)
    assert watched.run("wait").returncode == 1
    assert not wait_until_gone(process_mark, 10 + 30)  # its agents exited by themselves


def test_job_is_resumed_with_the_same_command_in_the_same_directory(watched: Watched) -> None:
    name = watched.name
    running = watched.run("resume", name)
    assert running.returncode == 2
    assert "is still RUNNING" in running.stderr
    watched.end.touch()
    assert watched.job.wait() == 0
    again = watched.run("resume", name)
    assert again.returncode == 0, again.stderr
    assert "COMPLETED" in again.stderr
    assert len(list((watched.job.directory / "runs").iterdir())) == 2
    assert watched.status()["name"] != name


def test_live_page_on_another_computer_is_named_with_its_tunnel(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 51234 192.0.2.9 2222")
    serving = subprocess.Popen(
        [TF4SLURM, "status", watched.name, "--web"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        assert serving.stderr is not None
        port = urlsplit(serving.stdout.readline()).port
        tunnel = serving.stderr.readline()
        assert f"run this there first: ssh -p 2222 -N -L {port}:127.0.0.1:{port} " in tunnel
        assert re.search(r" \S+@\S+$", tunnel)
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0
    finally:
        serving.kill()
        serving.communicate()
    watched.end.touch()
    watched.job.wait()


def test_unknown_job_is_exit_code_5(watched: Watched) -> None:
    unknown = watched.run("status", watched.name[:-1])
    assert unknown.returncode == 5
    assert watched.name in unknown.stderr
    watched.end.touch()
    watched.job.wait()


def test_ctrl_c_ends_the_wait_and_not_the_job(watched: Watched) -> None:
    waiting = subprocess.Popen([TF4SLURM, "wait", watched.name], stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stderr is not None
        assert "RUNNING" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        assert f"To end it: tf4slurm cancel {watched.name}" in waiting.stderr.read()
    finally:
        waiting.kill()
        waiting.wait()
    assert watched.status()["state"] == "RUNNING"
    watched.end.touch()
    watched.job.wait()


def test_state_is_coloured_on_a_terminal_unless_no_color_is_set(watched: Watched) -> None:
    coloured, plain = (on_terminal(["status"], {"NO_COLOR": value}) for value in ("", "1"))
    assert "\x1b[36m\x1b[1mRUNNING" in coloured
    assert "\x1b" not in plain
    watching = on_terminal(["status", "--watch"], {}, stop_at="Ctrl-C ends this display")
    assert "chief/0" in watching
    watched.end.touch()
    watched.job.wait()


def on_terminal(arguments: list[str], environ: dict[str, str], stop_at: str = "") -> str:
    """Run a verb under a pseudo-terminal; return its output. It is interrupted once `stop_at` is in the output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [TF4SLURM, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **environ},
    )
    os.close(theirs)
    shown, deadline, is_told = b"", time.monotonic() + 100, False
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.5)[0]:
                continue
            try:
                data = os.read(ours, 65536)
            except OSError:  # it has ended
                break
            shown += data
            if not is_told and stop_at and stop_at.encode() in shown:
                process.send_signal(signal.SIGINT)
                is_told = True
        assert process.wait(60) == (130 if stop_at else 0), shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode()
