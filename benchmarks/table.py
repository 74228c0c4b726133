"""Figures as one table: quantity, peer, bound, measured values, and outcome."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Figure

_LARGE = 100  # tasks; figures with fewer and without a bound are only in the curve of their quantity
_HEADS = ("what", "beside", "asked", "median", "spread", "runs", "outcome")


def text_table(figures: Sequence[Figure]) -> str:
    """Return the table for a terminal, each column as wide as its widest cell."""
    rows = [_HEADS, *map(_cells, _told(figures))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown_table(figures: Sequence[Figure]) -> str:
    """Return the table for a page; missed bounds are bold."""
    rows = [_HEADS, ("---",) * len(_HEADS)]
    for figure in _told(figures):
        *others, outcome = _cells(figure)
        rows.append((*others, f"**{outcome}**" if outcome == "not met" else outcome))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary(figures: Sequence[Figure]) -> str:
    """Return a sentence with the number of met bounds."""
    outcomes = [figure.outcome for figure in figures]
    met, missed = outcomes.count("met"), outcomes.count("not met")
    return f"{met} of {met + missed} bounds are met."


def number(value: float) -> str:
    """Return a value with about three digits."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    if size < 0.01:
        return f"{value:.2g}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def _told(figures: Sequence[Figure]) -> list[Figure]:
    curves = {figure.what for figure in figures if figure.at is not None and figure.at >= _LARGE}
    small = [each for each in figures if each.at is not None and each.at < _LARGE and each.what in curves]
    return [figure for figure in figures if figure.bound or figure not in small]


def _cells(figure: Figure) -> tuple[str, ...]:
    low, high = min(figure.values), max(figure.values)
    return (
        figure.name,
        figure.beside,
        figure.bound,
        f"{number(figure.median)} {figure.unit}",
        f"{number(low)} to {number(high)}" if len(figure.values) > 1 else "",
        str(len(figure.values)),
        figure.outcome,
    )
