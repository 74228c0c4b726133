"""Save, restore and evaluate checkpoints of the training state."""

from __future__ import annotations

import dataclasses
import json
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf4slurm.control.messages import CheckpointState
from tf4slurm.errors import CheckpointError, RendezvousConnectionError
from tf4slurm.jobs.formatting import as_sentence
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.scripts.data_shards import DataShards
from tf4slurm.scripts.functions import report, should_stop
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.checkpoint_files import NAME, count_bytes, find_finished, make_room, remove_unfinished
from tf4slurm.tensorflow.closures import MAX_NOT_PARSED, NOT_PARSED
from tf4slurm.tensorflow.concurrent_saves import copied_tables, separate_threads

logger = logging.getLogger(__name__)

_CANNOT_WRITE = (
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnknownError,  # such as EIO
)
_PS_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


def _advise(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.NotFoundError):
        return "Chief and ps must see the directory at the same path, on a shared file system."
    if isinstance(error, tf.errors.PermissionDeniedError):
        return "Give a directory on a shared file system, in which this user may write on the hosts of chief and ps."
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return "Make room on its file system: it, or this user's quota of it, is full."
    return "Its file system does not work."


def _find_cause(error: tf.errors.OpError) -> str:
    """Return the text of the system's error, such as "No space left on device", or else the first line of the message.

    TensorFlow's message has the file before it. In the message of a ps, it comes with stacks and the errors of gRPC.
    """
    found = re.search(r";\s*([^;\n]+)$", str(error.message), re.MULTILINE)
    return found[1].strip() if found else str(error.message).partition("\n")[0]


def _is_write_error(error: tf.errors.OpError) -> bool:
    """Return whether a file could not be written. TensorFlow raises AbortedError also after the loss of a ps."""
    return isinstance(error, _CANNOT_WRITE) or "Stale file handle" in str(error.message)


