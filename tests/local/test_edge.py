"""Errors of the system at the edge of the command line: each is one sentence. Output never fails for a character."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tf4slurm.cluster import Task
from tf4slurm.jobs.registry import register_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, ResultFile, StatusFile

ONE = ("--ps", "0", "--workers", "0")
UNUSUAL = "l\u00e4ufe \u2713"
IN_REMOVED_DIRECTORY = 'cd "$1" && rmdir "$1" && shift && exec "$@"'


def call(command: Sequence[str], stdout: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        timeout=60,
    )


def message_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the only line on standard error, without the program's name."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tf4slurm: ")
    return line.removeprefix("tf4slurm: ")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("verb", [("list",), ("run", *ONE, "--", "true")])
def test_unknown_log_level_is_refused_with_the_known_ones(verb: tuple[str, ...]) -> None:
    done = call([TF4SLURM, *verb], TF4SLURM_LOG="verbose")
    assert done.returncode == 2
    assert message_of(done) == "TF4SLURM_LOG is 'verbose'. Expected one of DEBUG, INFO, WARNING, ERROR, CRITICAL."
    assert not Path("runs").exists()


@pytest.mark.parametrize("level", ["", "debug", "Error"])
def test_log_level_is_accepted_in_any_case(level: str) -> None:
    done = call([TF4SLURM, "nodes", "count", "n1"], TF4SLURM_LOG=level)
    assert (done.returncode, done.stdout) == (0, "1\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", *ONE, "--", "true"),
        ("run", *ONE, "--runs-directory", "RUNS", "--", "true"),
        ("submit", *ONE, "--", "true"),
        ("config", "init", "--project"),
        ("report", "train-1", "--output", "page.html"),
        ("doctor", "--quick"),
    ],
    ids=" ".join,
)
def test_removed_working_directory_is_no_traceback(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "gone").mkdir()
    words = [str(tmp_path / "runs") if word == "RUNS" else word for word in arguments]
    done = call(["bash", "-c", IN_REMOVED_DIRECTORY, "bash", str(tmp_path / "gone"), TF4SLURM, *words])
    assert "Traceback" not in done.stderr
    assert done.returncode in (2, 3, 5), done.stderr
    assert not (tmp_path / "runs").exists()


def test_output_file_that_cannot_be_made_is_refused_without_a_draft(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file/below/o.out")
    done = call([TF4SLURM, "submit", *ONE, "--output", place, "--", "true"])
    assert done.returncode == 3
    assert f"The directory of --output, {os.path.dirname(place)!r}, cannot be created: " in message_of(done)
    assert os.listdir("runs") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("nodes", "expand", "n[1-3]"),
        ("config", "path"),
        ("script", *ONE, "--", "true"),
        ("--help",),
        ("doctor", "--quick", "--json"),
    ],
    ids=" ".join,
)
def test_full_standard_output_is_an_error(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = call([TF4SLURM, *arguments], full.fileno())
    assert done.returncode == 3
    assert "Standard output cannot be written: No space left on device." in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_full_standard_output_does_not_change_the_end_of_a_job() -> None:
    with open("/dev/full", "w") as full:
        done = call([TF4SLURM, "run", *ONE, "--", "bash", "-c", "echo hello; exit 5"], full.fileno())
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


@pytest.fixture
def ended_job(tmp_path: Path) -> str:
    """The name of an ended job, with characters outside of Latin-1 in its path and in its output."""
    run = RunDirectory.create(tmp_path / UNUSUAL, "train-1")
    run.write(JobFile(command=("true",)))
    run.write(StatusFile(reason=UNUSUAL))
    run.write_result(ResultFile(state="COMPLETED", reason=UNUSUAL))
    run.log(Task("chief", 0), 1).write_text(f"hello {UNUSUAL}\n", encoding="utf-8")
    return register_job("train-1", tmp_path / UNUSUAL, os.environ).name


def test_job_is_found_in_a_removed_working_directory(tmp_path: Path, ended_job: str) -> None:
    for arguments, output in ((("logs", ended_job), "hello"), (("list",), ended_job), (("status",), "COMPLETED")):
        (tmp_path / "gone").mkdir()
        done = call(["bash", "-c", IN_REMOVED_DIRECTORY, "bash", str(tmp_path / "gone"), TF4SLURM, *arguments])
        assert (done.returncode, output in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("encoding", ["latin-1:strict", "ascii:strict"])
@pytest.mark.parametrize(
    "arguments",
    [("logs",), ("list",), ("status",), ("report",), ("doctor", "--quick", "--runs-directory", UNUSUAL)],
    ids=lambda words: words[0],
)
def test_output_never_fails_for_a_character(ended_job: str, arguments: tuple[str, ...], encoding: str) -> None:
    done = call([TF4SLURM, *arguments], PYTHONIOENCODING=encoding)
    assert "Unicode" not in done.stderr
    assert done.returncode in ((0, 3) if arguments[0] == "doctor" else (0,)), done.stderr


def test_name_that_is_no_text_is_printed_as_it_is(tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xfcns"))
    RunDirectory.create(place, "train-1").write(JobFile(command=("true",)))
    register_job("train-1", place, os.environ)
    done = call([TF4SLURM, "report"], PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{place}/train-1/report.html\n"
