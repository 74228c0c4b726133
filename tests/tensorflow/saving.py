"""A training that saves all the time, for tests: python saving.py CHECKPOINTS paused|beside

Each step adds 1 to all values of the variables. With "paused", no step runs during a save, so that every value of a
checkpoint is its step. With "beside", workers train during a save, so that no value is below its step. The chief exits
with 3 if a restored value is wrong, or if the checkpoint is older than one that was saved before.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import tf4slurm
from tf4slurm.tensorflow import Checkpoints, run_steps

_ROWS = 500_000  # 16 MB in four shards and a variable of 8 MB: a save takes long enough to be killed in


def main(directory: Path, way: str) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()
    tf.get_logger().setLevel("ERROR")
    sharder = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=sharder)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        tables = [tf.Variable(tf.zeros((_ROWS, 4))) for _ in range(2)]
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    assert len(tables[0].variables) == 2  # one on each ps
    variables = {f"table_{i}": table for i, table in enumerate(tables)}
    checkpoints = Checkpoints(directory, step=step, keep=1, every_minutes=1e-6, **variables)
    seen = directory / "seen"
    at_least = int(seen.read_text() or 0) if seen.exists() else 0
    number = int(step.numpy())
    values = {float(number)} | {float(value) for table in tables for part in table.variables for value in ends(part)}
    print(f"restored {number} of {at_least} with {values}", flush=True)
    is_right = min(values) >= number if way == "beside" else values == {float(number)}
    if not is_right or number < at_least:
        os._exit(3)
    # Each attempt has a higher step, or the job would end: it is killed too often before new steps.
    tf4slurm.report(step=int(time.time()))
    parts = [part for table in tables for part in table.variables]
    if way == "beside":
        threading.Thread(target=note_saves, args=(checkpoints, seen), daemon=True).start()
        run_steps(coordinator, lambda: add_one(parts), 1_000_000_000, checkpoints=checkpoints)
        return
    while not tf4slurm.should_stop():
        number += 1
        for part in parts:
            part.assign(tf.fill(part.shape, float(number)))
        step.assign(number)
        checkpoints.save()
        note_save(number, seen)


def add_one(parts: list[tf.Variable]) -> None:
    for part in parts:
        with tf.device(part.device):  # the ones need not be sent
            part.assign_add(tf.ones(part.shape))


def note_saves(checkpoints: Checkpoints, seen: Path) -> None:
    """Note each save that has ended, in a thread."""
    noted = checkpoints.latest
    while True:
        time.sleep(0.01)
        if (latest := checkpoints.latest) != noted and latest is not None:
            noted = latest
            note_save(int(latest.rpartition("-")[2]), seen)


def note_save(number: int, seen: Path) -> None:
    draft = seen.with_name("draft")
    draft.write_text(str(number))
    draft.replace(seen)


def ends(part: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.reduce_min(part), tf.reduce_max(part)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
