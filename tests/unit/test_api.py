"""The functions of the library on run directories that no launcher of this test wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tf4slurm import api
from tf4slurm.cli.jobs import cancel
from tf4slurm.errors import CommandError, LaunchError
from tf4slurm.job import Picture
from tf4slurm.jobs import cancellation
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec

STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
signal.pause()
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[RunDirectory]:
    """The run directory of a launcher that ignores SIGTERM and SIGQUIT."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run = RunDirectory.create(tmp_path, "stubborn")
        run.write(JobFile(process=Process.of(process.pid), grace_period_seconds=0.1))
        yield run
        process.kill()


@pytest.mark.parametrize(
    ("grace_period_seconds", "sentence"),
    [
        (None, "stubborn did not stop in time and was killed."),
        (0.1, "stubborn did not stop in time and was killed."),
        (0, "stubborn was killed."),
    ],
)
def test_cancel_of_job_that_does_not_stop_kills_it_and_returns_its_end(
    stubborn: RunDirectory, grace_period_seconds: float | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "_MARGIN_SECONDS", 0.1)
    monkeypatch.setattr(cancellation, "_KILL_SECONDS", 0.5)
    monkeypatch.setattr(cancellation, "_NOW_SECONDS", 0.5)
    sentences: list[str] = []
    status = api.cancel(str(stubborn.path), grace_period_seconds=grace_period_seconds, on_progress=sentences.append)
    assert sentences[-1] == sentence
    assert (status.state, status.has_ended) == ("LOST", True)


def test_cancel_exits_with_code_of_first_error(tmp_path: Path) -> None:
    for name, host in (("elsewhere", "another-host"), ("newer", "")):
        run = RunDirectory.create(tmp_path, name)
        run.write(JobFile(process=Process(host, 1, 1)))
    (tmp_path / "newer" / "status.json").write_text('{"schema_version": 99}')
    (tmp_path / "elsewhere" / "status.json").write_text('{"schema_version": 1, "time": 9e9}')
    names = [str(tmp_path / "elsewhere"), str(tmp_path / "newer")]
    assert CliRunner().invoke(cancel, names).exit_code == 2  # JobStateError: it runs on another host
    assert CliRunner().invoke(cancel, names[::-1]).exit_code == 3  # SchemaVersionError


def test_launcher_that_exits_before_it_creates_a_run_directory_is_an_error_not_an_older_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory.create(tmp_path, "older").write(JobFile(process=Process.of(os.getpid())))
    monkeypatch.setattr(api, "own_command", lambda *arguments: [sys.executable, "-c", "import sys; sys.exit(3)"])
    with pytest.raises(LaunchError, match="exited with code 3 before it created a run directory") as error:
        api.run(JobSpec(("true",), workers=1, runs_directory=tmp_path))
    assert error.value.returncode == 3


def test_submit_and_estimate_refuse_a_missing_program_unless_an_environment_may_have_it(tmp_path: Path) -> None:
    spec = BatchSpec(("/nowhere/train",), workers=1, runs_directory=tmp_path / "runs")
    for refuse in (api.submit, api.estimate):
        with pytest.raises(CommandError, match="'/nowhere/train' does not exist"):
            refuse(spec, environ={})
        with pytest.raises(LaunchError, match="sbatch"):  # not installed in this PATH
            refuse(replace(spec, module=("a/1",), check_env=False), environ={"PATH": "/nowhere"})
    assert not list(tmp_path.glob("runs/*"))


def test_repr_of_a_picture_is_short() -> None:
    assert "PNG" not in repr(Picture(b"\x89PNG"))
