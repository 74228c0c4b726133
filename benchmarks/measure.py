"""Figures with their spread and their bound, and the machine they come from."""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Figure:
    """One measured quantity.

    Attributes:
        values: The measured values, in `unit`.
        bound: Bound of the median, such as "< 0.5"; empty for none.
        beside: What the value is compared with.
        at: Number of tasks. Figures with the same `what` at several numbers form a curve.
    """

    what: str
    unit: str
    values: tuple[float, ...]
    bound: str = ""
    beside: str = ""
    at: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def outcome(self) -> str:
        """Whether the median keeps the bound: "met", "not met", or "no bound"."""
        if not self.bound:
            return "no bound"
        sign, number = self.bound.split()
        return "met" if _COMPARE[sign](self.median, float(number)) else "not met"

    @property
    def name(self) -> str:
        """The quantity, with the number of tasks."""
        return self.what if self.at is None else f"{self.at:,} tasks: {self.what}"

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "at": self.at,
            "beside": self.beside,
            "unit": self.unit,
            "median": self.median,
            "low": min(self.values),
            "high": max(self.values),
            "values": list(self.values),
            "bound": self.bound,
            "outcome": self.outcome,
        }


def ratio(
    what: str, ours: Sequence[float], theirs: Sequence[float], bound: str, *, beside: str = "", at: int | None = None
) -> Figure:
    """Return ours divided by theirs, pair by pair: the two of a pair ran one after the other."""
    return Figure(what, "x", tuple(a / b for a, b in zip(ours, theirs, strict=True)), bound, beside, at)


def machine() -> dict[str, Any]:
    """Return the facts that the figures depend on: processors, load, memory, versions."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kilobytes = re.search(r"^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processors": os.cpu_count(),
        "model": model[1] if model else platform.machine(),
        "memory_gigabytes": round(int(kilobytes[1]) / 1e6, 1) if kilobytes else None,
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tf4slurm": importlib.metadata.version("tf4slurm"),
        "tensorflow": _version_of("tensorflow", "tensorflow-cpu"),
    }


def _version_of(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
