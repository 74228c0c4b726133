"""Train on data shards: `shard_batches()` in a worker's own process, `run_shards()` with a ClusterCoordinator."""

from __future__ import annotations

import collections
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf4slurm.control.shard_leases import MAX_CAPACITY
from tf4slurm.scripts.data_shards import DataShards, Shard
from tf4slurm.scripts.functions import should_stop
from tf4slurm.tensorflow.checkpoints import Checkpoints
from tf4slurm.tensorflow.closures import ClosureRunner, count_tasks, wait_for_closures
from tf4slurm.tensorflow.constants import check_arrays, explain_large_array
from tf4slurm.tensorflow.keras.limits import install_keras_limits
from tf4slurm.tensorflow.step_closure import FunctionStep
from tf4slurm.tensorflow.strategy import allow_exit_without_workers
from tf4slurm.tensorflow.training import StepReporter, StepsDone, translate_errors

_SHARDS_IN_HAND = 2  # that `shard_batches` leases at a time: it reads the second while the first is trained
_SHARDS_PER_WORKER = 2  # that `run_shards` leases: a worker trains one while the next waits
_MAX_NUMBERS = 100  # that step_fn may return


def shard_batches(shards: DataShards, read: Callable[[tf.data.Dataset], Any]) -> Iterator[Any]:
    """Yield the batches of the data shards that the job leases to this process.

        for batch in shard_batches(shards, lambda paths: tf.data.TFRecordDataset(paths).map(parse).batch(32)):
            train_step(batch)

    This fits scripts that train in the worker's own process, with MirroredStrategy or without a strategy. A shard is
    done when the loop asks for the batch after its last one. The process leases two shards at a time, because it reads
    the next one ahead. No batch has rows of two shards. After a `break`, the next call first yields all batches of the
    shards that were leased but not done.

    Args:
        shards: The result of `tf4slurm.data_shards`.
        read: Function that gets a dataset of the shard's paths, or of its row numbers, and returns a dataset of
            batches. `experimental_distribute_dataset` may have distributed the returned dataset. The function is called
            once per shard.

    Raises:
        ValueError: The loop is in the scope of a MultiWorkerMirroredStrategy, whose workers take equal numbers of
            steps.
        DataShardsError, RendezvousConnectionError: As for `DataShards.take`.
    """
    if isinstance(tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "The workers of a MultiWorkerMirroredStrategy step together, so they cannot take different numbers of "
            "shards. Use tf4slurm.share_of."
        )
    waiting = collections.deque(shards.in_hand)
    opened = collections.deque[tuple[Shard, Iterator[Any]]]()
    while True:
        if not opened:
            shard = waiting.popleft() if waiting else shards.take(_SHARDS_IN_HAND)
            if shard is None:
                return
            opened.append((shard, _open(read, shard)))
        shard, batches = opened.popleft()
        for batch in batches:
            if not opened and (ahead := shards.take(_SHARDS_IN_HAND, wait=False)) is not None:
                opened.append((ahead, _open(read, ahead)))
            yield batch
        shards.done(shard)


@translate_errors()
def run_shards(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    step_fn: Callable[..., Any],
    shards: DataShards,
    read: Callable[[tf.data.Dataset], tf.data.Dataset],
    *,
    step: tf.Variable | None = None,
    checkpoints: Checkpoints | None = None,
    timeout_seconds: float = 600.0,
) -> StepsDone:
    """Train on all data shards with the workers of a ParameterServerStrategy, one step per batch.

    The chief leases two shards per worker, and a worker trains a shard in one closure. The shard is done when its
    closure has returned. A lost worker's closures run again on another worker, from the beginning of their shards.
    After an error or Ctrl-C, run_shards waits at most 10 s for running closures. The next call waits for the rest, and
    trains the shards that were not done, from their beginning. So each row is trained at least once.

    The checkpoints are saved when due, on a stop request, and at the end. Workers train during a save, and a shard that
    is not done at the save is repeated after a restore. For this, give the shards to `Checkpoints`, too:
    Checkpoints(directory, step=step, shards=shards, weights=weights).

    Args:
        coordinator: The coordinator of the workers.
        step_fn: Function of one step, as for `run_steps`. It gets a batch, and returns at most 100 values.
        shards: The result of `tf4slurm.data_shards`, called in the chief only.
        read: Function that gets a dataset of the shard's paths, or of its row numbers, and returns a dataset of
            batches. It runs on the workers. Later calls with the same functions and counter use its trace again.
        step: Counter of the batches, a scalar tf.Variable of an integer type, created in the strategy's scope (default:
            `checkpoints.step`, or without checkpoints a new variable that starts at 0).
        checkpoints: The checkpoints to save (default: none).
        timeout_seconds: Longest time in seconds in which no shard is done, including tracing (default 600).

    Raises:
        ParameterServerLostError: A ps is lost. Another attempt resumes from the checkpoint.
        TrainingTimeoutError: No shard was done for `timeout_seconds`, or closures of an earlier call still run.
        TrainingError: step_fn returned something other than scalar tensors, or uses more than 2 GB of arrays.
        DataShardsError, RendezvousConnectionError: As for `DataShards.take`.
        CheckpointError: A checkpoint could not be written.
        BaseException: Any exception that step_fn raised.
    """
    if step is None and checkpoints is not None:
        step = checkpoints.step
    if step is None:
        with coordinator.strategy.scope():
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
    allow_exit_without_workers(coordinator)
    install_keras_limits()
    wait_for_closures(coordinator, timeout_seconds)
    closure = _make_closure(coordinator, step_fn, read, step.ref())
    return _ShardRun(closure, shards, checkpoints, timeout_seconds).run()


