"""Run units of work on the workers of a coordinator (`ClosureRunner`): steps, shards or parts of an evaluation.

Each unit is one closure. If its worker is lost before the chief has the result, the closure runs again. Each unit is
recorded as complete exactly once, unless `ClosureRunner.run` raises an error or ends at a stop request.

One thread schedules all closures of a run and records their results. The coordinator's own thread of each worker
fetches the result, as it does for `ClusterCoordinator.schedule`. So a closure costs the chief what TensorFlow's costs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import Closure, _is_worker_failure
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl

from tf4slurm.errors import TrainingTimeoutError
from tf4slurm.scripts.functions import should_stop

NOT_PARSED = "Unable to parse request"
"""The message of a fault of TensorFlow 2.21 (EagerClusterFunctionLibraryRuntime::Run).

While one thread sends the request of a function, another thread may instantiate a function for the first time. The
vector that both use then moves in memory, and the request has arbitrary bytes as its device.
"""
MAX_NOT_PARSED = 10  # attempts to run a closure or a save; a request that is really invalid fails each time

_CACHED_CLOSURES = 16  # there are at most 7 numbers of steps; to make a closure again costs 1 ms
_AHEAD = 8  # the most closures that wait for a worker: so many may end while the chief schedules others
_POLL_SECONDS = 0.1
_COUNT_SECONDS = 1.0
_STOP_SECONDS = 10.0  # leaves the rest of the grace period to the last checkpoint if a worker hangs
_MAX_LOSSES = 3  # of the result of a unit; after each the closure runs again
_LOSSES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InvalidArgumentError)
_runs: weakref.WeakKeyDictionary[Any, Future[BaseException | None]] = weakref.WeakKeyDictionary()
"""By coordinator, a future of the thread of the last `ClosureRunner.run`, until this thread has ended.

The thread sets its result to the exception that ended the run, or to None. `Thread.join` is not used: after a Ctrl-C in
it, Python before 3.13 counts a running thread as ended.
"""


class Work(Protocol):
    """The units of work of a `ClosureRunner`, such as the shards of one call of `run_shards`.

    The runner's thread calls these methods, and the caller's thread calls `stop`. Only one thread at a time is in
    `is_over`, `take`, `stop` or `complete`.
    """

    @property
    def is_over(self) -> bool:
        """Whether no more units will come. The runner reads this after `take` has returned None."""

    def take(self) -> Any:
        """Return the next unit. Return None if no unit is available now."""

    def stop(self) -> None:
        """Let `take` return no more units."""

    def make_closure(self, unit: Any, make: Callable[..., Any]) -> Any:
        """Return `make(function, *arguments)` with the tf.function of the unit's closure.

        Equal units may get copies of one closure.
        """

    def complete(self, unit: Any, worker: int, result: Any) -> None:
        """Record the result of a unit, the values of its function as numpy arrays, and the index of its worker."""

    def check_ps(self) -> None:
        """Raise TensorFlow's error if a ps is lost."""

    def describe_timeout(self) -> str:
        """Return the text of a TrainingTimeoutError, with "{seconds}" in place of the timeout."""


@dataclass(eq=False)
class _Run:
    """The runs of a unit's closure: how many there were, how many results were lost, and the latest one's result."""

    unit: Any
    num_runs: int = 0
    num_losses: int = 0
    result: _Result | None = None  # the coordinator has only a weak reference


class _Closure(Closure):  # type: ignore[misc]
    """A closure that notes the index of its worker.

    A function that calls `experimental_get_current_worker_index` would cost the chief another operation per closure.
    """

    run: _Run | None = None
    worker = 0

    def execute_on(self, worker: Any) -> None:
        self.worker = worker.worker_index
        super().execute_on(worker)


