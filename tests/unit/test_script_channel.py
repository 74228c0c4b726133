"""The script channel and the completion signal: states to the agent and back, for processes of the same user only."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import reprlib
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until
from tf4slurm.agent.script_channel_server import ScriptChannelServer
from tf4slurm.control.messages import BarrierArrival, DesiredState, ScriptState, ShardRequest, encode
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.errors import DataShardsError, RendezvousConnectionError
from tf4slurm.scripts import channel as script_channel
from tf4slurm.scripts import functions
from tf4slurm.scripts.channel import CompletionSignal, ScriptChannel, find_script_channel, to_socket_address
from tf4slurm.scripts.functions import barrier, report
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE


class Agent:
    """The agent's end of a channel, in an event loop that runs in a separate thread."""

    def __init__(self) -> None:
        self.states: list[ScriptState] = []
        self.points: list[StepMetrics] = []
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._is_open.wait(60)
        self.name = self._server.name

    async def _serve(self) -> None:
        self._server = ScriptChannelServer(self.states.append, self.points.append)
        await self._server.open()
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        self._is_open.set()
        await self._is_over.wait()
        self._server.close()

    def send(self, **fields: Any) -> None:
        self._loop.call_soon_threadsafe(self._server.send, DesiredState(**fields))

    def wait_for(self, condition: Callable[[ScriptState], bool]) -> None:
        """Wait until the last report fulfils the condition."""
        assert wait_until(lambda: bool(self.states) and condition(self.states[-1]), 60), self.states[-1:]

    def exit(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.close()


@pytest.fixture
def own_agent(agent: Agent, no_channel: None, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """Return the agent that the functions for scripts find."""
    monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, agent.name)
    return agent


@pytest.fixture
def no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the connection to the agent of an earlier test."""
    monkeypatch.setattr(script_channel, "_channel", None)
    monkeypatch.setattr(functions, "_warned", set())


def without_rate(state: ScriptState) -> ScriptState:
    return dataclasses.replace(state, steps_per_second=None)


def test_last_of_many_reports_is_received(agent: Agent) -> None:
    script = ScriptChannel(agent.name)
    for step in range(1000):
        script.report(step, {"loss": 0.5})
    agent.wait_for(lambda report: report.step == 999)
    assert len(agent.states) < 100
    assert (sum(entry.calls for entry in agent.points), agent.points[-1].step) == (1000, 999)
    script.completion_signal.send()
    expected = ScriptState(step=999, metrics=(("loss", 0.5),), completion="done")
    agent.wait_for(lambda report: without_rate(report) == expected)
    assert (agent.states[-1].steps_per_second or 0.0) > 100


def test_workers_of_the_process_with_the_strategy_remain_when_another_process_reports(agent: Agent) -> None:
    leader, other = ScriptChannel(agent.name), ScriptChannel(agent.name)
    leader.send(workers=(0, 1), unusable_workers=((2, "no data"),))
    agent.wait_for(lambda state: state.workers == (0, 1))
    other.report(7, {})
    agent.wait_for(lambda state: (state.step, state.workers) == (7, (0, 1)))
    assert agent.states[-1].unusable_workers == ((2, "no data"),)
    leader.send(workers=(0,))
    agent.wait_for(lambda state: state.workers == (0,))


def test_barrier_stop_and_completion_of_a_process_remain_when_another_process_reports_and_ends(agent: Agent) -> None:
    leader = ScriptChannel(agent.name)
    arrival = BarrierArrival("loaded", "token", 60.0)
    leader.send(step=5, barrier=arrival, handles_stop=True, completion="done")
    agent.wait_for(lambda state: state.step == 5)
    expected = ScriptState(step=7, metrics=(("loss", 0.5),), handles_stop=True, completion="done", barrier=arrival)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(to_socket_address(agent.name))
        other.sendall(encode(ScriptState(step=7, metrics=(("loss", 0.5),))) + b"\n")
        agent.wait_for(lambda state: state == expected)
    agent.wait_for(lambda state: state == dataclasses.replace(expected, step=5))


def test_requests_for_shards_that_are_together_too_long_are_refused_with_an_answer(agent: Agent) -> None:
    scripts = [ScriptChannel(agent.name) for _ in range(2)]
    requests = [long_request(f"{number}") for number in range(2)]
    scripts[0].send_shards("0", requests[0])
    agent.wait_for(lambda state: state.shards == (requests[0],))
    scripts[1].send(step=3)
    scripts[1].send_shards("1", requests[1])
    assert scripts[1].wait_until(lambda: bool(scripts[1].desired.shards), 60)
    (grant,) = scripts[1].desired.shards
    assert grant.token == "1"
    assert "Take fewer shards ahead" in grant.error
    assert scripts[0].desired.shards == ()
    agent.wait_for(lambda state: (state.step, state.shards) == (3, (requests[0],)))
    scripts[0].send_shards("0", None)
    scripts[1].send_shards("1", requests[1])
    agent.wait_for(lambda state: state.shards == (requests[1],))
    assert scripts[1].wait_until(lambda: not scripts[1].desired.shards, 60)


def test_request_for_shards_that_is_too_long_is_refused_before_it_is_sent(agent: Agent) -> None:
    script = ScriptChannel(agent.name)
    script.send_shards("0", long_request("0"))
    with pytest.raises(DataShardsError, match="at most 524,288"):
        script.send_shards("1", long_request("1"))
    script.send(step=3)
    agent.wait_for(lambda state: (state.step, state.shards) == (3, (long_request("0"),)))


def long_request(token: str) -> ShardRequest:
    return ShardRequest("data", token, 10, 1, "hash", done=tuple(range(10**7, 10**7 + 40_000)))


def run_in_fork(call: Callable[[], object]) -> None:
    process_id = os.fork()
    if process_id == 0:
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(process_id, 0)


def test_fork_sends_nothing_on_the_connection_of_its_parent(own_agent: Agent) -> None:
    def call() -> None:
        assert channel is not None
        channel.send(step=9)
        channel.completion_signal.send()
        report(accuracy=0.5)

    report(step=3)
    channel = find_script_channel()
    own_agent.wait_for(lambda state: state == ScriptState(step=3))
    run_in_fork(call)
    own_agent.wait_for(lambda state: state == ScriptState(step=3, metrics=(("accuracy", 0.5),)))


def test_end_of_a_process_is_noticed_while_its_fork_lives(own_agent: Agent) -> None:
    code = """
import os, sys
import tf4slurm
from tf4slurm.scripts.channel import find_script_channel
find_script_channel().send(stop_signal="SIGTERM")
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "forked\n"
        assert wait_until(lambda: any(state.stop_signal == "SIGTERM" for state in own_agent.states), 60)
        parent.wait(60)
        own_agent.wait_for(lambda state: state.stop_signal is None)


def test_stop_signals_are_forwarded_although_another_thread_asked_for_stop_requests_first(own_agent: Agent) -> None:
    code = """
import sys, threading
import tf4slurm
thread = threading.Thread(target=tf4slurm.should_stop)
thread.start()
thread.join()
tf4slurm.should_stop()
print("ready", flush=True)
sys.stdin.read()
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        script.send_signal(signal.SIGTERM)
        own_agent.wait_for(lambda state: state.stop_signal == "SIGTERM")


HELPERS = """
import multiprocessing, os, sys
import tf4slurm
from tf4slurm.scripts.channel import find_script_channel
def show(*_):
    print(find_script_channel().state.is_helper, flush=True)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("show()", "False"),
        ("if os.fork() == 0: show(), os._exit(0)\nos.wait()", "False"),  # its parent process has no connection
        ("find_script_channel()\nif os.fork() == 0: show(), os._exit(0)\nos.wait()", "True"),
        ("p = multiprocessing.get_context('fork').Process(target=show)\np.start()\np.join()", "True"),
        ("multiprocessing.get_context('fork').Pool(1).map(show, [0])", "True"),
    ],
)
@pytest.mark.usefixtures("own_agent")
def test_process_of_multiprocessing_and_fork_of_connected_process_are_helpers(code: str, expected: str) -> None:
    shown = subprocess.run([sys.executable, "-c", HELPERS + code], capture_output=True, text=True, timeout=120)
    assert (shown.stdout.strip(), shown.stderr) == (expected, "")


