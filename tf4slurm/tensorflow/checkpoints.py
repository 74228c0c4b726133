"""Save, restore and evaluate checkpoints of the training state."""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf4slurm.errors import CheckpointError, RendezvousConnectionError
from tf4slurm.jobs.formatting import as_sentence
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.scripts.data_shards import DataShards
from tf4slurm.scripts.functions import report, should_stop
from tf4slurm.server_dictionary import current_server_dictionary

logger = logging.getLogger(__name__)

_NAME = "ckpt"
_INDEX_END = 0xDB4775248B80FB57.to_bytes(8, "little")
"""The last 8 bytes of a complete index file, which is a table of LevelDB.

Source: https://github.com/google/leveldb/blob/main/doc/table_format.md.
"""

_CANNOT_WRITE = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError)
_PS_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


def _advice(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.NotFoundError):
        return "Chief and ps must see the directory at the same path, on a shared file system."
    if isinstance(error, tf.errors.PermissionDeniedError):
        return "Give a directory on a shared file system, in which this user may write on the hosts of chief and ps."
    return "Make room on its file system: it, or this user's quota of it, is full."


def _is_no_retracing_of_a_save(record: logging.LogRecord) -> bool:
    """Return whether to log a record. Only TensorFlow's warning that saves on a ps trace a function again is hidden."""
    return "tf_function_save" not in record.getMessage()


class _PositionState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """Saves the position of data shards in a checkpoint, and restores it."""

    def __init__(self, shards: DataShards) -> None:
        self._shards = shards
        self._position = ""

    def fetch(self) -> None:
        """Ask the launcher for the position of the shards. Call this before the variables are saved.

        The saved variables then contain the training of each shard that is done at this position.
        """
        self._position = json.dumps(self._shards.position())

    def serialize(self) -> str:
        return self._position

    def deserialize(self, string_value: bytes) -> None:
        self._shards.restore(json.loads(string_value))


