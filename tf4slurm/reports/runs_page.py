"""Make the page of many runs, such as those of a sweep: one HTML file that needs no network.

The page has a table that can be sorted, a plot of the curves of all runs for each metric, and plots of a metric against
each varied argument. A page of two runs has the comparison of two jobs instead of the plots.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tf4slurm.errors import COMPLETED, REQUEUED, STOPPED
from tf4slurm.jobs.formatting import format_number, format_seconds
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.comparison import compare
from tf4slurm.reports.metrics import LOWER_IS_BETTER, choose_best
from tf4slurm.reports.plots import (
    Mark,
    Plot,
    draw_curve,
    is_logarithmic,
    make_axis,
    make_word_axis,
)
from tf4slurm.reports.report import make_page, read_template, render
from tf4slurm.reports.runs import Run, label_runs, parse_number
from tf4slurm.reports.summary import JobSummary

MAX_METRICS = 4
_MAX_COLORED_RUNS = 12
_NUM_COLORS = 6
_NUM_SHADES = 8
_MAX_WORDS = 12  # on the axis of a plot
_MAX_REASONS = 20
_MAX_TEXT = 120  # characters of a name or value; a tooltip in the table has all
_MAX_REASON = 400  # characters of a reason
_LONG_TEXT = 30  # characters of a text that may be wrapped
_MIN_SCATTER_RUNS = 3
_STYLES = {COMPLETED: "good", STOPPED: "warn", REQUEUED: "warn", "FAILED": "bad", "LOST": "bad", "RUNNING": "live"}


@dataclass(frozen=True)
class Column:
    """A column of the table. `is_number` says that its values are compared as numbers."""

    title: str
    is_number: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of the table.

    Attributes:
        text: What the cell shows.
        value: What sorting compares. None for a missing value, which is sorted to the end.
        style: CSS class.
        title: The tooltip. Empty for none.
        link: The address to which the text is linked. Empty for none.
    """

    text: str
    value: str | float | None
    style: str = ""
    title: str = ""
    link: str = ""


@dataclass(frozen=True)
class Colors:
    """The colors of the runs.

    Attributes:
        styles: CSS classes of each run.
        legend: Classes and text of each entry of the legend.
        title: What the colors show. Empty if each run has its own color.
    """

    styles: Sequence[str]
    legend: Sequence[tuple[str, str]]
    title: str = ""


