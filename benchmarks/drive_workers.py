"""One chief and many workers: python drive_workers.py WORKERS STEP_SECONDS ROUNDS REPORT.json

The servers of a quarter of the workers share a process, and a step sleeps, so that a small host is not busy. Writes the
chief's processor time per closure, the steps and closures per second, and what each operation on all workers takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="2")

import tensorflow as tf

from tests.processes import wait_until
from tests.tensorflow.elastic_cluster import FakeChannel
from tf4slurm.control.messages import DesiredState
from tf4slurm.network.ports import hold_port
from tf4slurm.tensorflow import Checkpoints, closures, run_steps
from tf4slurm.tensorflow.elastic import let_workers_change
from tf4slurm.tensorflow.keras.execution import _EvaluationWork
from tf4slurm.tensorflow.servers import connect_parameter_server_strategy

_STEPS_PER_ROUND = 3  # of each worker
_LOOK_SECONDS = 0.02
_TIMEOUT_SECONDS = 120.0
_SERVERS = """
import json, sys, time
import tensorflow as tf
cluster, job, indices = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=len(indices) + 8, intra_op_parallelism_threads=1)
servers = [
    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config)
    for index in indices
]
print("up", flush=True)
time.sleep(100_000)
"""


class Driver:
    """A chief, in this process, with two ps and many workers, of which the last one joins later."""

    def __init__(self, num_workers: int, step_seconds: float) -> None:
        self.found: dict[str, Any] = {"operations": {}}
        self._num_workers = num_workers
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._held = [hold_port() for _ in range(num_workers + 4)]
        chief, first_ps, second_ps, *workers = (f"127.0.0.1:{held.port}" for held in self._held)
        self._cluster = {"chief": [chief], "ps": [first_ps, second_ps], "worker": workers}
        self._start("ps", [0, 1])
        quarter = num_workers // 4
        self._groups = [list(range(at, at + quarter)) for at in range(0, num_workers, quarter)]
        for group in (*self._groups, [num_workers]):
            self._start("worker", group)
        for process in self._processes.values():
            _wait_until_up(process)
        first_cluster = {**self._cluster, "worker": workers[:-1]}
        with self._operation("forming"):
            strategy = connect_parameter_server_strategy(first_cluster, None, _TIMEOUT_SECONDS)
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._channel = FakeChannel()
        let_workers_change(self._coordinator, first_cluster, self._channel)  # type: ignore[arg-type]
        with strategy.scope():
            weights = tf.Variable(tf.zeros([1000]))
            self._counter = tf.Variable(0, dtype=tf.int64, trainable=False)

        def make_dataset() -> Any:
            from tensorflow.python.data.experimental.ops.testing import sleep

            return tf.data.Dataset.from_tensors(tf.ones([1000])).repeat().apply(sleep(int(step_seconds * 1e6)))

        def step_fn(batch: Any) -> Any:
            weights.assign_sub(1e-6 * batch * tf.reduce_mean(weights))
            return tf.reduce_sum(batch)

        def one_step(iterator: Any) -> Any:
            loss = strategy.run(step_fn, args=(next(iterator),))
            self._counter.assign_add(1)
            return loss

        self._step_fn, self._one_step = step_fn, tf.function(one_step)
        with self._operation("create_per_worker_dataset"):
            self._batches = iter(self._coordinator.create_per_worker_dataset(make_dataset))
            self._schedule(tf.function(lambda: tf.constant(0)), num_workers)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()

    def compare(self, rounds: int) -> None:
        """Measure the chief's processor time per closure, in turns with TensorFlow's `schedule` and `run_steps`."""
        steps = _STEPS_PER_ROUND * self._num_workers
        with self._operation("first step of a function, with the time of the step"):
            self._schedule(self._one_step, self._num_workers, self._batches)
        self._run(2 * steps)
        with _counted_closures() as ends:
            for _, way in itertools.product(range(rounds), ("schedule", "run_steps")):
                used, started, num_ends = time.process_time(), time.monotonic(), len(ends)
                if way == "schedule":
                    self._schedule(self._one_step, steps, self._batches)
                else:
                    self._run(steps)
                seconds = time.monotonic() - started
                num_closures = len(ends) - num_ends if way == "run_steps" else steps
                values = self.found.setdefault(way, {"ms": [], "steps_per_second": [], "closures_per_second": []})
                values["ms"].append(1e3 * (time.process_time() - used) / num_closures)
                values["steps_per_second"].append(steps / seconds)
                values["closures_per_second"].append(num_closures / seconds)
        self.found["threads"] = len(os.listdir("/proc/self/task"))

    def change_workers(self) -> None:
        """While the workers train: one joins, is lost, joins again and leaves; a quarter is lost at once."""
        last, group = self._num_workers, self._groups[-1]
        training = threading.Thread(target=self._run, args=(1_000_000,), daemon=True)
        training.start()
        looks = _Looks(self._counter)
        with self._operation("one joins", looks):
            self._use(last + 1, range(last + 1))
        self._processes[last].kill()
        with self._operation("one is lost", looks):
            self._wait_for(range(last))
        with self._operation("it is back", looks):
            _wait_until_up(self._start("worker", [last]))
            self._wait_for(range(last + 1))
        with self._operation("one leaves", looks):
            self._use(last, range(last))
        self._processes[group[0]].kill()
        with self._operation(f"{len(group)} are lost", looks):
            self._wait_for(range(group[0]))
        time.sleep(5)
        with self._operation(f"{len(group)} are back", looks):
            _wait_until_up(self._start("worker", group))
            self._wait_for(range(last))
        with tempfile.TemporaryDirectory() as directory, self._operation("stop", looks):
            closures.should_stop = lambda: True  # type: ignore[attr-defined]
            training.join()
            closures.should_stop = lambda: False  # type: ignore[attr-defined]
            Checkpoints(Path(directory), step=self._counter).save()
        looks.end()

    def evaluate(self) -> None:
        """Run a part of an evaluation on each worker."""
        with self._operation("parts of an evaluation"):
            work = _EvaluationWork(tf.function(lambda index: index), self._num_workers)
            closures.ClosureRunner(self._coordinator, work, _TIMEOUT_SECONDS).run(ends_at_stop=False)

    def _start(self, role: str, indices: list[int]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TF_GRPC_REUSE_PORT": "true"}
        command = [sys.executable, "-c", _SERVERS, json.dumps(self._cluster), role, json.dumps(indices)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        self._processes[-1 if role == "ps" else indices[0]] = process
        return process

    def _schedule(self, function: Any, count: int, *args: Any) -> None:
        for _ in range(count):
            self._coordinator.schedule(function, args=args)
        self._coordinator.join()

    def _run(self, steps: int) -> None:
        run_steps(
            self._coordinator,
            self._step_fn,
            int(self._counter.numpy()) + steps,
            dataset=self._batches,
            step=self._counter,
            timeout_seconds=_TIMEOUT_SECONDS,
        )

    def _use(self, count: int, expected: range) -> None:
        self._channel.desired = DesiredState(workers=tuple(enumerate(self._cluster["worker"][:count])))
        self._wait_for(expected)

    def _wait_for(self, expected: range) -> None:
        """Wait until the chief uses exactly these workers."""
        assert wait_until(lambda: self._channel.sent.get("workers") == tuple(expected), _TIMEOUT_SECONDS, 0.005)

    @contextlib.contextmanager
    def _operation(self, name: str, looks: _Looks | None = None) -> Iterator[None]:
        """Note the seconds of an operation, and the chief's processor time, threads and memory after it."""
        started, used = time.monotonic(), time.process_time()
        yield
        seconds = time.monotonic() - started
        self.found["operations"][name] = {
            "seconds": seconds,
            "processor_seconds": time.process_time() - used,
            "threads": len(os.listdir("/proc/self/task")),
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "pause": looks.longest_pause_since(started) if looks else None,
        }
        print(name, self.found["operations"][name], flush=True)


