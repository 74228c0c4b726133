"""Compare the results of a case in one mode with those of Keras in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.tensorflow.reference.case import Case, Counts, Differs, Refused, Same, SameWeights

Results = Mapping[str, Any]
_COMPARED = ("history", "weights", "optimizer", "evaluated", "predicted")


def check(case: Case, expected: Same, alone: Results, found: Results, is_first: bool = True) -> list[str]:
    """Return what is not as expected; `is_first` leaves out files that only the first of the workers in step writes."""
    if "error" in alone:
        return [f"Keras in one process raises {alone['error']}"]
    if isinstance(expected, Refused):
        error = found.get("error", "no error")
        return [] if expected.error in error else [f"expected an error with {expected.error!r}, found: {error}"]
    if "error" in found:
        return [str(found["error"])]
    wrong = list(_differences(_counts(alone), _counts(found), 0.0, "counts"))
    if isinstance(expected, Counts):
        return wrong
    names: tuple[str, ...] = (*_COMPARED, "read") if is_first else _COMPARED
    if isinstance(expected, SameWeights):
        names = ("weights", "optimizer")
    different = [
        line for name in names for line in _differences(alone.get(name), found.get(name), case.tolerance, name)
    ]  # fmt: skip
    if isinstance(expected, Differs):
        return wrong if different else [*wrong, "expected a difference, found none: let the case say SAME"]
    return wrong + different


def _counts(results: Results) -> dict[str, Any]:
    """Return what is exact in any order of the steps."""
    return {
        "iterations": results["iterations"],
        "epochs": {name: len(values) for name, values in results["history"].items()},
        "evaluated": sorted(results.get("evaluated", ())),
        "weights": [np.shape(each) for each in results["weights"]],
    }


def _differences(one: Any, other: Any, tolerance: float, path: str) -> Iterator[str]:
    """Yield a line for each number, name or length that is not the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            yield f"{path}: {sorted(one)} in one process, {sorted(other)} here"
        for name in one.keys() & other.keys():
            yield from _differences(one[name], other[name], tolerance, f"{path} {name}")
    elif _is_nested(one) and _is_nested(other) and len(one) == len(other):
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _differences(first, second, tolerance, f"{path} {index}")
    elif not _is_close(one, other, tolerance):
        yield f"{path}: {one} in one process, {other} here"


def _is_nested(value: Any) -> bool:
    """Return whether a list is no array of numbers."""
    return isinstance(value, list) and any(isinstance(each, (list, dict, str)) for each in value)


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    try:
        first, second = np.asarray(one, "float64"), np.asarray(other, "float64")
    except (TypeError, ValueError):
        return bool(one == other)
    return first.shape == second.shape and np.allclose(first, second, tolerance, tolerance, equal_nan=True)
