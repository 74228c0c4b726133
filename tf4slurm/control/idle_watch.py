"""Warns of a job whose tasks run and only wait, as TensorFlow does without a word where it misses a chief."""

from __future__ import annotations

from collections.abc import Sequence

from tf4slurm.control.task_record import TaskRecord

_SECONDS = 60.0
_CORES = 0.02  # of each task; a TensorFlow server that waits uses less


class IdleWatch:
    """Looks at the tasks' processor time at intervals; warns once per start of the tasks."""

    def __init__(self) -> None:
        self._starts: tuple[object, ...] = ()
        self._since = 0.0
        self._cpu_seconds = 0.0
        self._has_warned = False

    def look(self, records: Sequence[TaskRecord], now: float) -> str | None:
        """Return a warning, the first time that no task has computed for a minute, and none has reported a step."""
        tasks = [record for record in records if record.role.is_in_cluster]
        statuses = [record.observed for record in tasks]
        starts = tuple((status.attempt, status.starts, status.state) for status in statuses)
        cpu_seconds = sum(status.usage.cpu_seconds for status in statuses)
        is_known = all(status.state == "running" and status.usage.cpu_seconds for status in statuses)
        is_waiting = is_known and not any(status.script.step is not None for status in statuses)
        if starts != self._starts:
            self._has_warned = False
        if starts != self._starts or not is_waiting or cpu_seconds - self._cpu_seconds > _CORES * _SECONDS * len(tasks):
            self._starts, self._since, self._cpu_seconds = starts, now, cpu_seconds
        elif now - self._since >= _SECONDS and not self._has_warned:
            self._has_warned = True
            return _describe({record.task.task_type for record in tasks})
        return None


def _describe(task_types: set[str]) -> str | None:
    """Return what tasks that wait may wait for; None where a chief has no part in it."""
    seen = f"every task runs, but for {_SECONDS:g} s none has computed or reported a step"
    if "ps" not in task_types:
        return None
    if "chief" not in task_types:
        return (
            f"{seen}. This job has no chief: if the script waits for one, as ParameterServerStrategy does, start it "
            "without --no-chief"
        )
    return f"{seen}. This job has a chief: if worker 0 leads in the script, start it with --no-chief"