class Checkpoints:
    """Saves and restores variables and a step counter.

        checkpoints = Checkpoints("checkpoints", step=step, every_minutes=10, weights=weights)

    `run_steps` saves when `every_steps` or `every_minutes` requires it, on a stop request, and at the end.

    In a job with ps, only the chief creates an instance. Each ps writes its own variables, so the directory must have
    the same path on the chief and on every ps. Variables that are split over several ps can be restored on a different
    number of ps. With MultiWorkerMirroredStrategy, every worker creates an instance, and `fit` saves in the first one.

    Killing the chief or a ps never destroys a finished checkpoint: its files are never overwritten, the file
    `checkpoint` lists only complete checkpoints, and older ones are deleted only after a save. The next instance for
    the directory removes the files of an unfinished save.

    Attributes:
        step: The step counter.
        restored: Path of the restored checkpoint, "directory/ckpt-STEP", or None.
        latest: Path of the newest finished checkpoint, or None.
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
        """Restore the newest readable checkpoint in the directory, if there is any.

        Args:
            directory: Directory of the checkpoints. It should hold no other files.
            step: The step counter, a scalar integer tf.Variable that `run_steps` increments. It must not be
                `optimizer.iterations`, which the optimizer increments.
            every_steps: Save when the counter reaches a multiple of this number (default: off). When steps of a lost
                worker run again, the counter may skip a multiple.
            every_minutes: Save this many minutes after the last save, or after this call (default: off).
            keep: Number of newest checkpoints to keep (default 3).
            trackables: The variables, models and optimizers to save, by name. A result of `data_shards` saves its
                position: shards that are not done at the save are repeated after a restore.

        Raises:
            CheckpointError: There are checkpoints, but none can be read. Or the newest readable one has other
                variables, or the position of other data.
            TypeError, ValueError: An argument is invalid. Nothing was done.
            tf.errors.OpError: A ps is lost (raised by TensorFlow).
        """
        keep = check_integer("keep", keep, at_least=1)
        every_steps = None if every_steps is None else check_integer("every_steps", every_steps, at_least=1)
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes is {every_minutes!r}: expected a number greater than 0, or None.")
        if not step.dtype.is_integer:
            raise TypeError(f"step is {step!r}: expected a scalar tf.Variable of an integer type.")
        self.step = step
        self.latest: str | None = None
        self._directory = Path(directory)
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else 60 * every_minutes
        self._positions: list[_PositionState] = []
        for name, trackable in trackables.items():
            if isinstance(trackable, DataShards):
                trackables[name] = _PositionState(trackable)
                self._positions.append(trackables[name])
        self._checkpoint = tf.train.Checkpoint(step=step, **trackables)
        tf.get_logger().addFilter(_is_no_retracing_of_a_save)
        _remove_unfinished(self._directory)
        self.restored = self.latest = self._restore()
        self._saved_step = int(step.numpy()) if self.restored else None
        self._saved_at = time.monotonic()
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(self._directory), keep, checkpoint_name=_NAME)

    def save(self) -> str:
        """Save a checkpoint, unless the current step is already saved.

        Returns:
            The path of the newest checkpoint.

        Raises:
            CheckpointError: The directory cannot be written, or the chief and the ps do not share it.
            DataShardsError, RendezvousConnectionError: As for `DataShards.position`.
            tf.errors.OpError: A ps is lost (raised by TensorFlow).
        """
        step = int(self.step.numpy())
        if self.latest is None or step != self._saved_step:  # saving a step twice would first delete its files
            for position in self._positions:
                position.fetch()
            try:
                self.latest = str(self._manager.save(checkpoint_number=step))
            except _CANNOT_WRITE as error:
                what = f"The checkpoint of step {step} could not be written to {self._directory}: {error.message}"
                raise CheckpointError(f"{as_sentence(what)} {_advice(error)}") from error
            self._saved_step = step
        self._saved_at = time.monotonic()
        return self.latest

    def is_due(self) -> bool:
        """Return whether `every_minutes` have passed since the last save. Without `every_minutes`, return False."""
        return self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds

    def next_due(self, step: int) -> int | None:
        """Return the next multiple of `every_steps` after `step`. Without `every_steps`, return None."""
        return None if self._every_steps is None else step - step % self._every_steps + self._every_steps

    def _restore(self) -> str | None:
        candidates = _finished(self._directory)
        for path in candidates:
            try:
                status = self._checkpoint.restore(path)
                status.assert_existing_objects_matched()
            except _PS_LOST:
                raise
            except (tf.errors.OpError, IndexError) as error:  # TensorFlow raises IndexError for truncated data
                logger.warning("Checkpoint %s cannot be read, trying the one before it: %s", path, error)
                continue
            except (AssertionError, ValueError) as error:
                raise CheckpointError(
                    f"The checkpoint {path} has other variables: {as_sentence(str(error))} Give another directory, or "
                    "the model that was saved."
                ) from error
            return path
        if candidates:
            raise CheckpointError(
                f"None of the checkpoints in {self._directory} can be read: {', '.join(candidates)}. Remove "
                "them to start from the beginning."
            )
        return None


def evaluate_checkpoints(
    directory: str | os.PathLike[str],
    evaluate: Callable[[str], Mapping[str, float] | None],
    *,
    look_seconds: float = 1.0,
) -> None:
    """Evaluate checkpoints in an evaluator until training is over, then exit the process.

    In other tasks, return at once. An evaluator always takes the newest checkpoint, so a slow evaluator skips some, but
    never the last one. After the other tasks are done, the job waits at most `tf4slurm run --finish-timeout` seconds
    for the evaluator. After a stop request, the evaluator takes no more checkpoints.

    Args:
        directory: The directory to which tf.train.CheckpointManager or tf4slurm.tensorflow.Checkpoints writes.
        evaluate: Function that gets the path of a checkpoint and returns metrics to report, such as
            {"accuracy": 0.97}, or None. It creates a model outside of any strategy, and reads the checkpoint into the
            model with tf.train.Checkpoint(…).read. If it raises because the checkpoint was deleted, the next
            checkpoint is evaluated.
        look_seconds: Interval in seconds between checks for a new checkpoint (default 1).

    Raises:
        SystemExit: Training is over, or the job was asked to stop. The exit code is 0.
        SlurmEnvironmentError: This process has no cluster spec.
        RendezvousConnectionError: This process has no agent, or the agent has exited.
    """
    if current_server_dictionary().task_type != "evaluator":
        return
    channel = find_script_channel()
    if channel is None:
        raise RendezvousConnectionError(
            "This evaluator has no agent, and could not learn when training is over. Start the script with "
            '"tf4slurm run --evaluators 1", or under srun call tf4slurm.get_server_dictionary() first.'
        )
    evaluated: str | None = None
    while not should_stop():
        is_over = channel.wait_until(
            lambda: channel.desired.is_finishing or channel.desired.is_training_over, look_seconds
        )
        newest: str | None = tf.train.latest_checkpoint(os.fspath(directory))
        if newest is not None and newest != evaluated:
            metrics = _evaluate(evaluate, newest)
            report(step=None, **{name: metrics[name] for name in metrics if name != "step"})
            evaluated = newest
        elif is_over:
            break
    raise SystemExit(0)


def check_integer(name: str, value: Any, *, at_least: int) -> int:
    """Return `value`, of any integer type, as an int. `name` is its name in errors.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is less than `at_least`.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected an integer.") from error
    if number < at_least:
        raise ValueError(f"{name} is {number}: expected at least {at_least}.")
    return number


