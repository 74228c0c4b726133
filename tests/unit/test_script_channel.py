"""The line between an agent and its script: reports up, orders down, for processes of the same user only."""

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
from tf4slurm import script_api as script
from tf4slurm.agent.script_channel import ScriptChannelServer
from tf4slurm.control.messages import DesiredState, ScriptState
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.script_api import ScriptChannel, barrier, report, to_path
from tf4slurm.system.variables import SCRIPT_CHANNEL_VARIABLE


def with_line(story: Callable[[ScriptChannelServer, list[ScriptState]], Any]) -> Any:
    """Run a story in a thread, beside an open line in an event loop."""
    reports: list[ScriptState] = []

    async def run() -> Any:
        line = ScriptChannelServer(reports.append)
        await line.open()
        try:
            return await asyncio.wait_for(asyncio.to_thread(story, line, reports), 20)
        finally:
            line.close()

    return asyncio.run(run())


def test_reports_go_up_and_the_last_of_many_is_told() -> None:
    def story(line: ScriptChannelServer, reports: list[ScriptState]) -> None:
        script = ScriptChannel(line.name)
        for step in range(1000):
            script.say_soon(step=step, metrics=(("loss", 0.5),))
        assert wait_until(lambda: bool(reports) and reports[-1].step == 999, 5)
        assert len(reports) < 20
        script.say(completion="done")
        assert wait_until(lambda: reports[-1] == ScriptState(step=999, metrics=(("loss", 0.5),), completion="done"), 5)

    with_line(story)


NOT_NUMBERS = {"note": "abc", "best": None, "huge": 10**400}


@pytest.mark.usefixtures("no_line")
def test_report_of_what_is_no_number_warns_and_does_not_raise_without_an_agent() -> None:
    def report_twice() -> None:
        for _ in range(2):
            report(step="three", loss=0.5, **NOT_NUMBERS)  # type: ignore[arg-type]

    with pytest.warns(RuntimeWarning) as told:
        report_twice()
    assert [str(each.message).partition(". ")[0] for each in told] == [
        "report() got step='three', which is not a number: it is left out",
        "report() got note='abc', which is not a number: it is left out",
        "report() got best=None, which is not a number: it is left out",
        f"report() got huge={reprlib.repr(10**400)}, which is not a number: it is left out",
    ]
    assert {each.filename for each in told} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(other="abc")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_line")
def test_report_of_what_is_no_number_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(line: ScriptChannelServer, reports: list[ScriptState]) -> None:
        monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, line.name)
        report(step=7, loss=0.25)
        report(step="eight", loss=0.5, **NOT_NUMBERS)  # type: ignore[arg-type]
        assert wait_until(lambda: bool(reports) and reports[-1].metrics == (("loss", 0.5),), 5)
        assert reports[-1].step == 7

    with pytest.warns(RuntimeWarning):
        with_line(story)


@pytest.mark.usefixtures("no_line")
def test_metrics_beyond_the_limit_are_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {f"metric {number}": float(number) for number in range(2700)} | {"n" * 101: 0.0}

    def story(line: ScriptChannelServer, reports: list[ScriptState]) -> None:
        monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, line.name)
        for step in range(2):
            report(step=step, **metrics)
        assert wait_until(lambda: bool(reports) and reports[-1].step == 1, 5)
        assert reports[-1].metrics == tuple((f"metric {number}", float(number)) for number in range(100))

    with pytest.warns(RuntimeWarning) as told:
        with_line(story)
    assert [str(each.message) for each in told if each.category is RuntimeWarning] == [
        "report() got 2701 metrics: the job keeps 100, with names of at most 100 characters. ScriptState fewer."
    ]


@pytest.mark.usefixtures("no_line")
def test_barrier_name_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(line: ScriptChannelServer, reports: list[ScriptState]) -> None:
        monkeypatch.setenv(SCRIPT_CHANNEL_VARIABLE, line.name)
        with pytest.raises(ValueError, match="has at most 1000 characters, this one 1001"):
            barrier("n" * 1001)

    with_line(story)


