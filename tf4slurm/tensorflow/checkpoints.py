"""`Checkpoints`: the variables of a training on disk, with its step counter, whatever is killed meanwhile."""

from __future__ import annotations

import logging
import operator
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = "ckpt"
_PS_GONE = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


class Checkpoints:
    """Saves variables and restores them; `run_steps` saves when it is time, when the job is to stop, and at the end.

        with strategy.scope():
            weights = tf.Variable(tf.zeros(1000))
            step = tf.Variable(0, dtype=tf.int64, trainable=False)
        checkpoints = Checkpoints("checkpoints", step=step, every_minutes=10, weights=weights)

    Only the chief has one; each ps writes the variables that it has, so chief and ps must see the directory under one
    name. Variables that are split over several ps may come back on another number of them.

    A kill at any moment, of chief or ps, never costs the checkpoint before: files get names that no finished checkpoint
    has, the file `checkpoint` names a new one only when it is complete, and older ones are deleted after that. What a
    killed save left is removed when the directory is opened again.

    Attributes:
        step: The counter of steps that goes with the variables.
        restored: The checkpoint that the variables come from, "directory/ckpt-STEP"; None if there was none.
        latest: The newest finished checkpoint; None if there is none.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: tf.Variable,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        **trackables: Any,
    ) -> None:
        """Restore the newest checkpoint of the directory that can be read, or leave the variables as they are.

        Args:
            directory: Where checkpoints are, or will be; nothing else should be there.
            step: A tf.Variable of an integer type that `run_steps` adds to; so not `optimizer.iterations`, to which the
                optimizer adds.
            every_steps: Save whenever the counter has reached a multiple of it; where the steps of a lost worker, run
                again, have carried the counter past one, at the next.
            every_minutes: Save so long after the last save.
            keep: How many checkpoints are kept, the newest ones.
            trackables: What to save, by name: variables, models, optimizers.

        Raises:
            CheckpointError: There are checkpoints but none can be read, or they are of other variables.
            TypeError, ValueError: An argument is not what it should be; nothing was done.
        """
        keep = to_index("keep", keep, at_least=1)
        every_steps = None if every_steps is None else to_index("every_steps", every_steps, at_least=1)
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes is {every_minutes!r}: expected a number greater than 0, or None.")
        if not step.dtype.is_integer:
            raise TypeError(f"step is {step!r}: expected a scalar tf.Variable of an integer type.")
        self.step = step
        self.latest: str | None = None
        self._directory = Path(directory)
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else 60 * every_minutes
        self._checkpoint = tf.train.Checkpoint(step=step, **trackables)
        _remove_unfinished(self._directory)
        self.restored = self.latest = self._restore()
        self._saved_step = int(step.numpy()) if self.restored else None
        self._saved_at = time.monotonic()
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(self._directory), keep, checkpoint_name=_NAME)

    def save(self) -> str:
        """Save now, unless the newest checkpoint is of the same step; return the path of the newest.

        Raises:
            CheckpointError: The ps write to a directory that the chief does not see, or it cannot be written.
        """
        step = int(self.step.numpy())
        if self.latest is None or step != self._saved_step:  # the same name again would destroy the finished one first
            try:
                self.latest = str(self._manager.save(checkpoint_number=step))
            except (
                tf.errors.NotFoundError,
                tf.errors.PermissionDeniedError,
                tf.errors.ResourceExhaustedError,
            ) as error:
                raise CheckpointError(
                    f"The checkpoint of step {step} could not be written to {self._directory}: {error.message} "
                    "Chief and ps must see the directory under the same name, on a file system that they share."
                ) from error
            self._saved_step = step
        self._saved_at = time.monotonic()
        return self.latest

    def is_due(self) -> bool:
        """Whether `every_minutes` have passed since the last save."""
        return self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds

    def next_due(self, step: int) -> int | None:
        """Return the next multiple of `every_steps` after this step; None without it."""
        return None if self._every_steps is None else step - step % self._every_steps + self._every_steps

    def _restore(self) -> str | None:
        candidates = _finished(self._directory)
        for path in candidates:
            try:
                status = self._checkpoint.restore(path)
                status.assert_existing_objects_matched()
            except _PS_GONE:
                raise
            except (tf.errors.OpError, IndexError) as error:  # IndexError is what its data give where they are cut off
                logger.warning("Checkpoint %s cannot be read, the one before is taken: %s", path, error)
                continue
            except (AssertionError, ValueError) as error:
                raise CheckpointError(
                    f"The checkpoint {path} is of other variables: {error} Give another directory, or the model that "
                    "was saved."
                ) from error
            return path
        if candidates:
            raise CheckpointError(
                f"None of the checkpoints in {self._directory} can be read: {', '.join(candidates)}. To begin anew, "
                "remove them."
            )
        return None


def to_index(name: str, value: Any, *, at_least: int) -> int:
    """Return an argument as an int, from whatever type of whole numbers.

    Raises:
        TypeError: It is not of such a type.
        ValueError: It is less than `at_least`.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected an integer.") from error
    if number < at_least:
        raise ValueError(f"{name} is {number}: expected at least {at_least}.")
    return number


def _finished(directory: Path) -> list[str]:
    """Return the checkpoints that the file `checkpoint` names, newest first; without it, all that look complete."""
    try:
        state = tf.train.get_checkpoint_state(str(directory))
    except ValueError:  # it is empty, as after a power failure; TensorFlow would not go on with it
        (directory / "checkpoint").unlink()
        state = None
    if state is not None:
        return list(reversed(state.all_model_checkpoint_paths))
    numbers = [int(path.stem.rpartition("-")[2]) for path in directory.glob(f"{_NAME}-*.index")]
    return [str(directory / f"{_NAME}-{number}") for number in sorted(numbers, reverse=True)]


def _remove_unfinished(directory: Path) -> None:
    """Remove what saves that were killed have left: parts in directories of their own, and parts without an index.

    TensorFlow writes an index under its final name. So the first one may be cut off, when no file names another yet.
    """
    if not (directory / "checkpoint").exists():
        for index in directory.glob(f"{_NAME}-*.index"):
            if re.fullmatch(_NAME + r"-\d+", index.stem) and _is_cut_off(index):
                index.unlink()
    for path in directory.glob(f"{_NAME}-*"):
        found = re.fullmatch(_NAME + r"-\d+(?:_temp|(\.data-\d+-of-\d+)(?:\.tempstate\d+)?)", path.name)
        if found is None:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif found[1] and not path.with_name(path.name.partition(".")[0] + ".index").exists():
            path.unlink(missing_ok=True)


def _is_cut_off(index: Path) -> bool:
    try:
        tf.train.load_checkpoint(str(index.with_suffix("")))
    except tf.errors.OpError as error:
        return "sstable" in str(error.message)  # "too short to be an sstable", or it has not the end of one
    return False
