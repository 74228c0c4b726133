"""Derive a timeline of the states of each task from the events of the job.

Times are seconds since the start of the job. The end of "importing" may be 0.25 s late, because agents check at
intervals whether a TensorFlow server answers.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tf4slurm.control.records import EVENT_KINDS, IMPORT_SECONDS
from tf4slurm.jobs.schema import Event

STATES = {
    "queued": "in Slurm's queue",
    "starting": "until the script starts",
    "importing": "mostly TensorFlow, until its server answers or it reports a step",
    "waiting": "until a task of the job reports a step",
    "training": "from the first step of the job on",
    "running": "it reports no steps",
    "blocked": "TensorFlow waits for a task that has ended",
    "restarting": "until the restart in place",
    "terminating": "exited, or being terminated",
}
"""The states of a task in their usual order, each with its meaning as the report's legend shows it."""

_MARKED_KINDS = {name for name, kind in EVENT_KINDS.items() if kind.is_in_timeline}
_FAILURES = ("lost", "attempt", "failed", "not_terminated")
_MIN_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class Span:
    """A time from `start` to `end` in which a task was in one state, a key of `STATES`."""

    state: str
    start: float
    end: float


@dataclass(frozen=True)
class TimelineEvent:
    """An event for which the timeline shows a mark. `kind` is a key of `EVENT_KINDS`, as in events.jsonl."""

    seconds: float
    kind: str
    text: str
    is_failure: bool = False


@dataclass(frozen=True)
class Wait:
    """A time in which all other tasks waited for `task`. It took `seconds` and ended at `until`.

    `what` is the reason. It completes the sentence "they waited for worker/0 …", such as "to register" or "at barrier
    'loaded'".
    """

    until: float
    seconds: float
    task: str
    what: str


@dataclass
class TaskTimeline:
    """The states and events of one task."""

    name: str
    spans: list[Span] = field(default_factory=list)
    events: list[TimelineEvent] = field(default_factory=list)

    @property
    def task_type(self) -> str:
        return task_type_of(self.name)


@dataclass(frozen=True)
class Timeline:
    """The timeline of a whole job.

    Attributes:
        start: 0, or the negative time at which Slurm queued the job.
        end: The time at which the job ended, or if it has not, the time of its last status or event.
        events: The events that concern the whole job.
        waits: The waits of 1 s or longer in which all tasks waited for one task.
        first_step_at: When the first step was reported; None without steps.
    """

    start: float
    end: float
    tasks: tuple[TaskTimeline, ...]
    events: tuple[TimelineEvent, ...]
    waits: tuple[Wait, ...]
    first_step_at: float | None

    @property
    def states(self) -> tuple[str, ...]:
        """The states that occur, in the order of `STATES`."""
        found = {span.state for task in self.tasks for span in task.spans}
        return tuple(state for state in STATES if state in found)


def task_type_of(name: str) -> str:
    """Return the type of a task from its name, such as "worker" for "worker/0"."""
    return name.partition("/")[0]


def make_timeline(
    events: Iterable[Event],
    names: Sequence[str] = (),
    end: float = 0.0,
    queued: tuple[float, float] | None = None,
    joined: Collection[str] = (),
) -> Timeline:
    """Return the timeline of a job from its events. Events without a time or kind are ignored.

    Args:
        events: The job's events, in any order.
        names: The names of the tasks, by rank. Tasks that appear only in events are added.
        end: The time at which the job ended, or if it has not, the time of its last status. The timeline ends with the
            last event if that is later.
        queued: When Slurm queued and started the job, in seconds relative to the start of the launcher, and so not
            positive. None for a job that was not queued.
        joined: The names of the joined workers, whose timelines begin when they registered.
    """
    builder = _TimelineBuilder(names, joined)
    names_by_rank = {f"rank {rank}": name for rank, name in enumerate(names)}
    timed = [(event.seconds, event) for event in events if event.seconds is not None and event.kind]
    for seconds, event in sorted(timed, key=lambda item: item[0]):
        builder.add(seconds, event, names_by_rank.get(event.task or "", event.task))
        end = max(end, seconds)
    return builder.finish(end, queued)