@pytest.fixture
def no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the connection to the agent of an earlier test."""
    monkeypatch.setattr(script, "_line", None)
    monkeypatch.setattr(script, "_warned", set())


def test_stop_callback_added_after_earlier_ones_have_returned_is_called_at_once() -> None:
    async def run() -> None:
        reports: list[ScriptState] = []
        line = ScriptChannelServer(reports.append)
        await line.open()
        script = await asyncio.to_thread(ScriptChannel, line.name)
        called, goes_on = [], threading.Event()

        def save_late() -> None:
            called.append("late")
            assert goes_on.wait(10)

        async def has(condition: Callable[[], bool]) -> bool:
            return await asyncio.to_thread(wait_until, condition, 5)

        script.add_callback(lambda: called.append("early"))
        line.tell(DesiredState(stop_reason="The job was stopped.", grace_period_seconds=5))
        assert await has(lambda: bool(reports) and reports[-1].has_saved)
        script.add_callback(save_late)
        assert await has(lambda: called == ["early", "late"])
        assert await has(lambda: not reports[-1].has_saved)  # the job waits for it
        goes_on.set()
        assert await has(lambda: reports[-1].has_saved)
        assert called == ["early", "late"]
        line.close()

    asyncio.run(run())


def test_who_connects_late_hears_how_things_stand() -> None:
    async def run() -> None:
        line = ScriptChannelServer(lambda report: None)
        await line.open()
        line.tell(DesiredState(stop_reason="The job was stopped.", grace_period_seconds=5))
        script = await asyncio.to_thread(ScriptChannel, line.name)
        heard = await asyncio.to_thread(script.wait_until, lambda: bool(script.desired.stop_reason), 5)
        assert heard
        line.tell(DesiredState(stop_reason="The job was stopped.", grace_period_seconds=5, released_barrier="token"))
        assert await asyncio.to_thread(script.wait_until, lambda: script.desired.released_barrier == "token", 5)
        line.close()
        with pytest.raises(RendezvousConnectionError, match="agent of this process is gone"):
            await asyncio.to_thread(script.wait_until, lambda: False, 5)

    asyncio.run(run())


def test_callbacks_are_called_once_in_a_thread_of_their_own() -> None:
    called: list[str] = []

    async def run() -> list[ScriptState]:
        reports: list[ScriptState] = []
        line = ScriptChannelServer(reports.append)
        await line.open()
        script = await asyncio.to_thread(ScriptChannel, line.name)

        def fail() -> None:
            called.append(threading.current_thread().name)
            raise ValueError("no space")

        script.add_callback(fail)
        script.add_callback(lambda: called.append("second"))
        for token in ("a", "b"):
            line.tell(DesiredState(stop_reason="stop", released_barrier=token))
        await asyncio.to_thread(wait_until, lambda: bool(reports) and reports[-1].has_saved, 5)
        line.close()
        return reports

    reports = asyncio.run(run())
    assert called == ["tf4slurm-on-stop", "second"]
    assert reports[-1].has_saved


@pytest.mark.parametrize("words", [b"nonsense\n", b'["DesiredState",{}]\n', b"x" * 100_000, b"\xff\n"])
def test_what_is_no_report_ends_the_connection_only(words: bytes) -> None:
    def story(line: ScriptChannelServer, reports: list[ScriptState]) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(to_path(line.name))
            stranger.recv(1000)
            try:
                stranger.sendall(words)
                assert stranger.recv(1000) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was ended before it had been read to its end
        ScriptChannel(line.name).say(step=1)
        assert wait_until(lambda: reports == [ScriptState(step=1)], 5)

    with_line(story)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becoming another user needs root, on Linux")
def test_another_user_is_not_heard_and_hears_nothing() -> None:
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(5)\n"
        "s.connect('\\0' + sys.argv[1][1:])\n"
        'try: s.sendall(b\'["ScriptState",{"step":1}]\\n\')\n'
        "except OSError: pass\n"
        "try: print(s.recv(1000))\n"
        "except ConnectionError: print(b'')\n"
    )

    def story(line: ScriptChannelServer, reports: list[ScriptState]) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, line.name], capture_output=True, text=True, timeout=15, check=True
        )
        assert reports == []
        return done.stdout

    assert with_line(story) == "b''\n"