NOT_NUMBERS = {"note": "abc", "best": None, "huge": 10**400}


@pytest.mark.usefixtures("no_channel")
def test_report_of_no_number_warns_without_an_agent() -> None:
    def report_twice() -> None:
        for _ in range(2):
            report(step="three", loss=0.5, **NOT_NUMBERS)  # type: ignore[arg-type]

    with pytest.warns(RuntimeWarning) as caught:
        report_twice()
    assert [str(each.message).partition(". ")[0] for each in caught] == [
        "report() got step='three', which is not a number: it is left out",
        "report() got note='abc', which is not a number: it is left out",
        "report() got best=None, which is not a number: it is left out",
        f"report() got huge={reprlib.repr(10**400)}, which is not a number: it is left out",
    ]
    assert {each.filename for each in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(other="abc")  # type: ignore[arg-type]


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("value", [10**5000, Unprintable(), 1j, [1.0], {}, b"one"], ids=type)
def test_report_of_any_value_raises_nothing(own_agent: Agent, value: Any) -> None:
    with pytest.warns(RuntimeWarning, match="which is not a number: it is left out") as caught:
        report(step=value, loss=value, accuracy=0.5)
    assert len([each for each in caught if each.category is RuntimeWarning]) == 2
    own_agent.wait_for(lambda report: report == ScriptState(metrics=(("accuracy", 0.5),)))


def test_report_is_sent_where_no_thread_can_be_started(own_agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    report(step=0)
    own_agent.wait_for(lambda report: report.step == 0)
    monkeypatch.setattr(threading.Timer, "start", fail)
    for step in range(1, 4):
        report(step=step, loss=0.5)
    own_agent.wait_for(lambda report: report.step == 3)
    assert [point.step for point in own_agent.points] == [0, 1, 2, 3]


def test_metrics_of_different_reports_are_kept(own_agent: Agent) -> None:
    report(step=7, loss=0.5)
    report(accuracy=0.25)
    report(step=8, loss=0.4)
    expected = ScriptState(step=8, metrics=(("loss", 0.4), ("accuracy", 0.25)))
    own_agent.wait_for(lambda report: without_rate(report) == expected)


def test_largest_possible_report_is_received(agent: Agent) -> None:
    metrics = {f"{number:03}" + "\x01" * 97: 1 / 3 for number in range(100)}
    script = ScriptChannel(agent.name)
    for step in range(5000):
        script.report(step, metrics)
    agent.wait_for(lambda report: report.step == 4999)
    assert sum(point.calls for point in agent.points) == 5000
    assert max(len(point.low) for point in agent.points) == 100


def test_report_of_no_number_keeps_the_other_metrics(own_agent: Agent) -> None:
    report(step=7, loss=0.25)
    with pytest.warns(RuntimeWarning):
        report(step="eight", loss=0.5, **NOT_NUMBERS)  # type: ignore[arg-type]
    own_agent.wait_for(lambda report: report.metrics == (("loss", 0.5),) and report.step == 7)


def test_metrics_beyond_the_limit_are_left_out_with_one_warning(own_agent: Agent) -> None:
    metrics = {f"metric {number}": float(number) for number in range(2700)} | {"n" * 101: 0.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            report(step=step, **metrics)
    own_agent.wait_for(lambda report: report.step == 1)
    assert own_agent.states[-1].metrics == tuple((f"metric {number}", float(number)) for number in range(100))
    assert [str(each.message) for each in caught if each.category is RuntimeWarning] == [
        "report() got 2701 metrics: the job keeps 100, with names of at most 100 characters. Report fewer."
    ]


@pytest.mark.usefixtures("own_agent")
@pytest.mark.parametrize(("name", "roles"), [("n" * 1001, ()), ("n", ("worker", "n" * 994))])
def test_barrier_name_too_long_is_refused(name: str, roles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="have at most 1000 characters, these 1001"):
        barrier(name, roles=roles)


def test_stop_callback_added_after_earlier_ones_have_returned_is_called_at_once(agent: Agent) -> None:
    script = ScriptChannel(agent.name)
    called, goes_on = [], threading.Event()

    def save_late() -> None:
        called.append("late")
        assert goes_on.wait(60)

    script.add_stop_callback(lambda: called.append("early"))
    agent.send(stop_reason="The job was stopped.", grace_period_seconds=60)
    agent.wait_for(lambda report: report.has_saved)
    script.add_stop_callback(save_late)
    assert wait_until(lambda: called == ["early", "late"], 60)
    agent.wait_for(lambda report: not report.has_saved)  # the job waits for this message
    goes_on.set()
    agent.wait_for(lambda report: report.has_saved)
    assert called == ["early", "late"]


def test_late_connection_receives_the_desired_state(agent: Agent) -> None:
    agent.send(stop_reason="The job was stopped.", grace_period_seconds=60)
    script = ScriptChannel(agent.name)
    assert script.wait_until(lambda: bool(script.desired.stop_reason), 60)
    agent.send(stop_reason="The job was stopped.", grace_period_seconds=60, released_barrier="token")
    assert script.wait_until(lambda: script.desired.released_barrier == "token", 60)
    agent.exit()
    with pytest.raises(RendezvousConnectionError, match="agent of this process has exited"):
        script.wait_until(lambda: False, 5)


def test_stop_callbacks_are_called_once_in_their_own_thread(agent: Agent) -> None:
    script = ScriptChannel(agent.name)
    called: list[str] = []

    def fail() -> None:
        called.append(threading.current_thread().name)
        raise ValueError("no space")

    script.add_stop_callback(fail)
    script.add_stop_callback(lambda: called.append("second"))
    for token in ("a", "b"):
        agent.send(stop_reason="stop", released_barrier=token)
    agent.wait_for(lambda report: report.has_saved)
    assert called == ["tf4slurm-on-stop", "second"]


@pytest.mark.parametrize("message", [b"nonsense\n", b'["DesiredState",{}]\n', b"x" * 3_000_000, b"\xff\n"])
def test_invalid_message_ends_only_its_connection(agent: Agent, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(to_socket_address(agent.name))
        peer.recv(1000)
        try:
            peer.sendall(message)
            assert peer.recv(1000) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass  # the connection was closed before everything was read
    ScriptChannel(agent.name).send(step=1)
    assert wait_until(lambda: agent.states == [ScriptState(), ScriptState(step=1)], 60)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becoming another user needs root, on Linux")
def test_other_users_process_can_neither_send_nor_receive(agent: Agent) -> None:
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(60)\n"
        "s.connect('\\0' + sys.argv[1][1:])\n"
        'try: s.sendall(b\'["ScriptState",{"step":1}]\\n\')\n'
        "except OSError: pass\n"
        "try: print(s.recv(1000))\n"
        "except ConnectionError: print(b'')\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, agent.name], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "b''\n"
    assert agent.states == []


# The completion signal

SCRIPT = """
import os, sys
from tf4slurm.scripts.channel import CompletionSignal
signal = CompletionSignal(lambda failed: print("failed" if failed else "done", flush=True))
signal.send_at_exit()
signal.send_at_exit()
"""


@pytest.mark.parametrize(
    ("signals", "expected"),
    [([True, False], [True]), ([False, False], [False]), ([False, True, True, False], [False, True])],
)
def test_only_the_first_signal_and_a_later_failure_are_sent(signals: list[bool], expected: list[bool]) -> None:
    sent: list[bool] = []
    signal = CompletionSignal(sent.append)
    for failed in signals:
        signal.send(failed)
    assert sent == expected


def test_exception_in_an_interactive_interpreter_is_no_failure() -> None:
    command = [sys.executable, "-i", "-c", SCRIPT]
    result = subprocess.run(command, input="1 / 0\n", capture_output=True, text=True, timeout=120)
    assert result.stdout == "done\n"
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    ("end", "sent", "code"),
    [
        ("", "done\n", 0),
        ("raise KeyError", "failed\n", 1),
        ("signal.send(failed=True)", "failed\n", 0),
        ("sys.exit(3)", "done\n", 3),
        ("os._exit(0)", "", 0),
        ("if os.fork() == 0: sys.exit()\nos.wait()", "done\n", 0),
    ],
)
def test_signal_is_sent_at_exit(end: str, sent: str, code: int) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.returncode) == (sent, code)
    assert ("KeyError" in result.stderr) == (end == "raise KeyError")


_WAITING_SCRIPT = """
import os, signal, threading, time
from tf4slurm.scripts import channel as script_channel
script_channel._WAKE_SECONDS = 0.1
channel = script_channel.find_script_channel()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
started = time.monotonic()
channel.wait_until(lambda: False, 1.0)
print(time.monotonic() - started)
"""


def test_suspended_script_waits_on(own_agent: Agent) -> None:
    """The script waits for 1 s, in which it is stopped for 1.5 s."""
    script = subprocess.Popen([sys.executable, "-c", _WAITING_SCRIPT], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    try:
        stat = Path(f"/proc/{script.pid}/stat")
        assert wait_until(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), 60)
        time.sleep(1.5)  # the length of the pause
        script.send_signal(signal.SIGCONT)
        assert float(script.stdout.readline()) > 2.2
    finally:
        script.kill()
        script.communicate()
