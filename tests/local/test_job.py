"""`Job` and the functions of the library, with local processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tf4slurm
from tests.jobs import TF4SLURM
from tf4slurm.errors import (
    LaunchError,
    OptionError,
    PlacementError,
    SchemaVersionError,
    UnknownJobError,
    UnknownTaskError,
)
from tf4slurm.job import Job
from tf4slurm.jobs.registry import latest_run
from tf4slurm.system.variables import ANSWER_VARIABLE

SCRIPT = """
import os, time, tf4slurm
task = os.environ["TF4SLURM_TASK"]
print("hello from", task, "<b>")
tf4slurm.barrier("all have printed")
if task.startswith("ps"):
    time.sleep(1000)
for step in range(5):
    tf4slurm.report(step=step)
    time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train it.py"
    path.write_text(SCRIPT)
    return path


def test_script_equals_that_of_command_line(script: Path) -> None:
    job = Job(
        [sys.executable, str(script), "two words"],
        ps=1,
        workers=2,
        data_workers=3,
        nodes=2,
        mem="2G",
        module=("a/1", "b"),
        exclusive=True,
        chief=False,
        site="none",
    )
    words = (
        "--ps",
        "1",
        "--workers",
        "2",
        "--data-workers",
        "3",
        "--nodes",
        "2",
        "--mem",
        "2G",
        "--module",
        "a/1",
        "--module",
        "b",
    )
    more = ("--exclusive", "--no-chief", "--site", "none")
    command = [TF4SLURM, "script", *words, *more, "--", sys.executable, str(script), "two words"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert job.script().splitlines()[2:] == printed.splitlines()[3:]  # without the line that has the command
    assert "not started" in repr(job)


def test_command_line_is_split_as_in_a_shell(script: Path) -> None:
    assert Job(f"python '{script}' 'two words'", workers=1).script().endswith(f"-- python '{script}' 'two words'\n")


def test_local_job_runs_and_has_status_logs_and_report(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tf4slurm.Job(
        [sys.executable, str(script)], ps=1, workers=1, nodes=4, time="1:00"
    )  # nodes is an option of sbatch
    assert job.run() == 0
    assert "chief/0 | hello from chief/0 <b>" in capsys.readouterr().out
    assert job.wait() == 0
    assert job.status().state == "COMPLETED"
    assert job.logs("chief/0") == "hello from chief/0 <b>\n"
    assert sorted(job.logs().splitlines())[1] == "ps/0 | hello from ps/0 <b>"
    assert "COMPLETED" in job._repr_html_()
    assert re.search(r"<pre>task .*^chief/0 .* 4\b", job._repr_html_(), re.DOTALL | re.MULTILINE)
    assert job.report(tmp_path / "life.html").read_text().startswith("<!DOCTYPE html>")
    assert job.plot()._repr_png_().startswith(b"\x89PNG")
    again = Job.find(job.status().name)
    assert again.status().exit_code == 0
    job.cancel()  # already ended: no effect


def test_quiet_job_prints_its_output_only_if_it_fails(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Job([sys.executable, str(script)], ps=1, workers=1)
    assert good.run(quiet=True) == 0
    assert capsys.readouterr().out == ""
    assert "hello from chief/0" in good.logs("chief/0")
    assert Job([sys.executable, "-c", "raise SystemExit('no data')"], ps=0, workers=1).run(quiet=True) == 1
    assert "no data" in capsys.readouterr().out
    assert Job([sys.executable, "-c", ""], ps=1, workers=0, requeue=1).run(quiet=True) == 2  # there is no queue
    assert "requeue" in capsys.readouterr().out


def test_invalid_options_and_unknown_jobs_are_errors(script: Path) -> None:
    with pytest.raises(OptionError, match="Did you mean 'workers'"):
        Job("true", worker=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="exclude each other"):
        Job("true", workers=1, mem="1G", mem_per_cpu="1G")
    with pytest.raises(OptionError, match="heartbeat-timeout"):
        Job("true", heartbeat_timeout_seconds=-1.0)
    with pytest.raises(OptionError, match="The number of workers is unknown"):
        Job("true").script()
    with pytest.raises(UnknownJobError, match="not started yet"):
        Job("true").status()
    with pytest.raises(UnknownJobError, match="no job 'x'"):
        Job.find("x")


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({"TF4SLURM_CHIEF": "no"}, {"placement": "ps,worker,worker", "workers": 2}),
        ({"TF4SLURM_DATA_PYTHON": "python3"}, {"data_workers": 1, "workers": 1}),
        ({"TF4SLURM_HEARTBEAT_TIMEOUT": "60"}, {"heartbeat_interval_seconds": 20, "workers": 1}),
        ({"TF4SLURM_NTASKS": "4"}, {}),
    ],
)
def test_options_that_settings_complete_are_valid(
    script: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: dict[str, Any]
) -> None:
    job = Job(["./train"], **options)
    with pytest.raises((OptionError, PlacementError)):
        job.script()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job.script().endswith(" -- ./train\n")


@pytest.mark.parametrize(
    "options",
    [{"name": "a/b"}, {"after": ["x"]}, {"env": ["NAME"]}, {"srun": ["=1"]}, {"mem": "1\n2"}, {"ps_sbatch": ["A b=1"]}],
)
def test_invalid_value_is_refused_before_settings_are_read(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Job("true", **options)


def test_local_run_prefers_explicit_options_even_if_default_to_settings(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"PS": "2", "REQUEUE": "1", "SRUN": "label", "NAME": "named", "GRACE_PERIOD": "7", "MAX_ATTEMPTS": "3"}
    for name, value in settings.items():
        monkeypatch.setenv(f"TF4SLURM_{name}", value)
    job = Job([sys.executable, "-c", ""], ps=1, workers=0, max_attempts=1)
    assert job.run() == 0
    file = latest_run(tf4slurm.api.find(job.status().name)).read_trusted_job()
    assert (file.counts["ps"], file.options["max_attempts"]) == (1, 1)  # given, although they are the defaults
    assert (file.name, file.grace_period_seconds) == ("named", 7)  # from the settings
    assert Job([sys.executable, "-c", ""], ps=1, workers=0, requeue=1).run() == 2  # there is no queue


def test_functions_of_the_library_run_watch_and_resume_a_job(script: Path) -> None:
    lines: list[str] = []
    spec = tf4slurm.JobSpec((sys.executable, str(script)), ps=1, workers=1)
    ended = tf4slurm.run(spec, on_output=lines.append)
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0)
    assert "chief/0 | hello from chief/0 <b>\n" in lines
    assert tf4slurm.status(ended.name).state == tf4slurm.wait(ended.name, timeout_seconds=1).state == "COMPLETED"
    assert [line.text for line in tf4slurm.logs(ended.name, "chief/0")] == ["hello from chief/0 <b>"]
    assert tf4slurm.cancel(ended.name).exit_code == 0  # it has ended
    assert tf4slurm.make_report(ended.name).name == "report.html"
    again = tf4slurm.resume(ended.name)
    assert (again.exit_code, again.name != ended.name) == (0, True)
    assert [job.name for job in tf4slurm.list_jobs(2)] == [again.name, ended.name]
    with pytest.raises(UnknownTaskError, match="It has: chief/0, ps/0, worker/0"):
        tf4slurm.logs(ended.name, "chef/0")
    with pytest.raises(LaunchError, match="exited with code 2 before it created a run directory"):
        tf4slurm.run(tf4slurm.JobSpec(("/nowhere",), workers=1), on_output=lines.append)


def test_run_returns_a_job_that_cannot_be_registered(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    code = f"import os; assert {ANSWER_VARIABLE!r} not in os.environ"
    spec = tf4slurm.JobSpec((sys.executable, "-c", code), ps=0, workers=0)
    ended = tf4slurm.run(spec, on_output=lambda line: None)
    assert (ended.state, Path(ended.run_directory or "").parent) == ("COMPLETED", script.parent / "runs")


def test_job_of_a_newer_version_is_refused_and_listed_as_unknown(script: Path) -> None:
    ended = tf4slurm.run(tf4slurm.JobSpec((sys.executable, "-c", ""), ps=0, workers=0), on_output=lambda line: None)
    path = Path(ended.run_directory or "") / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(SchemaVersionError, match="schema version 99"):
        tf4slurm.status(ended.name)
    (listed,) = tf4slurm.list_jobs(1)
    assert (listed.state, "schema version 99" in listed.reason) == ("UNKNOWN", True)
