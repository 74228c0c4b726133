"""SVG elements, scales and event marks for charts. Colors are CSS classes of page.css."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from tf4slurm.reports.formatting import make_visible

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
