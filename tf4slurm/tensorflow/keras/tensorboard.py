"""Let Keras's TensorBoard callback count steps, although `fit` calls its batch methods for groups of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

_PRIVATE_NAMES = (
    *("_should_trace", "_start_batch", "_stop_batch", "_start_trace", "_stop_trace", "_is_tracing"),
    "_global_train_batch",
)
"""What this module uses of the callback. A version of Keras without them counts groups."""


class TensorBoardSteps:
    """Starts and stops the profiles of the TensorBoard callbacks (`profile_batch`), and sets their numbers of steps.

    Keras counts the steps of one call of `fit`, from 1.
    """

    def __init__(self, callbacks: Sequence[Any], first_step: int) -> None:
        """Take over the profiles of the TensorBoard callbacks among these; `first_step` is the counter now."""
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
        """Return `target`, and before it the later steps at which a profile starts or stops: no other may run then."""
        found = {self._first_step + at for each in self._profiled for at in (each._start_batch - 1, each._stop_batch)}
        return [*sorted(at for at in found if step < at < target), target]

    def profile(self, step: int) -> None:
        """Start and stop profiles after this step."""
        done = step - self._first_step
        for each in self._profiled:
            if each._is_tracing and done >= each._stop_batch and done > self._started_at[id(each)]:
                each._stop_trace()
        for each in [each for each in self._waiting if done >= each._start_batch - 1]:
            self._waiting.remove(each)
            self._started_at[id(each)] = done
            each._start_trace()

    def count(self, before: int, step: int) -> None:
        """Set the counts of the callbacks before their batch methods are called for the steps after `before`.

        A callback that writes every so many steps (`update_freq`) writes once for a group in which that step is.
        """
        before, step = before - self._first_step, step - self._first_step
        for each in self._boards:
            due = step - step % each.update_freq if isinstance(each.update_freq, int) else 0
            each._global_train_batch = (due if due > before else step) - 1  # on_train_batch_begin adds 1

    def close(self) -> None:
        """Give the profiles back to the callbacks, which may be used again."""
        for each in self._profiled:
            each._should_trace = True
