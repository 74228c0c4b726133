"""Run units of work on the workers of a coordinator (`ClosureRunner`): steps, shards or parts of an evaluation.

Each unit is one closure. If its worker is lost before the chief has fetched the result, the closure runs again. Each
unit is recorded as complete exactly once, unless `ClosureRunner.run` raises an error or ends at a stop request.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import _is_worker_failure

from tf4slurm.errors import TrainingTimeoutError
from tf4slurm.scripts.functions import should_stop

CLOSURES_PER_WORKER = 2  # one runs while the next waits
NOT_PARSED = "Unable to parse request"
"""The message of a fault of TensorFlow 2.21 (EagerClusterFunctionLibraryRuntime::Run).

While one thread sends the request of a function, another thread may instantiate a function for the first time. The
vector that both use then moves in memory, and the request has arbitrary bytes as its device.
"""
MAX_NOT_PARSED = 10  # attempts to run a closure or a save; a request that is really invalid fails each time

_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0  # leaves the rest of the grace period to the last checkpoint if a worker hangs
_MAX_FETCHES = 3  # attempts to fetch a closure's result; each retry runs the closure again
_CAUSE_SECONDS = 5.0  # from a cancelled closure to the error of the closure that has failed
_Thread = Future[BaseException | None]
_threads: weakref.WeakKeyDictionary[Any, list[_Thread]] = weakref.WeakKeyDictionary()
"""By coordinator, one future for each thread of the last `ClosureRunner.run`, until all of these threads have ended.

A thread sets the result of its future to the exception that ended it, or to None. `Thread.join` is not used: after a
Ctrl-C in it, Python before 3.13 counts a running thread as ended.
"""


class Work(Protocol):
    """The units of work of a `ClosureRunner`, such as the shards of one call of `run_shards`.

    Several threads call these methods. Only one thread at a time is in `is_over`, `take`, `stop` or `complete`, and
    only one in `schedule`.
    """

    @property
    def is_over(self) -> bool:
        """Whether no more units will come. The runner reads this after `take` has returned None."""

    def take(self) -> Any:
        """Return the next unit. Return None if no unit is available now."""

    def stop(self) -> None:
        """Let `take` return no more units."""

    def schedule(self, unit: Any) -> Any:
        """Schedule the closure of a unit. Return its RemoteValue."""

    def complete(self, unit: Any, result: Any) -> None:
        """Record the fetched result of a unit."""

    def check_ps(self) -> None:
        """Raise TensorFlow's error if a ps is lost."""

    def describe_timeout(self) -> str:
        """Return the text of a TrainingTimeoutError, with "{seconds}" in place of the timeout."""


