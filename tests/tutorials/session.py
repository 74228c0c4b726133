"""Run the blocks of a notebook marked `console` again, on the login host of a real Slurm.

A line that begins with `$ ` is a command, and the following lines are its output. The commands run in the directory of
the notebook, in a new lab of four hosts, and their output replaces the old one. `# some time later` waits until no job
is left, `# when all its tasks run` until each task of the last job runs its script.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from tests.processes import wait_until
from tests.slurm.lab import SlurmLab
from tests.tutorials.notebook import clean_text, console_blocks, environment, replace_console_blocks

NODES = ("n1", "n2", "n3", "n4")
LATER = "# some time later"
ALL_RUN = "# when all its tasks run"
_TYPING_SECONDS = 1.0  # a pause before each command, as a person makes, so that Slurm shows the job's settled state
_COMMAND_SECONDS = 300
_QUEUE_SECONDS = 300
_USER = re.compile(r"\broot\b")


def session_of(notebook: Any) -> str:
    """Return the text of all console blocks; empty if the notebook has none."""
    return "".join(console_blocks(notebook))


def type_again(notebook: Any, lab: SlurmLab, directory: Path) -> None:
    """Run all console commands of a notebook in order, and replace their outputs."""
    replace_console_blocks(notebook, lambda block: _type(block, lab, directory))


def _type(block: str, lab: SlurmLab, directory: Path) -> str:
    lines = []
    for line in block.splitlines():
        if line == LATER:
            if not wait_until(lambda: not lab.queue(), _QUEUE_SECONDS, poll_seconds=0.5):
                raise TimeoutError(f"Jobs are left after {_QUEUE_SECONDS} s: {lab.queue()}")
            lines.append(line)
        elif line == ALL_RUN:
            if not wait_until(lambda: _all_run(directory), _QUEUE_SECONDS, poll_seconds=0.5):
                raise TimeoutError(f"Not all tasks of the last job run their script after {_QUEUE_SECONDS} s.")
            lines.append(line)
        elif line.startswith("$ "):
            time.sleep(_TYPING_SECONDS)
            done = lab.run(
                *("bash", "-c", f"exec 2>&1\n{line[2:]}"),
                cwd=directory / "TUTORIALS",
                env=environment(directory),
                timeout_seconds=_COMMAND_SECONDS,
                check=False,
            )
            lines += [line, *_clean(done.stdout, directory).splitlines()]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _all_run(directory: Path) -> bool:
    """Whether each task of the last job runs its script, according to the job's status.json."""
    last = max(directory.glob("TUTORIALS/runs/*/status.json"), key=lambda path: path.stat().st_mtime, default=None)
    tasks = json.loads(last.read_text(encoding="utf-8"))["tasks"] if last else []
    return bool(tasks) and all(task["state"] == "running" for task in tasks)


def _clean(text: str, directory: Path) -> str:
    return _USER.sub(" you", clean_text(text, directory))
