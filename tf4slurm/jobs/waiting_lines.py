"""Recognize the lines that TensorFlow prints while it waits for another task.

They are no sign of work: TensorFlow repeats them for as long as it waits. One of them names the task.
"""

from __future__ import annotations

import re

from tf4slurm.cluster import Task
from tf4slurm.control.messages import WAIT_SECONDS

_MOST_NAMES = 8  # reported by a task, because a session may wait for all tasks of a large job
# The formats of boilerplate.py, and two of TensorFlow's Python code: its own, and absl's "I1126 … file.py:7] ".
_PREFIX = (
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] \S+\] |[IWE]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+\] |INFO:tensorflow:)"
)
# A comment names the source file of the message in TensorFlow 2.21, and the seconds between two lines.
_MESSAGES = (
    # master.cc, 10 s: a session waits for the server of each task that its device_filters allow.
    r"CreateSession still waiting for response from worker: "
    r"/job:(?P<task_type>[\w.-]+)/replica:\d+/task:(?P<index>\d+)",
    # session_manager.py, 30 s: a session waits until the chief has initialized the variables.
    r"Waiting for model to be ready\. ",
    # session_manager.py, 30 s: a chief waits until another process has written a checkpoint.
    r"Waiting for checkpoint to be available\.",
    # checkpoint_utils.py, once for each wait: an evaluator waits for the next checkpoint.
    r"Waiting for new checkpoint at ",
    # basic_session_run_hooks.py, once, then each 1,000 steps: a worker begins when the others have made these steps.
    r"Waiting for global step \d+ before starting training\.",
    # collective_all_reduce_strategy.py, once: the strategy waits for all workers.
    r"Waiting for the cluster, timeout = ",
    # cluster_coordinator.py, once for each join().
    r"Waiting for all global closures to be finished\.",
)
_NEW_SESSION = re.compile(_PREFIX + "Scanning workers for devices: ")  # master.cc, one of boilerplate.py's messages
_LINE = re.compile(_PREFIX + f"(?:{'|'.join(_MESSAGES)})")


def _beginning(*parts: str) -> str:
    """Return a pattern that matches each beginning of these patterns in a row."""
    found = ""
    for part in reversed(parts):
        found = f"(?:{part}{found})?"
    return found


_TIME = (r"\d", r"\d", ":", r"\d", r"\d", ":", r"\d")
_DIGITS = (r"\d",) * 4
_BEGINNING = re.compile(
    "|".join(
        _beginning(*prefix, *text, ".*")
        for prefix in (
            (
                *_DIGITS,
                "-",
                r"\d",
                r"\d",
                "-",
                r"\d",
                r"\d",
                " ",
                *_TIME,
                r"[\d.]+",
                ":",
                " ",
                "[IWE]",
                " ",
                r"\S+",
                " ",
            ),
            ("[IWE]", *_DIGITS, " ", *_TIME, r"[\d.]+", " +", r"\d+", " ", r"\S+", " "),
            tuple("INFO:tensorflow:"),
        )
        for text in ("CreateSession still waiting", "Waiting for ", "Scanning workers for devices: ")
    )
)


def may_be_waiting_line(text: str) -> bool:
    """Return whether an incomplete line may become a line with which TensorFlow waits, or makes a session."""
    return _BEGINNING.fullmatch(text) is not None


def is_waiting_line(line: str) -> bool:
    """Return whether TensorFlow has printed this line because it waits for another task."""
    return _LINE.match(line) is not None


def is_new_session(line: str) -> bool:
    """Return whether TensorFlow has printed this line because it makes a session.

    A session that waits for the chief makes another one every 30 s. Each moves some kilobytes.
    """
    return _NEW_SESSION.match(line) is not None


def waited_task(line: str) -> Task | None:
    """Return the task for which TensorFlow waits according to this line. None for any other line."""
    found = _LINE.match(line)
    if found is None or found["task_type"] is None:
        return None
    return Task(found["task_type"], int(found["index"]))


class WaitedTasks:
    """The tasks for which a process waits, according to the lines that it has printed.

    One thread may call `note` while another one calls the other methods.
    """

    def __init__(self) -> None:
        self._seen_at: dict[str, float] = {}

    def note(self, line: str, now: float) -> None:
        """Read a line that was printed at the monotonic time `now`."""
        task = waited_task(line)
        if task is not None:
            self._seen_at[str(task)] = now

    def names(self, now: float) -> tuple[str, ...]:
        """Return the names of the tasks for which a line was printed within the last 30 s: the first 8, sorted."""
        names = (name for name, at in self._seen_at.copy().items() if now - at < WAIT_SECONDS)
        return tuple(sorted(names)[:_MOST_NAMES])

    def clear(self) -> None:
        """End all waits, because the process has made a step."""
        self._seen_at.clear()
