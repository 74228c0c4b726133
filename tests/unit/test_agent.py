"""Checks of an agent before it starts a child, and its reports of the child's exit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_service_and_client import in_event_loop, until
from tf4slurm.agent.child import OwnedChild
from tf4slurm.agent.child_setup import check_length
from tf4slurm.agent.rendezvous import LocalTask, Rendezvous
from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.control.messages import ObservedState
from tf4slurm.errors import PlacementError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.output import LineWriter

LONGEST = 32 * os.sysconf("SC_PAGE_SIZE") - len("TF_CONFIG=") - 1
"""What Linux takes, with the name, and the zero at its end."""


def test_cluster_spec_too_long_for_an_environment_is_refused() -> None:
    command = [sys.executable, "-S", "-c", "import os; print(len(os.environ['TF_CONFIG']))"]
    longest = check_length("x" * LONGEST, 5_000)
    run = subprocess.run(command, env={"TF_CONFIG": longest}, capture_output=True, text=True, check=True)
    assert int(run.stdout) == LONGEST
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(command, env={"TF_CONFIG": longest + "x"}, check=False)
    with pytest.raises(PlacementError, match=f"of 6,000 tasks makes TF_CONFIG {LONGEST + 11:,} bytes long"):
        check_length("x" * (LONGEST + 1), 6_000)


HOLDS_OUTPUT = """
rm -f printed
setsid sh -c 'touch held; until test -e released -a -e printed; do sleep 0.01; done; echo last' &
until test -e held; do sleep 0.01; done; rm held; echo first; touch printed
"""
"""The start of a shell script: a process that it leaves behind holds its output open until "released" exists."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the rest of the output for longer than a busy machine may delay a process."""
    monkeypatch.setattr("tf4slurm.system.child_process._DRAIN_SECONDS", 60)


class Child(OwnedChild):
    """A child of this process, which kills no other process below it: the lab of other tests is there, too."""

    async def kill_descendants(self) -> None:
        pass


class Reports:
    """A child of an agent without a launcher, and the states that the agent would have sent, with their times."""

    def __init__(self, directory: Path, script: str, **options: Any) -> None:
        script = f"cd {directory}; {script}"
        self.cluster = Cluster((Member(0, Task("chief", 0), "laptop", Address("127.0.0.1", 1)),))
        spec = JobSpec(("sh", "-c", script), workers=0, ps=0, **options)
        rendezvous = Rendezvous(LocalTask(0, "laptop"), spec, lambda: None)
        self.client = rendezvous.client
        self.states: list[tuple[float, ObservedState]] = []
        update = self.client.update

        def note(**changes: Any) -> None:
            update(**changes)
            self.states.append((time.monotonic(), self.client.observed))

        self.client.update = note  # type: ignore[method-assign]
        self.child = Child(rendezvous, dict(os.environ), RunDirectory(directory), LineWriter(sys.stdout))

    def start(self, start_count: int = 1) -> None:
        self.child.start(self.cluster, 1, start_count)

    async def wait_for(self, condition: Callable[[ObservedState], object]) -> tuple[float, ObservedState]:
        """Return the first state for which the condition holds, and its time."""
        await until(lambda: any(condition(state) for _, state in self.states))
        return next(each for each in self.states if condition(each[1]))


@in_event_loop
async def test_exit_is_reported_before_the_output_has_ended(tmp_path: Path) -> None:
    reports = Reports(tmp_path, HOLDS_OUTPUT + "exit 3")
    reports.start()
    at, exited = await reports.wait_for(lambda state: state.state == "exited")
    assert reports.client.exited_at is not None
    assert reports.client.exited_at <= at
    assert (exited.returncode, exited.killed_by, exited.tail) == (3, None, ())
    (tmp_path / "released").touch()
    _, full = await reports.wait_for(lambda state: state.tail)
    assert (full.state, full.tail) == ("exited", ("first", "last"))
    await reports.child.end(0)


@in_event_loop
async def test_last_lines_are_reported_before_the_agent_ends(tmp_path: Path) -> None:
    reports = Reports(tmp_path, HOLDS_OUTPUT + "exit 3")
    reports.start()
    await reports.wait_for(lambda state: state.state == "exited")
    asyncio.get_running_loop().call_later(0.3, (tmp_path / "released").touch)
    await reports.child.end(0)
    assert reports.client.observed.tail == ("first", "last")


@in_event_loop
async def test_restart_keeps_the_log_of_the_previous_child(tmp_path: Path) -> None:
    reports = Reports(tmp_path, HOLDS_OUTPUT + "exit 3")
    reports.start()
    await reports.wait_for(lambda state: state.state == "exited")
    reports.start(2)
    (tmp_path / "released").touch()
    await reports.wait_for(lambda state: (state.state, state.start_count) == ("exited", 2))
    await reports.child.end(0)
    order = [(state.state, state.start_count, state.tail) for _, state in reports.states]
    assert order == [
        ("running", 1, ()),
        ("exited", 1, ()),
        ("exited", 1, ("first", "last")),
        ("running", 2, ()),
        ("exited", 2, ("first", "last")),  # with what ended it, which the launcher compares before another start
    ]
    assert (tmp_path / "logs" / "chief-0.1.log").read_text() == "first\nlast\n" * 2


@in_event_loop
async def test_stopped_child_is_killed_by_the_liveness_probe(tmp_path: Path) -> None:
    reports = Reports(tmp_path, "kill -STOP $$", heartbeat_timeout_seconds=1, heartbeat_interval_seconds=0.1)
    reports.start()
    _, exited = await reports.wait_for(lambda state: state.state == "exited")
    assert (exited.returncode, exited.killed_by) == (-signal.SIGKILL, "liveness_probe")
    await reports.child.end(0)


@in_event_loop
async def test_container_is_searched_outside_of_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def which(name: str, path: str | None = None) -> str:
        threads.append(threading.current_thread())  # on a file system that stalls, this takes minutes
        return "/bin/false"

    monkeypatch.setattr("tf4slurm.agent.container.shutil.which", which)
    reports = Reports(tmp_path, "exit 3", container="tf.sif")
    reports.start()
    await reports.wait_for(lambda state: state.state == "exited")
    await reports.child.end(0)
    assert threads
    assert threading.main_thread() not in threads
