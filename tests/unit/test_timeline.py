"""The timeline from tables of events, and from the events of real jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event
from tf4slurm.reports.timeline import Span, Timeline, TimelineEvent, Wait, make_timeline
from tf4slurm.system.typed_json import from_json

RUNS = Path(__file__).parents[1] / "data" / "runs"


def event(seconds: float, kind: str, task: str | None = None, text: str = "", **facts: Any) -> Event:
    return Event(1000 + seconds, float(seconds), kind, task, text, **facts)


def spans_of(timeline: Timeline, name: str) -> list[tuple[str, float, float]]:
    (task,) = [each for each in timeline.tasks if each.name == name]
    return [(span.state, span.start, span.end) for span in task.spans]


FORMED = [
    event(1, "registered", "chief/0"),
    event(1.5, "registered", "ps/0"),
    event(6, "registered", "worker/0"),
    event(6, "checking"),
    event(7, "training"),
    event(8, "started", "chief/0"),
    event(8, "started", "ps/0"),
    event(8, "started", "worker/0"),
    event(10, "serving", "ps/0"),
    event(11, "serving", "worker/0"),
    event(14, "serving", "chief/0"),
]
TRAINED = [*FORMED, event(20, "first_step", "chief/0")]


def test_states_from_start_to_termination() -> None:
    ended = [
        event(30, "exited", "chief/0", "exited with code 0", returncode=0),
        event(30, "outcome"),
        event(30.5, "terminated", "chief/0"),
    ]
    timeline = make_timeline([*TRAINED, *ended, event(31, "terminated", "ps/0"), event(34, "terminated", "worker/0")])
    assert spans_of(timeline, "chief/0") == [
        ("starting", 0, 8),
        ("importing", 8, 14),
        ("waiting", 14, 20),
        ("training", 20, 30),
        ("terminating", 30, 30.5),
    ]
    assert spans_of(timeline, "worker/0")[1:] == [
        ("importing", 8, 11),
        ("waiting", 11, 20),
        ("training", 20, 30),
        ("terminating", 30, 34),
    ]
    assert (timeline.first_step_at, timeline.end) == (20, 34)
    assert timeline.states == ("starting", "importing", "waiting", "training", "terminating")


def test_tasks_wait_for_the_last_task() -> None:
    barrier = event(25, "barrier", "worker/0", "worker/0 arrived last", barrier="a", waited_seconds=12.5)
    timeline = make_timeline([*TRAINED, barrier])
    assert timeline.waits == (
        Wait(6, 4.5, "worker/0", "to register"),
        Wait(14, 3, "chief/0", "to start its TensorFlow server"),
        Wait(25, 12.5, "worker/0", "at barrier 'a'"),
    )


def test_without_reported_steps_tasks_are_running() -> None:
    timeline = make_timeline(FORMED, end=30)
    assert spans_of(timeline, "ps/0") == [("starting", 0, 8), ("importing", 8, 10), ("running", 10, 30)]
    assert timeline.first_step_at is None


@pytest.mark.parametrize(
    ("end", "states"),
    [
        (event(9, "exited", "worker/0", returncode=0), ["running"]),
        (event(9, "exited", "worker/0", returncode=1), ["importing"]),
        (event(70, "exited", "worker/0", returncode=1), ["running"]),
        (event(70, "serving", "worker/0"), ["importing"]),
        (event(9, "first_step", "worker/0"), ["importing", "training"]),
        (event(70, "first_step", "chief/0"), ["running"]),
    ],
)
def test_script_without_server_or_step_was_importing_unless_that_took_long(end: Event, states: list[str]) -> None:
    timeline = make_timeline([event(8, "started", "worker/0"), end], ["worker/0"], 71)
    found = [state for state, *_ in spans_of(timeline, "worker/0")]
    assert found[: len(states) + 1] == ["starting", *states]


def test_restart_in_place() -> None:
    again = [
        event(25, "exited", "worker/0", "worker/0 on n1 was killed by signal 9 (SIGKILL)"),
        event(25, "restarting", "worker/0", "restart 1 in place"),
        event(27, "started", "worker/0"),
        event(29, "serving", "worker/0"),
    ]
    timeline = make_timeline([*TRAINED, *again], end=40)
    assert spans_of(timeline, "worker/0")[3:] == [
        ("training", 20, 25),
        ("restarting", 25, 27),
        ("importing", 27, 29),
        ("training", 29, 40),
    ]
    assert [(event.kind, event.is_failure) for event in timeline.tasks[-1].events] == [
        ("exited", True),
        ("restarting", False),
    ]


@pytest.mark.parametrize(("returncode", "is_failure"), [(0, False), (-15, False), (1, True), (-9, True)])
def test_exit_by_sigterm_after_a_stop_request_is_no_failure(returncode: int, is_failure: bool) -> None:
    end = event(20, "exited", "worker/0", returncode=returncode)
    (task,) = make_timeline([event(1, "started", "worker/0"), event(10, "stopping"), end]).tasks
    assert [each.is_failure for each in task.events] == [is_failure]
    (task,) = make_timeline([event(1, "started", "worker/0"), end]).tasks
    assert [each.is_failure for each in task.events] == [returncode != 0]


@pytest.mark.parametrize(("kind", "is_failure"), [("attempt", True), ("vacant", False)])
def test_new_attempt_starts_all_tasks_again(kind: str, is_failure: bool) -> None:
    second_attempt = [
        event(24, "exited", "ps/0", "exited with code 1"),
        event(24, kind, None, "attempt 2 of 2"),
        event(26, "registered", "chief/0"),
        event(29, "started", "chief/0"),
        event(31, "first_step", "chief/0"),
    ]
    timeline = make_timeline([*TRAINED, *second_attempt], end=40)
    assert spans_of(timeline, "chief/0")[3:] == [
        ("training", 20, 24),
        ("starting", 24, 29),
        ("importing", 29, 31),
        ("training", 31, 40),
    ]
    assert timeline.events == (TimelineEvent(24, kind, "attempt 2 of 2", is_failure=is_failure),)


def test_worker_that_joined_starts_with_its_registration_and_was_not_queued() -> None:
    joined = [
        event(23, "registered", "worker/1"),
        event(24, "started", "worker/1"),
        event(28, "serving", "worker/1"),
        event(33, "terminated", "worker/1"),
    ]
    names = ["chief/0", "ps/0", "worker/0", "worker/1"]
    timeline = make_timeline([*TRAINED, *joined], names, 40, (-10.0, -1.0), ["worker/1"])
    assert spans_of(timeline, "worker/1") == [("starting", 23, 24), ("importing", 24, 28), ("training", 28, 33)]
    assert spans_of(timeline, "worker/0")[0] == ("queued", -10.0, -1.0)


def test_time_in_the_queue_comes_first() -> None:
    timeline = make_timeline(TRAINED, queued=(-60, -2))
    assert timeline.start == -60
    assert spans_of(timeline, "ps/0")[:2] == [("queued", -60, -2), ("starting", -2, 0)]
    assert make_timeline(TRAINED, queued=(-0.2, 0)).start == 0


def test_event_of_a_rank_belongs_to_its_task() -> None:
    timeline = make_timeline(
        [event(1, "registered", "rank 1"), event(3, "started", "worker/0")], ["chief/0", "worker/0"], 5
    )
    assert [task.name for task in timeline.tasks] == ["chief/0", "worker/0"]
    assert spans_of(timeline, "worker/0") == [("starting", 0, 3), ("importing", 3, 5)]


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"seconds": "x", "kind": "registered", "task": "ps/0"},
        {"seconds": float("nan"), "kind": "registered", "task": "ps/0"},
        {"seconds": 1, "kind": 3, "task": "ps/0"},
        {"seconds": 1, "kind": "registered", "task": ["ps/0"]},
        {"seconds": 1, "kind": "registered"},
    ],
)
def test_damaged_event_is_ignored(line: dict[str, Any]) -> None:
    damaged = from_json(Event, line)
    assert make_timeline([damaged, *TRAINED]) == make_timeline(TRAINED)


def test_timeline_without_events_is_empty() -> None:
    assert make_timeline([]) == Timeline(0.0, 0.0, (), (), (), None)
    assert make_timeline([], ["ps/0"], 3).tasks[0].spans == [Span("starting", 0.0, 3)]


def test_real_job_whose_worker_was_killed() -> None:
    timeline = make_timeline(RunDirectory(RUNS / "digits").read_lines(Event))
    states = [state for state, _, _ in spans_of(timeline, "worker/1")]
    restarted = ["importing", "training", "terminating"]
    assert states == ["starting", "importing", "waiting", "training", "restarting", *restarted]
    assert timeline.first_step_at == pytest.approx(21, abs=0.1)
    assert [event.kind for event in timeline.events] == ["outcome"]


def test_task_is_blocked_while_it_waits_for_one_that_has_ended() -> None:
    waits = [
        event(25, "exited", "worker/0", "exited with code 0", returncode=0),
        event(30, "blocked", "worker/1"),
        event(40, "unblocked", "worker/1"),
        event(50, "blocked", "worker/1"),
        event(60, "outcome"),
        event(61, "terminated", "worker/1"),
    ]
    started = [event(8, "started", "worker/1"), event(10, "serving", "worker/1")]
    timeline = make_timeline([*TRAINED, *started, *waits])
    assert spans_of(timeline, "worker/1")[-5:] == [
        ("training", 20, 30),
        ("blocked", 30, 40),
        ("training", 40, 50),
        ("blocked", 50, 60),
        ("terminating", 60, 61),
    ]
    assert "blocked" in timeline.states
