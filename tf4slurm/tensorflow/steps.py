"""`run_steps`: train so many steps on the workers of a ParameterServerStrategy, as fast as they can."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import ParameterServerLostError, TrainingError, TrainingTimeoutError
from tf4slurm.script_api import report, should_stop
from tf4slurm.tensorflow.checkpoints import Checkpoints, to_index
from tf4slurm.tensorflow.keras_limits import tell_keras_limits
from tf4slurm.tensorflow.leaving import let_leave
from tf4slurm.tensorflow.ledger import Ledger

logger = logging.getLogger(__name__)

_SLOTS_PER_WORKER = 2  # while a worker computes one closure, the next waits for it
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0  # of the job's grace_period, so that a worker which hangs does not cost the last checkpoint
_FETCHES = 3  # of one closure's result, each from another run of it: results that come back from nobody are an error
_MAX_STEPS = 64
_MAX_OPERATIONS = 4_000  # a graph of so many takes a second or two to trace and to send; larger steps take long enough
_slots: weakref.WeakKeyDictionary[Any, list[threading.Thread]] = weakref.WeakKeyDictionary()
"""The threads of the latest run_steps with each coordinator: they live as long as they wait for a closure."""


class StepsDone(NamedTuple):
    """What `run_steps` has done.

    Attributes:
        step: The counter at the end. It counts what was applied, repeated steps too.
        steps_by_worker: How many steps each worker did in this call, by its index: the chief adds up closures that have
            come back. What a worker had done of a closure when it was lost is not in it.
        means: The mean over these steps of each number that step_fn gave, by its name; {"loss": …} of a loss alone.
        is_stopped: Whether it returned early because the job is to stop.
        seconds: How long it took, with tracing and saving.
    """

    step: int
    steps_by_worker: tuple[int, ...]
    means: dict[str, float]
    is_stopped: bool
    seconds: float

    @property
    def steps(self) -> int:
        """The number of steps that this call did, each counted once."""
        return sum(self.steps_by_worker)

    @property
    def mean_loss(self) -> float | None:
        """The mean of the losses of these steps; None where step_fn gave none."""
        return self.means.get("loss")


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

    The job is told step, loss and other numbers (`tf4slurm.report`). When the job is to stop, closures that run are
    finished, or given up after 10 s, a checkpoint is saved, and the result says so. Whatever else ends it, such as
    Ctrl-C or an error, no closure is scheduled any more, and those that run are waited for, 10 s at most. Closures that
    run even then are waited for by the next call.

    Args:
        coordinator: The chief's ClusterCoordinator.
        step_fn: One step: `step_fn(batch)` with a dataset, else `step_fn()`. It runs on a worker, in `strategy.run`,
            and returns the loss, a scalar tensor; or several of them in a dict, by name; or None. Pass the same
            function to later calls: it is traced once.
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
        TrainingError: A dataset has ended, or step_fn returned something else than scalar tensors.
        CheckpointError: A checkpoint could not be written.
        TypeError, ValueError: An argument is not what it should be; nothing was done.
        BaseException: Whatever step_fn raised.
    """
    steps = to_index("steps", steps, at_least=0)
    if steps_per_call is not None:
        steps_per_call = to_index("steps_per_call", steps_per_call, at_least=1)
    _check(coordinator, step_fn, dataset, step, checkpoints, timeout_seconds)
    if not _wait_for(_slots.get(coordinator, []), timeout_seconds):
        raise TrainingTimeoutError(
            f"Closures of an earlier run_steps have not come back from a worker for {timeout_seconds:g} s. Look at the "
            "logs of the workers, or raise timeout_seconds."
        )
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


