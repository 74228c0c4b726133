"""The notices that a notebook prints of its cluster. The script channel is a fake: it has only the desired state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.clusters.notices import EVENTS, NoticePrinter
from tf4slurm.control.messages import DesiredState
from tf4slurm.control.records import EVENT_KINDS
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.jobs.run_directory import RunDirectory

STOP = DesiredState(stop_reason="The job was stopped: the launcher received SIGTERM.", grace_period_seconds=25)
FAILED = DesiredState(failure_reason="ps/0 was killed.")
TERMINATE = DesiredState(terminate=True, terminate_reason="Training is done.")
LOST = "lost"


class FakeChannel:
    """Has one state of `states` after the other, one per wait. LOST is the exit of the agent."""

    def __init__(self, *states: DesiredState | str) -> None:
        self.desired = DesiredState()
        self._states = list(states)

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        state = self._states.pop(0)
        if isinstance(state, str):
            raise RendezvousConnectionError("the agent has exited")
        self.desired = state
        return condition()


def print_all(directory: Path, *states: DesiredState | str, has_left: Callable[[], bool] = lambda: False) -> None:
    channel: Any = FakeChannel(*states)
    NoticePrinter(RunDirectory(directory), channel, lambda seconds: f"end within {seconds:g} s", has_left).run()


def write_events(directory: Path, *kinds: str) -> None:
    lines = (f'{{"kind": "{kind}", "text": "worker/0 {kind}"}}\n' for kind in kinds)
    (directory / "events.jsonl").write_text("".join(lines))


def test_stop_and_end_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_all(tmp_path, STOP, STOP, TERMINATE)
    stop = f"tf4slurm: {tmp_path.name} stops. {STOP.stop_reason} Its ps and workers end in at most 25 s: save now."
    assert capsys.readouterr().err.splitlines() == [stop, "tf4slurm: end within 15 s"]


def test_lost_ps_and_the_later_end_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_all(tmp_path, FAILED, FAILED, LOST)
    assert capsys.readouterr().err.splitlines() == ["tf4slurm: end within 0 s", "tf4slurm: end within 15 s"]


def test_new_events_of_tasks_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, "restarting")  # before the start
    channel: Any = FakeChannel(DesiredState(), DesiredState(), TERMINATE)
    printer = NoticePrinter(RunDirectory(tmp_path), channel, lambda seconds: "the end", lambda: False)
    write_events(tmp_path, "restarting", "restarting", "exited", "joined")
    printer.run()
    lines = ["tf4slurm: worker/0 restarting", "tf4slurm: worker/0 joined", "tf4slurm: the end"]
    assert capsys.readouterr().err.splitlines() == lines


def test_nothing_is_printed_after_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_all(tmp_path, STOP, has_left=lambda: True)
    assert capsys.readouterr().err == ""


def test_events_of_notices_are_known() -> None:
    assert set(EVENTS) <= set(EVENT_KINDS)