class RunSet:
    """The runs of a page, and what is known of them together.

    Attributes:
        runs: The runs, with labels if they differ in their arguments.
        labels: The names of all labels.
        metrics: At most 4 metrics: those that the most runs have. Of equally frequent ones, the first reported.
        numbers: The value of each label whose values are all numbers: by label, and by number of the run.
        best: The best value of each of the metrics over all runs.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = label_runs(runs)
        self.labels = [*dict.fromkeys(itertools.chain.from_iterable(run.labels for run in self.runs))]
        counts = Counter(itertools.chain.from_iterable(run.last for run in self.runs))
        self.metrics = [metric for metric, _ in counts.most_common(MAX_METRICS)]
        self.numbers: dict[str, dict[int, float]] = {}
        for label in self.labels:
            found = {n: parse_number(run.labels[label]) for n, run in enumerate(self.runs) if label in run.labels}
            numbers = {n: number for n, number in found.items() if number is not None}
            if len(numbers) == len(found):
                self.numbers[label] = numbers
        self.best: dict[str, float] = {}
        for metric in self.metrics:
            best = choose_best(metric, (run.best[metric] for run in self.runs if metric in run.best))
            if best is not None:
                self.best[metric] = best


def make_runs_page(title: str, runs: Sequence[Run], directory: Path | None = None) -> str:
    """Return an HTML page about runs, such as those of a sweep.

    The best value of a metric is the lowest if its name has a word such as "loss" or "error" (`metrics.choose_best`),
    else the highest. If no run has labels, the arguments and options that differ between
    the runs are shown instead. If there are two runs and both have a run directory, the page has the comparison of the
    two jobs.

    Args:
        title: Title of the page.
        runs: The runs, in the order of the table.
        directory: Where the page will be stored. Links to the report of each run are relative to it. None for no links.
    """
    found = RunSet(runs)
    colors = choose_colors(found)
    directories = [RunDirectory(Path(run.run_directory)) for run in runs if run.run_directory is not None]
    comparison = ""
    if len(runs) == len(directories) == 2:
        first, second = map(JobSummary, directories)
        comparison = compare(first, second, _name_apart(runs))
    curves = [] if comparison else [plot_curves(found, metric, colors) for metric in found.metrics]
    scatters = [plot_label(found, label, metric, colors) for metric in found.metrics[:1] for label in found.labels]
    problems = [] if comparison else [run for run in runs if run.reason and run.state != COMPLETED]
    body = render(
        "runs.html",
        title=title,
        counts=count_states(runs),
        columns=make_columns(found),
        rows=[make_row(found, number, directory) for number in range(len(runs))],
        words=", ".join(LOWER_IS_BETTER) if found.metrics else "",
        problems=[_describe_problem(run) for run in problems[:_MAX_REASONS]],
        num_more_problems=max(0, len(problems) - _MAX_REASONS),
        comparison=comparison,
        colors=colors,
        curves=[plot for plot in curves if plot is not None],
        scatters=[plot for plot in scatters if plot is not None],
    )
    script = read_template("runs.js") + (read_template("page.js") if comparison else "")
    return make_page(title, body, script, style=read_template("runs.css"))


def count_states(runs: Sequence[Run]) -> str:
    """Return the number of runs, and of those in each state, as "12 runs: 10 completed, 2 failed"."""
    counts = Counter(run.state for run in runs)
    parts = ", ".join(f"{count:,} {state.lower()}" for state, count in counts.most_common())
    number = f"{len(runs):,} run{'' if len(runs) == 1 else 's'}"
    return f"{number}: {parts}" if parts else number


def make_columns(found: RunSet) -> list[Column]:
    """Return the columns of the table."""
    metrics = [f"{_shorten(metric)}, {word}" for metric in found.metrics for word in ("last", "best")]
    return [
        Column("run"),
        *(Column(_shorten(label), label in found.numbers) for label in found.labels),
        Column("outcome (exit code)"),
        Column("steps", is_number=True),
        *(Column(metric, is_number=True) for metric in metrics),
        Column("duration", is_number=True),
    ]


def make_row(found: RunSet, number: int, directory: Path | None = None) -> list[Cell]:
    """Return the cells of the run with this number, in the order of the columns."""
    run = found.runs[number]
    cells = [_text_cell(run.name, run.name, _link(run, directory))]
    for label in found.labels:
        text = run.labels.get(label)
        if label in found.numbers:
            cells.append(Cell("–" if text is None else text.strip(), found.numbers[label].get(number)))
        else:
            cells.append(_text_cell("–" if text is None else text, text))
    outcome = run.state if run.exit_code is None else f"{run.state} ({run.exit_code})"
    cells.append(Cell(outcome, outcome, f"text {_STYLES.get(run.state, '')}".rstrip(), run.reason))
    cells.append(Cell("–" if run.steps is None else f"{run.steps:,}", run.steps))
    for metric in found.metrics:
        cells.append(_metric_cell(run.last.get(metric)))
        cells.append(_metric_cell(run.best.get(metric), found.best.get(metric)))
    cells.append(Cell("–" if run.seconds is None else format_seconds(run.seconds), run.seconds))
    return cells


def choose_colors(found: RunSet) -> Colors:
    """Return the colors of the runs.

    Of at most 12 runs each has its own color or dashes. The color of more runs shows the first label that varies:
    shades for numbers, colors for words. If no label varies, all runs have one color.
    """
    runs = found.runs
    if len(runs) <= _MAX_COLORED_RUNS:
        styles = [f"c{n % _NUM_COLORS}{' dashed' if n >= _NUM_COLORS else ''}" for n in range(len(runs))]
        return Colors(styles, [(style, _describe(run)) for style, run in zip(styles, runs, strict=True)])
    label = next((each for each in found.labels if len({run.labels.get(each) for run in runs}) > 1), None)
    if label is None:
        return Colors(["c0"] * len(runs), [])
    if label in found.numbers:
        numbers = found.numbers[label]
        shades = choose_shades(numbers.values())
        styles = [f"g{shades[numbers[n]]}" if n in numbers else "other" for n in range(len(runs))]
        legend = []
        for shade in dict.fromkeys(shades.values()):
            values = [value for value in shades if shades[value] == shade]
            words = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
            legend.append((f"g{shade}", words))
    else:
        counts = Counter(run.labels[label] for run in runs if label in run.labels)
        names = {word: f"c{n}" for n, (word, _) in enumerate(counts.most_common(_NUM_COLORS))}
        styles = [names[word] if (word := run.labels.get(label)) in names else "other" for run in runs]
        legend = [(style, _shorten(word)) for word, style in names.items()]
    if "other" in styles:
        legend.append(("other", "other or none"))
    return Colors(styles, legend, label)


def choose_shades(values: Iterable[float]) -> dict[float, int]:
    """Return the shade of each value, from 0 to 7, in increasing order of the values.

    Up to 8 different values have different shades, as far apart as possible. More values have shades by size, on a log
    scale if they span two decades or more.
    """
    found = sorted(set(values))
    if len(found) <= _NUM_SHADES:
        last = max(1, len(found) - 1)
        return {value: round(n * (_NUM_SHADES - 1) / last) for n, value in enumerate(found)}
    place = math.log10 if is_logarithmic(found) else float
    low, high = place(found[0]), place(found[-1])
    return {value: min(_NUM_SHADES - 1, int(_NUM_SHADES * (place(value) - low) / (high - low))) for value in found}


def plot_curves(found: RunSet, metric: str, colors: Colors) -> Plot | None:
    """Return the curves of a metric over steps, or None if no run reported it at two steps or more."""
    curves = {n: curve for n, run in enumerate(found.runs) if (curve := run.curves.get(metric))}
    if all(len(curve) < 2 for curve in curves.values()):
        return None
    x = make_axis([step for curve in curves.values() for step, _ in curve], has_margin=False, may_be_log=False)
    y = make_axis([value for curve in curves.values() for _, value in curve])
    marks = []
    for n, curve in curves.items():
        text = f"{_describe(found.runs[n])}; {_describe_metric(found.runs[n], metric)}"
        marks.append(Mark(n, colors.styles[n], draw_curve(curve, x, y), text))
    note = _describe_missing(len(found.runs) - len(curves), "steps of this metric")
    return Plot(_shorten(metric), x, y, "steps", marks, note=note)


def plot_label(found: RunSet, label: str, metric: str, colors: Colors) -> Plot | None:
    """Return a plot of the best value of a metric against a label.

    Return None for fewer than 3 runs with both, if the label does not vary, and for a label of more than 12 words.
    """
    runs = {n: run for n, run in enumerate(found.runs) if label in run.labels and metric in run.best}
    words = sorted({run.labels[label] for run in runs.values()})
    places = found.numbers.get(label)
    if len(runs) < _MIN_SCATTER_RUNS or len(words) < 2 or (places is None and len(words) > _MAX_WORDS):
        return None
    if places is not None:
        x = make_axis([places[n] for n in runs])
    else:
        x = make_word_axis([_shorten(word) for word in words])
        places = {n: words.index(run.labels[label]) + 0.5 for n, run in runs.items()}
    y = make_axis([run.best[metric] for run in runs.values()])
    marks = []
    for n, run in runs.items():
        text = f"{_describe(run)}; best {_shorten(metric)} {format_number(run.best[metric])}"
        marks.append(Mark(n, colors.styles[n], draw_curve([(places[n], run.best[metric])], x, y), text))
    metric, label = _shorten(metric), _shorten(label)
    note = _describe_missing(len(found.runs) - len(runs), f"a value of {metric} or {label}")
    return Plot(f"Best {metric} against {label}", x, y, label, marks, is_scatter=True, note=note)


def _text_cell(text: str, value: str | None, link: str = "") -> Cell:
    is_long = len(text) > _LONG_TEXT
    return Cell(_shorten(text), value, "text long" if is_long else "text", text if is_long else "", link)


def _describe_problem(run: Run) -> list[Cell]:
    """Return the cells of a run that has not completed: its name, state and reason."""
    return [
        _text_cell(run.name, run.name),
        _text_cell(run.state, run.state),
        Cell(_shorten(run.reason, _MAX_REASON), None),
    ]


def _metric_cell(value: float | None, top: float | None = None) -> Cell:
    if value is None:
        return Cell("–", None)
    if not math.isfinite(value):
        return Cell("NaN", None, "bad", "The last value was NaN or infinite.")
    return Cell(format_number(value), value, "top" if value == top else "", f"{value:.10g}")


def _link(run: Run, directory: Path | None) -> str:
    """Return a link to the report of a run that is relative to `directory`, or "" if the report does not exist."""
    if run.run_directory is None or directory is None:
        return ""
    report = Path(run.run_directory) / "report.html"
    return quote(os.path.relpath(report, directory)) if report.is_file() else ""


def _describe(run: Run) -> str:
    values = ", ".join(f"{_shorten(name)} {_shorten(value)}" for name, value in run.labels.items())
    return f"{_shorten(run.name)}: {values}" if values else _shorten(run.name)


def _describe_metric(run: Run, metric: str) -> str:
    last, best = run.last.get(metric), run.best.get(metric)
    parts = {"last": last, "best": best}
    return ", ".join(f"{word} {format_number(value)}" for word, value in parts.items() if value is not None)


def _describe_missing(count: int, what: str) -> str:
    if count == 1:
        return f"1 run without {what} is not drawn."
    return f"{count:,} runs without {what} are not drawn." if count else ""


def _name_apart(runs: Sequence[Run]) -> list[str]:
    """Return the names of runs, or the paths of their run directories if names are equal."""
    names = [run.name for run in runs]
    return names if len({*names}) == len(names) else [str(run.run_directory) for run in runs]


def _shorten(text: str, length: int = _MAX_TEXT) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