class _TimelineBuilder:
    """Derives the states of all tasks from events. Add the events in the order of time, then call `finish`."""

    def __init__(self, names: Sequence[str], joined: Collection[str] = ()) -> None:
        self._tasks = {name: TaskTimeline(name) for name in names}
        self._joined = joined
        present = [name for name in names if name not in joined]
        self._current: dict[str, tuple[str, float]] = dict.fromkeys(present, ("starting", 0.0))  # state and its start
        self._blocked_states: dict[str, str] = {}  # the states of tasks before "blocked"
        self._events: list[TimelineEvent] = []
        self._waits: list[Wait] = []
        self._times: dict[str, dict[str, float]] = defaultdict(dict)  # of the last event, by kind and task
        self._phase_at = 0.0
        self._first_step_at: float | None = None
        self._outcome_at: float | None = None
        self._is_training = False
        self._is_stopping = False

    def add(self, now: float, event: Event, task: str | None) -> None:
        if task is None:
            self._add_job_event(now, event.kind)
        else:
            self._add_task_event(now, event, task)
        if event.kind in _MARKED_KINDS:
            stops = (0, -signal.SIGTERM) if self._is_stopping else (0,)
            is_failure = event.kind in _FAILURES or (event.kind == "exited" and event.returncode not in stops)
            events = self._events if task is None else self._tasks[task].events
            events.append(TimelineEvent(now, event.kind, event.text, is_failure))

    def finish(self, end: float, queued: tuple[float, float] | None) -> Timeline:
        for name in self._tasks:
            self._leave(name, end)
        if self._outcome_at is not None:
            self._add_wait({**self._times["terminated"], **self._times["lost"]}, self._outcome_at, "to terminate")
        if self._first_step_at is None:
            for task in self._tasks.values():
                task.spans = [Span("running", s.start, s.end) if s.state == "waiting" else s for s in task.spans]
        start = 0.0
        if queued is not None and queued[0] <= -_MIN_WAIT_SECONDS:
            start, granted = queued[0], min(max(queued), 0.0)
            for task in (task for name, task in self._tasks.items() if name not in self._joined):
                task.spans[:0] = [Span("queued", start, granted), Span("starting", granted, 0.0)]
        tasks = tuple(self._tasks.values())
        return Timeline(start, end, tasks, tuple(self._events), tuple(self._waits), self._first_step_at)

    def _add_task_event(self, now: float, event: Event, name: str) -> None:
        kind = event.kind
        if name not in self._tasks:
            self._tasks[name] = TaskTimeline(name)
            self._current[name] = ("starting", self._phase_at)
        self._times[kind][name] = now
        state, since = self._current.get(name, ("", now))
        if kind == "registered" and name in self._joined and not self._tasks[name].spans:
            self._enter(name, "starting", now)
        elif kind == "started":
            self._enter(name, "importing", now)
        elif kind == "serving" and state == "importing":
            self._leave(name, now, has_imported=True)
            self._enter(name, "training" if self._is_training else "waiting", now)
        elif kind == "first_step":
            self._begin_training(now)
            if state in ("importing", "waiting"):
                self._leave(name, now, has_imported=True)
                self._enter(name, "training", now)
        elif kind == "exited":
            self._leave(name, now, has_succeeded=event.returncode == 0)
            self._enter(name, "terminating", now)
        elif kind == "blocked":
            self._blocked_states[name] = state
            self._enter(name, "blocked", now)
        elif kind == "unblocked" and state == "blocked":
            self._enter(name, self._blocked_states.pop(name, "running"), now)
        elif kind == "restarting":
            self._current[name] = ("restarting", since if state == "terminating" else now)
        elif kind in ("terminated", "lost"):
            self._leave(name, now)
        elif kind == "barrier":
            self._waits.append(Wait(now, event.waited_seconds or 0.0, name, f"at barrier {event.barrier!r}"))

    def _add_job_event(self, now: float, kind: str) -> None:
        if kind == "checking":
            self._add_wait(self._times["registered"], self._phase_at, "to register")
        elif kind == "training":
            self._phase_at = now
        elif kind in ("attempt", "vacant"):
            self._phase_at = now
            self._is_training = False
            self._times.clear()
            self._enter_all("starting", now)
        elif kind == "stopping":
            self._is_stopping = True
        elif kind == "outcome":
            self._outcome_at = now
            self._enter_all("terminating", now)

    def _begin_training(self, now: float) -> None:
        if self._is_training:
            return
        self._is_training = True
        if self._first_step_at is None:
            self._first_step_at = now
        self._add_wait(self._times["serving"], self._phase_at, "to start its TensorFlow server")
        for name in [name for name, (state, _) in self._current.items() if state == "waiting"]:
            self._enter(name, "training", now)

    def _enter_all(self, state: str, now: float) -> None:
        for name in [*self._current]:
            self._enter(name, state, now)

    def _enter(self, name: str, state: str, now: float) -> None:
        self._leave(name, now)
        self._current[name] = (state, now)

    def _leave(self, name: str, now: float, *, has_imported: bool = False, has_succeeded: bool = False) -> None:
        """End the current state of a task at the time `now`, and add it to the task's timeline.

        The state "importing" is added as "running" if the script has neither started a server nor reported a step
        (`has_imported` is False), and has run for 60 s or exited with 0 (`has_succeeded`).
        """
        state, since = self._current.pop(name, ("", now))
        if now <= since:
            return
        if state == "importing" and not has_imported and (has_succeeded or now - since >= IMPORT_SECONDS):
            state = "running"
        spans = self._tasks[name].spans
        if spans and spans[-1].state == state and spans[-1].end == since:
            spans[-1] = Span(state, spans[-1].start, now)
        else:
            spans.append(Span(state, since, now))

    def _add_wait(self, times: Mapping[str, float], since: float, what: str) -> None:
        """Add the wait of all tasks for the last one, unless it is shorter than 1 s.

        Args:
            times: When each task did what `what` names, such as "to register", in seconds, by name.
            since: The earliest start of the wait. The wait starts when the second-to-last task was done, if that is
                later.
            what: The reason of the wait (`Wait.what`).
        """
        if len(times) < 2:
            return
        (_, before), (name, at) = sorted(times.items(), key=lambda item: item[1])[-2:]
        seconds = at - max(before, since)
        if seconds >= _MIN_WAIT_SECONDS:
            self._waits.append(Wait(at, seconds, name, what))
