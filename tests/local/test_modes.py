"""The modes of all files and directories that the verbs create, under the umasks 0 and 077."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import tf4slurm
from tests.jobs import STEP, TF4SLURM, end_processes
from tests.processes import wait_until
from tf4slurm import api
from tf4slurm.cli.main import cli
from tf4slurm.doctor.host import probe_file, probe_path
from tf4slurm.launch.environment_archive import File, Relocation, open_archive
from tf4slurm.launch.node_copies import FIND, UNPACK
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.versions import COMMIT_FILE

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

RUNS = r"project/new/scratch/runs"
RUN = rf"{RUNS}/(python|train|test|notebook)-[0-9._-]+"
MODES = {
    # what settings and the list of jobs are kept in
    r"home(/\.local(/state(/tf4slurm)?)?|/\.config(/tf4slurm)?)?": 0o755,
    r"home/\.local/state/tf4slurm/jobs": 0o700,
    r"home/\.local/state/tf4slurm/jobs/[^/]+\.json": 0o600,
    r"home/\.local/state/tf4slurm/jobs\.lock": 0o600,
    r"home/\.config/tf4slurm/config\.toml": 0o644,
    r"project/tf4slurm\.toml": 0o644,
    # parents of run directories and of Slurm's output files
    r"project/new(/scratch(/runs|/output)?)?": 0o755,
    # batch scripts and snapshots of the code
    rf"{RUNS}/[^/]+\.(sh|draft)": 0o700,
    # the name of a local sweep, and its report
    rf"{RUNS}/[^/]+\.(sweep|html)": 0o600,
    rf"{RUNS}/[^/]+\.code": 0o700,
    rf"{RUNS}/[^/]+\.code/{re.escape(COMMIT_FILE)}": 0o600,
    rf"{RUNS}/[^/]+\.code/(?!{re.escape(COMMIT_FILE)}).+": None,
    # run directories
    rf"{RUN}(/logs|/metrics|/lost)?": 0o700,
    rf"{RUN}/((logs|metrics|lost)/)?[^/]+\.(jsonl?|log|times|html)": 0o600,
    rf"{RUN}/\.result\.json\.reserved": 0o600,
    r"project/page\.html": 0o600,
    # files that exist for a moment
    r"project/new/scratch/runs/\.tf4slurm-doctor-probe": 0o600,
    r"temporary/tf4slurm-[^/]+": 0o700,
    r"temporary/tf4slurm-[^/]+/(output|cluster\.json)": 0o600,
    r"temporary/tmp[^/]+": 0o600,
    # archives and copies of environments (--stage-env)
    rf"{RUNS}/\.environments-\d+": 0o700,
    rf"{RUNS}/\.environments-\d+/env-[^/]+\.tar": 0o600,
    r"disk/tf4slurm-\d+(/env-new(/0)?)?": 0o700,
    r"disk/tf4slurm-\d+/env-new/\.complete": 0o600,
    r"disk/tf4slurm-\d+/env-new/0/.+": None,
}
"""The expected mode of each path, before the umask takes its bits away. None: as in the source."""


@pytest.mark.parametrize("umask", [0, 0o077], ids=["umask 0", "umask 077"])
def test_every_created_file_has_the_mode_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    prepare(tmp_path, monkeypatch)
    existing = {*tmp_path.rglob("*")}

    def check() -> None:
        assert find_other_modes(tmp_path, existing, umask) == {}

    processes: list[subprocess.Popen[str]] = []
    before = os.umask(umask)
    try:
        run_local_jobs(check)
        submit_jobs(monkeypatch)
        stage_environment(tmp_path / "disk")
        start_joined_worker(processes)
        check()
        (running,) = Path().glob("new/scratch/runs/*/control.json")
        processes[0].kill()  # the agents write what they know
        assert wait_until(lambda: len([*running.parent.glob("lost/*.json")]) >= 2, 60)
    finally:
        os.umask(before)
        end_processes(processes)
    check()
    found = {str(path.relative_to(tmp_path)) for path in {*tmp_path.rglob("*")} - existing}
    unused = {pattern for pattern in MODES if not any(re.fullmatch(pattern, name) for name in found)}
    assert unused == {pattern for pattern in MODES if "doctor-probe" in pattern or "temporary" in pattern}


def prepare(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a project under git, a temporary directory, programs of Slurm, and an environment without a user's files."""
    for name in ("project", "temporary", "disk"):
        (directory / name).mkdir(mode=0o700)
    project, programs = directory / "project", directory / "programs"
    (project / "model").mkdir()
    for name, mode in (("train.py", 0o644), ("model/layers.py", 0o664), (".env", 0o644)):
        (project / name).write_text("")
        (project / name).chmod(mode)
    project.chmod(0o755)
    identity = ("-c", "user.name=x", "-c", "user.email=x")
    for command in (("init", "-q"), ("add", "train.py", "model"), (*identity, "commit", "-qm", "x")):
        subprocess.run(["git", *command], cwd=project, check=True)
    programs.mkdir()
    for name, text in (("sbatch", "cat > /dev/null; echo $$; exit ${EXIT_CODE:-0}"), ("scancel", "")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(directory / "home"))
    monkeypatch.setenv("TMPDIR", str(directory / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


def start(*arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    quiet, environ = subprocess.DEVNULL, {**os.environ, **(variables or {})}
    command = [TF4SLURM, *arguments]
    return subprocess.Popen(command, env=environ, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True)


def run(*arguments: str, codes: Sequence[int] = (0,), variables: Mapping[str, str] | None = None) -> None:
    process = start(*arguments, variables=variables)
    _, text = process.communicate(timeout=120)
    assert process.returncode in codes, (arguments, text)


def call(*arguments: str, code: int = 0) -> None:
    done = CliRunner().invoke(cli, arguments, obj=dict(os.environ))
    assert done.exit_code == code, (arguments, done.output, done.exception)


def run_local_jobs(check: Callable[[], None]) -> None:
    """Run jobs to their end, and call the verbs that read them. Call `check` while temporary files exist."""
    runs = Path("new/scratch/runs")
    run("run", *ONE, *PLACE, *PRINT)
    name = next(runs.iterdir()).name
    call("report", name, "--output", "page.html")
    run("resume", name)
    call("report", name, name)
    run("run", *ONE, *PLACE, "--grid", "x=1,2", *PRINT)
    call("report", next(runs.glob("*.sweep")).stem)
    run("task", *ONE, *PLACE, *PRINT, variables=ONLY_TASK)
    run("test", "--local", "--plain", *PLACE)
    for arguments in (("list",), ("status", name), ("logs", name), ("wait", name), ("cancel", name), ("env",)):
        call(*arguments)
    call("config", "init")
    call("config", "init", "--project")
    run("doctor", "--quick", *PLACE, codes=(0, 3))
    with probe_file(probe_path(runs, "probe")):
        check()
    lines: list[str] = []

    def on_output(line: str) -> None:
        check()
        lines.append(line)

    api.run(JobSpec(PRINT[1:], ps=0, workers=0, runs_directory=runs), local=True, on_output=on_output)
    assert lines
    with tf4slurm.LocalCluster(ps=1, workers=1, runs_directory=runs):
        check()


def submit_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit jobs with snapshots. Slurm's answer to the last one is lost, so that its draft is kept."""
    monkeypatch.setattr("tf4slurm.submission.submit._FIND_SECONDS", 0.1)
    roles = ("submit", "--ps", "1", "--workers", "1", *PLACE, "--output", "new/scratch/output/%x.out")
    for kind in ("copy", "git"):
        call(*roles, "--snapshot", kind, "--", sys.executable, "train.py")
    monkeypatch.setenv("EXIT_CODE", "1")
    call(*roles, "--", sys.executable, "train.py", code=1)


def stage_environment(disk: Path) -> None:
    """Write an archive, and unpack it as a node does."""
    tool = Path("train.py")
    archive = Path(f"new/scratch/runs/.environments-{os.getuid()}/env-new.tar").absolute()
    open_archive(archive, [File(str(tool), "0/train.py", tool.stat())], Relocation({}), threading.Event()).close()
    copies = disk / f"tf4slurm-{os.getuid()}"
    for script, arguments in (
        (FIND, (copies, "env-new", 1, 10**12, 40, 40)),
        (UNPACK, (copies, "env-new", shutil.copy(archive, disk / "env-new.tar"), "true", ".")),
    ):
        command = ["sh", "-c", script, "sh", *map(str, arguments)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "error" not in answer, answer


def start_joined_worker(processes: list[subprocess.Popen[str]]) -> None:
    """Leave a job and a worker that joins it running, in `processes`."""
    runs = Path("new/scratch/runs")
    earlier = {*runs.glob("*/status.json")}
    processes.append(start("run", "--ps", "1", "--workers", "1", *PLACE, "--", sys.executable, "-c", WAIT))
    assert wait_until(lambda: {*runs.glob("*/status.json")} > earlier, 60)
    (status,) = {*runs.glob("*/status.json")} - earlier
    processes.append(start("join", status.parent.name))
    assert wait_until(lambda: any(runs.glob("*/control.json")), 60)


def find_other_modes(directory: Path, existing: set[Path], umask: int) -> dict[str, str]:
    """Return the mode of each path that did not exist before, and that is not in the table or has another mode."""
    wrong = {}
    for path in sorted({*directory.rglob("*")} - existing):
        name = str(path.relative_to(directory))
        expected = [mode for pattern, mode in MODES.items() if re.fullmatch(pattern, name)]
        with contextlib.suppress(FileNotFoundError):  # a draft, which has replaced a file since
            found = stat.S_IMODE(path.stat().st_mode)
            if expected == [None]:
                original = directory / "project" / re.sub(r".*(\.code|env-new/0)/", "", name)
                mode = stat.S_IMODE(original.stat().st_mode)
                # tar gives root the mode in the archive, other users that without the permissions of others
                is_right = found in (mode, 0o755 & ~umask if path.is_dir() else mode & 0o700)
            else:
                is_right = [mode & ~umask for mode in expected if mode is not None] == [found]
            if not is_right:
                wrong[name] = oct(found)
    return wrong