class _Result(RemoteValueImpl):  # type: ignore[misc]
    """The RemoteValue of a closure that calls `report(values, error)` once, when the closure has ended.

    The values are numpy arrays in the structure of the function's result.
    """

    def __init__(self, type_spec: Any, report: Callable[[Any, Exception | None], None]) -> None:
        super().__init__(None, type_spec)
        self._report = report

    def get(self) -> Any:
        """Copy the result to this host. The coordinator calls this method after the closure has run on a worker.

        If the copy fails because the worker is lost, the coordinator runs the closure again on another one.
        """
        values = tf.nest.map_structure(lambda tensor: tensor.numpy(), self._values)
        self._report(values, None)
        return values

    def _set_error(self, error: Exception) -> None:
        super()._set_error(error)
        self._report(None, error)


@dataclass(eq=False)
class _Ended:
    """The end of a unit's closure: its result or its error, and the index of its worker.

    `run` is None for an error that `schedule` has raised.
    """

    run: _Run | None
    result: Any = None
    error: Exception | None = None
    worker: int = 0


class ClosureRunner:
    """Runs the units of a `Work` on the workers of a coordinator, one per worker, and some more that wait.

    Call `run` once.

    Attributes:
        num_workers: The number of connected workers, at least 1. They are counted once a second during `run`.
    """

    def __init__(self, coordinator: Any, work: Work, timeout_seconds: float) -> None:
        """Store the arguments. Call `wait_for_closures` first, because closures of an earlier call may still run.

        Args:
            coordinator: The coordinator of the workers.
            work: The units to run.
            timeout_seconds: The longest time without a completed unit.
        """
        self.num_workers = max(count_tasks("worker"), 1)
        self._coordinator = coordinator
        self._work = work
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()  # guards `take`, `stop` and `complete`
        self._changed_at = 0.0
        self._ended: Future[BaseException | None] = Future()
        self._error: BaseException | None = None
        self._is_given_up = False
        self._is_stopped = False
        # Used by the runner's thread only
        self._ends: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._running: set[_Run] = set()
        self._failed: list[_Ended] = []
        self._make_closure = functools.lru_cache(_CACHED_CLOSURES)(self._make)
        self._counted_at = time.monotonic()

    def run(self, poll: Callable[[], None] = lambda: None, *, ends_at_stop: bool = True) -> bool:
        """Run all units. Return whether the job was asked to stop meanwhile. With `ends_at_stop=False`, return False.

        Args:
            poll: Called in the caller's thread every 0.1 s, and at once if a worker has no unit.
            ends_at_stop: After a stop request, start no more units, and wait at most 10 s for running ones (default).
                With False, ignore stop requests. After an error or Ctrl-C, the call always waits like this.

        Raises:
            TrainingTimeoutError: No unit was completed for `timeout_seconds`.
            BaseException: Any exception that a unit or `poll` raised.
        """
        _runs[self._coordinator] = self._ended
        self._changed_at = time.monotonic()
        try:
            threading.Thread(target=self._run_units, name="tf4slurm-closures", daemon=True).start()
            is_stopped = self._is_given_up = self._watch(poll, ends_at_stop)
        except BaseException:
            self._give_up()
            raise
        if self._error is not None:
            self._give_up()
            raise self._error
        if self._ended.done():
            del _runs[self._coordinator]
        return is_stopped

    # In the caller's thread

    def _watch(self, poll: Callable[[], None], ends_at_stop: bool) -> bool:
        """Call `poll` as `run` describes, until all units are complete. Return whether a stop was requested.

        The call ends earlier after an error, or 10 s after a stop request. With `ends_at_stop=False`, stop requests are
        ignored, and the result is False.
        """
        is_stopped, give_up_at = False, float("inf")
        while time.monotonic() < give_up_at and self._error is None:
            self._poll(poll)
            with self._changed:
                if self._ended.done():
                    break
                self._changed.wait(_POLL_SECONDS)
            if ends_at_stop and not is_stopped and should_stop():
                self._is_stopped = is_stopped = True
                give_up_at = time.monotonic() + _STOP_SECONDS
                self._stop()
            if time.monotonic() - self._changed_at > self._timeout_seconds:
                raise TrainingTimeoutError(self._work.describe_timeout().format(seconds=f"{self._timeout_seconds:g} s"))
        poll()
        return is_stopped

    def _poll(self, poll: Callable[[], None]) -> None:
        """Call `poll`. Its duration does not count for the timeout: it may wait for a shard, or save a checkpoint."""
        begin = time.monotonic()
        poll()
        with self._changed:
            self._changed_at += time.monotonic() - max(self._changed_at, begin)

    def _stop(self) -> None:
        with self._changed:
            self._work.stop()
            self._changed.notify_all()

    def _give_up(self) -> None:
        """Schedule no more closures. Wait at most 10 s for running closures, because a worker may hang."""
        self._is_given_up = True
        self._stop()
        if self._ended.cancel() or not wait([self._ended], _STOP_SECONDS).not_done:
            _forget_run(self._coordinator)

    # In the runner's thread

    def _run_units(self) -> None:
        """Run units until no more will come, and no closure runs. Then set the result of the future `_ended`.

        If the future was cancelled before, do nothing.
        """
        if not self._ended.set_running_or_notify_cancel():
            return
        is_over = False
        while not is_over or self._running or self._failed:
            try:
                is_over = self._start_units()
                if self._is_stopped or self._is_given_up:
                    self._withdraw()
                if self._running:
                    self._take_end()
                elif self._failed:
                    self._run_again()
                elif not is_over:
                    self._wait_for_units()
            except BaseException as error:  # also sys.exit() in step_fn; `run` raises the error in its thread
                self._error = self._error or error
                self._is_given_up = is_over = True
                self._failed.clear()
                self._stop()
        with self._changed:
            self._ended.set_result(self._error)
            self._changed.notify_all()

    def _start_units(self) -> bool:
        """Start units until each worker has one, and some more. Return whether no more units will come."""
        if time.monotonic() >= self._counted_at + _COUNT_SECONDS:
            self._counted_at = time.monotonic()
            self.num_workers = max(count_tasks("worker"), 1)
        capacity = self.num_workers + min(self.num_workers, _AHEAD)
        while not (self._failed or self._is_given_up) and len(self._running) < capacity:
            with self._changed:
                if (unit := self._work.take()) is None:
                    self._changed.notify_all()  # `poll` may provide units
                    return self._work.is_over
            self._start(_Run(unit))
        return self._is_given_up and not self._failed

    def _wait_for_units(self) -> None:
        with self._changed:
            self._changed.wait(_POLL_SECONDS)

    def _start(self, run: _Run) -> None:
        run.num_runs += 1
        closures = self._coordinator._cluster.closure_queue
        closure = copy.copy(self._make_closure(run.unit, closures._cancellation_mgr))
        closure.run = run
        run.result = _Result(
            closure._output_type_spec,
            lambda values, error: self._ends.put(_Ended(run, values, error, closure.worker)),
        )
        closure._output_remote_value_ref = weakref.ref(run.result)
        self._running.add(run)
        try:
            closures.put(closure)
        except Exception as error:  # that of a closure that has failed; this one is cancelled
            self._failed.append(_Ended(None, error=error))

    def _make(self, unit: Any, cancellation_manager: Any) -> _Closure:
        """Make the closure of a unit, as `ClusterCoordinator.schedule` does."""
        strategy = self._coordinator.strategy
        with strategy.scope():  # a first call traces the function, which may create slot variables
            strategy.extended._being_scheduled = True
            try:
                closure: _Closure = self._work.make_closure(
                    unit, lambda function, *arguments: _Closure(function, cancellation_manager, args=arguments)
                )
                return closure
            finally:
                strategy.extended._being_scheduled = False

    def _withdraw(self) -> None:
        """Take back the closures that wait for a worker, because each would run as long as those that run now."""
        closures = self._coordinator._cluster.closure_queue
        while (closure := closures.get(timeout=0.0)) is not None:
            if not (isinstance(closure, _Closure) and closure.run in self._running):
                closures.put_back(closure)  # the script has scheduled it
                break
            self._running.discard(closure.run)
            closures.mark_finished()

    def _take_end(self) -> None:
        """Wait for the end of a closure, but at most 0.1 s, and record its result."""
        try:
            ended = self._ends.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        assert ended.run is not None
        self._running.discard(ended.run)
        ended.run.result = None
        if ended.error is not None:
            if self._is_given_up or not _may_run_again(ended.error):
                raise ended.error
            self._failed.append(ended)
            return
        with self._changed:
            self._work.complete(ended.run.unit, ended.worker, ended.result)
            self._changed_at = time.monotonic()

    def _run_again(self) -> None:
        """Run the closures again that have failed, or raise an error. No closure runs now.

        The results of lost workers may be lost. If a ps is lost, `check_ps`, or running a closure again, raises an
        error. After a request that could not be parsed (see `NOT_PARSED`), which may be that of another closure, the
        coordinator cancels all closures. It also does so if a worker is lost while its result is copied: the error of
        the copy may be a CancelledError, which the coordinator does not take for the loss of the worker.
        """
        failed, self._failed = self._failed, []
        errors = [ended.error for ended in failed if ended.error is not None]
        try:
            self._coordinator._cluster.closure_queue.done()  # raises, and forgets, the first error of any closure
        except Exception as error:
            errors.append(error)
        causes = [error for error in errors if not isinstance(error, tf.errors.CancelledError)]
        unexpected = [error for error in causes if not _may_run_again(error)]
        if unexpected:
            raise unexpected[0]
        if not causes or any(isinstance(error, _LOSSES) for error in causes):
            self._work.check_ps()
        for ended in failed:
            if ended.run is None:
                continue
            ended.run.num_losses += not causes or isinstance(ended.error, _LOSSES)
            if ended.error is not None and (
                ended.run.num_losses == _MAX_LOSSES or ended.run.num_runs == MAX_NOT_PARSED
            ):
                raise ended.error
            self._start(ended.run)


