"""Comparison of the figures with those that were stored before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import Figure
from benchmarks.table import number

_SAME = ("processors", "model", "memory_gigabytes")
"""Facts that are equal for two runs on the same machine."""

Spreads = dict[tuple[str, int | None], tuple[float, float]]


class EarlierRun(NamedTuple):
    """Date of an earlier run, and the minimum and maximum of each quantity that was measured more than once."""

    date: str
    spreads: Spreads


def read_earlier(file: Path, facts: Mapping[str, Any]) -> EarlierRun | None:
    """Return the run stored in `file`, if its machine had the same facts; else None."""
    if not file.exists():
        return None
    content = json.loads(file.read_text())
    if any(content["machine"][name] != facts[name] for name in _SAME):
        return None
    repeated = [figure for figure in content["figures"] if len(figure["values"]) > 1]
    return EarlierRun(
        content["machine"]["date"],
        {(figure["what"], figure["at"]): (figure["low"], figure["high"]) for figure in repeated},
    )


def agreement(figures: Sequence[Figure], earlier: EarlierRun) -> str:
    """Return a text with the number of quantities whose spreads overlap in both runs, and the names of the others."""
    both = [each for each in figures if len(each.values) > 1 and (each.what, each.at) in earlier.spreads]
    inside, apart = 0, []
    for figure in both:
        low, high = earlier.spreads[figure.what, figure.at]
        inside += low <= figure.median <= high
        if min(figure.values) > high or max(figure.values) < low:
            apart.append(f"{figure.name} ({number(figure.median)}, was {number(low)} to {number(high)})")
    text = (
        f"Beside the run of {earlier.date} on such a machine, of {len(both)} quantities with a spread: the spreads "
        f"of {len(both) - len(apart)} overlap, {inside} medians lie within the earlier spread."
    )
    return text + (f" Apart: {'; '.join(apart)}." if apart else "")