def _open(read: Callable[[tf.data.Dataset], Any], shard: Shard) -> Iterator[Any]:
    """Return an iterator of a shard's batches. TensorFlow begins to read the batches at once."""
    items = (
        tf.data.Dataset.from_tensor_slices(_encode(shard.files))
        if shard.files
        else tf.data.Dataset.range(shard.rows.start, shard.rows.stop, shard.rows.step)
    )
    dataset = read(items)
    if isinstance(dataset, tf.data.Dataset):
        options = tf.data.Options()
        options.experimental_warm_start = True
        dataset = dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
    return iter(dataset)


def _encode(paths: Sequence[str]) -> list[bytes]:
    """Return the paths as bytes, because a path need not be valid UTF-8."""
    return [os.fsencode(path) for path in paths]


@functools.lru_cache(maxsize=8)
def _make_closure(coordinator: Any, step_fn: Any, read: Any, counter_reference: Any) -> _ShardClosure:
    """Return the closure of these functions.

    It is cached, so that TensorFlow sends its graph to the workers only once. `counter_reference` is the result of
    `ref()` of the step counter, because a variable cannot be a key of the cache.
    """
    return _ShardClosure(coordinator, step_fn, read, counter_reference.deref())


class _ShardClosure:
    """Trains one shard on a worker, as a closure of the coordinator."""

    def __init__(
        self, coordinator: Any, step_fn: Callable[..., Any], read: Callable[..., tf.data.Dataset], counter: tf.Variable
    ) -> None:
        self.coordinator = coordinator
        self.counter = counter
        self._strategy = coordinator.strategy
        self._step = FunctionStep(step_fn)
        self._read = read
        self._names: tuple[str, ...] = ()
        files, rows = tf.TensorSpec([None], tf.string), tf.TensorSpec([3], tf.int64)
        self._train_files = tf.function(lambda paths: self._train(tf.data.Dataset.from_tensor_slices(paths)), [files])
        self._train_rows = tf.function(lambda rows: self._train(tf.data.Dataset.range(*tf.unstack(rows))), [rows])

    def make(self, shard: Shard, make: Callable[..., Any]) -> Any:
        with explain_large_array("The function of a shard"):
            if shard.files:
                return make(self._train_files, tf.constant(_encode(shard.files)))
            rows = (shard.rows.start, shard.rows.stop, shard.rows.step)
            return make(self._train_rows, tf.constant(rows, tf.int64))

    def split(self, result: Any) -> tuple[int, dict[str, float]]:
        """Split a result of `_train` into the number of steps and the sums by name."""
        steps, *sums = result
        return int(steps), {name: float(total) for name, total in zip(self._names, sums, strict=False)}

    def _train(self, items: tf.data.Dataset) -> Any:
        """Train the shard whose paths or row numbers are `items`. Return one tensor.

        The tensor has the number of steps, and the sum of each value that the steps return.
        """
        iterator = iter(self._read(items).prefetch(tf.data.AUTOTUNE))

        def train_batch(_: Any, steps: Any, sums: Any) -> Any:
            optional = iterator.get_next_as_optional()
            return tf.cond(
                optional.has_value(),
                lambda: (True, steps + 1, sums + self._train_batch(optional.get_value())),
                lambda: (False, steps, sums),
            )

        start = (tf.constant(True), tf.constant(0, tf.int64), tf.zeros([_MAX_NUMBERS], tf.float64))
        _, steps, sums = tf.while_loop(lambda more, *_: more, train_batch, start, parallel_iterations=1)
        graph = tf.compat.v1.get_default_graph()
        tf.autograph.experimental.do_not_convert(check_arrays)("The function of a shard", graph)
        return tf.concat([tf.cast([steps], tf.float64), sums], axis=0)

    def _train_batch(self, batch: Any) -> Any:
        sums = self._step.reduce(self._strategy, self._strategy.run(self._step, args=({}, batch)))
        self._names = tuple(sums)
        self.counter.assign_add(1)
        numbers = tf.stack([tf.cast(total, tf.float64) for total in sums.values()] or [tf.zeros([], tf.float64)])
        return tf.pad(numbers, [[0, _MAX_NUMBERS - numbers.shape[0]]])