def _evaluate(evaluate: Callable[[str], Mapping[str, float] | None], checkpoint: str) -> Mapping[str, float]:
    try:
        return evaluate(checkpoint) or {}
    except Exception:
        if tf.io.gfile.exists(f"{checkpoint}.index"):
            raise
        logger.warning("%s was deleted during its evaluation: evaluating the next one", checkpoint)
        return {}


def _finished(directory: Path) -> list[str]:
    """Return the paths of the finished checkpoints, newest first.

    The file `checkpoint` lists them. If there is no such file, they are the checkpoints that have an index file. An
    empty file `checkpoint` is deleted.
    """
    try:
        state = tf.train.get_checkpoint_state(str(directory))
    except ValueError:  # TensorFlow rejects the empty file that a power failure can leave
        (directory / "checkpoint").unlink()
        state = None
    if state is not None:
        return list(reversed(state.all_model_checkpoint_paths))
    numbers = [int(path.stem.rpartition("-")[2]) for path in directory.glob(f"{_NAME}-*.index")]
    return [str(directory / f"{_NAME}-{number}") for number in sorted(numbers, reverse=True)]


def _remove_unfinished(directory: Path) -> None:
    """Remove the files of unfinished saves: temporary directories, data without an index, and truncated indexes."""
    if not (directory / "checkpoint").exists():  # only the first save can leave a truncated index
        for index in directory.glob(f"{_NAME}-*.index"):
            if re.fullmatch(_NAME + r"-\d+", index.stem) and _is_truncated(index):
                index.unlink()
    for path in directory.glob(f"{_NAME}-*"):
        found = re.fullmatch(_NAME + r"-\d+(?:_temp|(\.data-\d+-of-\d+)(?:\.tempstate\d+)?)", path.name)
        if found is None:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif found[1] and not path.with_name(path.name.partition(".")[0] + ".index").exists():
            path.unlink(missing_ok=True)


def _is_truncated(index: Path) -> bool:
    try:
        return not index.read_bytes().endswith(_INDEX_END)
    except OSError:  # TensorFlow reports the error when it reads the checkpoint
        return False
