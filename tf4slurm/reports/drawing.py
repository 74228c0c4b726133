"""Marks on paper: what the drawings of a report are made of, as SVG text. Colours are classes: see page.css."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def escape(text: object) -> str:
    """Return any text as HTML or SVG shows it: no markup; what cannot be seen, or turns text around, as a box."""
    return html.escape(_UNSEEN.sub("\ufffd", str(text)), quote=True)


@dataclass(frozen=True)
class Scale:
    """Turns values from `low` to `high` into positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def svg(width: float, height: float, label: str, parts: Sequence[str], extra: str = "") -> str:
    """Return a drawing; `label` is what a screen reader says of it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"{extra}>'
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, words: object, style: str = "", anchor: str = "start") -> str:
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}" class="{style}"{where}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


def box(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}">{inside}</rect>'


def path(points: Sequence[tuple[float, float]], *, closed: bool = False) -> str:
    """Return the "d" of a path through these points."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + ("Z" if closed else "")


def symbol(x: float, y: float, kind: str, title: str) -> str:
    """Return the mark of an event: a shape for each kind, so that colour is not all that tells them apart."""
    shapes = {
        "cross": f"M{x - 4:g} {y - 4:g}L{x + 4:g} {y + 4:g}M{x - 4:g} {y + 4:g}L{x + 4:g} {y - 4:g}",
        "turn": f"M{x - 3.5:g} {y - 5:g}L{x + 4.5:g} {y:g}L{x - 3.5:g} {y + 5:g}Z",
        "gap": f"M{x:g} {y - 5:g}L{x + 4:g} {y:g}L{x:g} {y + 5:g}L{x - 4:g} {y:g}Z",
        "end": f"M{x - 3:g} {y - 3:g}h6v6h-6Z",
    }
    return f'<path class="mark {kind}" d="{shapes[kind]}"><title>{escape(title)}</title></path>'
