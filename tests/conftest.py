"""The leak check: a test that leaves a process behind on any host fails."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.jobs import Job
from tests.processes import MARK_VARIABLE, kill_leftovers

pytest_plugins = (
    "tests.slurm.fixtures",
    "tests.browser",
    "tests.growing_job",
    "tests.fake_slurm",
)  # used in several files

settings.register_profile("normal", max_examples=100, deadline=None, database=None)
settings.register_profile("long", max_examples=100_000, deadline=None, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "normal"))


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the registry of the tests' jobs separate from that of the user who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_configure() -> None:
    """Restore default signal handling for processes of tests, since a suite in the background ignores signals.

    Turn off gRPC's fork handlers, as `run_program` does: they abort children that Python 3.10 starts by fork.
    """
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def process_mark() -> Iterator[str]:
    """The mark that every process started by this test carries in its environment."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK_VARIABLE, mark)
        yield mark
    leftovers = kill_leftovers(mark, timeout_seconds=15)
    if leftovers:
        names = "\n".join(map(str, leftovers))
        pytest.fail(f"The test left these processes behind (killed now):\n{names}", pytrace=False)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the cluster spec that an earlier test has set in this process."""
    monkeypatch.setattr("tf4slurm.server_dictionary._current", [])


@pytest.fixture(autouse=True)
def lean_tensorflow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make TensorFlow import without Keras, which doubles the import time, except in tests marked `keras`."""
    if request.node.get_closest_marker("keras") is None:
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """One job on this host."""
    with Job(tmp_path) as job:
        yield job
