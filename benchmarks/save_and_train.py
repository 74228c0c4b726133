"""Training during saves: python save_and_train.py DIRECTORY BYTES ROUNDS REPORT.json

In turn, each round trains without a save, with one beside the training, and with one in a pause of it
(`consistent=True`). A step sleeps, so that the host is not busy, and updates rows of two tables with BYTES bytes
together, one on each ps.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from tf4slurm.tensorflow import Checkpoints, parameter_server_strategy, run_steps

_STEP_SECONDS = 0.02
_COLUMNS = 64
_STEPS = 4_000
_SAMPLE_SECONDS = 0.01
_WARM_STEPS = 400
_SAVE_MINUTES = 0.05  # after the first steps of a call


def main(directory: Path, num_bytes: int, rounds: int, report: Path) -> None:
    strategy, coordinator = parameter_server_strategy()
    rows = num_bytes // 2 // (4 * _COLUMNS)
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
        tables = [tf.Variable(tf.zeros([rows, _COLUMNS])) for _ in range(2)]
    assert len({table.device for table in tables}) == 2

    def make_dataset() -> Any:
        from tensorflow.python.data.experimental.ops.testing import sleep

        return tf.data.Dataset.random(seed=1).map(abs).apply(sleep(int(_STEP_SECONDS * 1e6)))

    def step_fn(number: Any) -> None:
        for table in tables:
            table.scatter_add(tf.IndexedSlices(tf.ones([1, _COLUMNS]), tf.reshape(number % rows, [1])))

    batches = iter(coordinator.create_per_worker_dataset(make_dataset))
    run_steps(coordinator, step_fn, _WARM_STEPS, dataset=batches, step=step)
    found: dict[str, list[Any]] = {"no save": [], "beside": [], "paused": []}
    for number, (way, measured) in itertools.product(range(rounds), found.items()):
        saves: list[tuple[float, float]] = []
        checkpoints = None
        if way != "no save":
            tables_by_name = dict(zip(("first", "second"), tables, strict=True))
            options = {"every_minutes": _SAVE_MINUTES, "consistent": way == "paused"}
            checkpoints = Checkpoints(directory / f"{way}-{number}", step=step, **options, **tables_by_name)
            checkpoints._manager = _OneSave(checkpoints._manager, saves)
        sampler = _StepSampler(step)
        run_steps(coordinator, step_fn, int(step) + _STEPS, dataset=batches, step=step, checkpoints=checkpoints)
        sampler.end()
        measured.append(sampler.between(*saves[0]) if saves else sampler.between(*sampler.ends))
    report.write_text(json.dumps(found))


class _OneSave:
    """Saves once, and notes when. Later saves do nothing."""

    def __init__(self, manager: Any, saves: list[tuple[float, float]]) -> None:
        self._manager, self._saves, self._path = manager, saves, ""

    def save(self, checkpoint_number: int) -> str:
        if not self._saves:
            begun = time.monotonic()
            self._path = self._manager.save(checkpoint_number=checkpoint_number)
            self._saves.append((begun, time.monotonic()))
        return self._path


class _StepSampler:
    """Reads the step counter 100 times a second, in a thread."""

    def __init__(self, step: tf.Variable) -> None:
        self._step, self._is_over = step, threading.Event()
        self._samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_SECONDS):
            self._samples.append((time.monotonic(), int(self._step.numpy())))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def ends(self) -> tuple[float, float]:
        return self._samples[0][0], self._samples[-1][0]

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return steps per second, and the longest time without a step, in a period and 1 s after it."""
        found = [(at, step) for at, step in self._samples if begin - 0.1 <= at <= end + 1.0]
        changes = [found[0][0]]
        changes += [at for (_, before), (at, step) in itertools.pairwise(found) if step != before]
        changes.append(found[-1][0])
        return {
            "seconds": end - begin,
            "steps_per_second": (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0]),
            "pause": max(b - a for a, b in itertools.pairwise(changes)),
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
