"""What a run directory tells of a job, read once: the value that the report and the live page are made of."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.status import is_lost, last_known
from tf4slurm.reports.advice import Advice, explain_failure, give_advice
from tf4slurm.reports.curves import Curves, make_curves
from tf4slurm.reports.resource_usage import JobNeeds, make_needs
from tf4slurm.reports.timeline import Timeline, make_timeline

_TAIL_LINES = 20
_TAIL_BYTES = 16_000


@dataclass(frozen=True)
class Story:
    """A job as its run directory tells it, whole, half written or still growing.

    Attributes:
        job, status, result, grant: job.json, status.json, result.json and slurm.json; empty if they are not there.
        names: The tasks by rank.
        tail: The last lines of what failed first.
        warnings: What may be wrong with it, in sentences: of a job that has ended by its result, else by its events.
        missing: What the run directory does not tell, in sentences.
        loss: What was known last, if the launcher ended without a result; else empty.
    """

    path: Path
    job: Mapping[str, Any]
    status: Mapping[str, Any]
    result: Mapping[str, Any]
    grant: Mapping[str, Any]
    names: tuple[str, ...]
    timeline: Timeline
    curves: Curves
    needs: JobNeeds
    advice: tuple[Advice, ...]
    explanation: tuple[str, ...]
    tail: tuple[str, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]
    loss: str = ""

    @property
    def has_ended(self) -> bool:
        return bool(self.result or self.loss)

    @property
    def cause(self) -> str | None:
        cause = self.result.get("cause")
        return cause if isinstance(cause, str) else None


def read_story(run: RunDirectory) -> Story:
    """Read a run directory; what is broken or not there is left out, and named in `missing`."""
    job, status, result = run.read_job() or {}, run.read_status() or {}, run.read_result() or {}
    grant, events = run.read_slurm() or {}, run.read_events()
    names = _names(job, status, result)
    seconds = max(_number(status.get("seconds")), _number(result.get("seconds")))
    timeline = make_timeline(events, names, seconds, _queued(grant, events))
    names = names or tuple(task.name for task in timeline.tasks)
    curves = make_curves(run.read_samples(), len(names))
    ends = [mark.seconds for mark in timeline.marks if mark.kind == "outcome"]
    training = (timeline.training_at or 0.0, ends[0] if ends else timeline.end)
    needs = make_needs(names, curves, grant, training, timeline.end)
    loss = f"Its launcher was killed, or its host went down. {last_known(run)}" if is_lost(run) else ""
    has_failed = bool(result) and result.get("exit_code") != 0
    return Story(
        path=run.path,
        job=job,
        status=status,
        result=result,
        grant=grant,
        names=names,
        timeline=timeline,
        curves=curves,
        needs=needs,
        advice=tuple(give_advice(needs, timeline, curves.undefined)),
        explanation=tuple(explain_failure(result, grant)) if has_failed else (),
        tail=_tail(run, result) if has_failed else (),
        warnings=tuple(_warnings(result, events)),
        missing=tuple(_missing(run, job, status, has_ended=bool(result or loss))),
        loss=loss,
    )


def _names(*sources: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tasks by rank, from the last source that tells them."""
    for source in reversed(sources):
        tasks = source.get("tasks")
        if isinstance(tasks, list) and tasks:
            return tuple(str(task.get("task")) if isinstance(task, dict) else "?" for task in tasks)
    return ()


def _warnings(result: Mapping[str, Any], events: list[dict[str, Any]]) -> list[str]:
    told = result.get("warnings") if result else [e.get("text") for e in events if e.get("kind") == "warning"]
    return [str(text) for text in told] if isinstance(told, list) else []


def _queued(grant: Mapping[str, Any], events: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return when Slurm took the job and let it begin, in seconds since the job's start."""
    submitted, granted = _number(grant.get("submitted")), _number(grant.get("started"))
    began = next((at - _number(e.get("seconds")) for e in events if (at := _number(e.get("time")))), 0.0)
    return (submitted - began, (granted or began) - began) if submitted and began else None


def _tail(run: RunDirectory, result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the last lines of the cause: those that its agent told, else the end of its log."""
    told = result.get("tail")
    if isinstance(told, list) and told:
        return tuple(map(str, told[-_TAIL_LINES:]))
    log = result.get("log")
    path = run.path / "logs" / Path(log).name if isinstance(log, str) else None
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(collections.deque(lines, _TAIL_LINES))


def _missing(run: RunDirectory, job: Mapping[str, Any], status: Mapping[str, Any], *, has_ended: bool) -> list[str]:
    said = []
    if not job:
        said.append("job.json is not there or cannot be read: what was run is not known.")
    if not run.events.exists():
        said.append("There is no events.jsonl: the life of the tasks is not known.")
    if not has_ended:
        phase = status.get("phase")
        where = f"when it was last written down, it was {phase}" if isinstance(phase, str) else "it left no word"
        said.append(f"There is no result.json: the job still runs, or its launcher was killed; {where}.")
    return said


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e12 else 0.0
