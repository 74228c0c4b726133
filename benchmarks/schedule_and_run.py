"""Steps that read a variable of the ps and add as much to it: by run_steps, one by one, or between-graph as in TF1.

    python schedule_and_run.py FLOATS SECONDS ROUNDS REPORT.json

The chief writes the steps per second of each round, {"run_steps": […], "one by one": […], "between-graph": […]}. The
methods take turns in one cluster, on the same ps and workers. Between-graph, each worker runs its own session on its
own server; the chief only starts it, by a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from tf4slurm.tensorflow import run_steps

_LOOK_SECONDS = 0.02


def main(floats: int, seconds: float, rounds: int, report: Path) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    orders = report.with_suffix(".orders")
    if resolver.task_type != "chief":
        server = tf.distribute.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc")
        if resolver.task_type == "worker":
            obey(server, resolver.task_id, floats, orders)
        server.join()
    orders.mkdir()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(tf.zeros(floats))
        counter = tf.Variable(0, dtype=tf.int64, trainable=False)

    def step() -> None:
        variable.assign_add(variable.read_value() * 0.5 + 1.0)

    one_step = tf.function(lambda: strategy.run(step))

    def one_by_one(seconds: float) -> float:
        """As in TensorFlow's documentation: schedule, schedule, …, join."""
        started, steps = time.monotonic(), 0
        while time.monotonic() - started < seconds:
            for _ in range(16):
                coordinator.schedule(one_step)
            coordinator.join()
            steps += 16
        return steps / (time.monotonic() - started)

    def together(seconds: float, pace: list[float]) -> float:
        steps = max(16, int(seconds * pace[-1]))
        started = time.monotonic()
        run_steps(coordinator, step, int(counter.numpy()) + steps, step=counter)
        pace.append(steps / (time.monotonic() - started))
        return pace[-1]

    pace = [one_by_one(seconds / 2)]
    ways: dict[str, Callable[[float], float]] = {
        "run_steps": lambda seconds: together(seconds, pace),
        "one by one": one_by_one,
        "between-graph": lambda seconds: between_graph(orders, seconds, spec.num_tasks("worker")),
    }
    for way in ways.values():  # the steps are traced, and every worker is connected
        way(seconds)
    way_names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in way_names[number % 3 :] + way_names[: number % 3]:
            found[name].append(ways[name](seconds))
    report.write_text(json.dumps(found))


def between_graph(orders: Path, seconds: float, workers: int) -> float:
    """Let the workers train between-graph for `seconds`; return the sum of their steps per second."""
    number = len(list(orders.glob("*.order")))
    write(orders / f"{number}.order", str(seconds))
    answers = [orders / f"{number}.{index}" for index in range(workers)]
    deadline = time.monotonic() + 10 * seconds + 60
    while not all(answer.exists() for answer in answers):
        assert time.monotonic() < deadline, "a worker did not answer"
        time.sleep(_LOOK_SECONDS)
    return sum(float(answer.read_text()) for answer in answers)


def obey(server: Any, index: int, floats: int, orders: Path) -> None:
    """Train as a worker of TF1 each time the chief orders it; never returns."""
    graph = tf.Graph()
    with graph.as_default():
        with tf.device("/job:ps/task:0"):
            variable = tf.compat.v1.get_variable("variable", [floats], tf.float32, tf.compat.v1.zeros_initializer())
            global_step = tf.compat.v1.train.get_or_create_global_step()
        with tf.device(f"/job:worker/task:{index}"):
            added = variable.read_value() * 0.5 + 1.0
        train = [variable.assign_add(added, read_value=False), global_step.assign_add(1, read_value=False)]
        initialize = tf.compat.v1.global_variables_initializer()
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
    number = 0
    session = None
    while True:
        order = orders / f"{number}.order"
        while not order.exists():
            time.sleep(_LOOK_SECONDS)
        if session is None:
            session = tf.compat.v1.Session(server.target, graph, config)
            session.run(initialize)  # all workers initialize; only the time matters
        started, steps, seconds = time.monotonic(), 0, float(order.read_text())
        while time.monotonic() - started < seconds:
            session.run(train)
            steps += 1
        write(orders / f"{number}.{index}", str(steps / (time.monotonic() - started)))
        number += 1


def write(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}-draft")
    draft.write_text(text)
    draft.replace(path)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
