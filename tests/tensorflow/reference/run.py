"""Train cases in one mode, and write the results of each as DIRECTORY/TASK/NUMBER.json.

python -m tests.tensorflow.reference.run ps DIRECTORY SGD Adam
tf4slurm run --ps 0 --no-chief --workers 2 -- python -m tests.tensorflow.reference.run in_step DIRECTORY SGD
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf4slurm
from tests.tensorflow.reference import models
from tests.tensorflow.reference.case import Case
from tests.tensorflow.reference.cases import CASES, GROUPS
from tf4slurm.tensorflow import evaluate, fit, job_strategy, predict

CLUSTERS: Mapping[str, tuple[int, int]] = {"ps": (2, 1), "asynchronous": (1, 3)}
"""The numbers of ps and workers, in the modes that have ps."""
WITHOUT_EVALUATION = {case.name for group in ("optimizers", "callbacks") for case in GROUPS[group]}
"""The weights and the History show what these do; evaluations take long."""


def fit_alone(model: Any, dataset_fn: Any, validation_data: Any = None, **options: Any) -> Any:
    options["validation_data"] = None if validation_data is None else validation_data()
    return model.fit(dataset_fn().repeat(), **options)


def evaluate_alone(model: Any, dataset_fn: Any, **options: Any) -> Any:
    return model.evaluate(dataset_fn(), return_dict=True, **options)


def predict_alone(model: Any, dataset_fn: Any) -> Any:
    return model.predict(dataset_fn(), verbose=0)


def main() -> None:
    mode, directory, *names = sys.argv[1:]
    output = Path(directory, os.environ.get("TF4SLURM_TASK", mode).replace("/", "-"))
    output.mkdir(parents=True)
    os.chdir(output)  # callbacks write files
    with contextlib.ExitStack() as stack:
        if mode in CLUSTERS:
            stack.enter_context(tf4slurm.LocalCluster(*CLUSTERS[mode]))
        strategy, coordinator = (tf.distribute.get_strategy(), None) if mode == "alone" else job_strategy()
        for name in names:
            begin = time.monotonic()
            try:
                found = train(CASES[name], mode, strategy, coordinator)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            found["seconds"] = round(time.monotonic() - begin, 2)
            Path(f"{list(CASES).index(name)}.json").write_text(json.dumps(found, default=to_list))


def train(case: Case, mode: str, strategy: Any, coordinator: Any) -> dict[str, Any]:
    """Train a case and return its results."""
    functions: tuple[Callable[..., Any], ...] = (fit_alone, evaluate_alone, predict_alone)
    given: dict[str, Any] = {}
    if mode != "alone":
        functions, given = (fit, evaluate, predict), {"coordinator": coordinator}
    fit_it, evaluate_it, predict_it = functions
    whole = getattr(models, case.data)
    options = {"epochs": 2, "steps_per_epoch": int(whole().cardinality()), "verbose": 0, **case.options, **given}
    if "validation_data" in options:
        options["validation_data"] = whole
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = case.make(models)
    data = (lambda: whole().map(take_part(strategy))) if mode == "in_step" else whole
    history = fit_it(model, data, callbacks=case.callbacks(models), **options).history
    found: dict[str, Any] = {
        "history": history,
        "weights": model.get_weights(),
        "optimizer": [each.numpy() for each in model.optimizer.variables],
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    if case.name not in WITHOUT_EVALUATION:
        found["evaluated"] = evaluate_it(model, whole, verbose=0, **given)
        found["predicted"] = predict_it(model, whole, **given)
    is_first = mode != "in_step" or strategy.cluster_resolver.task_id == 0
    return found | {"read": case.read(models, model) if case.read and is_first else None}


def take_part(strategy: Any) -> Callable[..., Any]:
    """Return a function that takes this worker's rows of a batch."""
    resolver = strategy.cluster_resolver
    index, count = resolver.task_id, resolver.cluster_spec().num_tasks("worker")
    return lambda *batch: tf.nest.map_structure(lambda rows: rows[index::count], batch)


def to_list(value: Any) -> Any:
    return np.asarray(value, "float64" if np.asarray(value).dtype.kind not in "iu" else None).tolist()


if __name__ == "__main__":
    main()
