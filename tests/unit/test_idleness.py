"""The warning that no task of a job shows a sign of work: scripts that are slow but work, and scripts that hang.

Each case has the rates of its tasks in a minute. Those with "measured" are of real jobs with TensorFlow 2.21 on two
cores, in the second minute after the start of the last server.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tf4slurm.cluster import Task
from tf4slurm.control.idleness import IDLE_SECONDS, IdleWatch, usage_interval_seconds
from tf4slurm.control.messages import ObservedState, ScriptState, Usage
from tf4slurm.control.records import TaskRecord
from tf4slurm.control.watches import Watches
from tf4slurm.roles import role_of
from tf4slurm.spec.job_spec import JobSpec

MINUTES = 20
TICK_SECONDS = 1.0
TWO_WORKERS = ("ps/0", "worker/0", "worker/1")
WITH_CHIEF = ("chief/0", *TWO_WORKERS)
MIRRORED = ("worker/0", "worker/1")

Change = Callable[[ObservedState, float], ObservedState]


@dataclass(frozen=True)
class Rates:
    """What a task uses in a minute, and how its state differs at a time (seconds since the start) from that."""

    cpu: float = 0.11  # measured: a TensorFlow server without work
    sent: float = 0
    received: float = 0
    change: Change = lambda state, seconds: state

    def at(self, seconds: float) -> ObservedState:
        minutes = seconds / 60
        usage = Usage(1, round(5 + self.cpu * minutes, 2), round(self.sent * minutes), round(self.received * minutes))
        return self.change(ObservedState("running", 1, usage=usage, has_server=True), seconds)


@dataclass(frozen=True)
class Case:
    """A job: its tasks, the rates of those that do not idle, and the interval of measurements if it is not usual."""

    tasks: Sequence[str] = TWO_WORKERS
    rates: Mapping[str, Rates] = field(default_factory=dict)
    is_connected: bool = True


def usage(**changes: Callable[[float], float]) -> Change:
    """Return a change of fields of `Usage`, each a function of the time."""

    def change(state: ObservedState, seconds: float) -> ObservedState:
        values: dict[str, Any] = {name: value(seconds) for name, value in changes.items()}
        return dataclasses.replace(state, usage=dataclasses.replace(state.usage, **values))

    return change


def script(make: Callable[[float], ScriptState]) -> Change:
    return lambda state, seconds: dataclasses.replace(state, script=make(seconds))


def every(period: float) -> Callable[[float], int]:
    return lambda seconds: int(seconds // period)


def printing(period: float) -> Rates:
    return Rates(change=usage(num_printed=every(period)))


def stepping(period: float) -> Rates:
    return Rates(change=script(lambda seconds: ScriptState(step=int(seconds // period))))


def restarting(state: ObservedState, seconds: float) -> ObservedState:
    return dataclasses.replace(state, start_count=1 + int(seconds // 50))


def bursts(seconds: float) -> float:
    """Return the processor time of a script that computes for 1 s in each 45 s."""
    return 5.0 + seconds // 45


def short_children(seconds: float) -> float:
    """Return the processor time of a script whose children compute for 10 s, and of whose time 9 s are lost."""
    return 5.0 + seconds % 10


HEALTHY = {
    "TF1 loop that sleeps for 5 s (measured)": Case(
        rates={
            "ps/0": Rates(0.18, 5428, 10714),
            "worker/0": Rates(0.13, 1296, 2924),
            "worker/1": Rates(0.15, 1296, 2921),
        }
    ),
    "TF1 loop that sleeps for 25 s (measured)": Case(
        rates={"ps/0": Rates(0.12, 1357, 2684), "worker/0": Rates(0.11, 324, 735), "worker/1": Rates(0.11, 324, 719)}
    ),
    "ParameterServerStrategy that sleeps for 20 s (measured)": Case(
        WITH_CHIEF,
        {
            "chief/0": Rates(0.12),
            "ps/0": Rates(0.12, 487, 1265),
            "worker/0": Rates(0.11, 85, 332),
            "worker/1": Rates(0.11, 170, 664),
        },
    ),
    "mirrored strategy that sleeps for 10 s (measured)": Case(
        MIRRORED, {"worker/0": Rates(0.17, 3452, 5253), "worker/1": Rates(0.15, 906, 1382)}
    ),
    "prints every 25 s": Case(rates={"worker/1": printing(25)}),
    "prints every 55 s": Case(WITH_CHIEF, {"chief/0": printing(55)}),
    "prints dots without a newline": Case(rates={"worker/0": printing(1)}),
    "a ps alone prints": Case(rates={"ps/0": printing(10)}),
    "reports a step every 30 s": Case(WITH_CHIEF, {"chief/0": stepping(30)}),
    "reports a step every 58 s": Case(WITH_CHIEF, {"chief/0": stepping(58)}),
    "reports metrics, no steps": Case(
        rates={"worker/0": Rates(change=script(lambda seconds: ScriptState(metrics=(("loss", seconds // 20),))))}
    ),
    "one of two workers computes on one core": Case(rates={"worker/1": Rates(60)}),
    "one of 200 workers computes on one core": Case(
        ("ps/0", *(f"worker/{index}" for index in range(200))), {"worker/7": Rates(60)}
    ),
    "computes on 2 % of a core": Case(WITH_CHIEF, {"chief/0": Rates(1.2)}),
    "computes for 1 s in 45 s": Case(WITH_CHIEF, {"chief/0": Rates(change=usage(cpu_seconds=bursts))}),
    "children of the script compute, one after the other": Case(
        rates={"worker/0": Rates(change=usage(cpu_seconds=short_children))}
    ),
    "GPUs compute": Case(rates={"worker/0": Rates(change=usage(gpu_percent=lambda seconds: 80.0))}),
    "an evaluator alone works": Case((*WITH_CHIEF, "evaluator/0"), {"evaluator/0": Rates(30)}),
    "a data server alone works": Case((*WITH_CHIEF, "data-dispatcher/0", "data-worker/0"), {"data-worker/0": Rates(9)}),
    "a worker is restarted every 50 s": Case(WITH_CHIEF, {"worker/0": Rates(change=restarting)}),
    "4,000 tasks, which are measured every 40 s": Case(
        ("ps/0", *(f"worker/{index}" for index in range(3999))), {"worker/7": printing(40)}
    ),
    "one process sleeps": Case(("chief/0",)),
    "one process and its evaluator sleep": Case(("chief/0", "evaluator/0")),
    "the launcher does not know the tasks": Case(is_connected=False),
}

HANGS = {
    "session waits for a dequeue (measured)": Case(
        rates={"ps/0": Rates(0.10), "worker/0": Rates(0.09), "worker/1": Rates(0.09)}
    ),
    "all tasks call server.join() (measured)": Case(
        rates={"ps/0": Rates(0.10), "worker/0": Rates(0.10), "worker/1": Rates(0.09)}
    ),
    "session without filters, after the other worker (measured)": Case(
        ("ps/0", "worker/1"), {"ps/0": Rates(0.11), "worker/1": Rates(0.21)}
    ),
    "no session is the chief's (measured)": Case(
        rates={
            "ps/0": Rates(0.11, 2312, 11124),
            "worker/0": Rates(0.14, change=usage(num_sessions=every(30))),
            "worker/1": Rates(0.14, change=usage(num_sessions=every(30))),
        }
    ),
    "ParameterServerStrategy without a chief (measured)": Case(
        rates={"ps/0": Rates(0.09), "worker/0": Rates(0.09), "worker/1": Rates(0.11)}
    ),
    "deadlock of a chief's threads (measured)": Case(
        WITH_CHIEF,
        {"chief/0": Rates(0.13), "ps/0": Rates(0.13), "worker/0": Rates(0.11), "worker/1": Rates(0.12)},
    ),
    "a mirrored strategy waits for a worker (measured)": Case(
        MIRRORED, {"worker/0": Rates(0.22, 2208, 2792), "worker/1": Rates(0.17)}
    ),
    "the same of 100 workers": Case(
        tuple(f"worker/{index}" for index in range(100)), {"worker/0": Rates(0.3, 100 * 1104, 100 * 1396)}
    ),
    "200 workers wait": Case(("ps/0", *(f"worker/{index}" for index in range(200)))),
    "deadlock after 100 steps": Case(
        WITH_CHIEF, {"chief/0": Rates(change=script(lambda seconds: ScriptState(step=min(100, int(seconds)))))}
    ),
    "deadlock after it has printed for 3 minutes": Case(
        rates={"worker/0": Rates(change=usage(num_printed=lambda seconds: min(18, seconds // 10)))}
    ),
}


def records_of(case: Case) -> list[TaskRecord]:
    tasks = [Task(name.partition("/")[0], int(name.partition("/")[2])) for name in case.tasks]
    has_chief = any(task.task_type == "chief" for task in tasks)
    return [
        TaskRecord(rank, task, role_of(task.task_type, has_chief=has_chief), is_connected=case.is_connected)
        for rank, task in enumerate(tasks)
    ]


def warning_times(case: Case, minutes: int = MINUTES) -> list[float]:
    """Return the times in seconds of the warnings of this job."""
    records, interval, watch = records_of(case), usage_interval_seconds(len(case.tasks)), IdleWatch()
    found: list[float] = []
    for seconds in itertools.takewhile(lambda each: each <= 60 * minutes, itertools.count(0, TICK_SECONDS)):
        if watch.is_due(seconds):
            for record in records:
                rates = case.rates.get(str(record.task), Rates())
                state, measured = rates.at(seconds), rates.at(seconds // interval * interval)
                record.observed = dataclasses.replace(state, usage=measured.usage)
            if watch.check(records, seconds) is not None:
                found.append(seconds)
    return found


def test_tables_have_the_promised_size() -> None:
    assert len(HEALTHY) >= 20
    assert len(HANGS) >= 10


@pytest.mark.parametrize("case", HEALTHY.values(), ids=HEALTHY)
def test_script_that_is_slow_but_works_is_not_warned_of(case: Case) -> None:
    assert warning_times(case, 5 if len(case.tasks) > 2000 else MINUTES) == []


@pytest.mark.parametrize("case", HANGS.values(), ids=HANGS)
def test_script_that_hangs_is_warned_of_once(case: Case) -> None:
    (seconds,) = warning_times(case)
    assert seconds >= IDLE_SECONDS


# The parts of the rule


def job(*names: str, **changes: object) -> list[TaskRecord]:
    """Return the records of running tasks of the given types, whose states have these fields."""
    records = records_of(Case([f"{name}/0" for name in names]))
    for record in records:
        state = ObservedState("running", 1, usage=Usage(cpu_seconds=10.0))
        record.observed = dataclasses.replace(state, **changes)  # type: ignore[arg-type]
    return records


WAITING = job("ps", "worker")


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("ps", "worker"), "no chief: if the script waits for one, as ParameterServerStrategy does, start it without"),
        (("chief", "ps", "worker"), "if worker 0 leads in the script, start it with --no-chief"),
    ],
)
def test_warning_names_what_was_looked_at_and_the_likely_cause(roles: tuple[str, ...], words: str) -> None:
    watch = IdleWatch()
    assert watch.check(job(*roles), 100) is None
    assert watch.check(job(*roles), 159) is None
    warning = watch.check(job(*roles), 160) or ""
    assert warning.startswith("No task has shown a sign of work for 60 s. ")
    assert " Seen: no new step, no output of the script, no traffic of a step" in warning
    assert "at most 0.6 s of processor time a minute in each task and its child processes" in warning
    assert words in warning


def test_warning_after_steps_does_not_blame_the_roles() -> None:
    watch = IdleWatch()
    records = job("ps", "worker", script=ScriptState(step=7))
    watch.check(records, 100)
    assert "chief" not in (watch.check(records, 160) or "chief")


@pytest.mark.parametrize(
    ("later", "is_active"),
    [
        (job("ps", "worker", usage=Usage(cpu_seconds=13)), True),
        (job("ps", "worker", script=ScriptState(step=3)), True),
        (job("ps", "worker", usage=Usage(cpu_seconds=10, num_printed=1)), True),
        (job("ps", "worker", usage=Usage(cpu_seconds=10, sent_bytes=9999)), True),
        (job("ps", "worker", start_count=2), True),
        (job("ps", "worker", usage=Usage(cpu_seconds=10.2)), False),
        (job("ps", "worker", waits_for=("worker/1",)), False),
    ],
    ids=["computes", "steps", "prints", "moves bytes", "was started again", "still waits", "TensorFlow prints"],
)
def test_warning_is_withdrawn_at_a_sign_of_work(later: list[TaskRecord], is_active: bool) -> None:
    watch = IdleWatch()
    assert watch.check(WAITING, 0) is None
    assert watch.check(WAITING, 60) is not None
    assert not watch.is_active
    assert watch.check(later, 70) is None
    assert watch.is_active == is_active


def test_script_that_was_quiet_for_longer_than_the_limit_gets_more_time() -> None:
    """A loop that shows a sign every 100 s is warned of once, and never again."""
    watch, found = IdleWatch(), []
    for seconds in range(0, 3600, 5):
        records = job("ps", "worker", script=ScriptState(step=seconds // 100))
        if watch.check(records, float(seconds)) is not None:
            found.append(seconds)
    assert found == [60]
    assert watch.limit_seconds == 200


def test_warning_names_filters_of_a_session_if_a_worker_has_ended() -> None:
    """A script that hides TensorFlow's messages (TF_CPP_MIN_LOG_LEVEL=2) prints no line about the wait."""
    records = records_of(Case(["ps/0", "worker/0", "worker/1"]))
    for record in records:
        record.observed = ObservedState("running", 1, usage=Usage(cpu_seconds=10.0))
    records[2].observed = ObservedState("exited", 1, returncode=0)
    watch = IdleWatch()
    watch.check(records, 100)
    warning = watch.check(records, 160) or ""
    assert "worker/1 exited with 0: a session of TensorFlow 1 without device_filters waits for such a task" in warning
    assert 'in worker/0, config=tf.compat.v1.ConfigProto(device_filters=["/job:ps", "/job:worker/task:0"])' in warning


def test_warning_and_its_end_are_events() -> None:
    watches = Watches(JobSpec())
    served = job("ps", "worker", has_server=True)
    watches.note_server()
    for seconds in range(0, 61, 5):
        found = watches.check(served, float(seconds), is_training=True)
    (warning,) = found.warnings
    assert list(watches.warnings) == [warning]
    found = watches.check(job("ps", "worker", script=ScriptState(step=3)), 65.0, is_training=True)
    assert found.withdrawn == [warning]
    assert not watches.warnings


def test_warning_follows_when_the_warning_that_explained_it_is_withdrawn() -> None:
    watches = Watches(JobSpec())
    watches.servers.note_start(0.0)  # without a server, a warning comes first
    served = job("ps", "worker")
    for seconds in range(0, 121, 5):
        watches.check(served, float(seconds), is_training=True)
    (explanation,) = watches.warnings
    assert "has started a TensorFlow server" in explanation
    watches.note_server()
    found = watches.check(served, 125.0, is_training=True)
    assert found.withdrawn == [explanation]
    (warning,) = found.warnings
    assert "No task has shown a sign of work" in warning
    for seconds in range(130, 300, 5):
        assert not watches.check(served, float(seconds), is_training=True).warnings
