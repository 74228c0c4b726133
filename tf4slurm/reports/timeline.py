"""What each task of a job did when, told by its events: pure.

What a span is called:

queued      the job waits in Slurm's queue
starting    from the job's start, or the new attempt's, until the task's child is started
importing   until the child's server answers, or it reports a step, whichever is told first
waiting     until the first task of the job reports a step
training    from then on; "running" in a job whose script reports no steps: then nobody can tell waiting from training
restarting  between the end of a child and its next start in place
terminating from the outcome, or from the child's own end, until the task is gone

When a server answers is seen up to a quarter of a second late. Times are seconds since the job's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STATES = ("queued", "starting", "importing", "waiting", "training", "running", "restarting", "terminating")

_MARKS = ("exited", "lost", "disconnected", "reconnected", "restarting", "not_restarted", "exited_early")
_JOB_MARKS = ("attempt", "stopping", "grace_period_over", "outcome", "not_terminated")
_LONGEST_SECONDS = 1e9  # more is no time of a job
_SHORT_SECONDS = 1.0  # of waiting: less is not worth a line


@dataclass(frozen=True)
class Span:
    """What a task did from `start` to `end`."""

    state: str
    start: float
    end: float


@dataclass(frozen=True)
class Mark:
    """Something that happened at a moment: its kind as in events.jsonl, and `is_bad` if something broke."""

    seconds: float
    kind: str
    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class Wait:
    """The others waited for `task` for so many `seconds`, until `until`, because of `what`."""

    until: float
    seconds: float
    task: str
    what: str


@dataclass
class TaskLife:
    """One task: what it did, and what happened to it."""

    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Timeline:
    """The whole job: from `start` (before 0 if it was queued) to `end`; `training_at` is when the first step came."""

    start: float
    end: float
    tasks: tuple[TaskLife, ...]
    marks: tuple[Mark, ...]
    waits: tuple[Wait, ...]
    training_at: float | None

    @property
    def states(self) -> tuple[str, ...]:
        """The states that occur, in the order of a life."""
        found = {span.state for task in self.tasks for span in task.spans}
        return tuple(state for state in STATES if state in found)


def make_timeline(
    events: Sequence[Mapping[str, Any]],
    names: Sequence[str] = (),
    end: float | None = None,
    queued: tuple[float, float] | None = None,
) -> Timeline:
    """Tell the lives of tasks from the lines of events.jsonl; what is no event is passed over.

    Args:
        names: The tasks by rank, as far as they are known otherwise; the events name the others.
        end: When the job ended, or was last seen; None for its last event.
        queued: When Slurm had taken the job into its queue, and when it let it begin: both before 0.
    """
    teller = _Teller(names)
    good = sorted(filter(_is_event, events), key=lambda event: float(event["seconds"]))
    for event in good:
        teller.tell(float(event["seconds"]), event["kind"], event["task"], str(event.get("text", "")))
    last = max(end or 0.0, float(good[-1]["seconds"]) if good else 0.0)
    return teller.conclude(last, queued)


def _is_event(event: Mapping[str, Any]) -> bool:
    seconds, task = event.get("seconds"), event.get("task", 0)
    is_time = isinstance(seconds, (int, float)) and abs(seconds) < _LONGEST_SECONDS
    return is_time and isinstance(event.get("kind"), str) and (task is None or isinstance(task, str))


class _Teller:
    """Follows all tasks through the events, in the order of time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ranks = {f"rank {rank}": name for rank, name in enumerate(names)}
        self._tasks = {name: TaskLife(name) for name in names}
        self._state: dict[str, tuple[str, float] | None] = dict.fromkeys(names, ("starting", 0.0))
        self._marks: list[Mark] = []
        self._waits: list[Wait] = []
        self._joined: dict[str, float] = {}
        self._serving: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        self._phase_at = 0.0
        self._training_at: float | None = None
        self._verdict_at: float | None = None
        self._is_training = False

    def tell(self, now: float, kind: str, task: str | None, text: str) -> None:
        if task is None:
            self._tell_job(now, kind, text)
            return
        name = self._ranks.get(task, task)
        if name not in self._tasks:
            self._tasks[name] = TaskLife(name)
            self._state[name] = ("starting", self._phase_at)
        if kind == "registered":
            self._joined[name] = now
        elif kind == "started":
            self._enter(name, "importing", now)
        elif kind == "serving":
            self._serving[name] = now
            self._leave_import(name, now)
        elif kind == "first_step":
            self._first_step(name, now)
        elif kind == "exited":
            self._enter(name, "terminating", now)
        elif kind == "restarting":
            state = self._state[name]
            self._state[name] = ("restarting", state[1] if state and state[0] == "terminating" else now)
        elif kind in ("terminated", "lost"):
            self._gone[name] = now
            self._enter(name, None, now)
        elif kind == "barrier":
            self._note_barrier(now, name, text)
        if kind in _MARKS:
            is_bad = kind == "lost" or (kind == "exited" and not text.endswith("exited with code 0"))
            self._tasks[name].marks.append(Mark(now, kind, text, is_bad))

    def conclude(self, end: float, queued: tuple[float, float] | None) -> Timeline:
        for name in self._tasks:
            self._enter(name, None, end)
        if self._verdict_at is not None:
            self._note_last(self._gone, self._verdict_at, "to terminate")
        self._name_training()
        start = 0.0
        if queued is not None and queued[0] <= -_SHORT_SECONDS:
            start, granted = queued[0], min(max(queued), 0.0)
            for life in self._tasks.values():
                life.spans[:0] = [Span("queued", start, granted), Span("starting", granted, 0.0)]
        tasks = tuple(self._tasks.values())
        return Timeline(start, end, tasks, tuple(self._marks), tuple(self._waits), self._training_at)

    def _tell_job(self, now: float, kind: str, text: str) -> None:
        if kind in _JOB_MARKS:
            self._marks.append(Mark(now, kind, text, kind in ("attempt", "not_terminated")))
        if kind == "checking":
            self._note_last(self._joined, self._phase_at, "to register")
        elif kind == "attempt":
            self._phase_at, self._is_training = now, False
            self._joined, self._serving = {}, {}
            for name, state in self._state.items():
                if state is not None:
                    self._enter(name, "starting", now)
        elif kind == "training":
            self._phase_at = now
        elif kind == "outcome":
            self._verdict_at = now
            for name, state in self._state.items():
                if state is not None:
                    self._enter(name, "terminating", now)

    def _enter(self, name: str, state: str | None, now: float) -> None:
        before = self._state[name]
        if before is not None and now > before[1]:
            spans = self._tasks[name].spans
            if spans and spans[-1].state == before[0] and spans[-1].end == before[1]:
                spans[-1] = Span(before[0], spans[-1].start, now)
            else:
                spans.append(Span(before[0], before[1], now))
        self._state[name] = None if state is None else (state, now)

    def _leave_import(self, name: str, now: float) -> None:
        state = self._state[name]
        if state is not None and state[0] == "importing":
            self._enter(name, "training" if self._is_training else "waiting", now)

    def _first_step(self, name: str, now: float) -> None:
        if not self._is_training:
            self._is_training = True
            if self._training_at is None:
                self._training_at = now
            self._note_last(self._serving, self._phase_at, "to import and serve")
            for other, state in self._state.items():
                if state is not None and state[0] == "waiting":
                    self._enter(other, "training", now)
        state = self._state[name]
        if state is not None and state[0] in ("importing", "waiting"):
            self._enter(name, "training", now)

    def _name_training(self) -> None:
        """Where no task has ever reported a step, what looks like waiting may be training."""
        if self._training_at is None:
            for life in self._tasks.values():
                life.spans = [Span("running", s.start, s.end) if s.state == "waiting" else s for s in life.spans]

    def _note_last(self, came: Mapping[str, float], since: float, what: str) -> None:
        """All waited for the one that came last, from when the one before it had come."""
        if len(came) < 2:
            return
        (_, before), (name, at) = sorted(came.items(), key=lambda item: item[1])[-2:]
        before = max(before, since)
        if at - before >= _SHORT_SECONDS:
            self._waits.append(Wait(at, at - before, name, what))

    def _note_barrier(self, now: float, name: str, text: str) -> None:
        words = text.rpartition("had waited ")[2].split()
        try:
            seconds = float(words[0])
        except (ValueError, IndexError):
            return
        what = text.partition("barrier ")[2].rpartition(": the first")[0]
        self._waits.append(Wait(now, seconds, name, f"at barrier {what}"))
