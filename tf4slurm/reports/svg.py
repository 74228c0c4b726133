"""SVG elements, scales, axis ticks and event marks for charts. Colors are CSS classes of page.css."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from tf4slurm.jobs.formatting import make_visible

_TIME_STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
MARKS = {
    "cross": "M-4 -4L4 4M-4 4L4 -4",
    "triangle": "M-3.5 -5L4.5 0L-3.5 5Z",
    "diamond": "M0 -5L4 0L0 5L-4 0Z",
    "square": "M-3 -3h6v6h-6Z",
}
"""Outlines of marks around 0, 0; shapes differ because some readers cannot tell colors apart."""


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to positions from `start` to `end`; values outside are clipped."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Drawing:
    """The content of an SVG and its size; screen readers read `label`."""

    width: float
    height: float
    label: str
    parts: Sequence[Markup]

    def to_svg(self, **attributes: object) -> Markup:
        box = f"0 0 {self.width:g} {self.height:g}"
        return element("svg", *self.parts, viewBox=box, role="img", aria_label=self.label, **attributes)


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Return an element with escaped text; `class_` and `aria_label` are the attributes class and aria-label."""
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escape(value)}"' for name, value in attributes.items() if value != ""
    )
    if not content:
        return Markup(f"<{tag}{pairs}/>")
    return Markup(f"<{tag}{pairs}>{''.join(map(_escape, content))}</{tag}>")


def text(x: float, y: float, words: object, style: str = "", anchor: str = "") -> Markup:
    """Return a text element."""
    return element("text", words, x=x, y=y, class_=style, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    """Return a straight line."""
    return element("path", class_=style, d=outline([(x1, y1), (x2, y2)]))


def outline(points: Sequence[tuple[float, float]], *, is_closed: bool = False) -> str:
    """Return the attribute "d" of a path through these points."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + ("Z" if is_closed else "")


def mark(x: float, y: float, kind: str, title: str) -> Markup:
    """Return one of `MARKS`, with a title that browsers show as a tooltip."""
    where = f"translate({x:g} {y:g})"
    return element("path", element("title", title), class_=f"mark {kind}", d=MARKS[kind], transform=where)


def _escape(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return escape(f"{value:g}" if isinstance(value, float) else make_visible(value))


def number_ticks(low: float, high: float, limit: int) -> list[float]:
    """Return at most about `limit` round numbers from `low` to `high` for an axis of numbers."""
    return _multiples(low, high, _round_up((high - low) / max(limit - 1, 1), (1, 2, 2.5, 5, 10)))


def time_ticks(low: float, high: float, limit: int) -> list[tuple[float, str]]:
    """Return at most about `limit` round times in seconds for an axis of time, with their labels."""
    raw = (high - low) / max(limit - 1, 1)
    if raw <= 10:
        step = _round_up(raw, (1, 2, 5, 10))
    elif raw <= 86400:
        step = next(each for each in _TIME_STEPS if raw <= each)
    else:
        step = 86400 * _round_up(raw / 86400, (1, 2, 5, 10))
    return [(seconds, _format_time(seconds, step)) for seconds in _multiples(low, high, step)]


def _format_time(seconds: float, step: float) -> str:
    """Return a time on an axis whose ticks are `step` seconds apart: "90 s", "2 min", "2:00 h" or "3 d"."""
    if step >= 86400:
        return f"{seconds / 86400:g} d"
    if step >= 3600 or abs(seconds) >= 7200:
        sign, whole = ("-" if seconds < 0 else ""), abs(round(seconds))
        return f"{sign}{whole // 3600}:{whole % 3600 // 60:02} h"
    if step >= 60:
        return f"{seconds / 60:g} min"
    return f"{seconds:g} s"


def _round_up(raw: float, leading_digits: tuple[float, ...]) -> float:
    """Return the smallest of `leading_digits` times a power of ten that is at least `raw`; 1 if `raw` <= 0."""
    if raw <= 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(digit for digit in (*leading_digits, 100.0) if digit * power >= raw * (1 - 1e-9)) * power


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, min(last, first + 100) + 1)]
