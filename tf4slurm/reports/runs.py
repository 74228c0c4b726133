"""Read what the page of many runs shows of each job: outcome, varied arguments, and metrics with their curves.

A page may have hundreds of runs with thousands of points each. Therefore the metrics are read without the checks of
`system/typed_json.py`, which take most of the time, and only those of up to three tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, ResultFile, StatusFile
from tf4slurm.reports.metrics import MAX_METRICS, MAX_NAME_LENGTH, choose_best

MAX_POINTS_PER_CURVE = 200
_MAX_DERIVED_LABELS = 6
_TASKS = ("chief-0", "worker-0", "evaluator-0")  # a metric is read from the first of these that reported it
_LARGEST = 1e15  # larger numbers are from damaged files
_NUMBERS = {float, int}  # type() is compared, because a bool is an int, too
_MISSING = object()

Curve = Sequence[tuple[float, float]]
"""The points (step, value) of a metric, in the order of the steps."""


@dataclass(frozen=True)
class Run:
    """One of the jobs on a page of many runs.

    Attributes:
        name: Its name on the page.
        labels: Values of the arguments that vary between the runs, by name, such as {"lr": "0.1"}.
        state: Its state, such as "COMPLETED" or "RUNNING" (`tf4slurm.JobStatus.state`).
        exit_code: Exit code of the job. None until it has ended.
        reason: Why the job is pending, or how it ended, in words.
        seconds: Duration of the job so far. None if unknown.
        steps: The furthest training step. None if no step was reported.
        last: The last value of each metric. It is NaN if the script reported NaN or infinity.
        best: The best finite value of each metric: the lowest of a loss or error, the highest of any other metric.
        curves: At most 200 points (step, value) of each metric that was reported with steps.
        run_directory: Path of its run directory. None if it has none.
        arguments: The arguments of its command and the options of the job, by name. If no run has labels, those that
            differ become the labels.
    """

    name: str
    labels: Mapping[str, str]
    state: str
    exit_code: int | None = None
    reason: str = ""
    seconds: float | None = None
    steps: int | None = None
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    run_directory: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)


def read_run(
    directory: RunDirectory | None,
    name: str,
    labels: Mapping[str, str],
    state: str,
    exit_code: int | None,
    reason: str,
) -> Run:
    """Read a run from its run directory. Each file is read once.

    A metric is that of the first of these tasks that reported it: the chief, worker 0, evaluator 0. If none of them
    reported metrics, it is that of the first task by name. Missing and damaged files count as empty.

    Args:
        directory: The run directory. None for a job that has none yet.
        name: Name of the run.
        labels: Values of the arguments that vary between the runs. If empty, those in job.json.
        state: State of the job.
        exit_code: Exit code of the job; None until it has ended.
        reason: How the job ended. If empty, the headline of result.json.

    Raises:
        SchemaVersionError: A newer version of tf4slurm wrote a file.
    """
    if directory is None:
        return Run(name, labels, state, exit_code, reason)
    job = directory.read(JobFile) or JobFile()
    result = directory.read(ResultFile)
    status = None if result is not None else directory.read(StatusFile)
    series = _read_metrics(directory.path / "metrics")
    steps = result.furthest_step if result is not None else None
    if status is not None:
        steps = max((task.step for task in status.tasks if task.step is not None), default=None)
    curves = {metric: points for metric, each in series.items() if (points := each.curve())}
    if steps is None:
        steps = max((round(points[-1][0]) for points in curves.values()), default=None)
    return Run(
        name=name,
        labels=labels or job.labels,
        state=state,
        exit_code=exit_code,
        reason=reason or (result.headline if result is not None else ""),
        seconds=result.seconds if result is not None else status.seconds if status is not None else None,
        steps=steps,
        last={metric: each.values[-1] for metric, each in series.items()},
        best={metric: best for metric, each in series.items() if (best := each.best(metric)) is not None},
        curves=curves,
        run_directory=str(directory.path),
        arguments={**_read_arguments(job.command), **flatten(job.options)},
    )


def label_runs(runs: Sequence[Run]) -> list[Run]:
    """Label the runs by what differs in their commands and options, if no run has labels. Return the labeled runs.

    Of more than 6 differences, the first 6 become labels. Arguments of the commands come before options of the job.
    The job's name is no label, because the page shows the name of each run.
    """
    if any(run.labels for run in runs):
        return [*runs]
    names = dict.fromkeys(itertools.chain(*(run.arguments for run in runs)))
    varied = [name for name in names if name != "name" and len({run.arguments.get(name) for run in runs}) > 1]
    chosen = varied[:_MAX_DERIVED_LABELS]
    return [
        dataclasses.replace(run, labels={name: run.arguments[name] for name in chosen if name in run.arguments})
        for run in runs
    ]


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the options in job.json as texts by name. The names of nested options are joined by spaces."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{name} ")
        else:
            found[prefix + name] = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return found


def parse_number(text: str) -> float | None:
    """Return the finite number that a text is, such as "1e-3", or None if it is none."""
    with contextlib.suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) and "_" not in text else None
    return None


def _read_arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a command by name: "--lr 0.1" and "--lr=0.1" have the name "lr".

    A switch has the value "yes". Other words have names by their order: the program is "argument 0". Values of a
    repeated option are joined by ", ".
    """
    found: dict[str, list[str]] = {}
    num_words = 0
    words = [*command]
    while words:
        word = words.pop(0)
        name, separator, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name or parse_number(word) is not None:
            name, value = f"argument {num_words}", word
            num_words += 1
        elif not separator:
            has_value = bool(words) and (not words[0].startswith("-") or parse_number(words[0]) is not None)
            value = words.pop(0) if has_value else "yes"
        found.setdefault(name, []).append(value)
    return {name: ", ".join(values) for name, values in found.items()}


