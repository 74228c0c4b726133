"""The thread of a script under plain srun: a stopped sidecar, and which waits never end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import wait_until
from tf4slurm.cluster import Task
from tf4slurm.control.messages import DesiredState
from tf4slurm.script_client import tf4slurm_sidecar as script_watch
from tf4slurm.script_client.tf4slurm_sidecar import STOPPED_SECONDS, ScriptWatch
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.proc import read_stat

OVER = DesiredState(is_training_over=True, have_leaders_ended=True)
CHIEF_ENDED = DesiredState(have_leaders_ended=True)
FAILED = DesiredState(failed_tasks=("worker/1",))


class Channel(SimpleNamespace):
    """A fake of the script channel: what it was told."""

    desired = DesiredState()
    loss = ""

    def lose(self, why: str) -> None:
        self.loss = why


def watch(channel: Any, task: Task, sidecar_id: int = 0, exit_seconds: float | None = 10.0) -> ScriptWatch:
    return ScriptWatch(channel, sidecar_id, task, [Task("worker", 1)], exit_seconds)


def test_sidecar_that_is_stopped_for_ten_seconds_is_lost() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sidecar:
        channel = Channel()
        watched = watch(channel, Task("ps", 0), sidecar.pid)
        os.kill(sidecar.pid, signal.SIGSTOP)
        assert wait_until(lambda: read_stat(sidecar.pid).state == "T", 60)
        watched._check_sidecar(0.0)
        os.kill(sidecar.pid, signal.SIGCONT)
        assert wait_until(lambda: read_stat(sidecar.pid).state != "T", 60)
        watched._check_sidecar(9.0)
        os.kill(sidecar.pid, signal.SIGSTOP)
        assert wait_until(lambda: read_stat(sidecar.pid).state == "T", 60)
        watched._check_sidecar(10.0)
        watched._check_sidecar(19.0)
        assert channel.loss == ""
        watched._check_sidecar(20.0)
        assert channel.loss == "The sidecar of ps/0 was stopped for 10 s."
        sidecar.kill()


@pytest.mark.parametrize(
    ("task_type", "desired", "waits_in", "expected"),
    [
        ("ps", OVER, "", 0),
        ("ps", CHIEF_ENDED, "server_lib.join", None),  # workers still train
        ("ps", FAILED, "session._extend_graph", None),
        ("worker", OVER, "", None),
        ("worker", CHIEF_ENDED, "server_lib.join", 0),
        ("worker", FAILED, "session._extend_graph", 1),
        ("worker", FAILED, "", None),
        ("chief", FAILED, "session._extend_graph", 1),
        ("chief", FAILED, "cluster_coordinator.fetch", 1),
        ("chief", DesiredState(failed_tasks=("worker/0",)), "cluster_coordinator.fetch", None),  # worker/1 goes on
        ("chief", FAILED, "parameter_server_strategy_v2._connect_to_cluster", 1),
        ("evaluator", OVER, "", None),
    ],
)
def test_process_that_waits_for_ever_ends(
    task_type: str, desired: DesiredState, waits_in: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(script_watch, "_main_thread_calls", lambda: [waits_in, "script.main"])
    monkeypatch.setattr(script_watch, "_exit", lambda code, _: codes.append(code))
    channel = Channel(desired=desired)
    watched = watch(channel, Task(task_type, 0))
    for now in (0.0, 9.0):
        watched._end_if_it_waits_for_ever(now)
    assert codes == []
    watched._end_if_it_waits_for_ever(10.0)
    assert codes == ([] if expected is None else [expected])


@pytest.mark.parametrize(("failed", "expected"), [(("worker/0",), [1]), (("worker/1",), [])])
def test_worker_whose_session_waits_for_a_failed_chief_ends(
    failed: tuple[str, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    calls = ["session_manager._ready", "session_manager.wait_for_session", "script.main"]
    monkeypatch.setattr(script_watch, "_main_thread_calls", lambda: calls)
    monkeypatch.setattr(script_watch, "_exit", lambda code, _: codes.append(code))
    watched = watch(Channel(desired=DesiredState(failed_tasks=failed)), Task("worker", 2))
    for now in (0.0, 39.0):
        watched._end_if_it_waits_for_ever(now)
    assert codes == []
    watched._end_if_it_waits_for_ever(40.0)
    assert codes == expected


def test_ps_is_not_ended_if_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(script_watch, "_exit", lambda code, _: codes.append(code))
    watched = watch(Channel(desired=OVER), Task("ps", 0), exit_seconds=None)
    for now in (0.0, 100.0):
        watched._end_if_it_waits_for_ever(now)
    assert codes == []


def test_stopped_sidecar_counts_as_lost_when_the_launcher_has_lost_it() -> None:
    assert JobSpec.heartbeat_timeout_seconds == STOPPED_SECONDS
