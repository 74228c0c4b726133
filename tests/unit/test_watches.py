"""The warning that the tasks of a job only wait, and its reason."""

from __future__ import annotations

import pytest

from tf4slurm.cluster import Task
from tf4slurm.control.messages import ObservedState, ScriptState, Usage
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.watches import IdleWatch
from tf4slurm.roles import role_of


def records_of(*names: str, cpu: float = 10.0, step: int | None = None, start_count: int = 1) -> list[TaskRecord]:
    has_chief = "chief" in names
    records = [TaskRecord(rank, Task(name, 0), role_of(name, has_chief=has_chief)) for rank, name in enumerate(names)]
    for record in records:
        record.observed = ObservedState(
            "running", start_count, usage=Usage(cpu_seconds=cpu), script=ScriptState(step=step)
        )
    return records


def warning_times(*looks: tuple[float, list[TaskRecord]]) -> list[float]:
    """Return the times at which a check of these gives a warning."""
    watch = IdleWatch()
    return [now for now, records in looks if watch.check(records, now) is not None]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("ps", "worker"), "no chief: if the script waits for one, as ParameterServerStrategy does, start it without"),
        (("chief", "ps", "worker"), "if worker 0 leads in the script, start it with --no-chief"),
    ],
)
def test_tasks_that_wait_for_a_minute_are_warned_of_with_the_reason(roles: tuple[str, ...], words: str) -> None:
    watch = IdleWatch()
    assert watch.check(records_of(*roles, cpu=10), 100) is None
    assert watch.check(records_of(*roles, cpu=10.5), 159) is None
    assert words in (watch.check(records_of(*roles, cpu=10.5), 160) or "")


WAITING = records_of("ps", "worker")


def test_warning_comes_once_for_each_start() -> None:
    again = records_of("ps", "worker", start_count=2)
    looks = ((0, WAITING), (60, WAITING), (200, WAITING), (210, again), (269, again), (270, again))
    assert warning_times(*looks) == [60, 270]


@pytest.mark.parametrize(
    ("later", "is_active"),
    [
        (records_of("ps", "worker", cpu=13), True),
        (records_of("ps", "worker", step=3), True),
        (records_of("ps", "worker", cpu=11), False),
        (records_of("ps", "worker", start_count=2), False),
    ],
    ids=["computes", "reports steps", "still waits", "was started again"],
)
def test_task_is_active_after_a_warning(later: list[TaskRecord], is_active: bool) -> None:
    watch = IdleWatch()
    assert watch.check(WAITING, 0) is None
    assert watch.check(WAITING, 60) is not None
    assert not watch.is_active
    assert watch.check(later, 70) is None
    assert watch.is_active == is_active


def test_slow_idle_use_of_the_processor_is_not_computation() -> None:
    looks = [(60 * minute, records_of("ps", "worker", cpu=10 + minute)) for minute in range(10)]
    assert warning_times(*looks) == [60]


@pytest.mark.parametrize(
    "later",
    [
        records_of("ps", "worker", cpu=13),
        records_of("ps", "worker", step=3),
        records_of("ps", "worker", cpu=0.0),
        records_of("ps", "worker", start_count=2),
    ],
    ids=["computes", "reports steps", "is not measured", "was started again"],
)
def test_no_warning_while_a_task_computes_or_is_unknown(later: list[TaskRecord]) -> None:
    assert warning_times((0, WAITING), (60, later), (61, WAITING)) == []


def test_no_warning_without_ps() -> None:
    assert warning_times((0, records_of("worker")), (100, records_of("worker"))) == []
