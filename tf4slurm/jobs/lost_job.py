"""A launcher that ended without a result.json (SIGKILL, the loss of its host): is that so, and what was known last?"""

from __future__ import annotations

import os
import time
from typing import Any

from tf4slurm.control.outcome import describe_end
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.system.proc import is_alive

_MOST_ENDS = 5
_LATEST = 1e11  # seconds since 1970 that a calendar still has


def is_lost(run: RunDirectory) -> bool:
    """Whether the launcher of this job surely ended without a result.

    That is so if its process is not on this host any more, where it ran here, or if agents have written that they
    lost it. (On another host a launcher that writes nothing may be stopped.)
    """
    if run.read_result() is not None:
        return False
    process = (run.read_job() or {}).get("process")
    if isinstance(process, dict) and process.get("host") == os.uname().nodename:
        return not is_alive(process)
    return bool(run.read_last_states())


def last_known(run: RunDirectory) -> str:
    """Return when the launcher last wrote where the job stood, that, and how scripts ended, in sentences."""
    status, states = run.read_status() or {}, run.read_last_states()
    sentences = []
    tasks = status.get("tasks")
    steps = [task.get("step") for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []
    reached = max((step for step in steps if isinstance(step, int)), default=None)
    if "time" in status:
        step = "" if reached is None else f", step {reached:,}"
        sentences.append(f"Last known at {_clock(status['time'])}: {status.get('phase')}{step}.")
    codes = [(task, state.get("returncode")) for task, state in states.items()]
    ends = [f"{task} {describe_end(code)}" for task, code in codes if isinstance(code, int)]
    if ends:
        more = f" and {len(ends) - _MOST_ENDS:,} more" if len(ends) > _MOST_ENDS else ""
        sentences.append(f"By themselves ended: {', '.join(ends[:_MOST_ENDS])}{more}.")
    ended = [state.get("time") for state in states.values() if state.get("state") == "ended"]
    if ended:
        sentences.append(f"Agents ended the scripts of {len(ended):,} tasks, at {_clock(ended[0])}.")
    return " ".join(sentences)


def _clock(seconds: Any) -> str:
    is_time = isinstance(seconds, (int, float)) and 0 < seconds < _LATEST
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if is_time else "an unknown time"
