"""Jobs whose script runs with each version of TensorFlow, from 1.15 to 2.21: what works, and what is refused.

`make tensorflow-versions` builds the environments, and stores the results (versions.py).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until
from tf4slurm.system.versions import read_versions
from tf4slurm.tensorflow.versions import CAPABILITIES

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent
VERSIONS = ("1.15", "2.4", "2.8", "2.11", "2.13", "2.15", "2.16", "2.18", "2.21")
SECONDS = 400  # the import of TensorFlow by four tasks takes a minute on a busy host
WITHOUT_CHIEF = ("--no-chief", "--ps", "1", "--workers", "2")
WITH_CHIEF = ("--ps", "1", "--workers", "2")
FLAGS = (
    *("--ps_hosts={ps_hosts}", "--worker_hosts={worker_hosts}"),
    *("--job_name={task_type}", "--task_index={task_index}"),
)
DIRECTORY = "DIRECTORY OF THE JOB"
TF4SLURM_PYTHON = (3, 10)


class Script(NamedTuple):
    """A script, how its job is started, and what it prints at its end.

    Attributes:
        longer: Further arguments with which the training is long enough for a fault.
        parts: The public names of `tf4slurm.tensorflow` that it imports.
    """

    path: str
    arguments: tuple[str, ...]
    options: tuple[str, ...]
    prints: tuple[str, ...]
    longer: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


WITH_FLAGS = Script(
    "unchanged_scripts/mnist_replica.py", FLAGS, WITHOUT_CHIEF, ("worker 0 trained", "worker 1 trained")
)
SESSION = Script(
    "unchanged_scripts/monitored_session.py",
    (DIRECTORY,),
    WITHOUT_CHIEF,
    ("worker 0 trained", "worker 1 trained"),
    ("--steps", "6000"),
)
GUIDE = Script("version_scripts/guide.py", (DIRECTORY,), WITH_CHIEF, ("trained to step 80",), ("--epochs", "60"))
STEPS = Script(
    "version_scripts/steps.py",
    (DIRECTORY,),
    WITH_CHIEF,
    ("trained to step 3",),
    ("--steps", "6000"),
    ("Checkpoints", "parameter_server_strategy", "run_steps"),
)
FIT = Script(
    "version_scripts/keras_fit.py",
    (DIRECTORY,),
    WITH_CHIEF,
    (
        "names loss mae val_loss val_mae epochs 3",
        "trained to step 150",
        "rows 1000 1 same error True",
    ),
    parts=("evaluate", "fit", "job_strategy", "predict"),
)
OLD = Script(
    "old_scripts/asynchronous.py",
    ("-ps", "1", "-workers", "2"),
    WITHOUT_CHIEF,
    ("worker 0 made", "worker 1 made", "ps 0 received done 1"),
    parts=("DoneHook",),
)


def train(job: Job, python: str, script: Script) -> None:
    """The script trains to its end."""
    start(job, python, script)
    check_end(job, script)


def kill_worker(job: Job, python: str, script: Script) -> None:
    """A killed worker is started again, and the training goes on."""
    kill(job, python, script, "worker/1")


def kill_ps(job: Job, python: str, script: Script) -> None:
    """After the loss of a ps, another attempt resumes from the checkpoint."""
    kill(job, python, script, "ps/0")
    assert job.result["attempts"] > 1
    assert any(int(step) > 0 for step in find_beginnings(job)), job.stdout


def stop_and_resume(job: Job, python: str, script: Script) -> None:
    """After a stop request, the same command resumes from the checkpoint."""
    start(job, python, script, "--grace-period", "5", longer=True)
    wait_for_checkpoint(job)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 143, job.stdout + job.stderr
    start(job, python, script, longer=True)
    check_end(job, script, longer=True)
    assert any(int(step) > 0 for step in find_beginnings(job)), job.stdout


class Case(NamedTuple):
    """A cell's row: what is done, and the script for it by the first version of TensorFlow that runs it."""

    check: Callable[[Job, str, Script], None]
    scripts: Mapping[str, Script]


FAULTS = {"1.15": SESSION, "2.4": GUIDE, "2.11": STEPS}
"""The script for the faults by the first version for which it is used."""

