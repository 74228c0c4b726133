"""The script channel and the completion signal: states to the agent and back, for processes of the same user only."""

from __future__ import annotations

import asyncio
import os
import reprlib
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import wait_until
from tf4slurm import script_api, script_channel
from tf4slurm.agent.script_channel_server import ScriptChannelServer
from tf4slurm.control.messages import DesiredState, ScriptState
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.script_api import barrier, report
from tf4slurm.script_channel import CompletionSignal, ScriptChannel, to_socket_address
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE


def with_channel(scenario: Callable[[ScriptChannelServer, list[ScriptState]], Any]) -> Any:
    """Run a scenario in a thread, with an open channel in an event loop."""
    reports: list[ScriptState] = []

    async def run() -> Any:
        server = ScriptChannelServer(reports.append)
        await server.open()
        try:
            return await asyncio.wait_for(asyncio.to_thread(scenario, server, reports), 20)
        finally:
            server.close()

    return asyncio.run(run())


def test_last_of_many_reports_is_received() -> None:
    def scenario(server: ScriptChannelServer, reports: list[ScriptState]) -> None:
        script = ScriptChannel(server.name)
        for step in range(1000):
            script.send_soon(step=step, metrics=(("loss", 0.5),))
        assert wait_until(lambda: bool(reports) and reports[-1].step == 999, 5)
        assert len(reports) < 20
        script.completion_signal.send()
        assert wait_until(lambda: reports[-1] == ScriptState(step=999, metrics=(("loss", 0.5),), completion="done"), 5)

    with_channel(scenario)


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


@pytest.mark.usefixtures("no_channel")
def test_report_of_no_number_keeps_the_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(server: ScriptChannelServer, reports: list[ScriptState]) -> None:
        monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, server.name)
        report(step=7, loss=0.25)
        report(step="eight", loss=0.5, **NOT_NUMBERS)  # type: ignore[arg-type]
        assert wait_until(lambda: bool(reports) and reports[-1].metrics == (("loss", 0.5),), 5)
        assert reports[-1].step == 7

    with pytest.warns(RuntimeWarning):
        with_channel(scenario)


@pytest.mark.usefixtures("no_channel")
def test_metrics_beyond_the_limit_are_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {f"metric {number}": float(number) for number in range(2700)} | {"n" * 101: 0.0}

    def scenario(server: ScriptChannelServer, reports: list[ScriptState]) -> None:
        monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, server.name)
        for step in range(2):
            report(step=step, **metrics)
        assert wait_until(lambda: bool(reports) and reports[-1].step == 1, 5)
        assert reports[-1].metrics == tuple((f"metric {number}", float(number)) for number in range(100))

    with pytest.warns(RuntimeWarning) as caught:
        with_channel(scenario)
    assert [str(each.message) for each in caught if each.category is RuntimeWarning] == [
        "report() got 2701 metrics: the job keeps 100, with names of at most 100 characters. Report fewer."
    ]


@pytest.mark.usefixtures("no_channel")
def test_barrier_name_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(server: ScriptChannelServer, reports: list[ScriptState]) -> None:
        monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, server.name)
        with pytest.raises(ValueError, match="has at most 1000 characters, this one 1001"):
            barrier("n" * 1001)

    with_channel(scenario)


