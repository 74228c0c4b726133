"""Trainings whose workers change, for tests: python elastic_training.py SCENARIO [ARGUMENT ...]

Each prints "passed" at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.tensorflow.elastic_cluster import ElasticCluster  # isort: skip  # sets variables of TensorFlow

import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import Closure

import tf4slurm
from tests.processes import wait_until
from tf4slurm.cluster import Address
from tf4slurm.errors import ParameterServerLostError
from tf4slurm.network.reachability import is_answering
from tf4slurm.tensorflow import run_shards, run_steps, worker_files
from tf4slurm.tensorflow.closures import _Result

STEPS_PER_CALL = 4


class Training(threading.Thread):
    """Trains with run_steps, in calls of 100 steps, until `end`. Each step reads a dataset of its worker."""

    def __init__(self, cluster: ElasticCluster) -> None:
        super().__init__(daemon=True)
        self.coordinator = cluster.coordinator
        with cluster.strategy.scope():
            self.counter = tf.Variable(0, dtype=tf.int64)
        self.calls: list[tuple[int, ...]] = []  # the steps by worker of each call
        self.error: BaseException | None = None
        self.asked = 0
        self._is_ended = False
        self.start()

    def run(self) -> None:
        try:
            dataset = iter(self.coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(7).repeat()))
            while not self._is_ended:
                before = int(self.counter.numpy())
                done = run_steps(
                    self.coordinator,
                    train_step,
                    before + 100,
                    dataset=dataset,
                    step=self.counter,
                    steps_per_call=STEPS_PER_CALL,
                    timeout_seconds=100,
                )
                assert done.step >= before + 100
                self.asked += done.steps
                self.calls.append(done.steps_by_worker)
        except BaseException as error:
            self.error = error

    def wait_for_steps(self, *workers: int) -> None:
        """Wait until each of these workers has completed steps in calls that begin from now on."""
        first = len(self.calls) + 1
        assert wait_until(lambda: bool(self.error) or set(workers) <= self.workers_since(first), 60, 0.01), (
            workers,
            self.calls[first:],
        )
        assert self.error is None, self.error

    def workers_since(self, first: int) -> set[int]:
        """Return the workers that have completed steps in the calls from this number on."""
        return {index for steps in self.calls[first:] for index, count in enumerate(steps) if count}

    def end(self, losses: int) -> None:
        """End the training; check the counter after so many losses of workers."""
        self._is_ended = True
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error
        surplus = int(self.counter.numpy()) - self.asked
        assert 0 <= surplus <= 2 * STEPS_PER_CALL * losses, (surplus, losses)
        print(f"{self.asked} steps, and {surplus} more for {losses} losses", flush=True)


def train_step(batch: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.linalg.svd(tf.random.uniform((30, 30)), compute_uv=False)]):
        return tf.cast(batch, tf.float32)


def random_changes(seed: str, events: str) -> None:
    """Let workers join, leave, fail, return and move at random."""
    chosen = random.Random(int(seed))
    cluster = ElasticCluster(2)
    training = Training(cluster)
    training.wait_for_steps(0, 1)
    dead: set[int] = set()
    losses = 0
    for number in range(int(events)):
        alive = sorted(cluster.wanted.keys() - dead)
        kinds = ["join", *(["move", "restart"] if alive else []), *(["return"] * 2 if dead else [])]
        kinds += ["leave", "kill"] if len(alive) > 1 else []
        kind = chosen.choice(kinds if len(cluster.wanted) < 5 else [each for each in kinds if each != "join"])
        index = chosen.choice(sorted(dead) if kind == "return" else alive or [0])
        if kind == "join":
            index = min(
                {*range(7)} - cluster.wanted.keys()
                if chosen.random() < 0.5
                else {*range(7, 12)} - cluster.wanted.keys()
            )
            cluster.place(index)
            cluster.publish()
            cluster.start(index)
        elif kind == "leave":
            left = cluster.wanted.pop(index)
            cluster.publish()
            cluster.wait_for(cluster.wanted.keys() - dead)
            cluster.kill_at(left)
        elif kind == "move":
            before = cluster.wanted[index]
            cluster.place(index)
            if chosen.random() < 0.5:
                cluster.kill_at(before)
                losses += 1
            cluster.start(index)
            cluster.publish()
        elif kind in ("kill", "restart"):
            cluster.kill(index)
            losses += 1
            dead.add(index)
        if kind in ("return", "restart"):
            cluster.start(index)
            dead.discard(index)
        used = cluster.wanted.keys() - dead
        seconds = cluster.wait_for(used)
        print(f"{number} {kind} {index} -> {sorted(used)} in {seconds:.2f} s", flush=True)
        if chosen.random() < 0.3:
            training.wait_for_steps(*used)
    training.wait_for_steps(*cluster.wanted.keys() - dead)
    training.end(losses)
    cluster.end()


def tensorflow_works_alone(losses: str) -> None:
    """Train, and compare TensorFlow's objects with those before `let_workers_change`."""
    cluster = ElasticCluster(2, is_elastic=False)
    before = describe_objects(cluster.coordinator)
    cluster.let_workers_change()
    training = Training(cluster)
    training.wait_for_steps(0, 1)
    for _ in range(int(losses)):
        cluster.kill(1)
        cluster.wait_for([0])
        cluster.start(1)
        cluster.wait_for([0, 1])
        training.wait_for_steps(0, 1)
    training.end(int(losses))
    assert describe_objects(cluster.coordinator) == before
    assert cluster.coordinator._cluster.failure_handler._preemption_handler_thread.is_alive()
    assert [worker.worker_index for worker in cluster.coordinator._cluster.workers] == [0, 1]
    assert "tf4slurm.tensorflow.elastic_workers" not in sys.modules
    cluster.end()


