"""Draw curves and scatter plots as SVG paths, with axes whose positions are percent of the plot's size.

Such a plot needs no script, and its text keeps its size when the plot is narrow. `charts.py` is for few lines with
values at the pointer; this module is for hundreds of lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SIZE = 1000
"""Width and height of the coordinates in a plot's SVG paths."""

_LOG_FACTOR = 100.0  # highest / lowest value from which an axis of positive values is logarithmic
_LEAST_LOG = 1e-300  # a smaller value has no logarithmic axis
_DIGITS = (6, 9, 12, 17)  # of the labels of an axis: the first with which they differ
_MAX_INTERVALS = 5
_MARGIN = 0.04  # of the range, on both sides


@dataclass(frozen=True)
class Axis:
    """The axis of a plot, from `low` to `high`.

    Attributes:
        is_log: Whether the axis is logarithmic.
        ticks: The position in percent of the axis, and the label, of each tick.
    """

    low: float
    high: float
    is_log: bool = False
    ticks: Sequence[tuple[float, str]] = field(default=())

    def percent(self, value: float) -> float:
        """Return the position of a value in percent of the axis."""
        low, high, at = (map(math.log10, (self.low, self.high, value))) if self.is_log else (self.low, self.high, value)
        return 100 * (at - low) / (high - low)


@dataclass(frozen=True)
class Mark:
    """A run's curve or dot.

    Attributes:
        run: Number of the run, from 0.
        style: CSS classes that select its color and dashes.
        path: Its SVG path.
        text: The run and its values, which the page shows at the pointer.
    """

    run: int
    style: str
    path: str
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot with the marks of many runs.

    Attributes:
        title: Title, such as a metric.
        x, y: The axes.
        x_name: What the x axis shows.
        marks: The marks, those of later runs above those of earlier ones.
        is_scatter: Whether the marks are dots.
        note: What the plot leaves out, in sentences.
    """

    title: str
    x: Axis
    y: Axis
    x_name: str
    marks: Sequence[Mark]
    is_scatter: bool = False
    note: str = ""

    @property
    def scales(self) -> str:
        """The name of the x axis, if the title does not have it, and which axes are logarithmic, in words."""
        log = [name for name, axis in (("x", self.x), ("y", self.y)) if axis.is_log]
        scale = [f"log scale of {' and '.join(log)}"] if log else []
        return ", ".join(scale if self.is_scatter else [self.x_name, *scale])

    @property
    def description(self) -> str:
        """What the plot shows, for readers who cannot see it."""
        what = self.title if self.is_scatter else f"{self.title} over {self.x_name}"
        extent = f"from {_label(self.y.low, 3)} to {_label(self.y.high, 3)}"
        return f"{what}, {len(self.marks):,} runs, {extent}. The table has the values. The arrow keys name the runs."


def is_logarithmic(values: Iterable[float]) -> bool:
    """Return whether an axis for these values is logarithmic: they are positive and span two decades or more."""
    found = [*values]
    return bool(found) and min(found) > _LEAST_LOG and max(found) >= _LOG_FACTOR * min(found) * (1 - 1e-9)


def make_axis(values: Sequence[float], *, has_margin: bool = True, may_be_log: bool = True) -> Axis:
    """Return an axis that shows the values, at least one.

    Args:
        values: The values.
        has_margin: Whether the axis is 4 % longer on both sides.
        may_be_log: Whether the axis is logarithmic if `is_logarithmic` says so for the values.
    """
    low, high = min(values), max(values)
    is_log = may_be_log and is_logarithmic(values)
    if is_log:
        low, high = math.log10(low), math.log10(high)
    margin = _MARGIN * (high - low) if has_margin else 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(low) / 10 or 1.0
    low, high = low - margin, high + margin
    if is_log:
        low, high = 10**low, 10**high
    axis = Axis(low, high, is_log)
    found = _find_log_ticks(low, high) if is_log else _find_ticks(low, high)
    candidates = [[_label(value, digits) for value in found] for digits in _DIGITS]
    labels = next((each for each in candidates if len({*each}) == len(each)), candidates[-1])
    places = [round(axis.percent(value), 2) for value in found]
    return Axis(low, high, is_log, [*zip(places, labels, strict=True)])


def make_word_axis(words: Sequence[str]) -> Axis:
    """Return an axis with a tick for each word. The word number n, from 0, is at the value n + 0.5."""
    return Axis(0.0, len(words), ticks=[(round(100 * (n + 0.5) / len(words), 2), word) for n, word in enumerate(words)])


def draw_curve(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    """Return the SVG path of a curve, or of a dot if it has one point."""
    places = [f"{_place(x, at)} {SIZE - _place(y, value)}" for at, value in points]
    return f"M{'L'.join(places)}" if len(places) > 1 else f"M{places[0]}h0"


def _place(axis: Axis, value: float) -> int:
    return round(axis.percent(value) * SIZE / 100)


def _find_ticks(low: float, high: float) -> list[float]:
    """Return at most 6 round values from `low` to `high`."""
    raw = (high - low) / _MAX_INTERVALS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if unit * factor >= raw * (1 - 1e-9))
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(n * step, digits) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _find_log_ticks(low: float, high: float) -> list[float]:
    """Return at most 6 powers of ten from `low` to `high`, which are at least two decades apart."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    stride = -(-(last - first + 1) // (_MAX_INTERVALS + 1))
    return [10.0**power for power in range(first, last + 1, stride)]


def _label(value: float, digits: int = _DIGITS[0]) -> str:
    """Return a number as text, with at most this many significant digits."""
    if value and (abs(value) >= 1e9 or abs(value) < 1e-4):
        return f"{value:.{digits}g}"
    return f"{float(f'{value:.{digits}g}'):,.15g}"
