"""Usual mistakes on the command line: each is refused with exit code 2, one line, and what to type instead."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM

ROLES = ("--ps", "1", "--workers", "2")


def tf4slurm(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "train.py").write_text("")
    environ = {**os.environ, "XDG_STATE_HOME": str(cwd / "state"), "XDG_CONFIG_HOME": str(cwd / "config")}
    return subprocess.run(
        [TF4SLURM, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environ,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "run --ps 1 --workers 2 python train.py --epochs 3",
            "tf4slurm run --ps 1 --workers 2 -- python train.py --epochs 3",
        ),
        ("run --workers 2 python train.py --ps 1", 'options of tf4slurm before "--"'),
        ("submit --workers 2 python -u train.py", "tf4slurm submit --workers 2 -- python -u train.py"),
        ("run -N 4 -- python train.py", "It is an option of submit and script. run uses the hosts of the allocation"),
        ("run --nodes 2 -- python train.py", "It is an option of submit and script."),
        ("run --dry-run --workers 1 -- python train.py", "It is an option of submit and grow."),
        ("submit --local -- python train.py", "It is an option of run and test."),
        (
            "submit -N 8 --ps 1 --workers 2 --dry-run -- python train.py",
            "the job has 4 tasks (1 chief + 1 ps + 2 worker)",
        ),
        ("submit -t 1hour --workers 1 --dry-run -- python train.py", "Expected Slurm's format, such as 90 (minutes)"),
        ("run --worker 2 -- python train.py", "Did you mean '--workers'? See \"tf4slurm run --help\"."),
        ("run --num-workers 2 -- python train.py", "Did you mean '--workers'?"),
        ("run --num-gpus 1 -- python train.py", "Did you mean '--gpus-per-worker'?"),
        ("submit --walltime 1:00 -- python train.py", "Did you mean '--time'?"),
        ("run --workers 1 -- train.py", 'Start it with its interpreter, such as "python train.py"'),
        ("run --workers 1 train.py", 'Start it with its interpreter, such as "python train.py"'),
        ("run --workers 1 -- python trian.py", "The script 'trian.py' does not exist in "),
        ("run --workers 1 -- pyhton train.py", "The program 'pyhton' does not exist."),
        ("run", 'There is no command. Give it after "--", such as: -- python train.py'),
        ("run -- python train.py", "Give --workers N."),
        ("run --workers two -- python train.py", "--workers: 'two' is not an integer."),
        ("run --requeue 3 --workers 1 -- python train.py", "--requeue is for jobs of Slurm"),
        ("run --site fnisterrae --workers 1 -- python train.py", "The profiles are"),
        ("train.py", "To run a script: tf4slurm run --ps 1 --workers 2 -- python train.py"),
        ("python train.py", "To run a script: tf4slurm run --ps 1 --workers 2 -- python train.py"),
        ("stop", "Use tf4slurm cancel ID."),
        ("kill 4711", "Use tf4slurm cancel ID."),
        ("ps", "Use tf4slurm list"),
        ("tail", "Use tf4slurm logs --follow."),
        ("show", "Use tf4slurm status"),
        ("start", "Use tf4slurm run (here) or tf4slurm submit (to Slurm)."),
        ("queue", "Use tf4slurm list."),
        ("stauts", "Did you mean 'status'?"),
        ("xyz", "The commands are run, submit,"),
        ("config lsit", "The commands are init, path, profiles, show."),
        ("--verbose", "No such option '--verbose' of \"tf4slurm\"."),
        ("cancel", "Which job? Give its id; tf4slurm list shows them."),
        ("resume", "Which job? Give its id; tf4slurm list shows them."),
        (
            "wait --timeout soon",
            "--timeout: 'soon' is not a time. Expected seconds, or a time with units, such as 90s, 5m,",
        ),
        ("wait --timeout nan", "--timeout: 'nan' is not a time. Expected seconds, or a time with units, such as 90s,"),
        ("cancel --grace-period 1x 1", "--grace-period: '1x' is not a time."),
        ("run --grace-period 1min --workers 1 -- python train.py", "--grace-period: '1min' is not a time."),
        (
            "run --masters 1 --workers 1 -- python train.py",
            "A job has one chief (TensorFlow 1: master) without an option",
        ),
        ("test --timeout 0", "--timeout: 0.0 is less than 1."),
        ("logs --tail -1", "--tail: -1 is less than 0."),
        ("logs --since yesterday", "--since: 'yesterday' is not a time. Expected seconds, or a time with units"),
        ("logs --grep [", "--grep: '[' is not a valid regular expression"),
        ("completion", "SHELL is missing."),
        ("completion csh", "SHELL: 'csh' is not one of 'bash', 'zsh', 'fish'."),
        ("script --snapshot git --workers 1 -- python train.py", "Omit --snapshot"),
        ("nodes expand n[1-", "the bracket is not closed"),
    ],
)
def test_mistake_is_refused_with_what_to_do(tmp_path: Path, line: str, words: str) -> None:
    done = tf4slurm(*line.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (message,) = done.stderr.splitlines()
    assert message.startswith("tf4slurm: ")
    assert words in message


@pytest.mark.parametrize("line", ["config show", "run --workers 1 -- python train.py"])
def test_unknown_settings_key_is_refused_with_the_nearest(tmp_path: Path, line: str) -> None:
    (tmp_path / "tf4slurm.toml").write_text('partion = "short"\n')
    done = tf4slurm(*line.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "'partion' is not an option. Did you mean 'partition'?" in done.stderr


def test_ps_0_with_a_chief_is_warned_of(tmp_path: Path) -> None:
    done = tf4slurm("script", "--ps", "0", "--workers", "2", "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0
    assert "the chief and 2 workers make 3 processes that train" in done.stderr
    done = tf4slurm("script", "--ps", "0", "--no-chief", "--workers", "2", "--", "python", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1h", "1:00:00"), ("90m", "1:30:00"), ("2d12h", "2-12:00:00"), ("45s", "0:00:45"), ("90", "90"), ("1-0", "1-0")],
)
def test_time_limit_with_a_unit_becomes_slurms_format(tmp_path: Path, text: str, expected: str) -> None:
    done = tf4slurm("script", "-t", text, *ROLES, "--", "python", "train.py", cwd=tmp_path)
    assert f"#SBATCH --time={expected}\n" in done.stdout


def test_command_without_options_needs_no_separator(tmp_path: Path) -> None:
    done = tf4slurm("script", *ROLES, "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("-- python train.py")


def test_logs_of_a_task_without_id_are_those_of_the_latest_job(tmp_path: Path) -> None:
    command = ("--", "bash", "-c", 'echo "hello from $TF4SLURM_TASK"')
    ended = tf4slurm("run", "--ps", "0", "--workers", "0", "--name", "first", *command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for arguments in (["chief/0"], ["chief/*"], ["first-*", "chief/0"], []):
        if arguments[:1] == ["first-*"]:
            arguments[0] = next((tmp_path / "runs").iterdir()).name
        assert tf4slurm("logs", *arguments, cwd=tmp_path).stdout == "hello from chief/0\n"
    missing = tf4slurm("logs", "worker/0", cwd=tmp_path)
    assert missing.returncode == 2
    assert "matches worker/0. It has: chief/0." in missing.stderr
    for typo, task in (("wroker", "worker"), ("cheif/0", "chief/0"), ("ps0", "ps")):
        misspelled = tf4slurm("logs", typo, cwd=tmp_path)
        assert (misspelled.returncode, misspelled.stdout) == (5, "")
        assert f"There is no task and no job {typo!r}. Did you mean {task!r}?" in misspelled.stderr
    silent = tf4slurm("run", "--ps", "0", "--workers", "0", "--name", "silent", "--", "true", cwd=tmp_path)
    assert silent.returncode == 0, silent.stderr
    name = next((tmp_path / "runs").glob("silent-*")).name
    nothing = tf4slurm("logs", "chief", cwd=tmp_path)
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert f"tf4slurm: chief/0 of {name}: no output." in nothing.stderr
    unknown = tf4slurm("logs", "frist", cwd=tmp_path)
    assert unknown.returncode == 5
    assert "Did you mean 'first-" in unknown.stderr


def test_command_in_quotes_is_refused_with_the_line_without_them(tmp_path: Path) -> None:
    done = tf4slurm("run", "--workers", "1", "--", "python train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Remove the quotes, such as -- python train.py\n" in done.stderr


def test_dry_run_warns_of_what_submit_refuses(tmp_path: Path) -> None:
    script = "The script 'trian.py' does not exist in "
    venv = "--venv '/no/such' is no virtual environment: '/no/such/bin/activate' does not exist. Check the path."
    cases: dict[tuple[str, ...], list[str]] = {
        ("--", "python", "train.py"): [],
        ("--", "python", "trian.py"): [script],
        ("--venv", "/no/such", "--", "python", "train.py"): [venv],
        ("--venv", "/no/such", "--", "python", "trian.py"): [script, venv],
        ("--venv", "/no/such", "--no-check-env", "--", "python", "trian.py"): [],
        ("--venv", "/no/such", "--prologue", "cd /data", "--", "python", "trian.py"): [venv],
    }
    for arguments, warnings in cases.items():
        done = tf4slurm("submit", "--dry-run", *ROLES, *arguments, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stdout.startswith("#!/bin/bash")
        lines = done.stderr.splitlines()
        assert len(lines) == len(warnings), (arguments, lines)
        if warnings:
            refused = tf4slurm("submit", *ROLES, *arguments, cwd=tmp_path)
            assert refused.returncode == 2
            assert warnings[0] in refused.stderr
        for line, words in zip(lines, warnings, strict=True):
            assert words in line


def test_script_with_the_line_endings_of_windows_is_named(tmp_path: Path) -> None:
    (tmp_path / "crlf.py").write_bytes(b"#!/usr/bin/env python3\r\nprint(1)\r\n")
    (tmp_path / "crlf.py").chmod(0o755)
    (tmp_path / "calls.sh").write_bytes(b"./crlf.py\n")
    direct = tf4slurm("run", "--ps", "0", "--workers", "0", "--", "./crlf.py", cwd=tmp_path)
    assert direct.returncode == 2
    assert "line endings of Windows (CRLF)" in direct.stderr
    assert "dos2unix ./crlf.py" in direct.stderr
    called = tf4slurm("run", "--ps", "0", "--workers", "0", "--", "bash", "calls.sh", cwd=tmp_path)
    assert called.returncode == 127
    assert "Explanation: A script has the line endings of Windows (CRLF)" in called.stderr
    assert "shares its file system" not in called.stderr
    assert "share its file system" not in called.stderr


def test_name_and_role_alone_are_the_latest_job_of_the_name_and_all_its_tasks(tmp_path: Path) -> None:
    roles = ("--ps", "0", "--workers", "2", "--no-chief")
    for word in ("first", "second"):
        command = ("--", "bash", "-c", f'echo "{word} of $TF4SLURM_TASK"')
        ended = tf4slurm("run", *roles, "--name", "train", *command, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    assert tf4slurm("run", "--ps", "0", "--workers", "0", "--name", "other", "--", "true", cwd=tmp_path).returncode == 0
    lines = tf4slurm("logs", "train", "worker", cwd=tmp_path).stdout.splitlines()
    assert sorted(lines) == ["worker/0 | second of worker/0", "worker/1 | second of worker/1"]
    assert tf4slurm("logs", "train", "worker/0", cwd=tmp_path).stdout == "second of worker/0\n"
    missing = tf4slurm("logs", "worker", cwd=tmp_path)
    assert missing.returncode == 2
    assert "No task of other-" in missing.stderr
    shown = tf4slurm("status", "train", cwd=tmp_path).stdout
    assert re.match(r"train-\d{8}-\d{6}(-2)?  COMPLETED", shown)
    assert tf4slurm("wait", "train", "--timeout", "1m", cwd=tmp_path).returncode == 0
    for verb in ("report", "cancel"):
        assert tf4slurm(verb, "train", cwd=tmp_path).returncode == 0


def test_smoke_test_does_what_its_warning_recommends(tmp_path: Path) -> None:
    done = tf4slurm("test", "--plain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--isolated closes them" in done.stderr
    done = tf4slurm("test", "--plain", "--isolated", cwd=tmp_path)
    assert "--isolated closes them" not in done.stderr
    assert done.returncode == 0 or "does not let this user create a network namespace" in done.stderr


@pytest.mark.parametrize("verb", [(), ("nodes",), ("config",)])
def test_group_without_a_verb_shows_its_help(tmp_path: Path, verb: tuple[str, ...]) -> None:
    done = tf4slurm(*verb, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "\nExamples:\n  tf4slurm" in done.stderr