def _report_save(**changes: Any) -> None:
    """Report the end of a save to the job. `changes` are fields of `CheckpointState`."""
    channel = find_script_channel()
    if channel is not None:
        before = channel.state.checkpoint or CheckpointState()
        channel.send(checkpoint=dataclasses.replace(before, num_saves=before.num_saves + 1, **changes))


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

    `run_steps` saves when `every_steps` or `every_minutes` requires it, on a stop request, and at the end. Workers
    train on during a due save: the counter is read first, then the variables. So such a checkpoint may have updates of
    later steps, which a restored training makes again, but the counter is never ahead of the variables. A ps needs
    memory for a second copy of each table (a variable with sparse updates), and of each other variable that is updated
    while it is written. With `consistent=True` workers pause.

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
        consistent: Whether the workers pause during each save of `run_steps` and `fit`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: tf.Variable,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        consistent: bool = False,
        max_failed_saves: int | None = None,
        **trackables: Any,
    ) -> None:
        """Restore the newest readable checkpoint in the directory, if there is any.

        Args:
            directory: Directory of the checkpoints. It should hold no other files.
            step: The step counter, a scalar integer tf.Variable that `run_steps` increments. It must not be
                `optimizer.iterations`, which the optimizer increments.
            every_steps: Save when the counter has reached or passed a multiple of this number (default: off).
            every_minutes: Save this many minutes after the last save, or after this call (default: off).
            keep: Number of newest checkpoints to keep (default 3).
            consistent: Whether the workers pause during each save of `run_steps` and `fit` (default: only during the
                last one of a training).
            max_failed_saves: How many due saves in a row may fail, for example on a full disk, before the training ends
                (default: any number). Each logs a warning. The last save of a training, and that of a stop, must not
                fail.
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
        if max_failed_saves is not None:
            max_failed_saves = check_integer("max_failed_saves", max_failed_saves, at_least=0)
        if not step.dtype.is_integer:
            raise TypeError(f"step is {step!r}: expected a scalar tf.Variable of an integer type.")
        self.step = step
        self.latest: str | None = None
        self.consistent = consistent
        self._max_failed_saves = max_failed_saves
        self._directory = Path(directory)
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else 60 * every_minutes
        self._positions: list[_PositionState] = []
        for name, trackable in trackables.items():
            if isinstance(trackable, DataShards):
                trackables[name] = _PositionState(trackable)
                self._positions.append(trackables[name])
        tf.get_logger().addFilter(_is_no_retracing_of_a_save)
        separate_threads()
        remove_unfinished(self._directory)
        self.restored = self.latest = self._restore(tf.train.Checkpoint(step=step, **trackables))
        self._saved_step = int(step.numpy()) if self.restored else None
        self._saved_at = time.monotonic()
        with tf.device(step.device):
            self._counter = tf.Variable(step.read_value(), trainable=False, name="saved_step")  # of the current save
        checkpoint = tf.train.Checkpoint(step=self._counter, **trackables)
        self._manager = tf.train.CheckpointManager(checkpoint, str(self._directory), keep, checkpoint_name=NAME)
        self._saving: Future[None] | None = None
        self._num_failed = 0  # due saves, one after another
        if (channel := find_script_channel()) is not None:
            num_saves = channel.state.checkpoint.num_saves if channel.state.checkpoint else 0
            state = CheckpointState(self.latest or "", self._saved_step or 0, num_saves)
            channel.send(checkpoint=state)

    def save(self) -> str:
        """Save a checkpoint, unless the current step is already saved. A save that has begun before ends first.

        Returns:
            The path of the newest checkpoint.

        Raises:
            CheckpointError: The directory cannot be written, or the chief and the ps do not share it.
            DataShardsError, RendezvousConnectionError: As for `DataShards.position`.
            tf.errors.OpError: A ps is lost (raised by TensorFlow).
        """
        self.finish_save()
        step = self._step_to_save()
        if step is not None:
            self._save(step)
        self._saved_at = time.monotonic()
        assert self.latest is not None
        return self.latest

    def begin_save(self) -> None:
        """Begin to save a checkpoint in a thread, unless the current step is already saved or a save still runs.

        A save that cannot be written logs a warning, up to `max_failed_saves` times in a row. The next call of this
        method, `save` or `finish_save` raises any other error.

        Raises:
            DataShardsError, RendezvousConnectionError, tf.errors.OpError: As for `save`.
        """
        if self._saving is not None and not self._saving.done():
            return
        self.finish_save()
        step = self._step_to_save()
        self._saved_at = time.monotonic()
        if step is None:
            return
        saving: Future[None] = Future()
        self._saving = saving

        def save() -> None:
            try:
                with copied_tables():
                    self._save_or_warn(step)
            except BaseException as error:
                saving.set_exception(error)
            else:
                saving.set_result(None)

        threading.Thread(target=save, name="tf4slurm-save", daemon=True).start()

    def finish_save(self) -> None:
        """Wait for the end of a save that `begin_save` has begun. Raise the error of this save."""
        if self._saving is not None:
            wait([self._saving])  # Ctrl-C ends the wait, not the save
            saving, self._saving = self._saving, None
            saving.result()

    def _step_to_save(self) -> int | None:
        """Return the current step, or None if it is already saved: to save it again would first delete its files.

        The positions of data shards are fetched here, because only one thread may use them, and before the variables
        are read.
        """
        step = int(self.step.numpy())
        if self.latest is not None and step == self._saved_step:
            return None
        for position in self._positions:
            position.fetch()
        return step

    def _save_or_warn(self, step: int) -> None:
        try:
            self._save(step)
            self._num_failed = 0
        except CheckpointError as error:
            self._num_failed += 1
            if self._max_failed_saves is not None and self._num_failed > self._max_failed_saves:
                raise
            last = "There is no checkpoint yet." if self.latest is None else f"The newest checkpoint is {self.latest}."
            logger.warning("%s %s The training goes on, and saves again at the next time.", error, last)

    def _save(self, step: int) -> None:
        """Save a checkpoint of the counter's value `step`, which was read before the variables are."""
        begun = time.monotonic()
        try:
            self._counter.assign(step)
            self.latest = self._write(step)
        except tf.errors.OpError as error:
            if not _is_write_error(error):
                raise
            what = f"The checkpoint of step {step} could not be written to {self._directory}: {_find_cause(error)}"
            failure = f"{as_sentence(what)} {_advise(error)}"
            _report_save(error=failure)
            raise CheckpointError(failure) from error
        self._saved_step = step
        seconds, num_bytes = round(time.monotonic() - begun, 3), count_bytes(self.latest)
        _report_save(newest=self.latest, step=step, seconds=seconds, num_bytes=num_bytes, error="")

    def _write(self, step: int) -> str:
        """Write a checkpoint, and return its path. If there is no room, keep only the newest readable one before."""
        attempts = 0
        while True:
            attempts += 1
            try:
                return str(self._manager.save(checkpoint_number=step))
            except tf.errors.ResourceExhaustedError:
                if not make_room(self._directory, self.latest):
                    raise
            except tf.errors.InternalError as error:
                if NOT_PARSED not in str(error) or attempts == MAX_NOT_PARSED:
                    raise

    def is_due(self) -> bool:
        """Return whether `every_minutes` have passed since the last save. Without `every_minutes`, return False."""
        return self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds

    def next_due(self, step: int) -> int | None:
        """Return the next multiple of `every_steps` after `step`. Without `every_steps`, return None."""
        return None if self._every_steps is None else step - step % self._every_steps + self._every_steps

    def _restore(self, checkpoint: tf.train.Checkpoint) -> str | None:
        candidates = find_finished(self._directory)
        for path in candidates:
            try:
                status = checkpoint.restore(path)
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