def _check(coordinator: Any, step_fn: Any, dataset: Any, step: Any, checkpoints: Any, timeout_seconds: Any) -> None:
    """Raise TypeError or ValueError for arguments of run_steps that would fail later."""
    is_counter = isinstance(step, tf.Variable) and step.dtype.is_integer and step.shape.rank == 0
    is_coordinator = isinstance(coordinator, tf.distribute.coordinator.ClusterCoordinator)
    is_number = isinstance(timeout_seconds, (int, float, np.number))
    for name, value, is_right, expected in (
        ("coordinator", coordinator, is_coordinator, "a ClusterCoordinator"),
        ("step_fn", step_fn, callable(step_fn), "a function of one step"),
        ("dataset", dataset, hasattr(dataset, "__next__"), "iter(coordinator.create_per_worker_dataset(…))"),
        ("step", step, is_counter, "a scalar tf.Variable of an integer type"),
        ("checkpoints", checkpoints, isinstance(checkpoints, Checkpoints), "Checkpoints"),
        ("timeout_seconds", timeout_seconds, is_number, "a number"),
    ):
        if not is_right and not (value is None and name in ("dataset", "step", "checkpoints")):
            raise TypeError(f"{name} is {value!r}: expected {expected}.")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds!r}: expected a number greater than 0.")


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
        self._progress = _Progress(self._ledger)
        self._scheduling = threading.Lock()  # ClusterCoordinator.schedule is for one thread at a time
        self._errors: list[BaseException] = []
        self._is_given_up = False

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
        means = {name: total / ledger.done for name, total in ledger.sums.items()}
        self._closure.portion = ledger.portion
        return StepsDone(step, tuple(ledger.steps_by_worker), means, is_stopped, time.monotonic() - started)

    def _run_until(self, limit: int, first: int) -> bool:
        """Do steps until `limit` are handed out and back, or it is time to save or stop; return whether to stop."""
        ledger = self._ledger
        ledger.open(limit)
        slots = [
            threading.Thread(target=self._fill_slot, name=f"tf4slurm-steps-{index}", daemon=True)
            for index in range(_SLOTS_PER_WORKER * self._num_workers)
        ]
        _slots[self._coordinator] = slots
        try:
            for slot in slots:
                slot.start()
            is_stopped = self._is_given_up = self._watch(slots, first)
        except BaseException:
            self._give_up(slots)
            raise
        if self._errors:
            self._give_up(slots)
            raise next(
                (error for error in self._errors if not isinstance(error, tf.errors.CancelledError)), self._errors[0]
            )
        return is_stopped

    def _watch(self, slots: list[threading.Thread], first: int) -> bool:
        """Wait for the end of the slots, or until it is time to give them up; return whether the job is to stop."""
        ledger = self._ledger
        is_stopped, give_up_at = False, float("inf")
        while any(slot.is_alive() for slot in slots) and time.monotonic() < give_up_at and not self._errors:
            max(slots, key=threading.Thread.is_alive).join(_LOOK_SECONDS)
            self._progress.tell(first)
            if not is_stopped and should_stop():
                is_stopped, give_up_at = True, time.monotonic() + _STOP_SECONDS
                ledger.close()
            if self._checkpoints is not None and self._checkpoints.is_due():
                ledger.close()
            if time.monotonic() - ledger.changed_at > self._timeout_seconds:
                raise TrainingTimeoutError(
                    f"No closure has come back from a worker for {self._timeout_seconds:g} s; so far they did "
                    f"{ledger.steps_by_worker} steps. TensorFlow waits until all lost workers are back. Look at the "
                    "logs of the workers, or raise timeout_seconds."
                )
        self._progress.tell(first)
        return is_stopped

    def _give_up(self, slots: list[threading.Thread]) -> None:
        """Schedule no more, and wait for the closures that run; not for long, since a worker may hang."""
        self._is_given_up = True
        self._ledger.close()
        if _wait_for(slots, _STOP_SECONDS) and self._errors:
            with contextlib.suppress(BaseException):
                self._coordinator.join()  # else it raised the error of a closure again at the next call

    def _fill_slot(self) -> None:
        """Keep one closure with the coordinator, until there are no more steps to be taken."""
        try:
            while steps := self._ledger.take(self._closure.most_steps):
                worker, *sums = (float(figure) for figure in self._do(steps))
                self._ledger.enter(int(worker), steps, dict(zip(self._closure.names or (), sums, strict=True)))
        except BaseException as error:  # sys.exit() in step_fn, too: it is for the thread that called run_steps
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
                if fetches == _FETCHES or self._is_given_up:
                    raise
        raise AssertionError


