"""What a script reads from: the data service of its job, or its own share of the files."""

from __future__ import annotations

import itertools
import json
import operator
import os
from collections.abc import Iterable

from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.system.variables import SERVICES_VARIABLE


def data_service() -> str:
    """Return the address of the job's tf.data service, such as "grpc://10.1.0.4:40123".

    It is what `tf.data.experimental.service.distribute(processing_mode, service)` takes.

    Raises:
        SlurmEnvironmentError: The job has none.

    Read beside https://www.tensorflow.org/api_docs/python/tf/data/experimental/service.
    """
    for address in json.loads(os.environ.get(SERVICES_VARIABLE, "{}")).get("data-dispatcher", ()):
        return f"grpc://{address}"
    raise SlurmEnvironmentError(
        'This job has no data service. Give "tf4slurm run" (or submit) --data-workers, such as --data-workers 2.',
        variable=SERVICES_VARIABLE,
    )


def share_of(files: Iterable[str | os.PathLike[str]], index: int, count: int) -> list[str]:
    """Return the files that worker `index` of `count` reads: of all files in the order of their names, every count-th.

    In an epoch, which is one pass of every worker through its share, each file is read by one worker, once: none is
    left out. That holds for whatever order the files come in, as hosts list directories differently, but all workers
    must give the same files. A worker that is started again begins its share anew: what it has read of the epoch is
    read once more, and what was learnt from it stays in the variables.

    Args:
        files: Their names; the same in all workers, in any order.
        index: The 0-based index of this worker.
        count: The number of workers.

    Raises:
        ValueError: A file is named twice, there is no such worker, or there are fewer files than workers.
        TypeError: The index is a tensor that is not known yet.
    """
    names = in_order(files, count)
    try:
        index = operator.index(index)
    except TypeError:
        raise TypeError(
            f"The index {index!r} is not a whole number. A coordinator's workers have a tensor for it: in the function "
            "that makes their dataset, call tf4slurm.tensorflow.files.worker_files(files) instead."
        ) from None
    if not 0 <= index < count:
        raise ValueError(f"There is no worker {index} of {count}: expected an index from 0 to {count - 1}.")
    return names[index::count]


def in_order(files: Iterable[str | os.PathLike[str]], count: int) -> list[str]:
    """Return the names of files in the order in which they are dealt to `count` workers, if each gets one.

    Raises:
        ValueError: As for `share_of`.
    """
    names = sorted(os.fspath(file) for file in files)
    for one, other in itertools.pairwise(names):
        if one == other:
            raise ValueError(f"{one!r} is there twice, and would be read twice in an epoch. Name each file once.")
    if len(names) < count:
        raise ValueError(
            f"{len(names)} files are too few for {count} workers: some would have nothing to read. Write the data to "
            f"at least {count} files, or deal out its rows: dataset.shard({count}, index)."
        )
    return names
