"""The Slurm lab of this session, and the check that each test leaves it idle."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.processes import wait_until
from tests.slurm.lab import SlurmLab, missing_slurm


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skip, or fail if TF4SLURM_REQUIRE_SLURM=1, where no lab can run; for tests that start their own lab."""
    _require(missing_slurm())


@pytest.fixture(scope="session")
def slurm_lab(slurm: None) -> Iterator[SlurmLab]:
    """One lab for the session. It ends with this process, even if that is killed: see `lab.sh hold`."""
    with SlurmLab() as lab:
        yield lab


@pytest.fixture(scope="session")
def accounting(slurm: None) -> None:
    """The same as `slurm`, for tests that start their own lab with accounting."""
    _require(missing_slurm(accounting=True))


@pytest.fixture(scope="session")
def accounting_lab(accounting: None) -> Iterator[SlurmLab]:
    """A lab of two nodes whose sacct works (slurmdbd with its own database), for the session. Leave no job in it."""
    with SlurmLab(["acct-1", "acct-2"], accounting=True) as lab:
        yield lab


@pytest.fixture
def lab(slurm_lab: SlurmLab, process_mark: str) -> Iterator[SlurmLab]:
    """The session's lab, idle; a test that leaves a job in its queue fails."""

    def left_behind() -> list[str]:  # the test is not responsible for the time that Slurm needs to end a job
        return [job for job in slurm_lab.queue() if not job.endswith(" COMPLETING")]

    slurm_lab.wait_idle()
    yield slurm_lab
    wait_until(lambda: not left_behind(), timeout_seconds=15)
    jobs = left_behind()
    if jobs:
        slurm_lab.cancel_all()
        pytest.fail("The test left these jobs behind (cancelled now): " + "; ".join(jobs), pytrace=False)
    slurm_lab.wait_idle()


def _require(reason: str | None) -> None:
    if reason is not None and os.environ.get("TF4SLURM_REQUIRE_SLURM") == "1":
        pytest.fail(reason, pytrace=False)
    if reason is not None:
        pytest.skip(reason)
