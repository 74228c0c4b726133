"""Every end of a launcher whose run directory exists has a result, whichever of its parts fails."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.control.service import ControlService
from tf4slurm.errors import LaunchError, PortsInUseError, RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch import launcher, start
from tf4slurm.launch.spawners import SrunSpawner
from tf4slurm.launch.start import run_job
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS

PLACES = {
    "registration": (start, "register_job"),
    "spawner": (start, "_make_spawner"),
    "service": (launcher, "make_service"),
    "job.json": (launcher.Launcher, "_write_job"),
    "control service": (launcher, "start_service"),
    "agents": (SrunSpawner, "start"),
    "end of the agents": (SrunSpawner, "close"),
    "result": (launcher, "make_result_file"),
}
ERRORS = {
    "error of tf4slurm": (LaunchError("srun cannot be started.", command=("srun",)), 3, "srun cannot be started."),
    "port": (PortsInUseError("All ports are in use."), 3, "All ports are in use."),
    "system": (PermissionError(13, "Permission denied", "/x"), 3, "'/x' cannot be used: Permission denied."),
    "mistake": (KeyError("x"), 1, "The launcher failed: KeyError: 'x'."),
    "exit": (SystemExit(5), 1, "The launcher failed: SystemExit: 5."),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Run a job in an allocation whose srun fails at once. Its control service does not listen.

    gRPC's servers for asyncio may crash in a process that runs one event loop after the other, as these tests do.
    """

    async def listen(*_: object) -> int:
        return 1

    monkeypatch.setattr(ControlService, "_start_server", listen)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    spec = JobSpec(("train",), workers=1, runs_directory=tmp_path / "runs")
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield lambda: run_job(spec, environ, SlurmAllocation(JobId(4711), 3, None), lambda _: TerminalOutput())
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def result_of(directory: Path) -> dict[str, Any]:
    (path,) = (directory / "runs").iterdir()
    assert (path / "report.html").exists()
    found: dict[str, Any] = json.loads((path / "result.json").read_text())
    return found


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_launcher_that_fails_writes_a_result(
    tmp_path: Path, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, place: str, error: str
) -> None:
    exception, exit_code, reason = ERRORS[error]
    owner, name = PLACES[place]

    def fail(*_: object, **__: object) -> None:
        raise exception

    async def fail_later(*_: object, **__: object) -> None:
        raise exception

    is_async = asyncio.iscoroutinefunction(getattr(owner, name))
    monkeypatch.setattr(owner, name, fail_later if is_async else fail)
    with pytest.raises(type(exception)):
        run()
    assert set(LAUNCHER_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())  # until the result was written
    result = result_of(tmp_path)
    assert (result["state"], result["exit_code"]) == ("FAILED", exit_code)
    assert result["reason"].startswith(reason)


def test_result_of_the_launcher_is_kept(
    tmp_path: Path, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(TerminalOutput, "on_result", fail)
    with pytest.raises(BrokenPipeError):
        run()
    assert result_of(tmp_path)["reason"].startswith("srun could not start the tasks: it exited with code 1.")


def test_step_that_is_stopped_while_its_tasks_start_stops_the_job(tmp_path: Path, run: Callable[[], object]) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 143\n")
    run()
    result = result_of(tmp_path)
    assert (result["state"], result["exit_code"]) == ("STOPPED", 143)
    assert result["reason"] == "The job was stopped: the step received SIGTERM while its tasks started."


def test_launcher_does_not_wait_for_ever_for_the_file_system(
    run: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf4slurm.launch.result_files._FILE_SYSTEM_SECONDS", 0.05)
    may_end = threading.Event()
    monkeypatch.setattr(RunDirectory, "write_result", lambda *_: may_end.wait(60))

    def fail(*_: object) -> None:
        raise RunDirectoryError("The file system does not answer.", path="runs")

    monkeypatch.setattr(launcher.Launcher, "_write_job", fail)
    with pytest.raises(RunDirectoryError):
        run()
    may_end.set()
