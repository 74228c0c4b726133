"""Scripts that do not use tf4slurm, in real jobs."""

from __future__ import annotations

import functools
import html
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until
from tests.tensorflow.test_keras import tf_keras

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

__all__ = ["tf_keras"]
SCRIPTS = Path(__file__).with_name("unchanged_scripts")
SECONDS = 170
HERE = "{directory of the job}"
FLAGS = (
    *("--ps_hosts={ps_hosts}", "--worker_hosts={worker_hosts}"),
    *("--job_name={task_type}", "--task_index={task_index}"),
)
CLUSTER = ("--ps", "2", "--workers", "2")
BETWEEN_GRAPH = ("--no-chief", "--ps", "1", "--workers", "2")
IN_STEP = ("--no-chief", "--ps", "0", "--workers", "2")


def case(*values: object, keras: int = 0, in_short: bool = False) -> Any:
    """Return a case with the Keras that its script uses; only some are in the short suite."""
    marks = [*([pytest.mark.keras] if keras == 3 else []), *([] if in_short else [pytest.mark.long])]
    return pytest.param(*values, keras, marks=marks)


def take_keras(version: int, request: pytest.FixtureRequest) -> None:
    if version == 2:
        request.getfixturevalue("tf_keras")


def start(job: Job, script: str, *arguments: str, options: tuple[str, ...]) -> None:
    words = [word.replace(HERE, str(job.directory)) for word in arguments]
    job.start(*options, command=(sys.executable, str(SCRIPTS / script), *words))


@pytest.mark.parametrize(
    ("script", "arguments", "options", "prints", "keras"),
    [
        case("mnist_replica.py", FLAGS, BETWEEN_GRAPH, ["worker 0 trained", "worker 1 trained"], in_short=True),
        case("mnist_replica.py", [*FLAGS, "--sync_replicas"], BETWEEN_GRAPH, ["worker 0 trained", "worker 1 trained"]),
        case("monitored_session.py", [HERE], BETWEEN_GRAPH, ["worker 0 trained", "worker 1 trained"]),
        case("parameter_server_training.py", ["fit", HERE], CLUSTER, ["trained, iterations 80"], keras=2),
        case("parameter_server_training.py", ["loop", HERE], CLUSTER, ["trained, step 80"]),
        case("multi_worker.py", ["fit", HERE], IN_STEP, ["worker/1 | trained, the loss falls"], keras=2),
        case("multi_worker.py", ["loop", HERE], IN_STEP, ["worker/1 | trained, the loss falls"], keras=2),
        case("multi_worker.py", ["loop", HERE], IN_STEP, ["worker/1 | trained, the loss falls"], keras=3),
        case(
            *(
                "parameter_server_training.py",
                ["fit", HERE, "--save-weights"],
                ("--ps", "1", "--workers", "1", "--evaluators", "1"),
            ),
            ["trained, iterations 80", f"evaluator/0 | evaluated {HERE}/ckpt-4"],
            keras=2,
        ),
    ],
)
def test_unchanged_script_trains_and_its_job_ends(
    job: Job,
    request: pytest.FixtureRequest,
    script: str,
    arguments: Sequence[str],
    options: tuple[str, ...],
    prints: list[str],
    keras: int,
) -> None:
    take_keras(keras, request)
    start(job, script, *arguments, options=options)
    assert job.wait(SECONDS) == 0, job.stdout + job.stderr
    for text in prints:
        assert text.replace(HERE, str(job.directory)) in job.stdout, job.stdout


@pytest.mark.parametrize(
    ("script", "options", "strategy", "keras"),
    [
        case(
            *("parameter_server_training.py", ("--ps", "1", "--workers", "1"), "ParameterServerStrategy"),
            keras=3,
            in_short=True,
        ),
        case("multi_worker.py", IN_STEP, "MultiWorkerMirroredStrategy", keras=3),
    ],
)
def test_keras_3_fit_failure_is_explained_in_one_line(
    job: Job, script: str, options: tuple[str, ...], strategy: str, keras: int
) -> None:
    start(job, script, "fit", HERE, options=options)
    assert job.wait(SECONDS) == 1, job.stdout + job.stderr
    (meaning,) = job.result["meaning"]
    assert f"Keras 3's fit does not work under {strategy}" in meaning
    assert "fit(model, dataset_fn, coordinator=coordinator" in meaning
    assert f"Explanation: {meaning}\n" in job.stderr
    assert meaning in html.unescape((job.run_directory / "report.html").read_text())


def count(job: Job, pattern: str) -> int:
    return len(re.findall(pattern, job.stdout))


@pytest.mark.keras
@pytest.mark.long
@pytest.mark.timeout(560)
@pytest.mark.usefixtures("tf_keras")
@pytest.mark.parametrize(
    ("script", "arguments", "options", "began"),
    [
        ("parameter_server_training.py", ("fit", HERE, "--epochs", "25"), CLUSTER, r"iterations (\d+)"),
        ("monitored_session.py", (HERE, "--steps", "40000"), BETWEEN_GRAPH, r"begins with step (\d+)"),
    ],
)
def test_unchanged_script_resumes_after_the_kill_of_each_role(
    job: Job, script: str, arguments: tuple[str, ...], options: tuple[str, ...], began: str
) -> None:
    start(job, script, *arguments, options=(*options, "--max-attempts", "5"))
    roles = ["worker/1", "ps/0"] if "--no-chief" in options else ["worker/1", "ps/0", "chief/0"]
    for task in roles:
        wanted = count(job, began) + 2
        assert wait_until(functools.partial(lambda least: count(job, began) >= least, wanted), 120), job.stdout
        os.kill(child_of(task), signal.SIGKILL)
    assert job.wait(400) == 0, job.stdout + job.stderr
    assert job.result["attempts"] > 1
    assert any(int(step) > 0 for step in re.findall(began, job.stdout))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mutable", "dense"])
def test_hash_tables_on_each_ps_are_trained_saved_and_restored(job: Job, kind: str) -> None:
    start(job, "tables.py", kind, HERE, options=("--ps", "2", "--workers", "1"))
    assert job.wait(SECONDS) == 0, job.stdout + job.stderr
    assert "trained to step 20 rows 10" in job.stdout
    start(job, "tables.py", kind, HERE, "--steps", "40", options=("--ps", "2", "--workers", "1"))
    assert job.wait(SECONDS) == 0, job.stdout + job.stderr
    assert "begins with step 20 rows 10" in job.stdout
    assert "trained to step 40 rows 10" in job.stdout


@pytest.mark.long
def test_job_without_a_chief_task_is_warned(job: Job) -> None:
    options = ("--no-chief", "--ps", "2", "--workers", "2", "--grace-period", "0")
    start(job, "parameter_server_training.py", "loop", HERE, options=options)
    assert wait_until(lambda: "starting the child processes" in job.stderr, 60), job.stderr
    job.wait_for_event("warning", timeout_seconds=160)
    assert "as ParameterServerStrategy does, start it without --no-chief" in job.stderr
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "start it without --no-chief" in " ".join(job.result["warnings"])
