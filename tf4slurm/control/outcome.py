"""The outcome of a job: its exit code, the reason, and the task that caused it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tf4slurm.cluster import Task


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: The exit code of `tf4slurm run`.
        reason: The reason why the job ended, as a sentence.
        cause: The task that failed first; None if no single task is the cause.
        tail: The last output lines of the child of `cause`.
        has_timed_out: The cluster did not form in time.
    """

    exit_code: int
    reason: str
    cause: Task | None = None
    tail: tuple[str, ...] = ()
    has_timed_out: bool = False

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0


def exit_code_of(returncode: int) -> int:
    """Return the exit code that a shell reports for a returncode: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode


def describe_end(returncode: int) -> str:
    """Return "exited with code 3" or "was killed by signal 9 (SIGKILL)"."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-returncode} ({name})"
