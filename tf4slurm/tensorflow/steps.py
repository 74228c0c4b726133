"""`run_steps`: train so many steps on the workers of a ParameterServerStrategy, as fast as they can."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import ParameterServerLostError, TrainingError, TrainingTimeoutError
from tf4slurm.script import report, should_stop
from tf4slurm.tensorflow.checkpoints import Checkpoints
from tf4slurm.tensorflow.keras_limits import tell_keras_limits
from tf4slurm.tensorflow.leaving import let_leave
from tf4slurm.tensorflow.ledger import Ledger

_SLOTS_PER_WORKER = 2  # while a worker computes one closure, the next waits for it
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0  # of the job's grace, so that a worker which hangs does not cost the last checkpoint
_FETCHES = 3  # of one closure's result, each from another run of it: results that come back from nobody are an error
_MAX_STEPS = 64
_MAX_OPERATIONS = 4_000  # a graph of so many takes a second or two to trace and to send; larger steps take long enough


class StepsDone(NamedTuple):
    """What `run_steps` has done.

    Attributes:
        step: The counter at the end. It counts what was applied, repeated steps too.
        steps_by_worker: How many steps each worker did in this call, by its index: the chief adds up closures that have
            come back. What a worker had done of a closure when it was lost is not in it.
        mean_loss: The mean of the losses of these steps; None where step_fn gave none.
        is_stopped: Whether it returned early because the job is to stop.
        seconds: How long it took, with tracing and saving.
    """

    step: int
    steps_by_worker: tuple[int, ...]
    mean_loss: float | None
    is_stopped: bool
    seconds: float

    @property
    def steps(self) -> int:
        """The number of steps that this call did, each counted once."""
        return sum(self.steps_by_worker)


def run_steps(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    step_fn: Callable[..., Any],
    steps: int,
    *,
    dataset: Any = None,
    step: tf.Variable | None = None,
    checkpoints: Checkpoints | None = None,
    steps_per_call: int | None = None,
    timeout_seconds: float = 600.0,
) -> StepsDone:
    """Train until the counter of steps has reached `steps`; less what a restored checkpoint has already.

    The counter counts a step when all that the step does is applied, so it tells what the variables have, whoever is
    lost; of a step that a lost worker had begun, a part may be applied that is not counted. When a worker is lost, the
    steps of its closure run again on another worker, also those that it had applied: up to half a second of a worker's
    steps (or two times `steps_per_call`) at each loss. Both times count, so the counter may end as much above `steps`.
    A worker that is started again reads its dataset from the beginning.

    The job is told step and loss (`tf4slurm.report`). When the job is to stop, closures that run are finished, or given
    up after 10 s, a checkpoint is saved, and the result says so.

    Args:
        coordinator: The chief's ClusterCoordinator.
        step_fn: One step: `step_fn(batch)` with a dataset, else `step_fn()`. It runs on a worker, in `strategy.run`,
            and returns the loss, a scalar tensor, or None. Pass the same function to later calls: it is traced once.
        steps: The number of steps in all, as the counter counts them.
        dataset: `iter(coordinator.create_per_worker_dataset(…))`. Each worker's dataset must not end: `repeat()` it.
        step: The counter, a tf.Variable of an integer type made in the strategy's scope; by default that of
            `checkpoints`, or one that begins with 0 at each call.
        checkpoints: Where to save when it is time, when the job is to stop, and at the end.
        steps_per_call: Steps in one scheduled closure. By default as many as take a quarter of a second: the chief's
            work for a closure is then no longer seen, and a stop or a lost worker costs no more; less if the step is a
            large graph. The steps are traced one after another, so many of them take long to trace.
        timeout_seconds: How long no closure may come back, tracing included: TensorFlow itself waits for ever, as for
            the second of two lost workers.

    Raises:
        ParameterServerLostError: A ps is gone, and its variables with it. Let the chief exit: another attempt
            (`tf4slurm run --max-attempts`) resumes from the checkpoint.
        TrainingTimeoutError: No closure came back in time.
        TrainingError: A dataset has ended, or step_fn returned something else than one number.
        CheckpointError: A checkpoint could not be written.
        Exception: Whatever step_fn raised.
    """
    let_leave(coordinator)
    tell_keras_limits()
    run = _Run(coordinator, step_fn, dataset, step, checkpoints, steps_per_call, timeout_seconds)
    try:
        return run.go(steps)
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        raise ParameterServerLostError(
            "A ps is gone, and with it the variables that it had. Start the job again, or give it --max-attempts: it "
            f"resumes from its checkpoint. TensorFlow says: {' '.join(str(error.message).split())[:200]}"
        ) from error
    except tf.errors.OutOfRangeError as error:
        raise TrainingError(
            "The dataset of a worker has ended. run_steps counts steps, not epochs: let it repeat() without end."
        ) from error


class _Run:
    """One call of `run_steps`."""

    def __init__(
        self,
        coordinator: Any,
        step_fn: Callable[..., Any],
        dataset: Any,
        step: tf.Variable | None,
        checkpoints: Checkpoints | None,
        steps_per_call: int | None,
        timeout_seconds: float,
    ) -> None:
        strategy = coordinator.strategy
        if step is None and checkpoints is not None:
            step = checkpoints.step
        if step is None:
            with strategy.scope():
                step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self._coordinator = coordinator
        self._counter = step
        self._closure = _make_closure(strategy, step_fn, step.ref())
        self._inputs = () if dataset is None else (dataset,)
        self._checkpoints = checkpoints
        self._timeout_seconds = timeout_seconds
        self._num_workers = _count_workers()
        self._ledger = Ledger(self._num_workers, steps_per_call, self._closure.portion)
        self._scheduling = threading.Lock()  # ClusterCoordinator.schedule is for one thread at a time
        self._errors: list[Exception] = []

    def go(self, steps: int) -> StepsDone:
        started = time.monotonic()
        ledger, checkpoints = self._ledger, self._checkpoints
        step = int(self._counter.numpy())
        is_stopped = False
        while step < steps and not is_stopped:
            target = steps if checkpoints is None else min(steps, checkpoints.next_due(step) or steps)
            is_stopped = self._run_until(ledger.done + target - step, step - ledger.done)
            step = int(self._counter.numpy())  # beyond the target where a lost worker's steps have run again
            if checkpoints is not None and (is_stopped or step == target or step >= steps or checkpoints.is_due()):
                checkpoints.save()
        mean_loss = ledger.loss_sum / ledger.losses if ledger.losses else None
        self._closure.portion = ledger.portion
        return StepsDone(step, tuple(ledger.steps_by_worker), mean_loss, is_stopped, time.monotonic() - started)

    def _run_until(self, limit: int, first: int) -> bool:
        """Do steps until `limit` are handed out and back, or it is time to save or stop; return whether to stop."""
        ledger = self._ledger
        ledger.open(limit)
        slots = [
            threading.Thread(target=self._fill_slot, name=f"tf4slurm-steps-{index}", daemon=True)
            for index in range(_SLOTS_PER_WORKER * self._num_workers)
        ]
        for slot in slots:
            slot.start()
        is_stopped, give_up_at = False, float("inf")
        progress = _Progress(ledger, first)
        while any(slot.is_alive() for slot in slots) and time.monotonic() < give_up_at:
            max(slots, key=threading.Thread.is_alive).join(_LOOK_SECONDS)
            progress.tell()
            if not is_stopped and should_stop():
                is_stopped, give_up_at = True, time.monotonic() + _STOP_SECONDS
                ledger.close()
            if self._errors and give_up_at == float("inf"):  # the other closures end too, unless a worker hangs
                give_up_at = time.monotonic() + _STOP_SECONDS
            if self._checkpoints is not None and self._checkpoints.is_due():
                ledger.close()
            if time.monotonic() - ledger.changed_at > self._timeout_seconds:
                raise TrainingTimeoutError(
                    f"No closure has come back from a worker for {self._timeout_seconds:g} s; so far they did "
                    f"{ledger.steps_by_worker} steps. TensorFlow waits until all lost workers are back. Look at the "
                    "logs of the workers, or raise timeout_seconds."
                )
        progress.tell()
        if self._errors:
            if not any(slot.is_alive() for slot in slots):
                with contextlib.suppress(Exception):
                    self._coordinator.join()  # else it raised the same error again at the next call
            raise next(
                (error for error in self._errors if not isinstance(error, tf.errors.CancelledError)), self._errors[0]
            )
        return is_stopped

    def _fill_slot(self) -> None:
        """Keep one closure with the coordinator, until there are no more steps to be taken."""
        try:
            while steps := self._ledger.take(self._closure.most_steps):
                worker, loss_sum, losses = self._do(steps)
                self._ledger.enter(int(worker), steps, float(loss_sum), int(losses))
        except Exception as error:
            self._errors.append(error)
            self._ledger.close()

    def _do(self, steps: int) -> Any:
        """Have a worker do so many steps; return what the closure gives.

        That stays on the worker until it is fetched: with a worker that dies in between it is lost, and the steps run
        again. A ps that is gone is told by the counter, or by TensorFlow when the closure runs again.
        """
        for fetches in range(1, _FETCHES + 1):
            with self._scheduling:
                result = self._coordinator.schedule(self._closure.function, args=(steps, *self._inputs))
            try:
                return result.fetch()
            except (tf.errors.UnavailableError, tf.errors.AbortedError):
                self._counter.numpy()
                if fetches == _FETCHES:
                    raise
        raise AssertionError


class _Progress:
    """Tells the job how far training is, with the mean loss since it was last told."""

    def __init__(self, ledger: Ledger, first: int) -> None:
        self._ledger = ledger
        self._first = first
        self._told = (ledger.done, ledger.loss_sum, ledger.losses)

    def tell(self) -> None:
        ledger = self._ledger
        now = (ledger.done, ledger.loss_sum, ledger.losses)
        done, loss_sum, losses = (new - old for new, old in zip(now, self._told, strict=True))
        if done:
            report(step=self._first + ledger.done, **({"loss": loss_sum / losses} if losses else {}))
            self._told = now


class _Closure:
    """The function that a worker runs: some steps. It gives [worker's index, sum of losses, number of losses].

    The steps are written out one after another. In a loop of TensorFlow's they would take twice as long, since each
    turn of it is agreed on with the ps, and so would calls of one function (measured with 4 B on a ps, steps a second:
    170 one by one, 1,100 in 32 written out, 620 in a loop, 630 in 32 calls).
    """

    def __init__(self, strategy: Any, step_fn: Callable[..., Any], counter_reference: Any) -> None:
        self.most_steps = 1
        self.portion = 1  # of the latest account
        self._strategy = strategy
        self._step_fn = step_fn
        self._counter = counter_reference.deref()
        self.function = tf.function(self._do_steps)

    def _do_steps(self, count: int, *iterators: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        figures = tf.zeros(2, tf.float64)
        for _ in range(count):
            before = len(graph.get_operations())
            batch = [next(iterator) for iterator in iterators]
            figures += _to_figures(self._strategy, self._strategy.run(self._step_fn, args=batch))
            operations = graph.get_operations()[before:]
            with tf.control_dependencies([each for each in operations if each.op_def.is_stateful]):
                self._counter.assign_add(1)  # the ps would count all steps at once, before any is applied
            self.most_steps = max(1, min(_MAX_OPERATIONS // len(operations), _MAX_STEPS))
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return tf.concat([[tf.cast(worker, tf.float64)], figures], axis=0)


@functools.lru_cache(maxsize=8)
def _make_closure(strategy: Any, step_fn: Callable[..., Any], counter_reference: Any) -> _Closure:
    """Return the closure, the same for the same arguments: its graphs are then on the workers already."""
    return _Closure(strategy, step_fn, counter_reference)


def _to_figures(strategy: Any, loss: Any) -> Any:
    """Return [loss, 1], or [0, 0] without a loss."""
    if loss is None:
        return tf.zeros(2, tf.float64)
    loss = strategy.reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None)
    if loss.shape.rank != 0:
        raise TrainingError(
            f"step_fn returned a loss of shape {loss.shape}, not one number: return tf.reduce_mean(loss)."
        )
    return tf.stack([tf.cast(loss, tf.float64), tf.ones((), tf.float64)])


def _count_workers() -> int:
    devices = (tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("CPU"))
    return len({device.task for device in devices if device.job == "worker"})
