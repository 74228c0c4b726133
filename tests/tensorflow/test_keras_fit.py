"""`fit`, `evaluate` and `predict` for models of Keras 3: on parameter servers, with workers in step, in one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import child_of, wait_until
from tf4slurm.jobs.tracebacks import without_logs

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

pytestmark = pytest.mark.timeout(400)  # older versions of TensorFlow are slow beside other tests

MODELS = Path(__file__).with_name("keras_models.py")
FEATURES = Path(__file__).with_name("keras_features.py")
NAMES = ("mlp", "cnn", "text", "recommender", "own-step", "outputs")
IN_STEP = ("--ps", "0", "--no-chief", "--workers", "2")
ORDER = """
import keras, tensorflow as tf
from tf4slurm.tensorflow import fit, job_strategy

class Shows(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, rows):
        return self.dense(rows)

    def train_step(self, batch):
        tf.print("rows", tf.cast(batch[0][:, 0], tf.int32), summarize=-1)
        return super().train_step(batch)

strategy, coordinator = job_strategy()
keras.utils.set_random_seed(0)
rows = tf.range(1000, dtype=tf.float32)[:, None]
with strategy.scope():
    model = Shows()
    model.compile(keras.optimizers.SGD(0.0), "mse")
data = lambda: tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(1000).batch(8)
fit(model, data, coordinator=coordinator, steps_per_epoch=200, verbose=0)
"""

IN_ONE_PROCESS = """
import keras, numpy as np, tensorflow as tf
from tf4slurm.tensorflow import fit

rows = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
data = lambda: tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(8)
for option in ("run_eagerly", "jit_compile"):
    histories = []
    for train in (lambda model: fit(model, data, epochs=2), lambda model: model.fit(data(), epochs=2)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], **{option: True})
        histories.append(train(model).history)
    ours, expected = histories
    print(option, len(ours["mae"]), all(np.allclose(ours[name], expected[name], rtol=1e-4) for name in expected))
"""

CLASS_WEIGHT = """
import keras, numpy as np, tensorflow as tf
from tf4slurm.tensorflow import evaluate, fit, predict

