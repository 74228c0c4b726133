"""Script of the preload benchmark: train on parameter servers, and write when something has happened.

python train_and_tell.py DIRECTORY

Each task writes its process id to TASK.pid. A ps or worker writes the time to TASK.serving when its server answers, the
chief to steps after each step. The times are those of time.monotonic.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import tensorflow as tf


def main(directory: Path) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    name = f"{resolver.task_type}-{resolver.task_id}"
    (directory / f"{name}.pid").write_text(str(os.getpid()))
    if resolver.task_type != "chief":
        server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc")
        (directory / f"{name}.serving").write_text(str(time.monotonic()))
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(0.0)
    step = tf.function(lambda: variable.assign_add(1.0))
    while not (directory / "over").exists():
        coordinator.schedule(step)
        coordinator.join()
        with (directory / "steps").open("a") as file:
            file.write(f"{time.monotonic()}\n")
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
