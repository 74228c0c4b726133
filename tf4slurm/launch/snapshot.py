"""A copy of the code as it is now, for a job that may wait for days."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tf4slurm.errors import RunDirectoryError, SubmissionError
from tf4slurm.launch.plan import LaunchPlan
from tf4slurm.launch.submission import Submission
from tf4slurm.run_directory import make_parent

_TIMEOUT_SECONDS = 60.0
_ENDING = ".code"


def place_snapshot(plan: LaunchPlan, submission: Submission) -> tuple[LaunchPlan, Submission]:
    """Say where the snapshot of a job will be, if it has one: beside its runs, by absolute paths, where nothing is."""
    if submission.snapshot == "none" or submission.directory is not None:
        return plan, submission
    runs = plan.runs_directory.absolute()
    stem = f"{plan.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (f"{stem}{'' if number == 1 else f'-{number}'}{_ENDING}" for number in range(1, 10_000))
    directory = next(runs / name for name in names if not (runs / name).exists())
    return replace(plan, runs_directory=runs), replace(submission, directory=directory)


def take_snapshot(kind: str, source: Path, target: Path, command: Sequence[str] = ()) -> None:
    """Copy a directory: of "git" the files that git tracks, as they are now; of "copy" all but .git and the runs.

    Args:
        target: Must not exist; its parent is where runs are kept.
        command: What will run there: a file of it that is in `source` must be in the snapshot too.

    Raises:
        SubmissionError: Git tracks nothing there, or not a file of the command.
        RunDirectoryError: It cannot be written.
    """
    try:
        make_parent(target.parent)
        target.mkdir(mode=0o700)
        if kind == "git":
            for name in _tracked_files(source):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, target / name, follow_symlinks=False)
        else:
            left_out = {source.resolve() / ".git", target.parent.resolve()}

            def ignore(directory: str, names: list[str]) -> list[str]:
                return [name for name in names if Path(directory, name).absolute() in left_out]

            shutil.copytree(source.resolve(), target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        _check_command(source, target, command)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, (OSError, shutil.Error)):
            raise RunDirectoryError(
                f"The snapshot {str(target)!r} cannot be made: {error}.", path=str(target)
            ) from error
        raise


def _tracked_files(source: Path) -> list[str]:
    command = ("git", "-C", str(source), "ls-files", "-z", "--cached")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="surrogateescape", timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SubmissionError(f"--snapshot git: {error}. Use --snapshot copy.", option="snapshot") from error
    names = [name for name in done.stdout.split("\0") if name and (source / name).is_file()]
    if done.returncode != 0 or not names:
        why = done.stderr.strip() or "git tracks no file here"
        raise SubmissionError(f"--snapshot git in {source}: {why}. Use --snapshot copy.", option="snapshot")
    return names


def _check_command(source: Path, target: Path, command: Sequence[str]) -> None:
    for word in command:
        if not Path(word).is_absolute() and (source / word).is_file() and not (target / word).is_file():
            raise SubmissionError(
                f"{word!r} would not be in the snapshot: git does not track it. Use git add, or --snapshot copy.",
                option="snapshot",
            )