CASES: Mapping[str, Case] = {
    "TensorFlow 1 script with flags, unchanged": Case(train, {"1.15": WITH_FLAGS}),
    "TensorFlow 1 script with TF_CONFIG, unchanged": Case(train, {"1.15": SESSION}),
    "ParameterServerStrategy after TensorFlow's guide, unchanged": Case(train, {"2.4": GUIDE}),
    "example of tf4slurm before 0.1": Case(train, {"2.8": OLD}),
    "`run_steps` and `Checkpoints`": Case(train, {"2.11": STEPS}),
    "`fit`, `evaluate`, `predict`": Case(train, {"2.11": FIT}),
    "killed worker": Case(kill_worker, FAULTS),
    "killed ps, with `--max-attempts`": Case(kill_ps, FAULTS),
    "stop and resume": Case(stop_and_resume, FAULTS),
}


def find_python(version: str) -> str | None:
    """Return the Python that has this version of TensorFlow, or None if `make tensorflow-versions` has not made one."""
    made = ROOT / f".tensorflow-{version}"
    if (made / "installed").exists():
        return str(made / "bin" / "python")
    for package in ("tensorflow-cpu", "tensorflow"):
        try:
            if importlib.metadata.version(package).startswith(f"{version}."):
                return sys.executable
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_job_with_version_of_tensorflow(
    job: Job,
    name: str,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    check_job(job, name, version, monkeypatch, record_property)


def check_job(
    job: Job,
    name: str,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Check that a job works with a version of TensorFlow, or is refused as `CAPABILITIES` says. Record the facts."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"There is no TensorFlow {version}: make tensorflow-versions")
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.delenv("TF2_BEHAVIOR", raising=False)  # set by an import of TensorFlow in this process
    found = read_versions(python)
    record_property("tensorflow", found["tensorflow"])
    record_property("python", found["python"])
    has_tf4slurm = numbers(found["python"]) >= TF4SLURM_PYTHON
    if not has_tf4slurm:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    case = CASES[name]
    fitting = [script for first, script in case.scripts.items() if numbers(first) <= numbers(version)]
    if fitting:
        case.check(job, python, fitting[-1])
        return
    (script,) = case.scripts.values()
    start(job, python, script)
    assert job.wait(SECONDS) != 0, job.stdout
    failure = job.result["failure"]
    sentence = f"{failure['type']}: {failure['message']}"
    refused = sorted(part for part in script.parts if not CAPABILITIES[part].includes(found["tensorflow"]))
    if script.parts and not has_tf4slurm:
        assert "No module named 'tf4slurm'" in sentence
        assert "import tf4slurm_client, which the job brings along" in " ".join(job.stderr.split())
    elif refused:
        capability = CAPABILITIES[min(refused)]
        assert f"needs TensorFlow {capability.first} or newer, but this is TensorFlow {version}." in sentence
        assert f"you can use {capability.instead}" in sentence
    else:
        assert sentence.startswith("AttributeError: module 'tensorflow"), sentence
    record_property("sentence", sentence)


def start(job: Job, python: str, script: Script, *options: str, longer: bool = False) -> None:
    words = [*script.arguments, *(script.longer if longer else ())]
    words = [word.replace(DIRECTORY, str(job.directory / "checkpoints")) for word in words]
    job.start(*script.options, *options, command=(python, str(SCRIPTS / script.path), *words))


def check_end(job: Job, script: Script, *, longer: bool = False) -> None:
    assert job.wait(SECONDS) == 0, job.stdout + job.stderr
    for text in [re.sub(r" step \d+$", " step ", each) for each in script.prints] if longer else script.prints:
        assert text in job.stdout, job.stdout


def kill(job: Job, python: str, script: Script, task: str) -> None:
    """Kill a task of a job after its first checkpoint, and check that the job trains to its end."""
    start(job, python, script, "--max-attempts", "4", longer=True)
    wait_for_checkpoint(job)
    os.kill(child_of(task), signal.SIGKILL)
    check_end(job, script, longer=True)


def wait_for_checkpoint(job: Job) -> None:
    directory = job.directory / "checkpoints"
    assert wait_until(lambda: len(list(directory.glob("*.index"))) >= 2, 240), job.stdout + job.stderr


def find_beginnings(job: Job) -> list[str]:
    """Return the steps with which the training began, of each attempt."""
    return re.findall(r"begins with step (\d+)", job.stdout)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
