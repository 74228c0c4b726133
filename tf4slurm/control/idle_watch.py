"""Warn about a job whose tasks all run but do not compute. No side effects."""

from __future__ import annotations

from collections.abc import Sequence

from tf4slurm.control.records import TaskRecord

_IDLE_SECONDS = 60.0
_IDLE_CORES = 0.02  # processor cores per task; an idle TensorFlow server uses less


class IdleWatch:
    """Notices that all tasks run but do not compute, for example because TensorFlow waits for a missing chief."""

    def __init__(self) -> None:
        self._starts: tuple[object, ...] = ()
        self._since = 0.0
        self._cpu_seconds = 0.0
        self._has_warned = False
        self.is_active = False  # whether a task has reported a step, or computed in the current 60 s

    def check(self, records: Sequence[TaskRecord], now: float) -> str | None:
        """Return a warning if no task has computed or reported a step for 60 s; else None.

        The warning is returned once, and again only after a task has started, ended or computed.
        """
        tasks = [record for record in records if record.role.is_in_cluster]
        states = [record.observed for record in tasks]
        starts = tuple((state.attempt, state.start_count, state.state) for state in states)
        cpu_seconds = sum(state.usage.cpu_seconds for state in states)
        is_known = all(state.state == "running" and state.usage.cpu_seconds for state in states)
        has_stepped = any(state.script.step is not None for state in states)
        has_computed = cpu_seconds - self._cpu_seconds > _IDLE_CORES * _IDLE_SECONDS * len(tasks)
        has_changed, is_over = starts != self._starts, now - self._since >= _IDLE_SECONDS
        self.is_active = has_stepped or (has_computed and not has_changed)
        if has_changed or self.is_active:
            self._has_warned = False
        if has_changed or self.is_active or not is_known or is_over:
            self._starts, self._since, self._cpu_seconds = starts, now, cpu_seconds
        if is_over and is_known and not (has_changed or self.is_active or self._has_warned):
            self._has_warned = True
            return _describe_idleness({record.task.task_type for record in tasks})
        return None


def _describe_idleness(task_types: set[str]) -> str | None:
    """Return the warning, with the chief as the probable cause; None if the job has no ps."""
    seen = f"All tasks run, but none has computed or reported a step for {_IDLE_SECONDS:g} s"
    if "ps" not in task_types:
        return None
    if "chief" not in task_types:
        return (
            f"{seen}. This job has no chief: if the script waits for one, as ParameterServerStrategy does, start it "
            "without --no-chief."
        )
    return f"{seen}. This job has a chief: if worker 0 leads in the script, start it with --no-chief."
