"""Let Keras's TensorBoard callback count steps, although `fit` calls its batch methods for groups of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

_PRIVATE_NAMES = (
    *("_should_trace", "_start_batch", "_stop_batch", "_start_trace", "_stop_trace", "_is_tracing"),
    "_global_train_batch",
)
"""Attributes of the callback that this module uses.

If a version of Keras lacks one, the callback counts groups of steps instead of steps.
"""


class TensorBoardSteps:
    """Starts and stops the profiles (`profile_batch`) of the TensorBoard callbacks, and sets their step counts.

    Each call of `fit` counts its steps from 1, as in Keras.
    """

    def __init__(self, callbacks: Sequence[Any], first_step: int) -> None:
        """Take over the profiles of the TensorBoard callbacks in `callbacks`. `first_step` is the step counter now."""
        self._first_step = first_step
        self._boards = [
            each
            for each in callbacks
            if isinstance(each, keras.callbacks.TensorBoard) and all(hasattr(each, name) for name in _PRIVATE_NAMES)
        ]
        self._waiting = [each for each in self._boards if each._should_trace]
        self._profiled = list(self._waiting)
        self._started_at: dict[int, int] = {}  # by the id of the callback
        for each in self._profiled:
            each._should_trace = False

    def pauses(self, step: int, target: int) -> list[int]:
        """Return the steps between `step` and `target` at which a profile starts or stops, and then `target`.

        Training pauses there, because no step may run while a profile starts or stops.
        """
        found = {self._first_step + at for each in self._profiled for at in (each._start_batch - 1, each._stop_batch)}
        return [*sorted(at for at in found if step < at < target), target]

    def profile(self, step: int) -> None:
        """Start and stop the profiles that are due after this step."""
        done = step - self._first_step
        for each in self._profiled:
            if each._is_tracing and done >= each._stop_batch and done > self._started_at[id(each)]:
                each._stop_trace()
        for each in [each for each in self._waiting if done >= each._start_batch - 1]:
            self._waiting.remove(each)
            self._started_at[id(each)] = done
            each._start_trace()

    def count(self, before: int, step: int) -> None:
        """Set the step counts of the callbacks before their batch methods are called for a group of steps.

        The group begins after the step `before` and ends with `step`. A callback that writes every `update_freq` steps
        writes once for a group that contains such a step.
        """
        before, step = before - self._first_step, step - self._first_step
        for each in self._boards:
            due = step - step % each.update_freq if isinstance(each.update_freq, int) else 0
            each._global_train_batch = (due if due > before else step) - 1  # on_train_batch_begin adds 1

    def close(self) -> None:
        """Let the callbacks start and stop their profiles themselves again, because other trainings may use them."""
        for each in self._profiled:
            each._should_trace = True
