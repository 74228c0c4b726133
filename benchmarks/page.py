"""The results as files: figures.json, and a page with the table and curves over the number of tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure
from benchmarks.table import markdown_table, number, summary

RESULTS = Path(__file__).with_name("results")
FIGURES = RESULTS / "figures.json"
Curves = dict[str, list[tuple[int, Figure]]]
_FEWEST_SIZES = 3
_PLOTS = {
    "rendezvous": ("seconds", ("rendezvous", "rendezvous, JAX", "rendezvous, torch")),
    "barrier": ("seconds", ("barrier", "barrier, JAX", "barrier, torch")),
    "time": (
        "seconds",
        (
            "the service's processor time, rendezvous to told to start",
            "a task decodes the cluster spec, four at a time",
            "proved to told to start",
            "restart (attempt 2): a failure to all told to start again",
            "outcome: a task's end to all others informed",
        ),
    ),
    "memory": ("megabytes", ("memory of the service",)),
    "messages": ("messages", ("messages, rendezvous to told to start",)),
    "bytes": (
        "kilobytes",
        (
            "bytes of messages, rendezvous to told to start",
            "the cluster spec's message",
            "the same without compression",
        ),
    ),
    "steady": ("kilobytes a second", ("bytes on the network in steady state",)),
}
"""Plots: name, label of the axis, and the quantities drawn together."""


def write_results(figures: Sequence[Figure], failed: Sequence[str], facts: dict[str, Any], comparison: str) -> None:
    """Write figures.json, the plots and README.md; `facts` describe the machine, `comparison` is a text."""
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": facts, "figures": [figure.to_json() for figure in figures], "not_measured": list(failed)}
    FIGURES.write_text(json.dumps(content, indent=1) + "\n")
    plots = [name for name, (label, names) in _PLOTS.items() if _draw(curves_of(figures, names), label, name)]
    (RESULTS / "README.md").write_text(page_of(figures, facts, failed, plots, comparison))


def curves_of(figures: Sequence[Figure], names: Sequence[str]) -> Curves:
    """Return the figures with these names that were measured at several numbers of tasks, sorted by that number."""
    curves: Curves = {}
    for what in names:
        points = sorted({f.at: f for f in figures if f.what == what and f.at is not None}.items())
        if len(points) >= _FEWEST_SIZES:
            curves[what] = points
    return curves


def page_of(
    figures: Sequence[Figure], facts: dict[str, Any], failed: Sequence[str], plots: Sequence[str], comparison: str = ""
) -> str:
    """Return the page in Markdown."""
    lines = ["# Figures", "", "Made by `make bench`; do not edit. Medians of the runs, from the least to the most.", ""]
    lines += [f"* {name.replace('_', ' ')}: {_fact(value)}" for name, value in facts.items()]
    lines += ["", summary(figures), ""]
    if failed:
        lines += [f"Not measured, for it failed or was given up: {', '.join(failed)}.", ""]
    if comparison:
        lines += [comparison, ""]
    lines += [markdown_table(figures), ""]
    if plots:
        lines += ["## How it grows", "", "Both axes logarithmic; the dotted line grows as the number of tasks.", ""]
        lines += [f"![{name} against the number of tasks](growth-{name}.svg)" for name in plots]
    return "\n".join(lines) + "\n"


def _fact(value: object) -> str:
    return ", ".join(number(each) for each in value) if isinstance(value, (list, tuple)) else str(value)


def _draw(curves: Curves, label: str, name: str) -> bool:
    """Draw the curves as growth-NAME.svg; return whether there were any."""
    if not curves:
        return False
    import matplotlib  # type: ignore[import-not-found,unused-ignore]  # in the extra [bench] only

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "tf4slurm", "font.size": 10})
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for what, points in curves.items():
        sizes = [at for at, _ in points]
        medians = [each.median for _, each in points]
        axes.plot(sizes, medians, marker="o", markersize=4, label=what)
        axes.fill_between(
            sizes, [min(e.values) for _, e in points], [max(e.values) for _, e in points], alpha=0.15, linewidth=0
        )
    _draw_line_of_n(axes, curves)
    axes.set(xscale="log", yscale="log", xlabel="tasks", ylabel=label)
    sizes = sorted({at for points in curves.values() for at, _ in points})
    axes.set_xticks(sizes, [f"{at:,}" for at in sizes])
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(RESULTS / f"growth-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return True


def _draw_line_of_n(axes: Any, curves: Curves) -> None:
    """Draw linear growth, through the last point of the highest curve."""
    points = max(curves.values(), key=lambda points: points[-1][1].median)
    first, last = points[0][0], points[-1][0]
    top = points[-1][1].median
    axes.plot([first, last], [top * first / last, top], color="grey", linestyle=":", label="as the tasks", zorder=0)
