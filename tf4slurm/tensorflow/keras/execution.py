"""Run a model for `fit`, `evaluate` and `predict`, on the workers of a ParameterServerStrategy or in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf4slurm.scripts.functions import should_stop
from tf4slurm.tensorflow.checkpoints import Checkpoints
from tf4slurm.tensorflow.closures import ClosureRunner, count_tasks, wait_for_closures
from tf4slurm.tensorflow.constants import create_per_worker_dataset
from tf4slurm.tensorflow.keras.step import KerasStep
from tf4slurm.tensorflow.step_closure import StepClosure
from tf4slurm.tensorflow.training import run_closures, translate_errors

_FLAGS = "flags"  # under this name, the workers sum up their requests to stop or end, so that all end at the same step
_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard")  # they write files, so only the first worker calls them


def make_execution(model: Any, coordinator: Any, timeout_seconds: float) -> OnWorkers | InThisProcess:
    """Return the object that runs the model: on the workers of the coordinator or, if it is None, in this process."""
    return InThisProcess(model) if coordinator is None else OnWorkers(model, coordinator, timeout_seconds)


class OnWorkers:
    """Runs steps and evaluations on the workers of a ParameterServerStrategy."""

    is_first = True
    is_alone = True  # no other process calls `fit`, `evaluate` or `predict`
    translate_errors = staticmethod(translate_errors)

    def __init__(self, model: Any, coordinator: Any, timeout_seconds: float) -> None:
        wait_for_closures(coordinator, timeout_seconds)  # those of an earlier call could change variables meanwhile
        self.model = model
        self.strategy = coordinator.strategy
        self._coordinator = coordinator
        self._timeout_seconds = timeout_seconds
        self._iterator: Any = None
        self._closure: StepClosure | None = None
        self._num_parts = count_tasks("worker")  # graphs contain it, so it does not change when workers join or leave

    def open(self, dataset_fn: Callable[[], Any]) -> Any:
        """Create the datasets of the workers. Return the element spec of their batches."""

        def repeated() -> Any:
            if count_tasks("worker") > 1:  # with the seed of keras.utils.set_random_seed, all would shuffle alike
                tf.compat.v1.set_random_seed(None)  # changes only the seed of this function's graph
            return dataset_fn().repeat()

        datasets = create_per_worker_dataset(self._coordinator, tf.function(repeated))
        self._iterator = iter(datasets)
        return datasets.element_spec

    def select(self, callbacks: list[Any]) -> list[Any]:
        return callbacks

    def train(
        self,
        step_fn: KerasStep,
        counter: Any,
        target: int,
        checkpoints: Checkpoints | None,
        observe: Any,
        epoch_end: int,
        last_step: int,
    ) -> bool:
        """Train until the counter reaches `target`. Return whether the job was asked to stop.

        `epoch_end` and `last_step` are the steps at which the epoch and the whole training will end. A checkpoint is
        saved when due, at the end of the epoch, and when training ends early. `observe` is that of `run_closures`.
        """
        steps_per_call = self.model.steps_per_execution
        self._closure = self._closure or StepClosure(self.strategy, step_fn, counter)
        done = run_closures(
            self._coordinator,
            self._closure,
            target,
            dataset=self._iterator,
            step=counter,
            checkpoints=checkpoints,
            steps_per_call=steps_per_call if steps_per_call > 1 else None,
            timeout_seconds=self._timeout_seconds,
            observe=observe,
            save_at=epoch_end,
            last_step=last_step,
        )
        return done.is_stopped

    def count_parts(self, on: str) -> int:
        """Return into how many parts a dataset is split: one per worker for `on="workers"`, and 1 for `on="chief"`."""
        return self._num_parts if on == "workers" else 1

    def run_parts(self, function: Any, on: str) -> list[Any]:
        """Call `function(index)` for each part of a dataset. Return the results in the order of the parts.

        The function is a concrete function of an int64 scalar. It runs on the workers for `on="workers"`, else in this
        process.
        """
        if on == "chief":
            return [_to_numpy(function(tf.constant(0, tf.int64)))]
        work = _EvaluationWork(function, self.count_parts(on))
        ClosureRunner(self._coordinator, work, self._timeout_seconds).run(ends_at_stop=False)
        return [result for _, result in sorted(work.results.items())]

    def gather(self, parts: list[Any]) -> list[Any]:
        """Return `parts`, the result of `run_parts`. It has the predictions of all workers already."""
        return parts

    def total(self, sums: list[Any]) -> Any:
        return tf.nest.map_structure(lambda *each: sum(each), *sums)


class _EvaluationWork:
    """The parts of an evaluation or prediction. Each is a unit of work of a `ClosureRunner`."""

    def __init__(self, function: Any, count: int) -> None:
        self.results: dict[int, Any] = {}
        self._function = function
        self._waiting = list(reversed(range(count)))

    @property
    def is_over(self) -> bool:
        return not self._waiting

    def take(self) -> int | None:
        return self._waiting.pop() if self._waiting else None

    def stop(self) -> None:
        self._waiting.clear()

    def make_closure(self, index: int, make: Callable[..., Any]) -> Any:
        return make(self._function, tf.constant(index, tf.int64))

    def complete(self, index: int, worker: int, result: Any) -> None:
        self.results[index] = result

    def check_ps(self) -> None:
        """Do nothing. The closure runs again, and raises an error if a ps is lost."""

    def describe_timeout(self) -> str:
        return (
            "No worker ended its part of the evaluation within {seconds}. See the logs of the workers, or raise "
            "timeout_seconds."
        )


class InThisProcess:
    """Runs steps and evaluations in this process.

    With MultiWorkerMirroredStrategy, all workers run them at the same time.
    """

    translate_errors = staticmethod(contextlib.nullcontext)

    def __init__(self, model: Any) -> None:
        self.model = model
        self.strategy = model.distribute_strategy
        resolver = getattr(self.strategy, "cluster_resolver", None)
        tasks = resolver.cluster_spec().num_tasks("worker") if resolver is not None and resolver.task_type else 1
        self._part = (tasks, resolver.task_id if resolver is not None and tasks > 1 else 0)
        self.is_first = self._part[1] == 0
        self.is_alone = tasks == 1
        self._train: Any = None
        self._iterator: Any = None
        self._mean = tf.function(self._mean_of_replicas)

    def open(self, dataset_fn: Any) -> Any:
        """Create the dataset of this process. Return the element spec of its batches."""
        make = dataset_fn if callable(dataset_fn) else lambda: dataset_fn
        spec: list[Any] = []
        for _ in range(self._part[1]):  # with the same global seed, all workers would shuffle alike
            tf.random.uniform(())  # changes the next seed

        def repeated(_: Any) -> Any:
            dataset = make().repeat()
            spec.append(dataset.element_spec)
            return dataset

        self._iterator = iter(self.strategy.distribute_datasets_from_function(repeated))
        return spec[0]

    def select(self, callbacks: list[Any]) -> list[Any]:
        """Return the callbacks that this process calls. Only the first worker calls those that write files.

        Raises:
            ValueError: BackupAndRestore is used with several workers.
        """
        if self._part[0] > 1 and any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
            raise ValueError("BackupAndRestore cannot restore several workers: give fit(…, checkpoints=DIRECTORY).")
        return [each for each in callbacks if self.is_first or type(each).__name__ not in _WRITERS]

    def train(
        self,
        step_fn: KerasStep,
        counter: Any,
        target: int,
        checkpoints: Checkpoints | None,
        observe: Any,
        epoch_end: int,
        last_step: int,
    ) -> bool:
        """Train as `OnWorkers.train` does, but call `observe` after every `steps_per_execution` steps of the model."""
        if self._train is None:
            self._train = self._make_function(step_fn)
        step = first = int(counter.numpy())
        sums: dict[str, Any] = {}
        is_stopped = is_ended = is_done = False
        while step < target and not (is_stopped or is_done):
            count = min(self.model.steps_per_execution, target - step)
            flags = tf.constant([should_stop(), is_ended], tf.float64)
            latest = _to_numpy(self._train(self._iterator, count, flags))
            stops, ends = latest.pop(_FLAGS)
            sums = {name: sums.get(name, 0.0) + np.float64(total) for name, total in latest.items()}
            step += count
            counter.assign(step)
            is_ended = observe(step, step - first, sums)
            is_stopped = should_stop() if self.is_alone else stops > 0
            is_done = is_ended if self.is_alone else ends > 0
            if checkpoints is not None and self.is_first and not is_stopped:
                due = checkpoints.next_due(step - count)
                if step >= last_step:
                    checkpoints.save()
                elif step >= epoch_end or checkpoints.is_due() or (due is not None and step >= due):
                    checkpoints.begin_save()  # if it fails, it logs a warning
                    checkpoints.finish_save()
        if checkpoints is not None and self.is_first and (is_stopped or is_done):
            checkpoints.save()
        return is_stopped

    def _make_function(self, step_fn: KerasStep) -> Any:
        run = tf.function(step_fn, jit_compile=True) if self.model.jit_compile is True else step_fn

        def train(iterator: Any, count: int, flags: Any) -> dict[str, Any]:
            sums: dict[str, Any] = {}
            for _ in range(count):
                sums = self.strategy.run(run, args=(sums, next(iterator)))
            each_flags = self.strategy.run(lambda: flags)
            flags_of_all = self.strategy.reduce(tf.distribute.ReduceOp.SUM, each_flags, axis=None)
            return step_fn.reduce(self.strategy, sums) | {_FLAGS: flags_of_all}

        return train if self.model.run_eagerly else tf.function(train)

    def count_parts(self, on: str) -> int:
        """Return into how many parts a dataset is split: one per worker for `on="workers"`, and 1 for `on="chief"`."""
        return self._part[0] if on == "workers" else 1

    def run_parts(self, function: Any, on: str) -> list[Any]:
        """Call `function(index)` for the part of a dataset that this process evaluates. Return a list of one result."""
        return [_to_numpy(function(tf.constant(self._part[1] if on == "workers" else 0, tf.int64)))]

    def gather(self, parts: list[Any]) -> list[Any]:
        """Return the predictions of all workers, one element for each worker, in the order of their indices.

        `parts` is the list that `run_parts` returned in this process. All workers must call this method.
        """
        if self.is_alone:
            return parts
        (own,) = parts
        sizes = self._gather_of_workers(own["sizes"])
        outputs = [self._gather_of_workers(rows) for rows in own["outputs"]]
        return [{"sizes": each, "outputs": rows} for each, *rows in zip(sizes, *outputs, strict=True)]

    def _gather_of_workers(self, values: Any) -> list[Any]:
        """Return one array per worker: the argument `values` with which each worker has called this method."""
        lengths = self._gather(tf.constant([len(values)]))
        replicas_of_worker = len(lengths) // self._part[0]  # all replicas of a worker give the same values
        return np.split(self._gather(tf.constant(values)), np.cumsum(lengths)[:-1])[::replicas_of_worker]

    def _gather(self, values: Any) -> Any:
        return self.strategy.gather(self.strategy.run(lambda: values), axis=0).numpy()

    def total(self, sums: list[Any]) -> Any:
        """Return the sums over all workers. `sums` is a list with the sums of this process."""
        if self.is_alone:
            return sums[0]
        means = _to_numpy(self._mean(tf.nest.map_structure(tf.convert_to_tensor, sums[0])))
        return {name: self._part[0] * value for name, value in means.items()}

    def _mean_of_replicas(self, values: dict[str, Any]) -> dict[str, Any]:
        each = self.strategy.run(lambda: values)
        return {
            name: self.strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None) for name, value in each.items()
        }


def _to_numpy(structure: Any) -> Any:
    return tf.nest.map_structure(lambda each: each.numpy() if tf.is_tensor(each) else each, structure)