def describe_objects(coordinator: Any) -> list[tuple[int, type, set[str], set[str]]]:
    """Return the identity, class, attributes and replaced methods of each object of TensorFlow's coordinator."""
    cluster, strategy = coordinator._cluster, coordinator.strategy
    objects = [coordinator, cluster, cluster.failure_handler, cluster.closure_queue, *cluster.workers]
    described = []
    for each in (*objects, strategy, strategy.extended):
        replaced = {name for name in vars(each) if callable(getattr(type(each), name, None))}
        described.append((id(each), type(each), set(vars(each)), replaced))
    assert {kind.__module__.split(".")[0] for _, kind, _, _ in described} == {"tensorflow"}
    assert not any(replaced for *_, replaced in described)
    return described


def lost_workers_return() -> None:
    """Let one of two lost workers return, and one of all; let another replace them; then lose the ps, too."""
    cluster = ElasticCluster(3)
    training = Training(cluster)
    training.wait_for_steps(0, 1, 2)
    cluster.kill(0)
    cluster.kill(1)
    cluster.wait_for([2])
    cluster.start(1)
    cluster.wait_for([1, 2])
    training.wait_for_steps(1, 2)
    cluster.kill(1)
    cluster.kill(2)
    cluster.wait_for([])
    cluster.start(2)
    cluster.wait_for([2])
    training.wait_for_steps(2)
    cluster.wanted.clear()
    cluster.place(3)
    cluster.publish()
    cluster.wait_for([])
    cluster.start(3)
    cluster.wait_for([3])
    training.wait_for_steps(3)
    training.end(losses=4)
    training = Training(cluster)
    training.wait_for_steps(3)
    cluster.kill(3)
    cluster.wait_for([])
    cluster.kill_ps()  # no worker returns
    training.join(60)
    assert isinstance(training.error, ParameterServerLostError), training.error
    cluster.end()


def unusable_worker_is_left_out() -> None:
    """Let a worker join on which the dataset's file is missing, and then a usable one."""
    cluster = ElasticCluster(1)
    coordinator = cluster.coordinator

    def make_dataset() -> tf.data.Dataset:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        path = tf.where(index == 1, "/does/not/exist", __file__)
        return tf.data.TextLineDataset(path).repeat()

    dataset = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
    read = tf.function(
        lambda iterator: (next(iterator), tf.distribute.coordinator.experimental_get_current_worker_index())
    )

    def workers_of_closures() -> set[int]:
        return {int(coordinator.schedule(read, args=(dataset,)).fetch()[1]) for _ in range(20)}

    assert workers_of_closures() == {0}
    cluster.place(1)
    cluster.publish()
    cluster.start(1)
    assert wait_until(lambda: workers_of_closures() == {0} and bool(cluster.channel.sent["unusable_workers"]), 60)
    ((index, error),) = cluster.channel.sent["unusable_workers"]
    assert index == 1
    assert "/does/not/exist" in error, error
    cluster.wait_for([0])
    del cluster.wanted[1]
    join(cluster, 2)
    assert wait_until(lambda: workers_of_closures() == {0, 2}, 60)
    assert cluster.channel.sent["unusable_workers"] == ()
    cluster.end()


