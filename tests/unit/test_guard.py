"""The guard above an agent: exit codes and signals pass through it, and nothing is left below it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until, wait_until_gone
from tf4slurm.system.exec_child import OTHER_SIGNALS, STOP_SIGNALS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

AGENT = """
import asyncio, os, signal, subprocess, sys, time
from tf4slurm.system import guard
from tf4slurm.system.exec_child import STOP_SIGNALS
from tf4slurm.system.guard import GUARD_LOST, start_guard
guard._CLEAN_SECONDS = 60  # a busy machine may delay the end of a killed process
if "slow" in sys.argv:  # the guard starts slowly
    handled_signals = guard._handled_signals
    guard._handled_signals = lambda: [time.sleep(0.5), *handled_signals()][1:]
start_guard(blocks_signals="blocks" in sys.argv)
if "blocks" in sys.argv:
    print(os.getpid(), flush=True)
    time.sleep(0.5)
    loop = asyncio.new_event_loop()
    guard.handle_stop_signals(loop, lambda name: os._exit(50))
    loop.run_forever()
for number in (GUARD_LOST, *(STOP_SIGNALS if "handles" in sys.argv else ())):
    signal.signal(number, lambda number, frame: os._exit(40 + number))
if "exits" in sys.argv:
    sys.exit(5)
for command in (["sleep", "1001"], ["sh", "-c", "trap '' TERM HUP; sleep 1002; sleep 1003"]):
    subprocess.Popen(command, start_new_session=True)
print(os.getpid(), flush=True)
if "leaves" in sys.argv:
    sys.exit(6)
while True:
    time.sleep(0.01)
"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def agent_of(guard: subprocess.Popen[str]) -> psutil.Process:
    assert guard.stdout is not None
    return psutil.Process(int(guard.stdout.readline()))


def test_exit_code_of_agent_is_that_of_its_guard() -> None:
    with start("exits") as guard:
        assert guard.wait(60) == 5


def test_leftovers_of_an_agent_that_ends_before_its_guard_waits_are_ended(process_mark: str) -> None:
    with start("leaves", "slow") as guard:
        assert guard.wait(60) == 6
    assert wait_until_gone(process_mark, timeout_seconds=0) == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_signal_to_guard_reaches_its_agent_and_leftovers_are_ended(
    number: signal.Signals, process_mark: str
) -> None:
    with start("handles") as guard:
        agent_of(guard)
        guard.send_signal(number)
        assert guard.wait(60) == 40 + number
    assert wait_until_gone(process_mark, timeout_seconds=0) == []


@pytest.mark.parametrize("number", [*STOP_SIGNALS, *OTHER_SIGNALS])
def test_signal_waits_until_the_guard_handles_or_ignores_it(number: signal.Signals) -> None:
    with start("handles", "slow") as guard:
        agent = agent_of(guard)
        guard.send_signal(number)
        if number not in STOP_SIGNALS:
            time.sleep(1)
            assert agent.is_running()
            guard.send_signal(signal.SIGTERM)
        assert guard.wait(60) == 40 + (number if number in STOP_SIGNALS else signal.SIGTERM)


def test_stop_signal_waits_until_the_agent_handles_it() -> None:
    """Slurm sends SIGTERM at a preemption, also while agents import their modules."""
    with start("blocks") as guard:
        agent_of(guard)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(60) == 50


def test_other_signals_do_not_end_a_guard() -> None:
    with start("handles") as guard:
        agent_of(guard)
        for number in OTHER_SIGNALS:
            guard.send_signal(number)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(60) == 40 + signal.SIGTERM


def test_guard_that_ignores_hangups_passes_none_on() -> None:
    with subprocess.Popen(
        ["nohup", sys.executable, "-c", AGENT, "handles"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as guard:
        agent_of(guard)
        guard.send_signal(signal.SIGHUP)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(60) == 40 + signal.SIGTERM


def test_killed_agent_leaves_nothing_and_its_guard_exits_with_7(process_mark: str) -> None:
    with start() as guard:
        agent_of(guard).kill()
        assert guard.wait(60) == 7
        assert guard.stderr is not None
        assert "was killed by signal 9" in guard.stderr.read()
    assert wait_until_gone(process_mark, timeout_seconds=0) == []


def test_child_that_a_shell_had_before_is_not_killed() -> None:
    command = 'sleep 300 >/dev/null 2>&1 & echo $!; exec "$@"'
    with subprocess.Popen(
        ["bash", "-c", command, "bash", sys.executable, "-c", AGENT, "handles"], stdout=subprocess.PIPE, text=True
    ) as guard:
        assert guard.stdout is not None
        helper, agent = psutil.Process(int(guard.stdout.readline())), agent_of(guard)
        assert wait_until(lambda: len(agent.children(recursive=True)) == 3, 60)
        left = agent.children(recursive=True)
        guard.terminate()
        assert guard.wait(60) == 40 + signal.SIGTERM
    assert helper.status() != psutil.STATUS_ZOMBIE
    helper.kill()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left)


def test_killed_guard_is_noticed_by_its_agent() -> None:
    with start() as guard:
        agent = agent_of(guard)
        assert wait_until(lambda: len(agent.children(recursive=True)) == 3, 60)
        descendants = agent.children(recursive=True)
        guard.kill()
        assert wait_until(lambda: not Path(f"/proc/{agent.pid}").exists() or agent.status() == "zombie", 60)
        for process in descendants:  # as in agent.py
            process.kill()
