"""What the events tell of each task's life: tables of events, and the events of real jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.timeline import Mark, Span, Timeline, Wait, make_timeline

RUNS = Path(__file__).parents[1] / "data" / "runs"


def event(seconds: float, kind: str, task: str | None = None, text: str = "") -> dict[str, Any]:
    return {"time": 1000 + seconds, "seconds": seconds, "kind": kind, "task": task, "text": text}


def spans_of(timeline: Timeline, name: str) -> list[tuple[str, float, float]]:
    (life,) = [task for task in timeline.tasks if task.name == name]
    return [(span.state, span.start, span.end) for span in life.spans]


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


def test_a_life_from_start_to_leave() -> None:
    ended = [
        event(30, "exited", "chief/0", "exited with code 0"),
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
    assert (timeline.training_at, timeline.end) == (20, 34)
    assert timeline.states == ("starting", "importing", "waiting", "training", "terminating")


def test_who_came_last_was_waited_for_by_all() -> None:
    barrier = event(25, "barrier", "worker/0", "worker/0 came last to barrier 'a': b': the first had waited 12.5 s")
    timeline = make_timeline([*TRAINED, barrier])
    assert timeline.waits == (
        Wait(6, 4.5, "worker/0", "to register"),
        Wait(14, 3, "chief/0", "to import and serve"),
        Wait(25, 12.5, "worker/0", "at barrier 'a': b'"),
    )


def test_without_reported_steps_nobody_says_waiting_or_training() -> None:
    timeline = make_timeline(FORMED, end=30)
    assert spans_of(timeline, "ps/0") == [("starting", 0, 8), ("importing", 8, 10), ("running", 10, 30)]
    assert timeline.training_at is None


def test_a_restart_in_place_is_seen_and_told() -> None:
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
    assert [(mark.kind, mark.is_bad) for mark in timeline.tasks[-1].marks] == [("exited", True), ("restarting", False)]


def test_a_new_attempt_starts_all_again() -> None:
    anew = [
        event(24, "exited", "ps/0", "exited with code 1"),
        event(24, "attempt", None, "attempt 2 of 2"),
        event(26, "registered", "chief/0"),
        event(29, "started", "chief/0"),
        event(31, "first_step", "chief/0"),
    ]
    timeline = make_timeline([*TRAINED, *anew], end=40)
    assert spans_of(timeline, "chief/0")[3:] == [
        ("training", 20, 24),
        ("starting", 24, 29),
        ("importing", 29, 31),
        ("training", 31, 40),
    ]
    assert timeline.marks == (Mark(24, "attempt", "attempt 2 of 2", is_bad=True),)


def test_what_slurm_knows_of_the_queue_comes_before() -> None:
    timeline = make_timeline(TRAINED, queued=(-60, -2))
    assert timeline.start == -60
    assert spans_of(timeline, "ps/0")[:2] == [("queued", -60, -2), ("starting", -2, 0)]
    assert make_timeline(TRAINED, queued=(-0.2, 0)).start == 0


def test_ranks_that_have_no_role_yet_are_the_tasks_of_these_ranks() -> None:
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
def test_what_is_no_event_is_passed_over(line: dict[str, Any]) -> None:
    assert make_timeline([line, *TRAINED]) == make_timeline(TRAINED)


def test_no_events_are_an_empty_timeline() -> None:
    assert make_timeline([]) == Timeline(0.0, 0.0, (), (), (), None)
    assert make_timeline([], ["ps/0"], 3).tasks[0].spans == [Span("starting", 0.0, 3)]


def test_a_real_job_whose_worker_was_killed() -> None:
    timeline = make_timeline(RunDirectory(RUNS / "digits").read_events())
    states = [state for state, _, _ in spans_of(timeline, "worker/1")]
    restarted = ["importing", "training", "terminating"]
    assert states == ["starting", "importing", "waiting", "training", "restarting", *restarted]
    assert timeline.training_at == pytest.approx(21, abs=0.1)
    assert [mark.kind for mark in timeline.marks] == ["outcome"]
