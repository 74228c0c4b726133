"""Train a number of steps on the workers of a ParameterServerStrategy (`run_steps()`)."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf4slurm.errors import ParameterServerLostError, TrainingError
from tf4slurm.scripts.functions import report
from tf4slurm.tensorflow.checkpoints import Checkpoints, check_integer
from tf4slurm.tensorflow.closures import ClosureRunner, count_tasks, wait_for_closures
from tf4slurm.tensorflow.constants import explain_large_array
from tf4slurm.tensorflow.keras.limits import install_keras_limits
from tf4slurm.tensorflow.running_cluster import connected_cluster
from tf4slurm.tensorflow.step_closure import StepClosure, make_closure
from tf4slurm.tensorflow.step_scheduler import StepScheduler
from tf4slurm.tensorflow.strategy import allow_exit_without_workers

logger = logging.getLogger(__name__)

_OBSERVE_SECONDS = 0.1
_END_SECONDS = 3.0  # from the loss of a ps until the launcher has ended the job


class StepsDone(NamedTuple):
    """The result of `run_steps` and `run_shards`.

    Attributes:
        step: The step counter at the end, including repeated steps.
        steps_by_worker: Steps that each worker completed in this call, by worker index. Closures that were lost with a
            worker do not count. Workers that have joined or left are included.
        means: By name, the mean over these steps of each value that step_fn returned. The name of a single tensor is
            "loss".
        is_stopped: Whether the job was asked to stop, so that the call may have returned early.
        seconds: The duration of the call in seconds, including tracing and saving.
    """

    step: int
    steps_by_worker: tuple[int, ...]
    means: dict[str, float]
    is_stopped: bool
    seconds: float

    @property
    def steps(self) -> int:
        """The number of steps of this call. Repeated steps count once."""
        return sum(self.steps_by_worker)

    @property
    def mean_loss(self) -> float | None:
        """The mean of the value "loss", or None if step_fn returned no value of this name."""
        return self.means.get("loss")


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise tf4slurm's errors in place of TensorFlow's.

    ParameterServerLostError is raised if a ps is lost, and TrainingError if a dataset has ended.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        notebook = connected_cluster()
        if notebook is not None and (end := notebook.find_end(_END_SECONDS)):
            raise ParameterServerLostError(
                f"The variables of the cluster are lost. {end} Training resumes from its checkpoint (Checkpoints)."
            ) from error
        raise ParameterServerLostError(
            "A ps is lost, and its variables with it. Start the job again, or give it --max-attempts: it resumes from "
            f"its checkpoint. TensorFlow's error: {' '.join(str(error.message).split())[:200]}"
        ) from error
    except tf.errors.OutOfRangeError as error:
        raise TrainingError(
            "The dataset of a worker has ended. run_steps counts steps, not epochs: call repeat() on the dataset."
        ) from error


@translate_errors()
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
    """Train until the step counter reaches `steps`, which includes the steps of a restored checkpoint.

    The counter counts the steps that were applied completely. A lost worker's closure runs again on another worker,
    including the steps already applied. So the counter may exceed `steps`. A restarted worker reads its dataset from
    the start.

    run_steps reports the step, the loss and other values to the job (`tf4slurm.report`). After a stop request, it waits
    at most 10 s for running closures, saves a checkpoint, and returns. After an error or Ctrl-C, it also waits at most
    10 s. The next call waits for the closures that still run.

    Args:
        coordinator: The coordinator of the workers.
        step_fn: `step_fn(batch)`, or without a dataset `step_fn()`. It runs on a worker, in `strategy.run`, and returns
            a scalar loss tensor, a dict of scalar tensors by name, or None. Later calls with the same function and the
            same counter use its traces again.
        steps: The value of the step counter at which to return.
        dataset: `iter(coordinator.create_per_worker_dataset(…))`. Each worker's dataset must not end: `repeat()` it.
        step: The counter, an integer tf.Variable created in the strategy's scope (default: `checkpoints.step`, or
            without checkpoints a new variable that starts at 0).
        checkpoints: The checkpoints to save when due, on a stop request, and at the end.
        steps_per_call: Number of steps per closure. The time to trace a closure grows with it. By default, a closure
            takes up to 0.25 s, less if the training is short, and with more than 25 workers longer, so that all workers
            together run at most 100 closures a second. A stop waits for one closure of each worker, and a lost worker
            repeats one.
        timeout_seconds: Longest time in seconds in which no closure completes, including tracing (default 600).

    Raises:
        ParameterServerLostError: A ps and its variables are lost. Let the chief exit: another attempt (`tf4slurm run
            --max-attempts`) resumes from the checkpoint. In a notebook the message has the steps to take.
        TrainingTimeoutError: No closure completed for `timeout_seconds`, or closures of an earlier call still run.
        TrainingError: A dataset has ended, or step_fn returned something other than scalar tensors, or uses more than
            2 GB of arrays.
        CheckpointError, DataShardsError, RendezvousConnectionError: As for `Checkpoints.save`.
        TypeError, ValueError: An argument is invalid. Nothing was done.
        BaseException: Any exception that step_fn raised.
    """
    steps = check_integer("steps", steps, at_least=0)
    if steps_per_call is not None:
        steps_per_call = check_integer("steps_per_call", steps_per_call, at_least=1)
    _check_arguments(coordinator, step_fn, dataset, step, checkpoints, timeout_seconds)
    if step is None and checkpoints is not None:
        step = checkpoints.step
    if step is None:
        with coordinator.strategy.scope():
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
    closure = make_closure(coordinator.strategy, step_fn, step.ref())
    return run_closures(
        coordinator,
        closure,
        steps,
        dataset=dataset,
        step=step,
        checkpoints=checkpoints,
        steps_per_call=steps_per_call,
        timeout_seconds=timeout_seconds,
        observe=StepReporter().observe,
        save_at=steps,
        last_step=steps,
    )


def run_closures(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    closure: StepClosure,
    steps: int,
    *,
    dataset: Any,
    step: tf.Variable,
    checkpoints: Checkpoints | None,
    steps_per_call: int | None,
    timeout_seconds: float,
    observe: Callable[[int, int, dict[str, Any]], bool],
    save_at: int,
    last_step: int,
) -> StepsDone:
    """Run closures until the step counter reaches `steps`. Arguments and exceptions are those of `run_steps`.

    Args:
        observe: Called as `observe(step, completed, sums)`, in this thread, about every 100 ms if steps have completed.
            `step` is the step counter; steps that ran again may be missing in it. `completed` is the number of steps
            that this call has completed. `sums` has, by name, the sum of each value that these steps returned. If the
            result is True, this call schedules no more closures, saves a checkpoint and returns.
        save_at: If the counter is at least this number at the end of this call, a checkpoint is saved even if none is
            due. The number may be greater than `steps`.
        last_step: The step at which the whole training ends, in this call or a later one. The fewer steps are expected,
            the fewer a closure has. Two numbers of steps are computed, and the greater one is expected: the steps left
            until `last_step`, and the steps done before this call, because a script may call `run_steps` in a loop.
    """
    wait_for_closures(coordinator, timeout_seconds)
    allow_exit_without_workers(coordinator)
    install_keras_limits()
    inputs = () if dataset is None else (dataset,)
    first_step = int(step.numpy())
    expected_steps = max(last_step - first_step, first_step)
    scheduler = StepScheduler(count_tasks("worker"), steps_per_call, closure.last_steps, expected_steps=expected_steps)
    work = _StepWork(coordinator, closure, inputs, step, scheduler)
    done = _StepRun(work, checkpoints, timeout_seconds, observe, last_step).run(steps, save_at)
    closure.last_steps = scheduler.closure_steps
    return done


class StepReporter:
    """Reports the step, and the mean of each value that step_fn returned, to the job.

    Logs one warning if a mean is not finite.
    """

    def __init__(self) -> None:
        self._completed = 0
        self._sums: dict[str, float] = {}
        self._has_warned = False

    def observe(self, step: int, completed: int, sums: dict[str, Any]) -> bool:
        """Report the means over the steps since the last call. Arguments are those of `observe` in `run_closures`.

        Return False, so that the training goes on.
        """
        latest = {name: total - self._sums.get(name, 0.0) for name, total in sums.items()}
        means = {name: total / (completed - self._completed) for name, total in latest.items()}
        self._completed, self._sums = completed, sums
        report(step=step, **means)
        not_finite = ", ".join(f"{name} is {total}" for name, total in latest.items() if not math.isfinite(total))
        if not_finite and not self._has_warned:
            self._has_warned = True
            text = "%s since step %d or a little before: training has probably diverged."
            logger.warning(text, not_finite, step)
        return False


def _check_arguments(
    coordinator: Any, step_fn: Any, dataset: Any, step: Any, checkpoints: Any, timeout_seconds: Any
) -> None:
    """Raise TypeError or ValueError for arguments of run_steps that would fail later."""
    is_counter = isinstance(step, tf.Variable) and step.dtype.is_integer and step.shape.rank == 0
    is_coordinator = isinstance(coordinator, tf.distribute.coordinator.ClusterCoordinator)
    is_number = isinstance(timeout_seconds, (int, float, np.number))
    for name, value, is_valid, expected in (
        ("coordinator", coordinator, is_coordinator, "a ClusterCoordinator"),
        ("step_fn", step_fn, callable(step_fn), "a function of one step"),
        ("dataset", dataset, hasattr(dataset, "__next__"), "iter(coordinator.create_per_worker_dataset(…))"),
        ("step", step, is_counter, "a scalar tf.Variable of an integer type"),
        ("checkpoints", checkpoints, isinstance(checkpoints, Checkpoints), "Checkpoints"),
        ("timeout_seconds", timeout_seconds, is_number, "a number"),
    ):
        if not is_valid and not (value is None and name in ("dataset", "step", "checkpoints")):
            raise TypeError(f"{name} is {value!r}: expected {expected}.")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds!r}: expected a number greater than 0.")


@dataclass(frozen=True, eq=False)
class _StepWork:
    """The `Work` of one call of `run_closures`. A unit is the number of steps of a closure."""

    coordinator: Any
    closure: StepClosure
    inputs: tuple[Any, ...]
    counter: tf.Variable
    scheduler: StepScheduler

    @property
    def is_over(self) -> bool:
        return True  # always, if `take` returns None: the limit is set before a run, and never rises during it

    def take(self) -> int | None:
        return self.scheduler.take(self.closure.max_copies) or None

    def stop(self) -> None:
        self.scheduler.stop()

    def make_closure(self, steps: int, make: Callable[..., Any]) -> Any:
        with explain_large_array("The step"):
            return make(self.closure.function, steps, *self.inputs)

    def complete(self, steps: int, worker: int, result: Any) -> None:
        self.scheduler.add_completed(worker, steps, self.closure.split(result))

    def check_ps(self) -> None:
        self.counter.numpy()

    def describe_timeout(self) -> str:
        return (
            "No closure completed within {seconds}; the workers' steps so far are "
            f"{self.scheduler.steps_by_worker}. See the logs of the workers, or raise timeout_seconds."
        )


@dataclass(eq=False)
class _StepRun:
    """Runs one call of `run_closures`."""

    work: _StepWork
    checkpoints: Checkpoints | None
    timeout_seconds: float
    observe: Callable[[int, int, dict[str, Any]], bool]
    last_step: int  # of the whole training
    observed: int = 0
    observed_at: float = 0.0
    is_ended: bool = False  # `observe` has returned True
    save_step: int | None = None  # the next step at which `every_steps` requires a save

    def run(self, steps: int, save_at: int) -> StepsDone:
        started = time.monotonic()
        scheduler, counter, checkpoints = self.work.scheduler, self.work.counter, self.checkpoints
        step = int(counter.numpy())
        is_stopped = False
        if checkpoints is not None and step >= save_at:  # closures of an earlier, interrupted call have reached it
            self._save(step)
        self.save_step = None if checkpoints is None else checkpoints.next_due(step)
        while step < steps and not is_stopped and not self.is_ended:
            pauses = checkpoints is not None and checkpoints.consistent
            target = min(steps, (self.save_step or steps) if pauses else steps)
            is_stopped = self._run_until(scheduler.completed + target - step, step - scheduler.completed)
            step = int(counter.numpy())  # above the target if steps of a lost worker ran again
            if checkpoints is not None and (step >= save_at or is_stopped or self.is_ended or self._is_due(step)):
                self._save(step, is_last=is_stopped or self.is_ended)
        sums = {name: total for name, total in scheduler.sums.items() if isinstance(total, float)}
        means = {name: total / scheduler.completed for name, total in sums.items()}
        return StepsDone(step, tuple(scheduler.steps_by_worker), means, is_stopped, time.monotonic() - started)

    def _run_until(self, limit: int, first_step: int) -> bool:
        """Run closures until this call of `run_closures` has completed `limit` steps.

        Return whether the job was asked to stop. The call ends earlier if so, if a checkpoint is due, or if `observe`
        returned True. `first_step` is the step counter minus the steps that this call of `run_closures` has completed.
        """
        self.work.scheduler.set_limit(limit)
        runner = ClosureRunner(self.work.coordinator, self.work, self.timeout_seconds)
        is_stopped = runner.run(lambda: self._poll(first_step, runner.num_workers))
        self._observe(first_step)
        return is_stopped

    def _poll(self, first_step: int, num_workers: int) -> None:
        if time.monotonic() < self.observed_at + _OBSERVE_SECONDS:
            return
        self._observe(first_step)
        self.observed_at = time.monotonic()
        self.work.scheduler.set_workers(num_workers)
        if self.checkpoints is not None and self._is_due(first_step + self.observed):
            if self.checkpoints.consistent:
                self.work.scheduler.stop()
            else:
                self.checkpoints.begin_save()
                self.save_step = self.checkpoints.next_due(first_step + self.observed)

    def _is_due(self, step: int) -> bool:
        assert self.checkpoints is not None
        return self.checkpoints.is_due() or (self.save_step is not None and step >= self.save_step)

    def _save(self, step: int, *, is_last: bool = False) -> None:
        """Save while no closure runs. If the training goes on with `fit`'s next epoch, it need not wait for the end."""
        assert self.checkpoints is not None
        if is_last or step >= self.last_step:
            self.checkpoints.save()
        else:
            self.checkpoints.begin_save()
            if self.checkpoints.consistent:
                self.checkpoints.finish_save()
        self.save_step = self.checkpoints.next_due(step)

    def _observe(self, first_step: int) -> None:
        completed, sums = self.work.scheduler.snapshot()
        if completed != self.observed:
            self.observed = completed
            if self.observe(first_step + completed, completed, sums):
                self.is_ended = True
                self.work.scheduler.stop()
