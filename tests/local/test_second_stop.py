"""A second stop request while the scripts save: only Ctrl-C again and `tf4slurm cancel --now` cut the save."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tf4slurm
from tests.jobs import TF4SLURM, Job
from tests.processes import press_later, wait_until

SCRIPT = """
import os, pathlib, sys, threading, time, tf4slurm
task, directory = os.environ["TF4SLURM_TASK"].replace("/", "-"), pathlib.Path(sys.argv[1])
if task != "chief-0":
    threading.Event().wait()
tf4slurm.should_stop()
(directory / "ready").touch()
while not tf4slurm.should_stop():
    time.sleep(0.02)
(directory / "saving").touch()
time.sleep(float(sys.argv[2]))
(directory / "saved").touch()
"""
SAVE, FOR_EVER = "3", "1000"  # seconds
GRACE = "60"
LEFT = re.compile(r"saves already, or ends: at most (\d+) s are left\. To skip them: tf4slurm cancel --now ")


def start(job: Job, seconds: str, *options: str) -> None:
    command = (sys.executable, "-c", SCRIPT, str(job.children), seconds)
    job.start("--ps", "1", "--workers", "0", "--grace-period", GRACE, *options, command=command)
    wait_for(job, "ready")


def wait_for(job: Job, name: str) -> None:
    assert wait_until((job.children / name).exists, 60), f"no {name}: {job.stderr}"


def cancel(job: Job, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TF4SLURM, "cancel", str(job.run_directory), *options], capture_output=True, text=True)


def cancel_in_background(job: Job) -> subprocess.Popen[str]:
    return subprocess.Popen([TF4SLURM, "cancel", str(job.run_directory)], stderr=subprocess.PIPE, text=True)


def send(number: signal.Signals) -> Callable[[Job], object]:
    def act(job: Job) -> None:
        assert job.process is not None
        job.process.send_signal(number)

    return act


SECOND = {
    "cancel": lambda job: cancel(job).check_returncode(),
    "cancel with a short grace period": lambda job: cancel(job, "--grace-period", "0.1").check_returncode(),
    "cancel in Python": lambda job: tf4slurm.cancel(str(job.run_directory)),
    "SIGTERM": send(signal.SIGTERM),
    "SIGUSR1": send(signal.SIGUSR1),
    "closed terminal": send(signal.SIGHUP),
    "the first Ctrl-C": send(signal.SIGINT),
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_second_request_leaves_the_save_its_time(job: Job, second: Callable[[Job], object]) -> None:
    start(job, SAVE)
    with cancel_in_background(job) as first:
        wait_for(job, "saving")
        second(job)
        assert job.wait() == 143, job.stderr
        assert first.stderr is not None
        told = first.stderr.read()
    assert (job.children / "saved").exists(), job.stderr
    assert "has ended: STOPPED, exit code 143" in told


def test_second_cancel_prints_the_time_that_is_left_and_status_shows_it(job: Job) -> None:
    start(job, "12")  # longer than the next calls take on a busy machine
    with cancel_in_background(job) as first:
        wait_for(job, "saving")
        run = str(job.run_directory)
        assert wait_until(lambda: tf4slurm.status(run).grace_seconds_left is not None, 60)
        shown = subprocess.run([TF4SLURM, "status", run], capture_output=True, text=True).stdout
        left = tf4slurm.status(run).grace_seconds_left
        again = cancel(job)
        assert (again.returncode, first.wait(60)) == (0, 0)
        assert first.stderr is not None
        assert f"is asked to save and stop; at most {GRACE} s are left." in first.stderr.read()
    assert left is not None
    assert left < float(GRACE)
    found = LEFT.search(again.stderr)
    assert found is not None, again.stderr
    assert 0 < float(found[1]) <= left + 0.5
    assert re.search(r"^  Its scripts save after a stop request: at most \d+ s are left\.$", shown, re.MULTILINE), shown
    assert (job.children / "saved").exists()
    assert tf4slurm.status(run).grace_seconds_left is None


def test_cancels_from_two_terminals_at_once_let_the_script_save(job: Job) -> None:
    start(job, SAVE)
    with cancel_in_background(job) as first, cancel_in_background(job) as second:
        assert [first.wait(60), second.wait(60)] == [0, 0]
    assert job.wait() == 143
    assert (job.children / "saved").exists()


@pytest.mark.parametrize("options", [("--now",), ("--now", "--yes"), ("--grace-period", "0")])
def test_cancel_now_ends_a_job_that_saves(job: Job, options: tuple[str, ...]) -> None:
    start(job, FOR_EVER)
    with cancel_in_background(job) as first:
        wait_for(job, "saving")
        now = cancel(job, *options)
        assert (now.returncode, job.wait(), first.wait(60)) == (0, 143, 0), now.stderr
    assert "is asked to end at once." in now.stderr
    assert "has ended: STOPPED, exit code 143" in now.stderr
    assert re.search(
        r"received SIGQUIT while the scripts save: the last \d+ s of the grace period are skip", job.stderr
    )
    assert job.result["state"] == "STOPPED"
    assert " chief/0 got SIGTERM before it had stopped by itself" in job.result["reason"]


def test_cancel_now_ends_a_job_that_trains_without_a_save(job: Job) -> None:
    start(job, SAVE)
    tf4slurm.cancel(str(job.run_directory), now=True)
    assert job.wait() == 128 + signal.SIGQUIT
    assert not (job.children / "saving").exists()
    assert (job.result["state"], job.result["exit_code"]) == ("STOPPED", 131)


def test_now_excludes_a_grace_period(job: Job) -> None:
    start(job, SAVE)
    refused = cancel(job, "--now", "--grace-period", "5")
    assert refused.returncode == 2
    assert "--now and --grace-period exclude each other" in refused.stderr
    cancel(job, "--now").check_returncode()


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, *command: str) -> None:
        pid, self._master = pty.fork()
        if pid == 0:
            os.execv(command[0], command)
        self._pid = pid
        self.output = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> None:
        assert wait_until(lambda: text in " ".join(self.output.split()), 60), self.output

    def wait(self) -> int:
        """Return the exit code of the command at its end."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        self._reading.join(60)
        return code

    def close(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process of the terminal has ended
            while select.select([self._master], [], [], 60)[0] and (data := os.read(self._master, 65536)):
                self.output += data.decode(errors="replace")


@pytest.fixture
def in_terminal() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def start(*command: str) -> Terminal:
        terminals.append(Terminal(*command))
        return terminals[-1]

    yield start
    for each in terminals:
        each.close()


def run_command(directory: Path, seconds: str) -> list[str]:
    options = ["--runs-directory", str(directory / "runs"), "--ps", "1", "--workers", "0", "--grace-period", GRACE]
    return [TF4SLURM, "run", *options, "--", sys.executable, "-c", SCRIPT, str(directory), seconds]


def test_second_ctrl_c_ends_the_job_and_the_first_says_so(tmp_path: Path, in_terminal: Callable[..., Terminal]) -> None:
    terminal = in_terminal(*run_command(tmp_path, FOR_EVER))
    assert wait_until((tmp_path / "ready").exists, 60), terminal.output
    terminal.type("\x03")
    text = f"the job has {GRACE} s to save and stop; Ctrl-C again skips the rest and ends all tasks at once"
    terminal.wait_for(text)
    assert wait_until((tmp_path / "saving").exists, 60), terminal.output
    press_later()
    terminal.type("\x03")
    terminal.wait_for("received SIGINT while the scripts save: the last ")
    assert terminal.wait() == 130, terminal.output
    assert not (tmp_path / "saved").exists()


def test_first_ctrl_c_after_a_cancel_cuts_nothing_and_says_what_the_next_does(
    tmp_path: Path, in_terminal: Callable[..., Terminal]
) -> None:
    terminal = in_terminal(*run_command(tmp_path, FOR_EVER))
    assert wait_until((tmp_path / "ready").exists, 60), terminal.output
    (run,) = (tmp_path / "runs").iterdir()
    with subprocess.Popen([TF4SLURM, "cancel", str(run)], stderr=subprocess.DEVNULL) as first:
        assert wait_until((tmp_path / "saving").exists, 60), terminal.output
        terminal.type("\x03")
        terminal.wait_for("the scripts save already, and have ")
        terminal.wait_for("s left; Ctrl-C again skips the rest and ends all tasks at once")
        assert json.loads((run / "status.json").read_text())["phase"] == "stopping"
        press_later()
        terminal.type("\x03")
        assert (terminal.wait(), first.wait(60)) == (143, 0)


@pytest.mark.parametrize(("answer", "exit_code"), [("n", 1), ("y", 0)])
def test_cancel_now_asks_on_a_terminal(
    job: Job, in_terminal: Callable[..., Terminal], answer: str, exit_code: int
) -> None:
    start(job, SAVE)
    terminal = in_terminal(TF4SLURM, "cancel", "--now", str(job.run_directory))
    terminal.wait_for(f"End {job.run_directory.name} at once, without saving? [y/N]:")
    terminal.type(f"{answer}\n")
    assert terminal.wait() == exit_code, terminal.output
    assert tf4slurm.status(str(job.run_directory)).has_ended == (answer == "y")
    if answer == "n":
        assert "Traceback" not in terminal.output
        assert in_terminal(TF4SLURM, "cancel", "--now", "-y", str(job.run_directory)).wait() == 0
    assert job.wait() == 131