def unparsed_request_is_sent_again() -> None:
    """Let closures of run_steps fail as in a race of TensorFlow, which is too rare for a test: first some, then all."""
    cluster = ElasticCluster(2)
    with cluster.strategy.scope():
        counter = tf.Variable(0, dtype=tf.int64)
    failures = itertools.chain(range(3))
    execute_on = Closure.execute_on

    def fail_or_execute(closure: Any, worker: Any) -> None:
        if next(failures, None) is not None:
            raise tf.errors.InternalError(None, None, f"{worker.device_name}: Unable to parse request")
        execute_on(closure, worker)

    def train(steps: int) -> int:
        return run_steps(cluster.coordinator, lambda: tf.constant(1.0), steps, step=counter, steps_per_call=2).step

    Closure.execute_on = fail_or_execute
    assert 20 <= train(20) < 60
    failures = itertools.chain(itertools.count())
    with pytest.raises(tf.errors.InternalError, match="Unable to parse request"):
        train(1000)
    assert 10 <= next(failures) < 200
    failures = itertools.chain()
    assert train(1000) >= 1000
    cluster.end()


def training_goes_on_while_an_iterator_is_deleted() -> None:
    """Let a worker leave whose iterator takes seconds to delete; closures on the other worker do not wait for it."""
    cluster = ElasticCluster(2)
    coordinator = cluster.coordinator

    def make_dataset() -> tf.data.Dataset:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        numbers = tf.data.Dataset.from_tensors(index).repeat()
        return numbers.map(lambda index: tf.cond(index == 1, lambda: very_slowly(index), lambda: index)).prefetch(1)

    dataset = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
    read = tf.function(read_next)
    assert wait_until(lambda: int(coordinator.schedule(read, args=(dataset,)).fetch()) == 1, 60)
    add = tf.function(lambda: tf.constant(1))
    coordinator.schedule(add).fetch()  # traced: only tracing waits for the update
    del cluster.wanted[1]
    cluster.publish()
    ends = [time.monotonic()]
    while cluster.channel.sent["workers"] != (0,):
        coordinator.schedule(add).fetch()
        ends.append(time.monotonic())
    longest = max(after - before for before, after in itertools.pairwise(ends))
    print(f"left in {ends[-1] - ends[0]:.1f} s, longest closure {longest:.1f} s", flush=True)
    assert ends[-1] - ends[0] > 1.0, "the deletion was not slow"
    assert len(ends) > 10, "closures wait for the deletion"
    cluster.end()


def stopped_worker_leaves() -> None:
    """Let a worker that does not answer leave."""
    cluster = ElasticCluster(2)
    training = Training(cluster)
    training.wait_for_steps(0, 1)
    stopped = cluster.wanted.pop(1)
    cluster.signal(stopped, signal.SIGSTOP)
    cluster.publish()
    print(f"left in {cluster.wait_for([0]):.1f} s", flush=True)
    training.wait_for_steps(0)
    training.end(losses=1)
    cluster.end()


def stopped_workers_move_and_return() -> None:
    """Let a worker that does not answer move, and another one return after a third has joined."""
    cluster = ElasticCluster(3)
    training = Training(cluster)
    training.wait_for_steps(0, 1, 2)
    cluster.signal(cluster.wanted[2], signal.SIGSTOP)
    cluster.place(2)
    cluster.start(2)
    cluster.publish()
    training.wait_for_steps(0, 1, 2)
    cluster.signal(cluster.wanted[1], signal.SIGSTOP)
    cluster.place(3)
    cluster.start(3)
    cluster.publish()
    print(f"joined beside a stopped worker in {cluster.wait_for([0, 2, 3]):.1f} s", flush=True)
    training.wait_for_steps(0, 2, 3)
    cluster.signal(cluster.wanted[1], signal.SIGCONT)
    cluster.wait_for([0, 1, 2, 3])
    training.wait_for_steps(0, 1, 2, 3)
    training.end(losses=2)
    cluster.end()


def results_of_a_moved_worker() -> None:
    """Fetch the result of a step after its worker was killed, and another server has taken the worker's place."""
    cluster = ElasticCluster(2)
    get = _Result.get
    moved, held = threading.Event(), threading.Event()

    def get_late(result: Any) -> Any:
        if not held.is_set() and "task:0" in tf.nest.flatten(result._values)[0].device:
            held.set()
            assert moved.wait(60)
        return get(result)

    training = Training(cluster)
    training.wait_for_steps(0, 1)
    _Result.get = get_late  # type: ignore[method-assign,assignment]
    assert held.wait(60)
    step = int(training.counter.numpy())
    assert wait_until(lambda: int(training.counter.numpy()) >= step + 4 * STEPS_PER_CALL, 60), "the held step is done"
    left = cluster.wanted.pop(0)
    cluster.publish()
    cluster.kill_at(left)
    cluster.wait_for([1])
    cluster.place(0)
    cluster.start(0)
    cluster.publish()
    cluster.wait_for([0, 1])
    moved.set()
    training.wait_for_steps(0, 1)
    training.end(losses=1)
    cluster.end()