rows = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
numbers = np.arange(40) % 3
for targets, loss in ((numbers, "sparse_categorical_crossentropy"), (np.eye(3)[numbers], "categorical_crossentropy")):
    data = lambda: tf.data.Dataset.from_tensor_slices((rows, targets)).batch(8)
    weights = {"epochs": 2, "class_weight": {0: 0.5, 2: 4.0}}
    histories = []
    for train in (lambda model: fit(model, data, **weights), lambda model: model.fit(data(), **weights)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", loss)
        histories.append(train(model).history["loss"])
    print("equal", np.allclose(*histories, rtol=1e-4))
print("batches", evaluate(model, (rows, targets), batch_size=5, return_dict=True, verbose=0).keys())
print("rows", len(predict(model, rows, batch_size=7, verbose=0)))
for wrong in (lambda: fit(model, data, batch_size=8), lambda: evaluate(model, data, batch_size=8)):
    try:
        wrong()
    except (TypeError, ValueError) as error:
        print(error)
"""
INTERRUPTED = """
import keras, numpy as np, tensorflow as tf
from tf4slurm.tensorflow import fit

interrupts = []

class Interrupts(keras.initializers.Zeros):
    def __call__(self, *arguments, **options):
        if tf.executing_eagerly() and not interrupts:
            interrupts.append(1)
            raise KeyboardInterrupt
        return super().__call__(*arguments, **options)

model = keras.Sequential([keras.layers.Dense(1, bias_initializer=Interrupts())])
model.compile("sgd", "mse")
rows = np.ones((8, 2), "float32")
data = lambda: tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(4)
try:
    fit(model, data, verbose=0)
except KeyboardInterrupt:
    print("interrupted")
fit(model, data, verbose=0)
print("iterations", int(model.optimizer.iterations))
"""
PROFILES = """
import pathlib, sys, keras, numpy as np, tensorflow as tf
import tf4slurm.tensorflow
from tf4slurm.tensorflow import fit, job_strategy

rows = np.zeros((80, 2), "float32")
data = lambda: tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(1)
counts, saves = [], []

class Saves(tf4slurm.tensorflow.Checkpoints):
    def _save(self, step):
        saves.append(step)
        super()._save(step)

class Counts(keras.callbacks.TensorBoard):
    def _start_trace(self):
        super()._start_trace()
        counts.append(int(self.model.optimizer.iterations))

    def _stop_trace(self, *arguments):
        super()._stop_trace(*arguments)
        counts.append(int(self.model.optimizer.iterations))

def train():
    strategy, coordinator = job_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        step = tf.Variable(0, dtype=tf.int64)
    board = Counts("board", profile_batch=(10, 50), update_freq=20)
    saved = Saves("saved", step=step, model=model)
    options = dict(coordinator=coordinator, callbacks=[board], verbose=0)
    fit(model, data, epochs=3, steps_per_epoch=40, checkpoints=saved, **options)
    print("saves", saves)
    fit(model, data, epochs=1, steps_per_epoch=60, **options)
    print("counts", counts)
    for path in pathlib.Path("board/train").glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            if any(value.tag == "batch_loss" for value in event.summary.value):
                print("written", event.step)

if sys.argv[1] == "ps":
    with tf4slurm.LocalCluster(ps=1, workers=2):
        train()
else:
    train()
"""


PREDICTED = """
import keras, numpy as np, tensorflow as tf
from tf4slurm.tensorflow import job_strategy, predict

strategy, _ = job_strategy()
with strategy.scope():
    inputs = keras.layers.Input((2,))
    double = keras.layers.Rescaling(2.0)(inputs)
    model, several = keras.Model(inputs, double), keras.Model(inputs, [double, double[:, :1]])
rows = np.arange(192, dtype="float32").reshape(96, 2)
dataset = lambda: tf.data.Dataset.from_tensor_slices(rows[:48]).batch(10)
found = predict(model, dataset)
print("function", np.array_equal(found, 2 * rows[:48]), found.shape)
found = predict(model, rows)
print("array", np.array_equal(found, 2 * rows), found.shape)
found = predict(model, rows, on="chief")
print("chief", np.array_equal(found, 2 * rows), found.shape)
both, first = predict(several, dataset)
print("several", np.array_equal(first, both[:, :1]), both.shape, first.shape)
"""


def run(*command: str, directory: Path, timeout_seconds: float = 350) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    environ.pop("TF_USE_LEGACY_KERAS", None)
    return subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )


def result_of(directory: Path, model: str, *options: str, roles: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train a model; return what the script wrote."""
    path = directory / f"{model}.json"
    script = (sys.executable, str(MODELS), model, "--json", str(path), *options)
    command = (TF4SLURM, "run", *roles, "--", *script) if roles else script
    ran = run(*command, directory=directory)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dict(json.loads(path.read_text()))


def features(directory: Path, *names: str) -> list[str]:
    """Run parts of keras_features.py in a LocalCluster; return the printed lines."""
    ran = run(sys.executable, str(FEATURES), *names, directory=directory)
    errors = "\n".join(without_logs(ran.stderr.splitlines()))
    assert ran.returncode == 0, ran.stdout[-3000:] + errors[-5000:]
    return ran.stdout.splitlines()


@pytest.mark.long  # the reference suite compares other models
@pytest.mark.parametrize("model", NAMES)
def test_model_trains_on_ps_as_with_keras(tmp_path: Path, model: str) -> None:
    keras = result_of(tmp_path, model, "--keras", "--epochs", "6")
    ours = result_of(tmp_path, model, "--epochs", "6", roles=("--ps", "2", "--workers", "2"))
    assert ours["iterations"] == ours["steps"] == keras["iterations"]
    assert {name: len(values) for name, values in ours["history"].items()} == {
        name: len(values) for name, values in keras["history"].items()
    }
    assert ours["epoch"] == keras["epoch"] == list(range(6))
    assert ours["accuracy"] > keras["accuracy"] - 0.05


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "mlp", "outputs"])
def test_one_process_trains_exactly_as_keras(tmp_path: Path, model: str) -> None:
    keras, ours = (result_of(tmp_path, model, "--epochs", "3", *more) for more in (["--keras"], []))
    assert ours["history"].keys() == keras["history"].keys()
    for name, values in keras["history"].items():
        assert ours["history"][name] == pytest.approx(values, rel=1e-3), name
    assert ours["accuracy"] == pytest.approx(keras["accuracy"], abs=1e-6)
    assert ours["iterations"] == keras["iterations"]


def test_one_process_trains_without_a_graph_and_with_xla(tmp_path: Path) -> None:
    ran = run(sys.executable, "-c", IN_ONE_PROCESS, directory=tmp_path)
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("run_eagerly", "jit_compile"))]
    assert lines == ["run_eagerly 2 True", "jit_compile 2 True"], ran.stdout + ran.stderr


