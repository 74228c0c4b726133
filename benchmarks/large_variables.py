"""Training limited by the network: each step reads 40 MB of variables from the ps and adds 40 MB to them.

python large_variables.py SECONDS REPORT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

_FLOATS = 10_000_000


def main(seconds: float, report: Path) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(tf.zeros(_FLOATS))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        variable.assign_add(variable.read_value() * 0.5 + 1.0)
        return tf.constant(0)

    for _ in range(2):
        coordinator.schedule(step)
    coordinator.join()  # the step is traced, and both workers are connected
    started, steps = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        for _ in range(2):
            coordinator.schedule(step)
        coordinator.join()
        steps += 2
    report.write_text(json.dumps({"steps_per_second": steps / (time.monotonic() - started), "steps": steps}))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
