"""`tf4slurm tensorboard`, with a stand-in for TensorBoard that prints its arguments."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile

EVENTS = "events.out.tfevents.1"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A job that was started in tmp_path/home, with older event files in the same directory."""
    old = tmp_path / "home" / "old" / EVENTS
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    run = RunDirectory.create(tmp_path / "runs", "train-1")
    run.write(JobFile(directory=str(tmp_path / "home")))
    return run


def call(*arguments: str, programs: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = f"{programs}:/usr/bin:/bin" if programs else "/usr/bin:/bin"
    command = [TF4SLURM, "tensorboard", *arguments]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60)


def write_events(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / EVENTS).touch()


def test_command_is_printed_if_tensorboard_is_not_installed(run: RunDirectory, tmp_path: Path) -> None:
    write_events(tmp_path / "home" / "my logs" / "train")
    write_events(tmp_path / "home" / "my logs" / "test")
    result = call(str(run.path), "--port", "7007")
    logs = tmp_path / "home" / "my logs"
    assert (result.returncode, result.stdout) == (0, f"tensorboard --logdir '{logs}' --host 127.0.0.1 --port 7007\n")
    assert "ssh -N -L 7007:127.0.0.1:7007 " in result.stderr
    assert "pip install tensorboard" in result.stderr


def test_tensorboard_is_started_if_installed(run: RunDirectory, tmp_path: Path) -> None:
    write_events(run.path / "board")
    write_events(tmp_path / "home" / "elsewhere")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "tensorboard").write_text('#!/bin/sh\necho "called: $*"\nexit 3\n')
    (programs / "tensorboard").chmod(0o755)
    result = call(str(run.path), programs=programs)
    expected = f"called: --logdir {run.path / 'board'} --host 127.0.0.1 --port 6006\n"
    assert (result.returncode, result.stdout) == (3, expected)
    result = call(str(run.path), "--print", programs=programs)
    assert (result.returncode, result.stdout.startswith("tensorboard --logdir ")) == (0, True)


def test_error_without_event_files_names_the_searched_directories(run: RunDirectory, tmp_path: Path) -> None:
    result = call(str(run.path))
    assert result.returncode == 3
    assert str(tmp_path / "home") in result.stderr
    assert "give --logdir" in result.stderr
    assert call("no-such-job").returncode == 5