@dataclass(slots=True)
class _Series:
    """The values of one metric.

    Attributes:
        values: The values, in the order of time. NaN for those that are not finite.
        steps: The step of each value. None if the script reported none.
        extremes: Lowest and highest values of lines that stand for several reports.
    """

    values: list[float] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    extremes: list[float] = field(default_factory=list)

    def best(self, metric: str) -> float | None:
        return choose_best(metric, filter(math.isfinite, itertools.chain(self.values, self.extremes)))

    def curve(self) -> Curve:
        """Return at most 200 points: the first, the last, and means of groups of consecutive points between them.

        Of a step that was repeated after a restart, the last value is used.
        """
        steps: Sequence[Any] = self.steps
        values: Sequence[float] = self.values
        is_usual = None not in steps and all(map(math.isfinite, values)) and all(map(operator.lt, steps, steps[1:]))
        if not is_usual:
            pairs = zip(self.steps, self.values, strict=True)
            points = {step: value for step, value in pairs if step is not None and math.isfinite(value)}
            steps = sorted(points)
            values = [points[step] for step in steps]
        if len(steps) <= MAX_POINTS_PER_CURVE:
            return [*zip(steps, values, strict=True)]
        size = -(-(len(steps) - 2) // (MAX_POINTS_PER_CURVE - 2))
        groups = [slice(start, min(start + size, len(steps) - 1)) for start in range(1, len(steps) - 1, size)]
        means = [(_mean(steps[group]), _mean(values[group])) for group in groups]
        return [(steps[0], values[0]), *means, (steps[-1], values[-1])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _read_metrics(directory: Path) -> dict[str, _Series]:
    """Return the series of at most 24 metrics, by name."""
    files: dict[str, list[tuple[int, Path]]] = {}
    for path in directory.glob("*-*.*.jsonl"):
        task, _, attempt = path.name.removesuffix(".jsonl").rpartition(".")
        if attempt.isdecimal():
            files.setdefault(task, []).append((int(attempt), path))
    found: dict[str, _Series] = {}
    for task in [task for task in _TASKS if task in files] or sorted(files)[:1]:
        series: dict[str, _Series] = {}
        for _, path in sorted(files[task]):
            _read_series(path, series)
        for metric, each in series.items():
            found.setdefault(metric, each)
    return {metric[:MAX_NAME_LENGTH]: found[metric] for metric in itertools.islice(found, MAX_METRICS)}


def _read_series(path: Path, series: dict[str, _Series]) -> None:
    """Add the values in a file of metrics to `series`."""
    steps, metrics, extremes = _read_lines(path)
    for name in dict.fromkeys(itertools.chain.from_iterable(metrics)):
        each = series.setdefault(name, _Series())
        values, at = [entry.get(name, _MISSING) for entry in metrics], steps
        if _MISSING in values:
            at = [step for step, value in zip(steps, values, strict=True) if value is not _MISSING]
            values = [value for value in values if value is not _MISSING]
        each.values += _to_numbers(values)
        each.steps += at
        if extremes:
            found = _to_numbers([value for entry in extremes if (value := entry.get(name)) is not None])
            each.extremes += filter(math.isfinite, found)


def _read_lines(path: Path) -> tuple[list[int | None], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the lines of a file of metrics have: steps, values, and lowest and highest values.

    Damaged lines are skipped. If the file cannot be read, all lists are empty.
    """
    steps: list[int | None] = []
    metrics: list[dict[str, Any]] = []
    extremes: list[dict[str, Any]] = []
    decode = json.JSONDecoder().raw_decode  # json.loads takes half as long again
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = decode(line)[0]
                values, step = entry["metrics"], entry.get("step")
            except (ValueError, RecursionError, LookupError, TypeError):
                continue
            if type(values) is dict:
                metrics.append(values)
                steps.append(step if type(step) is int and -_LARGEST < step < _LARGEST else None)
                if "low" in entry or "high" in entry:
                    extremes += [each for each in (entry.get("low"), entry.get("high")) if type(each) is dict]
    return steps, metrics, extremes


def _to_numbers(values: list[Any]) -> list[float]:
    """Return the values. Those that are no finite numbers, and too large ones, become NaN."""
    if {*map(type, values)} <= _NUMBERS:  # the usual case: these checks take a tenth of the time of the loop below
        is_bounded = not values or (min(values) > -_LARGEST and max(values) < _LARGEST)
        if is_bounded and all(map(math.isfinite, values)):
            return values
    return [value if type(value) in _NUMBERS and -_LARGEST < value < _LARGEST else math.nan for value in values]
