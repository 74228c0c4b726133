"""Figures with their spread, and the machine they come from."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured quantity: all its values, in `unit`, and the bound that was asked for."""

    what: str
    unit: str
    values: tuple[float, ...]
    bound: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        spread = f"{self.median:9.3f} {self.unit:4} ({low:.3f} to {high:.3f}, n={len(self.values)})"
        return f"{self.what:72} {spread:48} asked: {self.bound}"

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "values": list(self.values),
            "bound": self.bound,
        }


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processors, load, versions."""
    return {
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], bound: str) -> Figure:
    """Return ours over theirs, pair by pair: the two of a pair ran one after the other."""
    return Figure(what, "x", tuple(a / b for a, b in zip(ours, theirs, strict=True)), bound)
