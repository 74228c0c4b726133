"""Each failing script, run as a job: result.json, terminal and `status` name the failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.failing.scripts import PLAIN, SCRIPTS, TENSORFLOW, FailingScript
from tests.jobs import TF4SLURM

QUICK = ("exception", "segmentation fault", "killed", "exit with text", "closure", "input function")
"""The scripts that each run of the tests starts as local jobs."""


def cases(names: list[str], quick: Sequence[str] = QUICK) -> list[Any]:
    """Return parameters for the scripts of these names. Those that are not in `quick` are `long`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


def check(failure: dict[str, Any] | None, script: FailingScript) -> None:
    assert failure is not None
    assert failure["type"] == script.type
    assert failure["message"].startswith(script.message), failure
    assert (failure["file"], failure["line"]) == (script.file, script.line), failure
    assert failure["task"].startswith(script.task), failure
    assert failure["ran_in_task"] is script.ran_in_task, failure
    assert failure["caused_by"] == script.caused_by, failure
    if script.worker is None:
        assert failure["worker"] is None, failure
    else:
        assert str(failure["worker"]).startswith(script.worker), failure


@pytest.mark.parametrize("name", cases([*SCRIPTS]))
def test_job_names_failure_of_script(name: str, tmp_path: Path) -> None:
    if name in TENSORFLOW:
        pytest.importorskip("tensorflow")
    script = SCRIPTS[name]
    command = script.write(tmp_path, sys.executable)
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [TF4SLURM, "run", "--name", "failing", *script.options, "--", *command],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode != 0
    (path,) = (tmp_path / "runs").glob("*/result.json")
    result = json.loads(path.read_text())
    check(result["failure"], script)
    shown = subprocess.run([TF4SLURM, "status"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    listed = subprocess.run([TF4SLURM, "list"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    report = (path.parent / "report.html").read_text()
    headline = f"{script.type}: {script.message[:60]}" if script.message else script.type
    assert f"Root cause: {headline}" in done.stderr
    assert headline in shown.stdout
    assert headline[:40] in listed.stdout
    assert headline.partition(":")[0] in report


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(GROUPS, os.W_OK), reason="needs control groups of version 1 that this user can make")
def test_kill_because_memory_ran_out_is_named(tmp_path: Path) -> None:
    group = GROUPS / f"tf4slurm-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("400M")
        code = "x = [bytearray(10**7) for _ in range(200)]"
        inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        done = subprocess.run(
            [*inside, TF4SLURM, "run", "--ps", "0", "--workers", "0", "--", sys.executable, "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        group.rmdir()
    assert done.returncode == 137
    assert "SIGKILL: out of memory: Linux killed it, because its control group has no more (chief/0)" in done.stderr
    assert "Memory ran out: ask for more" in done.stderr
    assert "somebody killed the process" not in done.stderr


def test_worker_that_fails_twice_on_one_line_before_its_server_is_not_started_again(tmp_path: Path) -> None:
    script = PLAIN["worker before its server"]
    done = subprocess.run(
        [TF4SLURM, "run", *script.options, "--", *script.write(tmp_path, sys.executable)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    starts = {task["task"]: task["starts"] for task in result["tasks"]}
    assert starts == {"chief/0": 1, "ps/0": 1, "worker/0": 1, "worker/1": 2}
    assert (run / "logs" / "worker-1.1.log").read_text().count("Traceback") == 2
    assert "is not restarted again: it failed twice on the same line before its server ran" in done.stderr
    assert "Root cause: ValueError: no data for this worker (train.py:4, worker/1)" in done.stderr
