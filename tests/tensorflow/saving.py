"""A training that does nothing but save, for tests: python saving.py CHECKPOINTS

Every variable of a checkpoint has the value of its step; the chief exits with 3 if a restored variable has not,
or if the checkpoint is older than one that was saved before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import tf4slurm
from tf4slurm.tensorflow import Checkpoints

_ROWS = 500_000  # 16 MB in four shards and a variable of 8 MB: a save takes long enough to be killed in


def main(directory: Path) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()
    tf.get_logger().setLevel("ERROR")
    sharder = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=sharder)
    tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        tables = [tf.Variable(tf.zeros((_ROWS, 4))) for _ in range(2)]
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    assert len(tables[0].variables) == 2  # one on each ps
    checkpoints = Checkpoints(directory, step=step, keep=1, **{f"table_{i}": table for i, table in enumerate(tables)})
    seen = directory / "seen"
    at_least = int(seen.read_text() or 0) if seen.exists() else 0
    number = int(step.numpy())
    values = {float(number)} | {float(value) for table in tables for part in table.variables for value in ends(part)}
    print(f"restored {number} of {at_least} with {values}", flush=True)
    if values != {float(number)} or number < at_least:
        os._exit(3)
    while not tf4slurm.should_stop():
        number += 1
        for table in tables:
            for part in table.variables:
                part.assign(tf.fill(part.shape, float(number)))
        step.assign(number)
        checkpoints.save()
        draft = directory / "draft"
        draft.write_text(str(number))
        draft.replace(seen)


def ends(part: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.reduce_min(part), tf.reduce_max(part)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