class _Progress:
    """Tells the job how far training is, with the mean of loss and other numbers since it was last told."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told = ledger.account()
        self._has_warned = False

    def tell(self, first: int) -> None:
        """Tell it; `first` is the step at which the ledger began."""
        done, sums = self._ledger.account()
        done_before, sums_before = self._told
        if done > done_before:
            latest = {name: total - sums_before.get(name, 0.0) for name, total in sums.items()}
            report(step=first + done, **{name: total / (done - done_before) for name, total in latest.items()})
            self._told = done, sums
            wrong = [f"{name} is {total}" for name, total in latest.items() if not math.isfinite(total)]
            if wrong and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s since step %d or a little before: training has most likely diverged.",
                    *(", ".join(wrong), first + done),
                )


class _Closure:
    """The function that a worker runs: some steps. It gives [worker's index, the sum of each of `names`].

    The steps are written out one after another. In a loop of TensorFlow's they would take twice as long, since each
    turn of it is agreed on with the ps, and so would calls of one function (measured with 4 B on a ps, steps a second:
    170 one by one, 1,100 in 32 written out, 620 in a loop, 630 in 32 calls).
    """

    def __init__(self, strategy: Any, step_fn: Callable[..., Any], counter_reference: Any) -> None:
        self.most_steps = 1
        self.portion = 1  # of the latest account
        self.names: tuple[str, ...] | None = None  # of the numbers that step_fn returns
        self._has_warned = False
        self._strategy = strategy
        self._step_fn = step_fn
        self._counter = counter_reference.deref()
        self.function = tf.function(self._do_steps)

    def _do_steps(self, count: int, *iterators: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        sums: dict[str, Any] = {}
        for _ in range(count):
            before = len(graph.get_operations())
            batch = [next(iterator) for iterator in iterators]
            figures = _to_figures(self._strategy, self._strategy.run(self._step_fn, args=batch))
            if self.names not in (None, tuple(figures)):
                raise TrainingError(
                    f"step_fn returned {tuple(figures)}, and {self.names} before: return the same always."
                )
            self.names = tuple(figures)
            sums = {name: sums.get(name, 0.0) + figure for name, figure in figures.items()}
            operations = graph.get_operations()[before:]
            with tf.control_dependencies([each for each in operations if each.op_def.is_stateful]):
                self._counter.assign_add(1)  # the ps would count all steps at once, before any is applied
            self.most_steps = max(1, min(_MAX_OPERATIONS // len(operations), _MAX_STEPS))
        self._warn_of_variables_outside(graph)
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return tf.stack([tf.cast(worker, tf.float64), *sums.values()])

    def _warn_of_variables_outside(self, graph: Any) -> None:
        """Say which variables of the step are on no ps, once."""
        used = getattr(graph, "_watched_variables", ())  # `graph.variables` has them when the graph is complete
        outside = sorted({variable.name for variable in used if "/job:ps/" not in variable.device})
        if outside and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The step uses variables that were made outside of the strategy's scope: %s. They are in the chief, "
                "and every step of each worker goes there. Make them in `with strategy.scope():`.",
                ", ".join(outside),
            )


@functools.lru_cache(maxsize=8)
def _make_closure(strategy: Any, step_fn: Callable[..., Any], counter_reference: Any) -> _Closure:
    """Return the closure, the same for the same arguments: its graphs are then on the workers already."""
    return _Closure(strategy, step_fn, counter_reference)


def _to_figures(strategy: Any, result: Any) -> dict[str, Any]:
    """Return the numbers that step_fn has returned, by name.

    Raises:
        TrainingError: It is not one scalar tensor, a dict of them, or None.
    """
    numbers = result if isinstance(result, dict) else {} if result is None else {"loss": result}
    for name, number in numbers.items():
        if not isinstance(name, str) or name == "step":
            raise TrainingError(f"step_fn returned a number of the name {name!r}: expected a str other than 'step'.")
        tensors = strategy.experimental_local_results(number)
        if not all(tf.is_tensor(each) and (each.dtype.is_floating or each.dtype.is_integer) for each in tensors):
            raise TrainingError(
                f"step_fn returned {number!r} as {name}, not a number as a tensor: return tf.reduce_mean(loss), a dict "
                "of such tensors by name, or None."
            )
    figures = {name: strategy.reduce("MEAN", numbers[name], axis=None) for name in sorted(numbers)}
    for name, figure in figures.items():
        if figure.shape.rank != 0:
            raise TrainingError(
                f"step_fn returned a {name} of shape {figure.shape}, not one number: return tf.reduce_mean(loss)."
            )
    return {name: tf.cast(figure, tf.float64) for name, figure in figures.items()}


def _count_workers() -> int:
    devices = (tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("CPU"))
    return len({device.task for device in devices if device.job == "worker"})


def _wait_for(slots: list[threading.Thread], seconds: float) -> bool:
    """Wait until these threads have ended, but no longer; return whether they have."""
    deadline = time.monotonic() + seconds
    for slot in slots:
        if slot.is_alive():
            slot.join(max(0.0, deadline - time.monotonic()))
    return not any(slot.is_alive() for slot in slots)
