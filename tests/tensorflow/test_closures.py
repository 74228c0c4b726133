"""`ClosureRunner` with TensorFlow's queue of closures, and workers that are threads of the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

from tensorflow.python.distribute.coordinator.cluster_coordinator import (  # noqa: E402
    Closure,
    _CoordinatedClosureQueue,
)

from tf4slurm.tensorflow import closures  # noqa: E402
from tf4slurm.tensorflow.step_closure import FunctionStep, StepClosure  # noqa: E402


class _Coordinator:
    """A coordinator whose workers are threads. `fails(unit)` is called before each run; it may return an error."""

    def __init__(self, num_threads: int, fails: Callable[[int], Exception | None] = lambda unit: None) -> None:
        self.queue = _CoordinatedClosureQueue()
        self._cluster = SimpleNamespace(closure_queue=self.queue)
        self.strategy = SimpleNamespace(scope=contextlib.nullcontext, extended=SimpleNamespace(_being_scheduled=False))
        self._fails = fails
        for index in range(num_threads):
            threading.Thread(target=self._run, args=(index,), name=f"worker-{index}", daemon=True).start()

    def join(self) -> None:
        self.queue.wait()

    def _run(self, index: int) -> None:
        while (closure := self.queue.get()) is not None:
            if (error := self._fails(closure._args[0])) is not None:
                closure.maybe_call_with_output_remote_value(lambda value, error=error: value._set_error(error))
                self.queue.mark_failed(error)
                continue
            closure.worker = index
            values = closure._function(*closure._args)
            closure.maybe_call_with_output_remote_value(lambda value, values=values: value._set_values(values))
            closure.maybe_call_with_output_remote_value(lambda value: value.get())
            self.queue.mark_finished()


class _Work:
    """Units 0 to `count` - 1. The result of each is its number, after a call of `function`."""

    def __init__(self, count: int, function: Callable[[int], None] = lambda unit: None) -> None:
        self.waiting = list(reversed(range(count)))
        self.done: Counter[int] = Counter()
        self._function = function

    @property
    def is_over(self) -> bool:
        return not self.waiting

    def take(self) -> int | None:
        return self.waiting.pop() if self.waiting else None

    def stop(self) -> None:
        self.waiting.clear()

    def make_closure(self, unit: int, make: Callable[..., Any]) -> Any:
        def run(number: int) -> Any:
            self._function(number)
            return tf.constant(number)

        return make(run, unit)

    def complete(self, unit: int, worker: int, result: Any) -> None:
        assert result == unit
        self.done[unit] += 1

    def check_ps(self) -> None:
        pass

    def describe_timeout(self) -> str:
        return "no unit in {seconds}"


@pytest.fixture
def coordinators() -> Iterator[Callable[..., _Coordinator]]:
    made: list[_Coordinator] = []

    def make(*args: Any) -> _Coordinator:
        made.append(_Coordinator(*args))
        return made[-1]

    yield make
    for each in made:
        each.queue.stop()


def test_runner_has_one_thread_for_300_workers(coordinators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closures, "count_tasks", lambda role: 300)
    coordinator, work, before = coordinators(4), _Work(2_000), set(threading.enumerate())
    names: set[str] = set()

    def look() -> None:
        names.update(each.name for each in threading.enumerate() if each not in before)

    assert closures.ClosureRunner(coordinator, work, 60.0).run(look) is False
    assert work.done == Counter(range(2_000))
    assert names == {"tf4slurm-closures"}


def test_stop_waits_for_running_closures_and_takes_back_the_others(
    coordinators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, taken_back = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(closures, "count_tasks", lambda role: 2)
    monkeypatch.setattr(closures, "should_stop", lambda: True)

    def run(unit: int) -> None:
        running.release()
        assert taken_back.wait(30)

    coordinator, work = coordinators(2), _Work(100, run)

    def poll() -> None:  # the first poll waits for both workers, the later ones for the queue
        if not taken_back.is_set() and not work.waiting and coordinator.queue._queue.empty():
            taken_back.set()
        elif work.waiting:
            assert running.acquire(timeout=30)
            assert running.acquire(timeout=30)

    assert closures.ClosureRunner(coordinator, work, 60.0).run(poll) is True
    assert work.done == Counter([0, 1])
    assert coordinator.queue.done()


def test_stop_leaves_the_closures_of_the_script(coordinators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, is_scheduled = threading.Event(), threading.Event()
    monkeypatch.setattr(closures, "count_tasks", lambda role: 1)
    monkeypatch.setattr(closures, "should_stop", is_scheduled.is_set)
    ran: list[str] = []
    coordinator = coordinators(1)

    def run(unit: int) -> None:
        assert may_end.wait(30)

    work = _Work(100, run)

    def poll() -> None:
        if not is_scheduled.is_set() and coordinator.queue.inflight_closure_count:
            own = Closure(ran.append, coordinator.queue._cancellation_mgr, args=("own",))
            coordinator.queue.put(own)
            is_scheduled.set()
        elif not work.waiting:
            may_end.set()

    closures.ClosureRunner(coordinator, work, 60.0).run(poll)
    coordinator.join()
    assert ran == ["own"]


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "the worker is lost"),
        tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled."),
        tf.errors.InternalError(None, None, f"{closures.NOT_PARSED} of a closure"),
    ],
    ids=["worker lost", "worker lost during the copy", "not parsed"],
)
def test_units_whose_closures_failed_or_were_cancelled_complete_once(
    coordinators: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(closures, "count_tasks", lambda role: 8)
    failed: set[int] = set()

    def fails(unit: int) -> Exception | None:
        is_first = unit % 10 == 0 and unit not in failed
        failed.add(unit)
        return error if is_first else None

    work = _Work(200)
    closures.ClosureRunner(coordinators(4, fails), work, 60.0).run()
    assert work.done == Counter(range(200))
    assert {unit for unit in failed if unit % 10 == 0} == set(range(0, 200, 10))


def test_error_of_a_closure_of_the_script_that_cancels_the_units_is_raised(
    coordinators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closures, "count_tasks", lambda role: 2)
    is_scheduled = threading.Event()
    coordinator = coordinators(2, lambda unit: ValueError("a fault of the script") if unit == "own" else None)

    def poll() -> None:
        if not is_scheduled.is_set():
            coordinator.queue.put(Closure(str, coordinator.queue._cancellation_mgr, args=("own",)))
            is_scheduled.set()

    work = _Work(1000, lambda unit: time.sleep(0.01))
    with pytest.raises(ValueError, match="a fault of the script"):
        closures.ClosureRunner(coordinator, work, 60.0).run(poll)


def test_unit_that_is_always_cancelled_fails(coordinators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closures, "count_tasks", lambda role: 2)
    error = tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled.")
    runs: list[int] = []

    def fails(unit: int) -> Exception | None:
        runs.append(unit)
        return error if unit == 5 else None

    coordinator = coordinators(2, fails)
    with pytest.raises(tf.errors.CancelledError):
        closures.ClosureRunner(coordinator, _Work(50), 60.0).run()
    assert runs.count(5) == closures._MAX_LOSSES


def test_error_of_a_closure_is_raised_and_the_next_run_succeeds(
    coordinators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closures, "count_tasks", lambda role: 2)
    errors = [tf.errors.InvalidArgumentError(None, None, "a fault of the step")]
    coordinator = coordinators(2, lambda unit: errors.pop() if unit == 5 and errors else None)
    work = _Work(50)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a fault of the step"):
        closures.ClosureRunner(coordinator, work, 60.0).run()
    assert work.done[5] == 0
    closures.wait_for_closures(coordinator, 60.0)
    again = _Work(50)
    closures.ClosureRunner(coordinator, again, 60.0).run()
    assert again.done == Counter(range(50))


@pytest.mark.parametrize("max_copies", [1, 64], ids=["calls", "copies"])
def test_closure_with_more_steps_than_copies_calls_one_function(max_copies: int) -> None:
    weight, counter = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)

    def step_fn(batch: Any) -> dict[str, Any]:
        weight.assign_add(batch)
        return {"batch": batch, "weight": weight.read_value()}

    closure = StepClosure(tf.distribute.get_strategy(), FunctionStep(step_fn), counter)
    iterator = iter(tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert closure.split(closure.function(1, iterator).numpy()) == {"batch": 1.0, "weight": 1.0}
    closure.max_copies = max_copies
    assert closure.split(closure.function(4, iterator).numpy()) == {"batch": 14.0, "weight": 3.0 + 6.0 + 10.0 + 15.0}
    assert (int(counter), float(weight)) == (5, 15.0)
    operations = closure.function.get_concrete_function(4, iterator).graph.get_operations()
    num_calls = sum(each.type == "StatefulPartitionedCall" for each in operations)
    assert num_calls == (4 if max_copies == 1 else 0)
