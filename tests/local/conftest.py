"""One job of this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    if job.process is not None and job.process.poll() is None:  # a test that failed half-way
        job.process.kill()
        job.process.wait()