class ClosureRunner:
    """Runs the units of a `Work` on the workers of a coordinator, with two closures per worker. Call `run` once."""

    def __init__(self, coordinator: Any, work: Work, timeout_seconds: float) -> None:
        """Store the arguments. Call `wait_for_closures` first, because closures of an earlier call may still run.

        `timeout_seconds` is the longest time without a completed unit.
        """
        self._coordinator = coordinator
        self._work = work
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()  # guards `take` and `complete`
        self._changed_at = 0.0
        self._scheduling = threading.Lock()  # ClusterCoordinator.schedule is not thread-safe
        self._errors: list[BaseException] = []
        self._has_not_parsed = False  # a worker could not parse a request in this run
        self._is_given_up = False

    def run(self, poll: Callable[[], None] = lambda: None, *, ends_at_stop: bool = True) -> bool:
        """Run all units. Return whether the job was asked to stop meanwhile. With `ends_at_stop=False`, return False.

        Args:
            poll: Called in the caller's thread after a completed unit, and otherwise every 0.1 s.
            ends_at_stop: After a stop request, start no more units, and wait at most 10 s for running ones (default).
                With False, ignore stop requests. After an error or Ctrl-C, the call always waits like this.

        Raises:
            TrainingTimeoutError: No unit was completed for `timeout_seconds`.
            BaseException: Any exception that a unit or `poll` raised.
        """
        threads: list[_Thread] = []
        _threads[self._coordinator] = threads
        self._changed_at = time.monotonic()
        try:
            is_stopped = self._is_given_up = self._watch(threads, poll, ends_at_stop)
        except BaseException:
            self._give_up(threads)
            raise
        if self._errors:
            self._give_up(threads)
            causes = [error for error in self._errors if not isinstance(error, tf.errors.CancelledError)]
            raise (causes or self._errors)[0]
        if all(each.done() for each in threads):
            del _threads[self._coordinator]
        return is_stopped

    def _watch(self, threads: list[_Thread], poll: Callable[[], None], ends_at_stop: bool) -> bool:
        """Start the threads that run units, and call `poll`, as `run` describes. Return whether a stop was requested.

        The call ends when all threads have ended, when one has failed, or 10 s after a stop request. With
        `ends_at_stop=False`, stop requests are ignored, and the result is False.
        """
        is_stopped, give_up_at, next_start = False, float("inf"), 0.0
        while time.monotonic() < give_up_at and not self._errors:
            self._poll(poll)
            if time.monotonic() >= next_start:
                next_start = time.monotonic() + _POLL_SECONDS
                self._start_threads(threads)
            with self._changed:
                if all(each.done() for each in threads):
                    break
                self._changed.wait(_POLL_SECONDS)
            if ends_at_stop and not is_stopped and should_stop():
                is_stopped, give_up_at = True, time.monotonic() + _STOP_SECONDS
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

    def _start_threads(self, threads: list[_Thread]) -> None:
        """Start threads until there are two per worker, and add their futures to `threads`."""
        while len(threads) < CLOSURES_PER_WORKER * max(count_tasks("worker"), 1):
            ended: _Thread = Future()
            name = f"tf4slurm-closures-{len(threads)}"
            threads.append(ended)  # first: a Ctrl-C in `start` may come before or after the thread has started
            threading.Thread(target=self._run_units, args=(ended,), name=name, daemon=True).start()

    def _stop(self) -> None:
        with self._changed:
            self._work.stop()
            self._changed.notify_all()

    def _give_up(self, threads: list[_Thread]) -> None:
        """Schedule no more closures. Wait at most 10 s for running closures, because a worker may hang."""
        self._is_given_up = True
        self._stop()
        wait([each for each in threads if not each.cancel()], _STOP_SECONDS)
        if all(each.done() for each in threads):
            _forget_run(self._coordinator, threads)

    def _run_units(self, ended: _Thread) -> None:
        """Run one unit after another, in a thread, until there are no more, or one fails.

        At the end, the result of the thread's future `ended` is the exception of the unit that failed, or None. If the
        future was cancelled before, do nothing.
        """
        if not ended.set_running_or_notify_cancel():
            return
        failure: BaseException | None = None
        try:
            while (unit := self._next()) is not None:
                result = self._run_unit(unit)
                with self._changed:
                    self._work.complete(unit, result)
                    self._changed_at = time.monotonic()
                    self._changed.notify_all()
        except BaseException as error:  # also sys.exit() in step_fn; `run` raises the error in its thread
            failure = error
            self._errors.append(error)
            self._stop()
        finally:
            with self._changed:
                ended.set_result(failure)
                self._changed.notify_all()

    def _next(self) -> Any:
        """Wait for the next unit, and return it. Return None if no more units will come."""
        with self._changed:
            while (unit := self._work.take()) is None and not self._work.is_over:
                self._changed.wait(_POLL_SECONDS)
            return unit

    def _run_unit(self, unit: Any) -> Any:
        """Run the closure of a unit on a worker. Return the result.

        If the worker is lost before its result is fetched, the closure runs again, at most three times in all. If a ps
        is lost, `check_ps` or running the closure again raises an error.
        """
        fetches = attempts = 0
        while True:
            attempts += 1
            try:
                with self._scheduling:
                    result = self._work.schedule(unit)
                return fetch_result(result)
            except (tf.errors.InternalError, tf.errors.CancelledError) as error:
                if not self._is_not_parsed(error) or attempts == MAX_NOT_PARSED:
                    raise
            except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InvalidArgumentError) as error:
                # An InvalidArgumentError: another server, at the index of the lost worker, does not have the result.
                if isinstance(error, tf.errors.InvalidArgumentError) and not _is_worker_failure(error):
                    raise
                self._work.check_ps()
                fetches += 1
                if fetches == _MAX_FETCHES or self._is_given_up:
                    raise

    def _is_not_parsed(self, error: tf.errors.OpError) -> bool:
        """Return whether to run a closure again, because a worker could not parse a request.

        The request may be that of another closure (see `NOT_PARSED`). The coordinator raises the error in `fetch` and
        in the next `schedule`, and cancels all other closures. All of these closures run again.
        """
        with self._changed:
            if NOT_PARSED in str(error):
                self._has_not_parsed = True
                self._changed.notify_all()
            elif isinstance(error, tf.errors.CancelledError):  # the thread of the failed closure may be slower
                self._changed.wait_for(
                    lambda: self._has_not_parsed or self._errors or self._is_given_up, _CAUSE_SECONDS
                )
        is_other = isinstance(error, tf.errors.InternalError) and NOT_PARSED not in str(error)
        return self._has_not_parsed and not (is_other or self._errors or self._is_given_up)


def fetch_result(result: Any) -> Any:
    """Return the value of a RemoteValue on this host. Raise its error if it has one.

    RemoteValue.fetch alone may return None in place of the error: a thread of the coordinator fetches the value, too,
    and if that fails, it sets the error while this thread waits for its turn.
    """
    value = result.fetch()
    if value is None and (error := result._get_error()) is not None:
        raise error
    return value


def wait_for_closures(coordinator: Any, timeout_seconds: float) -> None:
    """Wait for the closures that still run after an earlier call ended with an error, Ctrl-C or a stop request.

    Raises:
        TrainingTimeoutError: They did not complete within `timeout_seconds`.
    """
    threads = _threads.get(coordinator, [])
    if wait([each for each in threads if not each.cancel()], timeout_seconds).not_done:
        raise TrainingTimeoutError(
            f"Closures of an earlier call did not complete within {timeout_seconds:g} s. See the logs of the workers, "
            "or raise timeout_seconds."
        )
    _forget_run(coordinator, threads)


def _forget_run(coordinator: Any, threads: list[_Thread]) -> None:
    """Forget the futures of an earlier `ClosureRunner.run`, whose threads have all ended.

    If one of the threads has failed, clear the coordinator's error. Otherwise its next call would raise this error.
    """
    if any(not each.cancelled() and each.result() for each in threads):
        with contextlib.suppress(Exception):
            coordinator.join()
    _threads.pop(coordinator, None)


def count_tasks(role: str) -> int:
    """Return the number of tasks of `role` ("ps" or "worker") to which TensorFlow is connected in this process."""
    devices = (tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("CPU"))
    return len({device.task for device in devices if device.job == role})