def _wait_until_up(servers: subprocess.Popen[bytes]) -> None:
    assert servers.stdout is not None
    assert servers.stdout.readline() == b"up\n"


class _Looks:
    """Reads the step counter 50 times a second, in a thread, and notes when it changes."""

    def __init__(self, counter: tf.Variable) -> None:
        self._counter, self._is_over = counter, threading.Event()
        self._changes = [time.monotonic()]
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def longest_pause_since(self, begin: float) -> float:
        """Return the longest time without a step, which the end of the last step before `begin` starts."""
        changes = [*self._changes, time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(changes) if after >= begin)

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        before = -1
        while not self._is_over.wait(_LOOK_SECONDS):
            step = int(self._counter.numpy())
            if step != before:
                self._changes.append(time.monotonic())
                before = step


@contextlib.contextmanager
def _counted_closures() -> Iterator[list[None]]:
    """Yield a list that gets an item for each closure of a `ClosureRunner` that ends."""
    ends: list[None] = []
    get = closures._Result.get

    def count(result: Any) -> Any:
        ends.append(None)
        return get(result)

    closures._Result.get = count  # type: ignore[method-assign,assignment]
    yield ends
    closures._Result.get = get  # type: ignore[method-assign]


def main(num_workers: int, step_seconds: float, rounds: int, report: Path) -> None:
    driver = Driver(num_workers, step_seconds)
    try:
        driver.compare(rounds)
        driver.evaluate()
        driver.change_workers()
        report.write_text(json.dumps(driver.found))
    finally:
        driver.end()
    os._exit(0)  # TensorFlow's destructors would wait for servers


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
