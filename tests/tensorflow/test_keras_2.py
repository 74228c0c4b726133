"""`fit` with Keras 2, the Keras of TensorFlow 2.11 to 2.15: lost tasks, a stop request, and workers in step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job
from tests.tensorflow.test_versions import FIT, Script, find_python, kill_ps, kill_worker, stop_and_resume, train

pytestmark = [pytest.mark.keras, pytest.mark.long, pytest.mark.timeout(900)]

LONG = FIT._replace(prints=("rows 1000 1 same error True",), longer=("--epochs", "150"))
IN_STEP = FIT._replace(
    arguments=(*FIT.arguments, "--in-step"),
    options=("--ps", "0", "--no-chief", "--workers", "2"),
)


@pytest.fixture(params=["2.11", "2.15"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python of an environment with this version of TensorFlow."""
    found = find_python(request.param)
    if found is None:
        pytest.skip(f"There is no TensorFlow {request.param}: make tensorflow-versions")
    monkeypatch.delenv("TF2_BEHAVIOR", raising=False)  # set by an import of TensorFlow in this process
    return found


@pytest.mark.parametrize("check", [kill_worker, kill_ps, stop_and_resume])
def test_fit_goes_on_or_resumes(job: Job, python: str, check: Callable[[Job, str, Script], None]) -> None:
    check(job, python, LONG)


def test_workers_train_in_step(job: Job, python: str) -> None:
    train(job, python, IN_STEP)