def _may_run_again(error: Exception) -> bool:
    """Return whether the closures may succeed if those that failed with this error, or were cancelled, run again."""
    if isinstance(error, tf.errors.InternalError):
        return NOT_PARSED in str(error)
    if isinstance(error, tf.errors.InvalidArgumentError):
        return bool(_is_worker_failure(error))  # another server, at the index of the lost worker, has no such result
    return isinstance(error, (tf.errors.CancelledError, *_LOSSES))


def wait_for_closures(coordinator: Any, timeout_seconds: float) -> None:
    """Wait for the closures that still run after an earlier call ended with an error, Ctrl-C or a stop request.

    Raises:
        TrainingTimeoutError: They did not complete within `timeout_seconds`.
    """
    ended = _runs.get(coordinator)
    if ended is not None and not ended.cancel() and wait([ended], timeout_seconds).not_done:
        raise TrainingTimeoutError(
            f"Closures of an earlier call did not complete within {timeout_seconds:g} s. See the logs of the workers, "
            "or raise timeout_seconds."
        )
    _forget_run(coordinator)


def _forget_run(coordinator: Any) -> None:
    """Forget an earlier `ClosureRunner.run`, whose thread has ended.

    If it has failed, clear the coordinator's error. Otherwise its next call would raise this error.
    """
    ended = _runs.pop(coordinator, None)
    if ended is not None and not ended.cancelled() and ended.result() is not None:
        with contextlib.suppress(Exception):
            coordinator.join()


def count_tasks(role: str) -> int:
    """Return the number of tasks of `role` ("ps" or "worker") to which TensorFlow is connected in this process."""
    job = f"/job:{role}/"
    return sum(
        device.name.endswith(":CPU:0") and job in device.name for device in tf.config.list_logical_devices("CPU")
    )
