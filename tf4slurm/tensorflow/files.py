"""`worker_files`: each worker's share of the files where a coordinator makes the datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.input import in_order
from tf4slurm.server_dictionary import current_server_dictionary


def worker_files(files: Iterable[str | os.PathLike[str]], workers: int | None = None) -> tf.data.Dataset:
    """Return a dataset of the names of this worker's files, the share of `tf4slurm.share_of`.

    To be called in the function that `ClusterCoordinator.create_per_worker_dataset` is given, where the index of a
    worker is not a number yet but a tensor:

        from tf4slurm.tensorflow.files import worker_files

        def make_dataset():
            return worker_files(paths).interleave(tf.data.TFRecordDataset).batch(32)

        rows = iter(coordinator.create_per_worker_dataset(make_dataset))

    Args:
        files: Their names, in any order.
        workers: The number of workers; by default that of this process's cluster.

    Raises:
        ValueError: A file is named twice, or there are fewer files than workers.
        SlurmEnvironmentError: `workers` is not given, and no cluster is known.
        RuntimeError: TensorFlow's, where no coordinator makes the dataset.
    """
    count = len(current_server_dictionary().cluster["worker"]) if workers is None else workers
    index = tf.distribute.coordinator.experimental_get_current_worker_index()
    return tf.data.Dataset.from_tensor_slices(in_order(files, count)).shard(count, index)
