"""Warning for a job whose tasks run but do not compute, for example because TensorFlow waits for a missing chief."""

from __future__ import annotations

from collections.abc import Sequence

from tf4slurm.control.task_record import TaskRecord

_SECONDS = 60.0
_CORES = 0.02  # processor cores per task; an idle TensorFlow server uses less


class IdleWatch:
    """Watches the processor time of all tasks. Warns at most once until a task starts or ends."""

    def __init__(self) -> None:
        self._starts: tuple[object, ...] = ()
        self._since = 0.0
        self._cpu_seconds = 0.0
        self._has_warned = False

    def check(self, records: Sequence[TaskRecord], now: float) -> str | None:
        """Return a warning, once, if no task has computed for 60 s and none has reported a step; else None."""
        tasks = [record for record in records if record.role.is_in_cluster]
        states = [record.observed for record in tasks]
        starts = tuple((state.attempt, state.starts, state.state) for state in states)
        cpu_seconds = sum(state.usage.cpu_seconds for state in states)
        is_known = all(state.state == "running" and state.usage.cpu_seconds for state in states)
        is_waiting = is_known and not any(state.script.step is not None for state in states)
        if starts != self._starts:
            self._has_warned = False
        if starts != self._starts or not is_waiting or cpu_seconds - self._cpu_seconds > _CORES * _SECONDS * len(tasks):
            self._starts, self._since, self._cpu_seconds = starts, now, cpu_seconds
        elif now - self._since >= _SECONDS and not self._has_warned:
            self._has_warned = True
            return _describe({record.task.task_type for record in tasks})
        return None


def _describe(task_types: set[str]) -> str | None:
    """Return the warning, with the chief as the probable cause; None if the job has no ps."""
    seen = f"all tasks run, but none has computed or reported a step for {_SECONDS:g} s"
    if "ps" not in task_types:
        return None
    if "chief" not in task_types:
        return (
            f"{seen}. This job has no chief: if the script waits for one, as ParameterServerStrategy does, start it "
            "without --no-chief"
        )
    return f"{seen}. This job has a chief: if worker 0 leads in the script, start it with --no-chief"
