"""What a case of the reference suite is: a model with its data, and how each mode differs from one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Same:
    """All results are those of one process, up to the tolerance."""

    words: str = "same"


@dataclass(frozen=True)
class Counts(Same):
    """Steps, epochs and names of the results are those of one process; numbers depend on the order of the steps."""

    words: str = "exact counts"


@dataclass(frozen=True)
class SameWeights(Same):
    """The weights are those of one process too, because the gradients do not depend on the order of the steps."""

    words: str = "same weights, exact counts"


@dataclass(frozen=True)
class Refused(Same):
    """An error is raised whose message contains `error`."""

    words: str = "refused"
    error: str = ""


@dataclass(frozen=True)
class Differs(Same):
    """The counts are those of one process, and other results are not: `words` say how."""


SAME, COUNTS, SAME_WEIGHTS = Same(), Counts(), SameWeights()


def refused(error: str) -> Refused:
    return Refused(error=error)


def differs(words: str) -> Differs:
    return Differs(words=words)


@dataclass(frozen=True)
class Case:
    """A model that is trained in each mode.

    Attributes:
        name: Words of Keras that a user would search for.
        make: Returns the compiled model; its argument is the module `models`, since this module must not import Keras.
        data: The name of a function of `models` that returns the dataset of an epoch.
        options: Further arguments of `fit`.
        callbacks: Returns the callbacks; its argument is `models`.
        read: Returns further results to compare, from `models` and the trained model.
        tolerance: Relative and absolute error of float results.
        is_quick: Belongs to the fifth that `make test` runs.
    """

    name: str
    make: Callable[[Any], Any]
    data: str = "numbers"
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Any], list[Any]] = lambda models: []
    read: Callable[[Any, Any], Any] | None = None
    tolerance: float = 1e-4
    ps: Same = SAME
    in_step: Same = SAME
    asynchronous: Same = COUNTS
    is_quick: bool = False
