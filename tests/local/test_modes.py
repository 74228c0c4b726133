"""The modes of all files and directories that the verbs create, under the umasks 0 and 077."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.jobs import STEP, TF4SLURM, end_processes
from tests.processes import wait_until
from tf4slurm.cli.main import cli

ONE = ("--ps", "0", "--workers", "0")
PLACE = ("--runs-directory", "new/scratch/runs")
PRINT = ("--", sys.executable, "-c", "import tf4slurm; print(1); tf4slurm.report(step=1, loss=2.0)")
WAIT = """
import os, time
while not os.path.exists(os.path.join(os.environ["TF4SLURM_RUN_DIRECTORY"], "end")):
    time.sleep(0.05)
"""
ONLY_TASK = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_GTIDS": "0",
    "SLURM_NODEID": "0",
}

MODES = {
    r"home(/\.local(/state(/tf4slurm)?)?|/\.config(/tf4slurm)?)?": 0o755,
    r"home/\.local/state/tf4slurm/jobs": 0o700,
    r"home/\.local/state/tf4slurm/jobs/[^/]+\.json": 0o600,
    r"home/\.config/tf4slurm/config\.toml": 0o644,
    r"project/tf4slurm\.toml": 0o644,
    r"project/new(/scratch(/runs|/output)?)?": 0o755,
    r"project/new/scratch/runs/[^/]+\.sh": 0o700,
    r"project/new/scratch/runs/[^/]+\.code": 0o700,
    r"project/new/scratch/runs/[^/]+\.code/.+": None,  # as the copied files
    r"project/new/scratch/runs/(python|train)-[0-9.-]+(/logs|/metrics)?": 0o700,
    r"project/new/scratch/runs/(python|train)-[0-9.-]+/(logs/|metrics/)?[^/]+\.(jsonl?|log|times|html)": 0o600,
    r"project/new/scratch/runs/(python|train)-[0-9.-]+/(end|\.result\.json\.reserved)": 0o600,
    r"project/page\.html": 0o600,
}
"""The expected mode of each path, before the umask takes its bits away."""


@pytest.mark.parametrize("umask", [0, 0o077], ids=["umask 0", "umask 077"])
def test_every_created_file_has_the_mode_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    project, programs = tmp_path / "project", tmp_path / "programs"
    project.mkdir(mode=0o700)
    (project / "train.py").write_text("")
    (project / "train.py").chmod(0o644)
    programs.mkdir()
    for name, text in (("sbatch", "cat > /dev/null; echo 4711"), ("scancel", "")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    existing = {*tmp_path.rglob("*")}
    processes: list[subprocess.Popen[str]] = []
    before = os.umask(umask)
    try:
        create_files(project, processes)
        joined = next(project.glob("new/scratch/runs/*/control.json"))
        check(tmp_path, existing, umask)
        joined.with_name("end").touch(0o600)
        assert processes[0].wait(60) == 0
    finally:
        os.umask(before)
        end_processes(processes)
    check(tmp_path, existing, umask)


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    quiet = subprocess.DEVNULL
    command = [TF4SLURM, *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True
    )


def create_files(project: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Call the verbs; leave a job and a worker that joins it running, in `processes`."""

    def run(*arguments: str, **variables: str) -> None:
        process = start(*arguments, **variables)
        _, text = process.communicate(timeout=60)
        assert process.returncode == 0, (arguments, text)

    def call(*arguments: str) -> None:
        done = CliRunner().invoke(cli, arguments, obj=dict(os.environ))
        assert done.exit_code == 0, (arguments, done.output, done.exception)

    runs = project / "new/scratch/runs"
    run("run", *ONE, *PLACE, *PRINT)
    name = next(runs.iterdir()).name
    call("report", name, "--output", "page.html")
    run("resume", name)
    call("report", name, name)
    output = ("--snapshot", "copy", "--output", "new/scratch/output/%x.out")
    call("submit", "--ps", "1", "--workers", "1", *PLACE, *output, "--", sys.executable, "train.py")
    call("config", "init")
    call("config", "init", "--project")
    run("task", *ONE, *PLACE, *PRINT, **ONLY_TASK)
    for arguments in (("list",), ("status", name), ("logs", name), ("wait", name), ("cancel", name), ("env",)):
        call(*arguments)
    earlier = {*runs.glob("*/status.json")}
    processes.append(start("run", "--ps", "1", "--workers", "1", *PLACE, "--", sys.executable, "-c", WAIT))
    assert wait_until(lambda: {*runs.glob("*/status.json")} > earlier, 60)
    (status,) = {*runs.glob("*/status.json")} - earlier
    processes.append(start("join", status.parent.name))
    assert wait_until(lambda: any(runs.glob("*/control.json")), 60)


def check(directory: Path, existing: set[Path], umask: int) -> None:
    """Compare the mode of each path that did not exist before with the table."""
    wrong = {}
    for path in sorted({*directory.rglob("*")} - existing):
        name = str(path.relative_to(directory))
        expected = [mode for pattern, mode in MODES.items() if re.fullmatch(pattern, name)]
        found = stat.S_IMODE(path.stat().st_mode)
        if expected != [None] and [mode and mode & ~umask for mode in expected] != [found]:
            wrong[name] = oct(found)
    assert wrong == {}