@pytest.fixture
def no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the connection to the agent of an earlier test."""
    monkeypatch.setattr(script_channel, "_channel", None)
    monkeypatch.setattr(script_api, "_warned", set())


def test_stop_callback_added_after_earlier_ones_have_returned_is_called_at_once() -> None:
    async def run() -> None:
        reports: list[ScriptState] = []
        server = ScriptChannelServer(reports.append)
        await server.open()
        script = await asyncio.to_thread(ScriptChannel, server.name)
        called, goes_on = [], threading.Event()

        def save_late() -> None:
            called.append("late")
            assert goes_on.wait(10)

        async def has(condition: Callable[[], bool]) -> bool:
            return await asyncio.to_thread(wait_until, condition, 5)

        script.add_stop_callback(lambda: called.append("early"))
        server.send(DesiredState(stop_reason="The job was stopped.", grace_period_seconds=5))
        assert await has(lambda: bool(reports) and reports[-1].has_saved)
        script.add_stop_callback(save_late)
        assert await has(lambda: called == ["early", "late"])
        assert await has(lambda: not reports[-1].has_saved)  # the job waits for this message
        goes_on.set()
        assert await has(lambda: reports[-1].has_saved)
        assert called == ["early", "late"]
        server.close()

    asyncio.run(run())


def test_late_connection_receives_the_desired_state() -> None:
    async def run() -> None:
        server = ScriptChannelServer(lambda report: None)
        await server.open()
        server.send(DesiredState(stop_reason="The job was stopped.", grace_period_seconds=5))
        script = await asyncio.to_thread(ScriptChannel, server.name)
        received = await asyncio.to_thread(script.wait_until, lambda: bool(script.desired.stop_reason), 5)
        assert received
        server.send(DesiredState(stop_reason="The job was stopped.", grace_period_seconds=5, released_barrier="token"))
        assert await asyncio.to_thread(script.wait_until, lambda: script.desired.released_barrier == "token", 5)
        server.close()
        with pytest.raises(RendezvousConnectionError, match="agent of this process has exited"):
            await asyncio.to_thread(script.wait_until, lambda: False, 5)

    asyncio.run(run())


def test_stop_callbacks_are_called_once_in_their_own_thread() -> None:
    called: list[str] = []

    async def run() -> list[ScriptState]:
        reports: list[ScriptState] = []
        server = ScriptChannelServer(reports.append)
        await server.open()
        script = await asyncio.to_thread(ScriptChannel, server.name)

        def fail() -> None:
            called.append(threading.current_thread().name)
            raise ValueError("no space")

        script.add_stop_callback(fail)
        script.add_stop_callback(lambda: called.append("second"))
        for token in ("a", "b"):
            server.send(DesiredState(stop_reason="stop", released_barrier=token))
        await asyncio.to_thread(wait_until, lambda: bool(reports) and reports[-1].has_saved, 5)
        server.close()
        return reports

    reports = asyncio.run(run())
    assert called == ["tf4slurm-on-stop", "second"]
    assert reports[-1].has_saved


@pytest.mark.parametrize("message", [b"nonsense\n", b'["DesiredState",{}]\n', b"x" * 100_000, b"\xff\n"])
def test_invalid_message_ends_only_its_connection(message: bytes) -> None:
    def scenario(server: ScriptChannelServer, reports: list[ScriptState]) -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(to_socket_address(server.name))
            peer.recv(1000)
            try:
                peer.sendall(message)
                assert peer.recv(1000) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass  # the connection was closed before everything was read
        ScriptChannel(server.name).send(step=1)
        assert wait_until(lambda: reports == [ScriptState(step=1)], 5)

    with_channel(scenario)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becoming another user needs root, on Linux")
def test_other_users_process_can_neither_send_nor_receive() -> None:
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(5)\n"
        "s.connect('\\0' + sys.argv[1][1:])\n"
        'try: s.sendall(b\'["ScriptState",{"step":1}]\\n\')\n'
        "except OSError: pass\n"
        "try: print(s.recv(1000))\n"
        "except ConnectionError: print(b'')\n"
    )

    def scenario(server: ScriptChannelServer, reports: list[ScriptState]) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, server.name], capture_output=True, text=True, timeout=15, check=True
        )
        assert reports == []
        return done.stdout

    assert with_channel(scenario) == "b''\n"


# The completion signal

SCRIPT = """
import os, sys
from tf4slurm.script_channel import CompletionSignal
signal = CompletionSignal(lambda failed: print("failed" if failed else "done", flush=True))
signal.send_at_exit()
signal.send_at_exit()
"""


def test_only_the_first_signal_is_sent() -> None:
    sent: list[bool] = []
    signal = CompletionSignal(sent.append)
    signal.send(failed=True)
    signal.send()
    assert sent == [True]


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
    result = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=30)
    assert (result.stdout, result.returncode) == (sent, code)
    assert ("KeyError" in result.stderr) == (end == "raise KeyError")