def resources_on_newcomers() -> None:
    """Use a table and a dataset that are older than a worker, and datasets that are newer than one that has left."""
    cluster = ElasticCluster(1)
    strategy, coordinator = cluster.strategy, cluster.coordinator
    with strategy.scope():
        content = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        table = tf.lookup.StaticHashTable(content, default_value=0)
    gc.collect()  # now Python's list of objects has later ones, such as the dataset, before the table
    gc.disable()

    def make_dataset() -> tf.data.Dataset:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        files = worker_files(["only"], workers=1).map(tf.strings.length)
        numbers = tf.data.Dataset.from_tensors((index, table.lookup(tf.constant("b"))))
        return tf.data.Dataset.zip((numbers, files)).repeat()

    def read(iterator: Any) -> Any:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        return index, *tf.nest.flatten(next(iterator)), table.lookup(tf.constant("a"))

    function = tf.function(read)

    def check(dataset: Any, *workers: int) -> None:
        """Run closures until these workers have run some; each must use the resources that are on its worker."""
        seen: Counter[int] = Counter()

        def run() -> bool:
            for result in [coordinator.schedule(function, args=(dataset,)) for _ in range(10)]:
                index, index_in_dataset, *numbers = map(int, result.fetch())
                assert (index_in_dataset, numbers) == (index, [2, 4, 1])
                seen[index] += 1
            return seen.keys() == set(workers)

        assert wait_until(run, 60), seen

    dataset = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
    check(dataset, 0)
    with making_tuples():  # as TensorFlow does while it traces a function
        join(cluster, 2)
    check(dataset, 0, 2)
    del cluster.wanted[0]
    cluster.publish()
    cluster.wait_for([2])
    check(dataset, 2)
    newer = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
    check(newer, 2)
    join(cluster, 1)
    check(newer, 1, 2)
    join(cluster, 0)
    check(dataset, 0, 1, 2)
    check(newer, 0, 1, 2)
    cluster.kill(1)
    check(newer, 0, 2)
    cluster.start(1)
    check(dataset, 0, 1, 2)
    return_slowly(cluster, 0)
    check(dataset, 0, 1, 2)
    cluster.end()


@contextlib.contextmanager
def making_tuples() -> Iterator[None]:
    """Make tuples in a thread during a `with` block, and check that this succeeds."""
    failures: list[SystemError] = []
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            try:
                tuple([number] for number in range(3000))
            except SystemError as error:
                failures.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    yield
    is_over.set()
    thread.join()
    assert not failures


def shards_for_newcomers() -> None:
    """Let a worker join while run_shards trains; each row is seen."""
    cluster = ElasticCluster(1)
    with cluster.strategy.scope():
        counts = tf.Variable(tf.zeros([2000]))
        step = tf.Variable(0, dtype=tf.int64)
    shards = tf4slurm.data_shards(2000, shard_size=10, epochs=1)
    take, has_joined = shards.take, threading.Event()

    def take_and_leave_some(*arguments: Any, **options: Any) -> Any:
        if int(step.numpy()) > 100:
            assert has_joined.wait(60)
        return take(*arguments, **options)

    shards.take = take_and_leave_some  # type: ignore[method-assign]

    def train(rows: tf.Tensor) -> None:
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(rows, tf.float32), rows))

    def read(rows: tf.data.Dataset) -> tf.data.Dataset:
        return rows.batch(5).map(slowly)

    def join_later() -> None:
        assert wait_until(lambda: int(step.numpy()) > 20, 60)
        join(cluster, 1)
        has_joined.set()

    joining = threading.Thread(target=join_later)
    joining.start()
    done = run_shards(cluster.coordinator, train, shards, read, step=step)
    joining.join()
    assert done.step == 400
    assert min(done.steps_by_worker) > 0, done.steps_by_worker
    assert set(counts.numpy()) == {1.0}
    cluster.end()