class _ShardRun:
    """Runs one call of `run_shards`. Each shard is a unit of work of a `ClosureRunner`."""

    def __init__(
        self, closure: _ShardClosure, shards: DataShards, checkpoints: Checkpoints | None, timeout_seconds: float
    ) -> None:
        self._closure = closure
        self._shards = shards
        self._checkpoints = checkpoints
        self._timeout_seconds = timeout_seconds
        self._steps_by_worker = [0] * count_tasks("worker")
        self._sums: dict[str, float] = {}
        self._terminal = StepReporter()
        self._waiting = collections.deque(shards.in_hand)  # left by an earlier call that ended with an error
        self._done: collections.deque[Shard] = collections.deque()
        self._num_in_hand = len(self._waiting)
        self.is_over = False

    def run(self) -> StepsDone:
        started = time.monotonic()
        runner = ClosureRunner(self._closure.coordinator, self, self._timeout_seconds)
        self._next_save = self._find_next_save()
        try:
            is_stopped = runner.run(lambda: self._poll(runner.num_workers))
        finally:
            self._report_done()
        if self._checkpoints is not None:
            self._checkpoints.save()
        steps = sum(self._steps_by_worker)
        means = {name: total / steps for name, total in self._sums.items() if steps}
        seconds = time.monotonic() - started
        return StepsDone(self._step(), tuple(self._steps_by_worker), means, is_stopped or should_stop(), seconds)

    # Methods that the ClosureRunner calls

    def take(self) -> Shard | None:
        return self._waiting.popleft() if self._waiting else None

    def stop(self) -> None:
        self.is_over = True
        self._waiting.clear()  # these shards remain leased, and are not done

    def make_closure(self, shard: Shard, make: Callable[..., Any]) -> Any:
        return self._closure.make(shard, make)

    def complete(self, shard: Shard, worker: int, result: Any) -> None:
        steps, sums = self._closure.split(result)
        self._steps_by_worker += [0] * (worker + 1 - len(self._steps_by_worker))
        self._steps_by_worker[worker] += steps
        for name, total in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        self._done.append(shard)

    def check_ps(self) -> None:
        self._step()

    def describe_timeout(self) -> str:
        return (
            "No shard was done within {seconds}. See the logs of the workers, give data_shards a smaller shard_size, "
            "or raise timeout_seconds."
        )

    # Methods that run in the caller's thread

    def _poll(self, num_workers: int) -> None:
        """Report the shards that are done, lease the next ones, and save a checkpoint if it is due."""
        self._report_done()
        capacity = min(_SHARDS_PER_WORKER * num_workers, MAX_CAPACITY)
        while not self.is_over and (shard := self._shards.take(capacity, wait=not self._num_in_hand)) is not None:
            self._num_in_hand += 1
            self._waiting.append(shard)
        if not self._num_in_hand:
            self.is_over = True  # all shards of all processes are done, or the job was asked to stop
        if self._checkpoints is not None and (self._checkpoints.is_due() or self._step() >= self._next_save):
            self._checkpoints.begin_save()
            self._next_save = self._find_next_save()

    def _report_done(self) -> None:
        done = [self._done.popleft() for _ in range(len(self._done))]
        if done:
            self._num_in_hand -= len(done)
            self._shards.done(*done)
            if steps := sum(self._steps_by_worker):
                self._terminal.observe(self._step(), steps, dict(self._sums))

    def _step(self) -> int:
        return int(self._closure.counter.numpy())

    def _find_next_save(self) -> float:
        due = None if self._checkpoints is None else self._checkpoints.next_due(self._step())
        return float("inf") if due is None else due