def test_fit_can_be_called_again_after_an_interrupt_while_variables_are_initialized(tmp_path: Path) -> None:
    ran = run(sys.executable, "-c", INTERRUPTED, directory=tmp_path)
    assert ran.stdout.splitlines() == ["interrupted", "iterations 2"], ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("model", ["outputs", "cnn", "text"])
def test_workers_in_step_train_the_same_model(tmp_path: Path, model: str) -> None:
    ours = result_of(tmp_path, model, "--epochs", "12", roles=IN_STEP)
    assert ours["iterations"] == ours["steps"]
    assert ours["accuracy"] > 0.9
    assert all(len(values) == 12 for values in ours["history"].values())
    assert all(re.match("(val_)?(loss|digit_|even_|accuracy)", name) for name in ours["history"])


@pytest.mark.parametrize("roles", [("--ps", "1", "--workers", "2"), IN_STEP], ids=["ps", "in-step"])
def test_each_worker_shuffles_in_its_own_order_with_a_global_seed(tmp_path: Path, roles: tuple[str, ...]) -> None:
    ran = run(TF4SLURM, "run", *roles, "--", sys.executable, "-c", ORDER, directory=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first: dict[str, str] = {}
    for worker, rows in re.findall(r"^(worker/\d) \| rows (\[.*\])$", ran.stdout + ran.stderr, re.MULTILINE):
        first.setdefault(worker, rows)
    assert len(first) == len(set(first.values())) == 2, first


def test_job_sees_steps_loss_and_metrics_without_a_line_in_the_script(tmp_path: Path) -> None:
    result_of(tmp_path, "mlp", "--epochs", "3", roles=("--ps", "1", "--workers", "1"))
    (run_directory,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run_directory / "metrics" / "chief-0.1.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 132
    assert rows[-1]["metrics"].keys() == {"val_loss", "val_accuracy"}
    losses = [row["metrics"]["loss"] for row in rows if "loss" in row["metrics"]]
    assert losses[-1] < losses[0] / 2


@pytest.mark.long
def test_evaluator_sees_the_metrics_of_the_model(tmp_path: Path) -> None:
    roles = ("--ps", "1", "--workers", "1", "--evaluators", "1")
    ours = result_of(tmp_path, "mlp", "--epochs", "4", "--checkpoints", str(tmp_path / "saved"), roles=roles)
    (run_directory,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run_directory / "metrics" / "evaluator-0.1.jsonl").read_text().splitlines()]
    assert rows[-1]["metrics"].keys() == {"loss", "accuracy"}
    assert rows[-1]["metrics"]["accuracy"] == pytest.approx(ours["accuracy"], abs=1e-6)


def test_killed_worker_costs_no_step_and_no_epoch(job: Job, tmp_path: Path) -> None:
    assert_trains_after_kill(job, tmp_path, "worker/0")


def test_killed_ps_resumes_at_the_saved_epoch(job: Job, tmp_path: Path) -> None:
    assert_trains_after_kill(job, tmp_path, "ps/0")


def assert_trains_after_kill(job: Job, directory: Path, task: str, prefix: tuple[str, ...] = ()) -> None:
    """Train 20 epochs, kill a task after the fourth, and check what the script wrote at its end."""
    path = directory / "result.json"
    script = [sys.executable, str(MODELS), "mlp", "--epochs", "20", "--json", str(path)]
    options = ("--ps", "1", "--workers", "2", "--max-attempts", "2")
    job.start(*options, command=[*script, "--checkpoints", str(directory / "saved")], prefix=prefix)
    assert wait_until(lambda: (directory / "saved").exists() and saved_steps(directory / "saved") >= 4 * 44, 90)
    os.kill(child_of(task), signal.SIGKILL)
    assert job.wait(300) == 0, job.stdout
    assert "retracing" not in job.stdout
    ours = json.loads(path.read_text())
    first = ours["epoch"][0]
    assert 0 < first < 19 if task == "ps/0" else first == 0, job.stdout
    assert ours["epoch"] == list(range(first, 20))
    assert all(len(values) == len(ours["epoch"]) for values in ours["history"].values())
    assert ours["steps"] <= ours["iterations"] <= ours["steps"] + 4 * 64
    assert ours["accuracy"] > 0.9


def saved_steps(directory: Path) -> int:
    return max((int(path.stem.rpartition("-")[2]) for path in directory.glob("ckpt-*.index")), default=0)


def test_each_callback_of_keras_has_its_effect(tmp_path: Path) -> None:
    lines = [line for line in features(tmp_path, "callbacks") if ": " in line and not line.startswith("Batch ")]
    assert [line.partition(":")[0] for line in lines if line.endswith(": works")] == [
        "ModelCheckpoint",
        "EarlyStopping",
        "ReduceLROnPlateau",
        "LearningRateScheduler",
        "rate of workers",
        "TensorBoard",
        "CSVLogger",
        "LambdaCallback",
        "BackupAndRestore",
        "TerminateOnNaN",
        "stop_training",
        "own History",
    ], lines


@pytest.mark.keras
def test_class_weight_and_batch_size_mean_the_same_as_in_keras(tmp_path: Path) -> None:
    ran = run(sys.executable, "-c", CLASS_WEIGHT, directory=tmp_path)
    assert [line for line in ran.stdout.splitlines() if re.match("equal|batches|rows|fit|batch_size", line)] == [
        "equal True",
        "equal True",
        "batches dict_keys(['loss'])",
        "rows 40",
        "fit() has no argument batch_size. Let dataset_fn return batches: dataset.batch(32).",
        "batch_size (in fit: validation_batch_size) is 8, but a dataset has batches already. Leave it out, and let the "
        "dataset have batches of that size.",
    ], ran.stdout + ran.stderr


@pytest.mark.keras
@pytest.mark.parametrize("where", ["ps", "one process"])
def test_tensorboard_counts_steps_and_writes_the_profile(tmp_path: Path, where: str) -> None:
    ran = run(sys.executable, "-c", PROFILES, where, directory=tmp_path)
    assert "counts [9, 50, 129, 170]" in ran.stdout, ran.stdout + ran.stderr
    assert "saves [40, 80, 120]" in ran.stdout  # not where a profile begins or ends
    assert list(tmp_path.glob("board/train/plugins/profile/*/*.xplane.pb"))
    written = [int(line.split()[1]) for line in ran.stdout.splitlines() if line.startswith("written")]
    assert written
    assert all(step % 20 == 0 for step in written)


def test_lookup_tables_work_in_all_functions(tmp_path: Path) -> None:
    lines = features(tmp_path, "tables")
    assert lines[:3] == ["loss: 1.5", "sum: 36.0", "sum: 36.0"]
    assert {"logs: ['loss', 'val_loss']", "total: 30"} <= set(lines)


def test_results_of_metrics_may_be_arrays_and_dicts_and_what_is_no_sum_is_refused(tmp_path: Path) -> None:
    lines = features(tmp_path, "metrics")
    assert "different: [] {}" in lines
    assert "shapes: {'f1_score': (3,), 'precision': (2,)}" in lines
    for kind in ("RunningMean", "ByOther"):
        text = rf"refused {kind}: .*The metric 'rows' assigns a value to 'total' that depends on earlier values"
        assert sum(bool(re.match(text, line)) for line in lines) == 2, lines


def test_assigned_value_of_an_earlier_read_is_no_addition(tmp_path: Path) -> None:
    assert "moved: 0.25 added: 3.0" in features(tmp_path, "assignments")


def test_predict_of_workers_in_step_returns_all_rows_in_order(tmp_path: Path) -> None:
    ran = run(TF4SLURM, "run", *IN_STEP, "--", sys.executable, "-c", PREDICTED, directory=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.findall(r"^(worker/\d) \| (\w+) (.*)$", ran.stdout + ran.stderr, re.MULTILINE)
    kinds = [
        ("function", "True (48, 2)"),
        ("array", "True (96, 2)"),
        ("chief", "True (96, 2)"),
        ("several", "True (48, 2) (48, 1)"),
    ]
    assert sorted(found) == sorted((f"worker/{index}", *kind) for index in range(2) for kind in kinds)


def test_evaluate_and_predict_count_each_row_once(tmp_path: Path) -> None:
    lines = features(tmp_path, "evaluation")
    assert [line for line in lines if line.endswith(": equal")] == [
        *(f"{what} in {size}: equal" for size in (5, 48, 100) for what in ("function", "chief", "dataset")),
        "steps: equal",
    ], lines
    assert lines[10:] == [
        *["endless evaluate: ValueError: The dataset never ends: give the number of steps (in fit: validation_steps)."],
        *["endless predict: ValueError: The dataset never ends: give the number of steps (in fit: validation_steps)."],
        "empty evaluate: TrainingError: The dataset of the evaluation has no batch.",
        "empty predict: TrainingError: The dataset of the prediction has no batch.",
        "outputs: {'one': (48, 2), 'two': (48, 1)}",
        "evaluation: done",
    ]


def test_mistakes_are_named_before_a_worker_starts(tmp_path: Path) -> None:
    found = dict(line.split(": ", 1) for line in features(tmp_path, "mistakes") if not line.startswith("refused"))
    assert found.pop("iterations") == "0"
    assert found.pop("mistakes") == "done"
    for name, words in {
        "uncompiled": "ValueError: The model is not compiled",
        "outside": "ValueError: The model was created or compiled outside of the coordinator's strategy",
        "optimizer outside": "ValueError: The model was created or compiled outside .* sgd_1/iteration",
        "dataset": "TypeError: dataset_fn is a dataset: expected a function",
        "arrays": "TypeError: dataset_fn is of type tuple: expected a function",
        "no steps": "ValueError: steps_per_epoch is missing: the workers repeat their datasets",
        "callback": r"ValueError: Keras never calls Typo.on_epoch_ends. Did you mean on_epoch_end\?",
        "lambda": r"ValueError: Keras never calls LambdaCallback.on_batch_ends. Did you mean on_batch_end\?",
        "class": "TypeError: The callback .*TerminateOnNaN'> is no keras.callbacks.Callback: give an instance",
        "epochs": "ValueError: epochs is -1: expected at least 0",
        "no model": "TypeError: model is 'model': expected a keras.Model of Keras 3",
        "no coordinator": "ValueError: The model belongs to a ParameterServerStrategy: give its coordinator",
        "strategy": "TypeError: coordinator is .*: expected a ClusterCoordinator",
        "validation": "TypeError: data is a dataset, which workers cannot read: give a function",
        "place": "ValueError: The place of the evaluation is 'ps': expected",
        "endless validation": "ValueError: The dataset never ends: give the number of steps",
    }.items():
        assert re.match(words, found.pop(name)), name
    assert found == {}


def test_keras_own_methods_name_the_function_to_call(tmp_path: Path) -> None:
    refused = [line for line in features(tmp_path, "mistakes") if line.startswith("refused")]
    names = [
        re.findall(r"Model\.(\w+) of Keras 3 fails .* Call tf4slurm\.tensorflow\.(\w+)\(model", line)
        for line in refused
    ]
    assert names == [[("fit", "fit")], [("evaluate", "evaluate")], [("predict", "predict")]]


def test_split_embedding_is_saved_as_one_table_that_a_process_without_ps_loads(tmp_path: Path) -> None:
    lines = features(tmp_path, "embedding")
    assert "slices: [(5, 4), (5, 4)] [True, True] 2" in lines
    for line in ("loss: falls", "keras: True 2", "devices: {False}", "exported: True", "one slice: True 1"):
        assert line in lines
    text = "\n".join(lines)
    assert "The saved table of table has the shape (10, 4): expected (11, 4)." in text
    assert "slices: slices is 3: expected 1 to 2, the number of rows." in lines


def test_two_workers_count_steps_rows_and_rates_exactly(tmp_path: Path) -> None:
    lines = features(tmp_path, "counts")
    assert "iterations: 1000 rate: 0.125 rows: [8000, 8000]" in lines


@pytest.mark.long
@pytest.mark.parametrize("roles", [("--ps", "1", "--workers", "2"), IN_STEP], ids=["ps", "in-step"])
def test_stopped_training_is_saved_and_the_next_job_resumes(job: Job, tmp_path: Path, roles: tuple[str, ...]) -> None:
    path, saved = tmp_path / "result.json", tmp_path / "saved"
    script = [sys.executable, str(MODELS), "mlp", "--json", str(path), "--checkpoints", str(saved), "--epochs"]
    job.start(*roles, command=[*script, "3000"])
    assert wait_until(lambda: saved.exists() and saved_steps(saved) >= 100, 90)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM, job.stdout
    stopped = json.loads(path.read_text())
    assert saved_steps(saved) == stopped["iterations"]
    per_epoch = stopped["steps"] // 3000
    epochs = stopped["iterations"] // per_epoch + 2
    resumed = result_of(tmp_path, "mlp", "--checkpoints", str(saved), "--epochs", str(epochs), roles=roles)
    assert resumed["epoch"] == [epochs - 2, epochs - 1]
    assert resumed["iterations"] == resumed["steps"]
