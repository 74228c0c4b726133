"""Invalid input: a clear error at once, exit code 2 or 3, and nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import STEP, TF4SLURM

ROLES = ["--ps", "1", "--workers", "1"]


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TF4SLURM, "run", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environ},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (ROLES, 2, "There is no command"),
        ([*ROLES, "--"], 2, "There is no command"),
        (["--ps", "-1", "--workers", "1", "--", "true"], 2, "-1 is less than 0"),
        (["--ps", "1", "--workers", "0", "--no-chief", "--", "true"], 2, "needs at least one worker"),
        (
            [*ROLES, "--data-workers", "1", "--", "true"],
            2,
            "Name it with --data-python, such as --data-python python3.",
        ),
        (
            [*ROLES, "--data-workers", "1", "--data-python", "no-such-python", "--", "true"],
            2,
            "The program 'no-such-python' does not exist",
        ),
        (["--ps", "1", "--", "true"], 2, "The number of workers is not known"),
        ([*ROLES, "--ports", "40000-39999", "--", "true"], 2, "is not a range of ports"),
        ([*ROLES, "--ports", "40000-40001", "--", "true"], 2, "2 ports (40000-40001) are too few for 3 tasks"),
        ([*ROLES, "--interface", "ib99", "--", "true"], 3, "'ib99' does not exist"),
        (
            [*ROLES, "--heartbeat-interval", "10", "--", "true"],
            2,
            "--heartbeat-interval 10 is not shorter than --heartbeat-timeout 10",
        ),
        ([*ROLES, "--start-timeout", "0", "--", "true"], 2, "0.0 is not greater than 0"),
        ([*ROLES, "--no-such-option", "--", "true"], 2, "--no-such-option"),
        ([*ROLES, "--", "no-such-program"], 2, "'no-such-program' does not exist"),
        ([*ROLES, "--", sys.executable, "no_such_script.py"], 2, "'no_such_script.py' does not exist"),
        ([*ROLES, "--", "./not_executable"], 2, "chmod +x"),
        ([*ROLES, "--runs-directory", "/proc/runs", "--", "true"], 3, "/proc/runs"),
        ([*ROLES, "--runs-directory", "not_executable", "--", "true"], 3, "not a directory"),
    ],
)
def test_invalid_input_is_refused_with_a_reason(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    (tmp_path / "not_executable").write_text("#!/bin/sh\n")
    result = run(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_unknown_interface_is_refused_with_existing_ones(tmp_path: Path) -> None:
    assert "lo" in run(*ROLES, "--interface", "ib99", "--", "true", cwd=tmp_path).stderr.partition("Found: ")[2]


def test_allocation_without_srun_is_refused(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "1", "PATH": str(tmp_path)}
    result = run("--workers", "1", "--", sys.executable, "-c", "pass", cwd=tmp_path, **environ)
    assert result.returncode == 3
    assert "srun cannot be started" in result.stderr


def test_roles_that_do_not_fit_the_allocation_are_refused(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "6"}
    more = run("--ps", "2", "--workers", "4", "--", "true", cwd=tmp_path, **environ)
    assert more.returncode == 2
    assert "1 chief + 2 ps + 4 worker need 7 tasks, but Slurm gives 6" in more.stderr
    fewer = run("--ps", "1", "--workers", "1", "--", "true", cwd=tmp_path, **environ)
    assert fewer.returncode == 2
    assert "need 3 tasks, but Slurm gives 6" in fewer.stderr
    assert not (tmp_path / "runs").exists()


def test_run_under_srun_is_refused(tmp_path: Path) -> None:
    result = run("--workers", "2", "--", "true", cwd=tmp_path, **STEP)
    assert result.returncode == 3
    assert "srun tf4slurm task" in result.stderr


def test_child_without_tensorflow_shows_its_error_as_root_cause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import tensorflow_that_is_not_there\n")
    result = run("--ps", "1", "--workers", "1", "--", sys.executable, "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("Root cause:") == 1
    assert "ModuleNotFoundError" in result.stderr.partition("Root cause:")[2]


def test_script_with_resolver_of_tensorflow_is_warned_before_it_starts(tmp_path: Path) -> None:
    code = "print('started')\nif False:\n    tf.distribute.cluster_resolver.SlurmClusterResolver({'worker': 2})\n"
    (tmp_path / "train.py").write_text(code)
    result = run("--ps", "0", "--workers", "0", "--", sys.executable, "train.py", cwd=tmp_path)
    assert (result.returncode, "started" in result.stdout) == (0, True)
    assert "WARNING: train.py: TensorFlow's own SlurmClusterResolver does not use the cluster" in result.stderr


def test_missing_interpreter_fails_the_child(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    result = run(*ROLES, "--", str(script), cwd=tmp_path)
    assert result.returncode == 127
    assert "does not exist" in result.stderr.partition("Root cause:")[2]
