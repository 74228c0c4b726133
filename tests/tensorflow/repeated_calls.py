"""Trainings by `run_shards` that fail and are called again, for tests: python repeated_calls.py SCENARIO

Each step adds 1, on the worker, to the counts of its rows. Each scenario checks them, and prints "passed" at its end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import tf4slurm
from tf4slurm.errors import TrainingTimeoutError
from tf4slurm.scripts.data_shards import DataShards
from tf4slurm.tensorflow import job_strategy, run_shards, shard_batches

ROWS = 400


class Training:
    """Counts how often each row was trained."""

    def __init__(self) -> None:
        self.strategy, self.coordinator = job_strategy()
        with self.strategy.scope():
            self.counts = tf.Variable(tf.zeros([ROWS], tf.int32))
            self.failures = tf.Variable(0)
            self.pauses = tf.Variable(0)

    def step(self, rows: Any) -> None:
        """Fail if `failures` is not 0, and take 1 s if `pauses` is not 0."""
        tf.debugging.assert_equal(self.failures, 0, "failure")
        pause = tf.numpy_function(pause_for, [self.pauses], tf.int32)
        with tf.control_dependencies([pause]):
            self.counts.scatter_add(tf.IndexedSlices(tf.ones_like(rows, tf.int32), rows))

    def run(self, shards: DataShards, **options: Any) -> Any:
        return run_shards(self.coordinator, self.step, shards, lambda rows: rows.batch(5), **options)

    def check(self, most: int) -> None:
        counts = self.counts.numpy()
        assert 1 <= counts.min() <= counts.max() <= most, counts
        print("rows", len(counts), "trained", counts.sum())


def pause_for(seconds: Any) -> Any:
    time.sleep(float(seconds))
    return seconds


def error(training: Training) -> None:
    """Let all steps fail for a while, twice."""
    shards = tf4slurm.data_shards(ROWS, shard_size=10, epochs=1)
    for _ in range(2):
        training.failures.assign(1)
        with pytest.raises(tf.errors.InvalidArgumentError, match="failure"):
            training.run(shards)
        assert not shards.is_over
    training.failures.assign(0)
    assert training.run(shards).steps == ROWS // 5
    assert shards.is_over
    training.check(1)
    assert training.run(shards).steps == 0  # all are done


def timeout(training: Training) -> None:
    """Let a call time out; the process can end while a closure runs, and the rest is trained by the next call."""
    shards = tf4slurm.data_shards(ROWS, shard_size=10, epochs=1)
    training.pauses.assign(4)
    with pytest.raises(TrainingTimeoutError, match="No shard was done within 1 s"):
        training.run(shards, timeout_seconds=1)
    training.pauses.assign(0)
    training.run(shards)
    training.check(2)
    training.pauses.assign(1000)
    with pytest.raises(TrainingTimeoutError):
        training.run(tf4slurm.data_shards(ROWS, shard_size=10, epochs=1, name="others"), timeout_seconds=1)


def empty(training: Training) -> None:
    """Train shards that have no batch, and a file whose name is not UTF-8."""
    shards = tf4slurm.data_shards(ROWS, shard_size=10, epochs=1)
    done = run_shards(training.coordinator, training.step, shards, lambda rows: rows.take(0).batch(5))
    assert (done.steps, done.means, shards.is_over) == (0, {}, True)
    path = Path(os.fsdecode(b"rows-\xff.txt"))
    path.write_text("7\n")
    files = tf4slurm.data_shards([path], epochs=1, name="files")
    done = run_shards(training.coordinator, training.step, files, read_numbers)
    assert (done.steps, training.counts.numpy()[7]) == (1, 1)
    files = tf4slurm.data_shards([path], epochs=1, name="more files")
    assert [batch.numpy().tolist() for batch in shard_batches(files, read_numbers)] == [[7]]


def read_numbers(paths: tf.data.Dataset) -> tf.data.Dataset:
    lines = paths.flat_map(tf.data.TextLineDataset)
    return lines.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(5)


if __name__ == "__main__":
    with tf4slurm.LocalCluster(ps=1, workers=2):
        globals()[sys.argv[1]](Training())
        print("passed", flush=True)
