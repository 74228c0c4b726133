"""A paused launcher: Ctrl-Z in a real terminal pauses the whole job; SIGSTOP of the launcher is named as the cause."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.jobs import CHILD, NAMES, ROLES, TF4SLURM, Job
from tests.processes import child_of, marked_processes, wait_until, wait_until_gone
from tf4slurm.system.proc import read_stat

TIMEOUT = 10.0
"""The heartbeat timeout in seconds."""

OPEN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
IGNORE = "import os, signal, sys; signal.signal(signal.SIGTSTP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


SHELL = "bash --norc --noprofile -i"


class Terminal:
    """An interactive shell in a pseudo-terminal."""

    def __init__(self) -> None:
        self._master, terminal = pty.openpty()
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", OPEN, *SHELL.split()],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, count: int = 1) -> None:
        assert wait_until(lambda: self.output.count(text) >= count, 60), self.output

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(60)
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process of the terminal has ended
            while data := os.read(self._master, 65536):
                self.output += data.decode(errors="replace")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def run_in(terminal: Terminal, job: Job) -> None:
    command = [TF4SLURM, "run", "--runs-directory", str(job.directory / "runs"), *ROLES]
    command += ["--heartbeat-timeout", f"{TIMEOUT:g}", "--", "sh", "-c", 'setsid sleep 300 & exec "$@"', "sh"]
    command += [sys.executable, str(CHILD), str(job.children)]
    terminal.type(f"{shlex.join(command)}\n")


def start_children(terminal: Terminal, job: Job) -> list[int]:
    """Start the job; return the launcher, its agents and its children."""
    run_in(terminal, job)
    children = [job.wait_for_child(name)["pid"] for name in NAMES]
    agents = [read_stat(child).parent_id for child in children]
    return [read_stat(agents[0]).parent_id, *agents, *children]


def states(process_ids: list[int]) -> set[str]:
    """Return the states of the processes; "" of one that has ended."""
    found = set()
    for each in process_ids:
        try:
            found.add(read_stat(each).state)
        except OSError:
            found.add("")
    return found


def test_ctrl_z_stops_no_process_that_a_shell_had_before(terminal: Terminal, job: Job) -> None:
    line = "set -m; sleep 300 & echo helper-$!-; set +m; exec"
    command = [TF4SLURM, "run", "--runs-directory", str(job.directory / "runs"), *ROLES]
    command += ["--", sys.executable, str(CHILD), str(job.children)]
    terminal.type(f"bash -c {shlex.quote(f'{line} {shlex.join(command)}')}\n")
    children = [job.wait_for_child(name)["pid"] for name in NAMES]
    found = re.findall(r"helper-(\d+)-", terminal.output)
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    assert wait_until(lambda: states(children) == {"T"}, 60), states(children)
    assert states([int(found[-1])]) == {"S"}
    terminal.type("fg; echo exit-code-$?\n")
    job.end_child("chief-0")
    terminal.wait_for("exit-code-0")
    os.kill(int(found[-1]), signal.SIGKILL)


def test_job_continues_after_ctrl_z(terminal: Terminal, job: Job) -> None:
    processes = start_children(terminal, job)
    for count in (1, 2):
        terminal.type("\x1a")
        terminal.wait_for("Stopped", count)
        assert wait_until(lambda: states(processes) == {"T"}, 60), states(processes)
        time.sleep(TIMEOUT + 2)
        terminal.type("fg; echo exit-code-$?\n")
        assert wait_until(lambda: "T" not in states(processes), 60)
        assert not wait_until(lambda: bool(states(processes) & {"", "Z"}), 2)
    job.end_child("chief-0")
    terminal.wait_for("exit-code-0")
    assert job.result["state"] == "COMPLETED"
    assert not [event for event in job.events if event["kind"] in ("lost", "disconnected", "restarting")]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_suspended_job_can_be_stopped(terminal: Terminal, job: Job, number: signal.Signals, exit_code: int) -> None:
    processes = start_children(terminal, job)
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    terminal.type(f"kill -{number.name[3:]} %1; fg\n")
    assert wait_until((job.run_directory / "result.json").exists, 60)
    assert (job.result["state"], job.result["exit_code"]) == ("STOPPED", exit_code)
    assert wait_until(lambda: states(processes) == {""}, 60)


def test_suspended_job_that_is_killed_leaves_no_process(terminal: Terminal, job: Job, process_mark: str) -> None:
    start_children(terminal, job)
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    terminal.type("kill -KILL %1\n")
    assert wait_until(lambda: [each.command for each in marked_processes(process_mark)] == [SHELL], 60)


def test_ctrl_z_before_the_agents_start(terminal: Terminal, job: Job, process_mark: str) -> None:
    run_in(terminal, job)
    assert wait_until(lambda: any(f"{TF4SLURM} run" in each.command for each in marked_processes(process_mark)), 60)
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    time.sleep(TIMEOUT + 1)
    terminal.type("fg; echo exit-code-$?\n")
    for name in NAMES:
        job.wait_for_child(name)
    job.end_child("chief-0")
    terminal.wait_for("exit-code-0")


def test_ignored_ctrl_z_stops_nothing(job: Job) -> None:
    job.start(*ROLES, prefix=(sys.executable, "-c", IGNORE))
    for name in NAMES:
        job.wait_for_child(name)
    assert job.process is not None
    job.process.send_signal(signal.SIGTSTP)
    job.end_child("chief-0")
    assert job.wait() == 0


def others_than_preloaders(mark: str) -> list[int]:
    """Return the ids of the marked processes, without the preloader, which ends with the launcher."""
    return [each.pid for each in marked_processes(mark) if "preload/program.py" not in each.command]


def test_stopped_launcher_is_the_cause(job: Job, process_mark: str) -> None:
    job.start(*ROLES, "--heartbeat-timeout", f"{TIMEOUT:g}")
    for name in NAMES:
        job.wait_for_child(name)
    launcher = job.process
    assert launcher is not None
    children = [child_of(name.replace("-", "/")) for name in NAMES]
    launcher.send_signal(signal.SIGSTOP)
    try:
        assert wait_until(lambda: not [each for each in marked_processes(process_mark) if each.pid in children], 60)
        assert wait_until(lambda: others_than_preloaders(process_mark) == [launcher.pid], 60)
    finally:
        launcher.send_signal(signal.SIGCONT)
    assert job.wait() == 7
    assert job.result["cause"] is None
    assert job.result["reason"].startswith("The launcher was paused for ")
    assert wait_until_gone(process_mark, 30) == []