def keras_for_newcomers() -> None:
    """Let a worker join during `fit`, which then also evaluates on it."""
    import keras

    from tf4slurm.tensorflow import fit

    cluster = ElasticCluster(1)
    with cluster.strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    rows = tf.random.stateless_uniform((40, 3), seed=(1, 2))

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(8)

    def join_in_second_epoch(epoch: int, _: object) -> None:
        if epoch == 1:
            join(cluster, 1)

    history = fit(
        model,
        data,
        coordinator=cluster.coordinator,
        epochs=3,
        steps_per_epoch=100,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=join_in_second_epoch)],
        validation_data=data,
        verbose=0,
    ).history
    assert history["val_loss"][-1] < history["val_loss"][0] < 1.0
    assert len(history["mae"]) == 3
    cluster.end()


def functions_are_traced_during_updates() -> None:
    """Trace functions in this thread, as `evaluate` and a save do, while a worker leaves and joins again and again."""
    cluster = ElasticCluster(2)
    join(cluster, 2)  # makes the workers elastic
    elastic = cluster.coordinator._cluster.failure_handler.elastic
    updates = 0
    is_over = threading.Event()
    errors: list[BaseException] = []

    def update() -> None:
        nonlocal updates
        try:
            while not is_over.is_set():
                elastic._connect_to({index: elastic._connected[index] for index in (0, 1)})
                elastic._connect_to(elastic._connected)
                updates += 2
        except BaseException as error:
            errors.append(error)

    updating = threading.Thread(target=update)
    updating.start()
    traced = 0
    try:
        while (updates < 40 or traced < 40) and not errors:
            tf.function(lambda number=traced: tf.constant(number) + 1).get_concrete_function()
            traced += 1
    finally:
        is_over.set()
        updating.join()
        print(f"{traced} functions traced during {updates} updates {errors}", flush=True)
    assert not errors
    cluster.end()


def first_step_of_a_newcomer() -> None:
    """Print the time from the start of a server that listens to the first step on it."""
    cluster = ElasticCluster(1)
    training = Training(cluster)
    training.wait_for_steps(0)
    for index in range(1, 4):
        cluster.place(index)
        cluster.publish()
        cluster.start(index)
        address = Address.from_text(cluster.wanted[index])
        assert wait_until(functools.partial(is_listening, address), 60, 0.002)
        listening = time.monotonic()
        used = cluster.wait_for(range(index + 1))
        training.wait_for_steps(index)
        seconds = time.monotonic() - listening
        print(f"worker/{index}: connected {used:.2f} s after it listens, first steps {seconds:.2f} s", flush=True)
        assert seconds < 25.0  # gRPC would wait longer before it connects to a server that was missing
    training.end(losses=0)
    cluster.end()


def join(cluster: ElasticCluster, index: int) -> None:
    """Let a worker join, and wait until the chief uses it."""
    cluster.place(index)
    cluster.publish()
    cluster.start(index)
    cluster.wait_for(cluster.wanted.keys())


def return_slowly(cluster: ElasticCluster, index: int) -> None:
    """Let a worker leave and join again. Its thread takes the closures of its resources before it is in use."""
    from tf4slurm.tensorflow import elastic_workers

    class SlowWorker(elastic_workers._ElasticWorker):
        def connect(self) -> None:
            super().connect()
            time.sleep(0.2)  # meanwhile its thread takes a closure

    del cluster.wanted[index]
    cluster.publish()
    cluster.wait_for(cluster.wanted.keys())
    cluster.coordinator._cluster.workers[index].__class__ = SlowWorker
    join(cluster, index)


def is_listening(address: Address) -> bool:
    return asyncio.run(is_answering(address, 1.0)) is True


def slowly(rows: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.linalg.svd(tf.random.uniform((120, 120)), compute_uv=False)]):
        return tf.identity(rows)


def read_next(iterator: Any) -> Any:
    return next(iterator)


def very_slowly(index: tf.Tensor) -> tf.Tensor:
    """Return the index after one operation of some seconds, which cannot be cancelled."""
    values = tf.linalg.svd(tf.random.uniform((2500, 2500)), compute_uv=False)
    return tf.cast(tf.minimum(values[0], 1.0), index.dtype)  # the largest singular value is above 1


def main() -> None:
    faulthandler.dump_traceback_later(int(os.environ.get("LIMIT_SECONDS", "150")), exit=True)
    tf.get_logger().setLevel("FATAL")
    scenario, *arguments = sys.argv[1:]
    started = time.monotonic()
    try:
        globals()[scenario](*arguments)
    except BaseException:
        faulthandler.dump_traceback()  # what the workers' threads wait for
        raise
    print(f"passed in {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
